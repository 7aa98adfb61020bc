"""The fake servers stand beside the tests of SGLang."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "sglang"))
