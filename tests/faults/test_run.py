"""Whole runs whose disk is full, whose directory another run uses, and that are killed in it."""

import errno
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from distributed import Running

from jaxrl_llm.checkpoint import folder as folders
from jaxrl_llm.hf import export
from jaxrl_llm.host import lock
from jaxrl_llm.train import main

SUPERVISED = [
    *("--config", "sft_tiny.py", "--steps", "2", "--prompts_per_step", "8", "--eval.every", "0"),
    *("--checkpoint.every", "1", "--checkpoint.async_save", "false", "--log.progress", "none"),
    *("--log.tensorboard", "false", "--mesh.data", "1", "--mesh.fsdp", "8"),
    *("--model.architecture.num_layers", "1", "--model.architecture.hidden_size", "32"),
    *("--model.architecture.mlp_size", "32", "--model.architecture.head_dim", "8"),
]


def train(run_dir: Path, *more: str) -> int:
    return main([*SUPERVISED, "--run_dir", str(run_dir), *more])


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def full_after_one_save(monkeypatch):
    """Room for one checkpoint: the disk is full when the second is to be written."""
    room = [1 << 40]
    monkeypatch.setattr(folders, "free_bytes", lambda folder: room.pop() if room else 0)


@pytest.mark.slow
def test_a_last_step_that_does_not_fit_fails_the_run(tmp_path, capsys, monkeypatch, full_after_one_save):
    """Training continues when a save does not fit; a run whose result is not on the disk is no success."""
    assert train(tmp_path) == 1
    said = capsys.readouterr().err
    assert (
        f"error: step 2, the last, is not saved: the disk of {tmp_path}/checkpoints was full, and the newest "
        "checkpoint there is 1. Free some space, or lower --checkpoint.keep, and run the same command again"
    ) in said
    assert "Traceback" not in said
    assert saved(tmp_path) == ["1"]
    assert (tmp_path / "hf/model.safetensors").is_file()  # that fitted
    monkeypatch.undo()
    assert train(tmp_path) == 0
    assert saved(tmp_path) == ["1", "2"]


@pytest.mark.slow
def test_no_room_for_the_export_either(tmp_path, capsys, monkeypatch, full_after_one_save):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert train(tmp_path) == 1
    said = capsys.readouterr().err
    assert "step 2, the last, is not saved" in said
    assert f"The model is not exported or uploaded: {tmp_path}/hf: the export needs" in said
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_a_full_disk_stops_the_run_if_asked(tmp_path, capsys, full_after_one_save):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert train(tmp_path, "--checkpoint.on_full_disk", "stop") == 1
    said = capsys.readouterr().err
    assert "step 2 is NOT saved: it needs" in said and "Traceback" not in said
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.slow
def test_a_finished_run_without_its_checkpoints_is_not_trained_anew(tmp_path, capsys):
    assert train(tmp_path) == 0
    shutil.rmtree(tmp_path / "checkpoints")
    before = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "hf/model.safetensors")}
    capsys.readouterr()
    assert train(tmp_path, "--seed", "7") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/hf: the model of a finished run, which has no checkpoint any")
    assert f"set another --run_dir, or move {tmp_path} away." in said
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    shutil.rmtree(tmp_path / "hf")  # as of a run that was killed before its first checkpoint
    assert train(tmp_path, "--seed", "7") == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() != before["metrics.jsonl"]


HOLDER = """
import sys, time
from pathlib import Path
from jaxrl_llm.host.lock import run_dir_lock
with run_dir_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_one_run_in_a_directory(tmp_path, capsys):
    other = Running(["-c", HOLDER, str(tmp_path)])
    while "held" not in other.peek("stdout"):
        assert other.process.poll() is None, other.end()
        time.sleep(0.02)
    assert train(tmp_path) == 2
    said = capsys.readouterr().err
    pid, host = other.process.pid, socket.gethostname()
    assert said.startswith(f"error: {tmp_path} is in use by process {pid} on {host}: two runs would")
    assert "set another --run_dir" in said
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]  # it touched nothing

    os.kill(pid, signal.SIGKILL)
    assert other.end().code == -signal.SIGKILL
    assert train(tmp_path) == 0
    assert train(tmp_path, "--steps", "3") == 0  # this process gave it back, too
    assert "in use" not in capsys.readouterr().err


def test_a_file_system_without_locks_is_warned_about(tmp_path, capsys, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with lock.run_dir_lock(tmp_path), lock.run_dir_lock(tmp_path):
        pass
    assert f"{tmp_path} is on a file system without locks" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    match = rf"{tmp_path}/file/run cannot be written to: Not a directory. Set --run_dir"
    with pytest.raises(ValueError, match=match), lock.run_dir_lock(tmp_path / "file/run"):
        pass
