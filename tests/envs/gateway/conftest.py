"""The helpers of these tests, importable by their names."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "rollout" / "native"), str(HERE.parents[1])]
