"""The reading path of docs/architecture.md: one GRPO step, within an afternoon's read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILES, MAX_LINES = 12, 2300


def reading_path() -> list[Path]:
    """Return the files of the table under "The reading path", in order."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## The reading path\n")[1].split("\n## ")[0]
    return [ROOT / name for name in re.findall(r"^\| `([\w/]+\.py)` \|", section, re.M)]


def test_one_step_is_an_afternoons_read():
    files = reading_path()
    assert files[0] == ROOT / "jaxrl_llm/train.py" and 8 <= len(files) <= MAX_FILES, files
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES
