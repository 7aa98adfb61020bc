"""Tests of both engines use the fake servers of `servers` and the small engines of `native`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("servers", "native")]
