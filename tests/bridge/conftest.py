"""The fake servers are those of the rollout tests."""

import sys
from pathlib import Path

for folder in ("rollout", "rollout/servers", "rollout/native"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
