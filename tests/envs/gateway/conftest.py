"""The helpers of these tests, importable by their names."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path += [str(HERE), str(TESTS / "rollout" / "native"), str(TESTS / "rollout" / "servers"), str(TESTS)]
