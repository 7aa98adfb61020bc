"""`scripts/fit.py`: docs/fit.md is what it writes, and phases compiled again replace those of a plan."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fit():
    spec = importlib.util.spec_from_file_location("fit", ROOT / "scripts/fit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_compiled_cases(fit, tmp_path, monkeypatch):
    page = tmp_path / "fit.md"
    page.write_text(fit.PAGE.read_text())
    monkeypatch.setattr(fit, "PAGE", page)
    fit.render()
    assert page.read_text() == (ROOT / "docs/fit.md").read_text()


def phase(name, peak, seconds, error=""):
    return {"name": name, "peak": peak, "step_seconds": seconds, "error": error}


def test_phases_compiled_again_replace_the_others(fit):
    before = {"memory": 10, "selected": [], "phases": [phase("decode", 9, 4.0), phase("update", 12, 2.0)]}
    again = {"memory": 10, "selected": ["update"], "phases": [phase("update", 7, 1.0)], "mesh": {"fsdp": 8}}
    plan = fit.merged(before, again)
    assert [p["step_seconds"] for p in plan["phases"]] == [4.0, 1.0]
    assert plan["peak"] == {"phase": "decode", "bytes": 9} and plan["fits"] and plan["step_seconds"] == 5.0
    assert plan["selected"] == [] and plan["mesh"] == {"fsdp": 8}
    failed = again | {"phases": [phase("update", 7, 1.0, error="INTERNAL")]}
    assert not fit.merged(before, failed)["fits"]
