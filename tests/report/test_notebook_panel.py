"""The progress of a run in a notebook: one output, updated in place."""

import types

import pytest

from jaxrl_llm.report import progress
from jaxrl_llm.report.progress import NotebookPanel, Progress, in_notebook

display = pytest.importorskip("IPython.display")


@pytest.fixture
def shown(monkeypatch):
    """The contents of all updates, newest last."""
    contents = []
    handle = types.SimpleNamespace(update=lambda content, raw: contents.append(content))

    def show(content, raw, display_id):
        handle.update(content, raw)
        return handle

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    return contents


def test_the_table_has_the_evaluations_and_the_last_step(shown):
    panel = NotebookPanel(total=3, done=0)
    panel.step(0, {"step": 0, "eval/pass@1": 0.25}, "")
    panel.phase("rollout")
    panel.step(1, {"step": 1, "reward/mean": 0.5, "kl": None}, "10 tokens/s  0:02 left")
    assert shown[-1]["text/plain"] == "step 1/3  rollout  10 tokens/s  0:02 left"
    panel.step(2, {"step": 2, "reward/mean": 0.75, "eval/pass@1": 0.5}, "10 tokens/s  0:01 left")
    panel.close()
    assert shown[-1]["text/plain"] == "step 2/3  10 tokens/s  0:01 left"
    rows = ("step", "eval/pass@1", "reward/mean"), ("0", "0.25", ""), ("2", "0.5", "0.75")
    table = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    assert f"<table>{table}</table>" in shown[-1]["text/html"]
    assert '<progress value="2" max="3">' in shown[-1]["text/html"]


def test_a_notebook_gets_the_panel_and_nothing_else_does(shown, monkeypatch, capsys):
    assert not in_notebook()
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(kernel=None))
    assert in_notebook()
    assert Progress("plain", 2).panel is None
    progress = Progress("auto", 2)
    progress.step(1, {"step": 1, "loss": 0.5, "time/step": 1.0, "tokens_per_second": 7.0})
    progress.message("data for train: rows 4")
    progress.close()
    assert shown[-1]["text/plain"] == "step 1/2  7 tokens/s  0:01 left"
    assert capsys.readouterr().out == "data for train: rows 4\n"  # no line a step
