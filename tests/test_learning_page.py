"""docs/learning.md, as benchmarks/learn.py writes it."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks/learn.py"


@pytest.fixture
def learn(tmp_path, monkeypatch):
    """The script, in a folder without runs."""
    monkeypatch.syspath_prepend(FILE.parent)
    spec = importlib.util.spec_from_file_location("learning_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "learning.md")
    return module


def test_sections_of_studies_without_runs_are_kept(learn):
    section = "## LoRA calculator: reproduced\n\nA claim.\n\n| full | 0.9 |\n\n    full: python\n"
    learn.PAGE.write_text(f"An introduction.\n\n{section}\n## Of no study: reproduced\n\nGone.\n")
    learn.write_report()
    page = learn.PAGE.read_text()
    assert section in page and page.startswith(learn.INTRO)
    assert "Gone." not in page and "kept from an earlier one: LoRA calculator." in page
    learn.write_report()
    assert learn.PAGE.read_text() == page


def test_margin_of_a_claim_is_one_of_means(learn):
    claim = learn.STUDIES["lora_calculator"].holds
    assert claim({"full": [1.0, 0.9, 0.8], "rank_1": [0.7, 0.98, 0.9]})  # 0.86 is 0.04 below 0.9
    assert not claim({"full": [1.0, 0.9, 0.8], "rank_1": [0.7, 0.95, 0.87]})  # 0.84 is 0.06 below
