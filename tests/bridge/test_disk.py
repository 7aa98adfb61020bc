"""Folders for weights: a run's own, in memory where it can be, and none outlives its run."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.bridge.transports import disk
from jaxrl_llm.bridge.transports.disk import LOCK, remove_abandoned, weight_folder

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(disk, "MEMORY", folder)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def locked(memory: Path, name: str) -> tuple[Path, subprocess.Popen]:
    """A folder whose lock another process holds."""
    folder = memory / f"jaxrl_llm_{name}"
    folder.mkdir()
    (folder / LOCK).touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / LOCK)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    return folder, holder


def end(holder: subprocess.Popen) -> None:
    holder.kill()
    holder.wait()
    holder.stdout.close()


def test_folders_in_memory_go_once_nobody_holds_their_lock_and_not_before(memory):
    alive, holder = locked(memory, "1_a")  # whatever process has number 1 now
    for name in ("jaxrl_llm_new", "of_others"):
        (memory / name).mkdir()  # without a lock: another run may be about to make one
    try:
        remove_abandoned()
        assert names(memory) == {alive.name, "jaxrl_llm_new", "of_others"}
    finally:
        end(holder)
    remove_abandoned()
    assert names(memory) == {"jaxrl_llm_new", "of_others"}


def test_a_runs_own_folder_is_locked_until_it_ends_and_then_gone(memory, tmp_path):
    with pytest.raises(OSError, match="full"), weight_folder(tmp_path / "run", "", True, 1) as folder:
        assert folder.parent == memory
        (folder / "weights").touch()
        remove_abandoned()
        assert (folder / "weights").exists()
        raise OSError("full")
    assert names(memory) == set()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(memory, tmp_path, monkeypatch):
    taken, flock = [], fcntl.flock

    def first_too_late(file, flags):
        if not taken:
            taken.append(Path(file.name))
            taken[0].unlink()
            taken[0].parent.rmdir()
        flock(file, flags)

    monkeypatch.setattr(disk.fcntl, "flock", first_too_late)
    with weight_folder(tmp_path / "run", "", True, 1) as folder:
        assert folder.is_dir() and folder != taken[0].parent


def test_where_memory_is_short_or_servers_are_elsewhere_the_folder_is_the_runs(memory, tmp_path):
    run, shared = tmp_path / "run", tmp_path / "shared"
    with weight_folder(run, "", True, 1 << 60) as folder:
        assert folder == run / "weights"
    with weight_folder(run, "", False, 1) as folder:
        assert folder == run / "weights"
    with (
        weight_folder(run, str(shared), True, 1) as one,
        weight_folder(tmp_path / "2", str(shared), True, 1) as two,
    ):
        assert one.parent == two.parent == shared and one != two and one.name.startswith("run-")
    assert names(memory) == set()
