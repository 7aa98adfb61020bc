"""The fake servers are those of the rollout tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout/sglang"))
