"""Tests of both engines use the fake servers of `sglang` and the small engines of `native`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("sglang", "native")]
