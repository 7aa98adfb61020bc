"""A run directory that is deleted or moved while its run goes on."""

import json

import pytest

from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.jsonl import read_rows
from jaxrl_llm.report.log import RunLog


@pytest.mark.parametrize("remake", [True, False])
def test_a_run_directory_that_disappears_is_told_once_and_made_anew(tmp_path, capsys, remake):
    (above := tmp_path / "runs").mkdir()
    log = RunLog(run_dir := above / "run", LogConfig(progress="none"), 4)
    log.config({"a": 1})
    log.step(1, {}, tokens=1)
    capsys.readouterr()
    above.rename(tmp_path / "moved")
    above.write_text("") if not remake else None
    with log.phase("rollout"):
        pass
    said = capsys.readouterr().out
    assert said.startswith(
        f"warning: {run_dir} has disappeared, with all that was in it; training continues, and"
    )
    log.samples(2, [{"response": "x"}])
    log.step(2, {}, tokens=1)
    log.finish()
    assert "warning" not in capsys.readouterr().out
    if remake:
        assert json.loads((run_dir / "config.json").read_text()) == {"a": 1}
        assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [2]
        assert len(read_rows(run_dir / "samples.jsonl")) == 1 and any((run_dir / "tensorboard").iterdir())
