"""Checkpoints that are cut off, damaged, or do not fit on the disk."""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import Running

from jaxrl_llm.checkpoint import folder as folders
from jaxrl_llm.checkpoint import manifest
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.manifest import fingerprint
from jaxrl_llm.checkpoint.state import Checkpointer, SaveError
from jaxrl_llm.errors import RunError, UserError

META = {"config": {"seed": 0}}
SIZE = 50_000  # float32 values, random: they do not compress


def state_of(step: int, size: int = SIZE) -> dict:
    return {"w": jax.random.normal(jax.random.key(step), (size,)), "step": jnp.int32(step)}


def target(size: int = SIZE) -> dict:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        "w": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=one),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=one),
    }


@pytest.fixture
def two_saved(tmp_path) -> Path:
    """A run with checkpoints of steps 1 and 2; returns their folder."""
    saver = Checkpointer(CheckpointConfig(keep=2), tmp_path)
    for step in (1, 2):
        saver.save(step, state_of(step), META, {})
    saver.close()
    return saver.folder


def restored(run_dir: Path) -> int:
    """The step that is restored, its arrays compared bit for bit."""
    step, state, _ = Checkpointer(CheckpointConfig(), run_dir).restore(target())
    assert np.asarray(state["w"]).tobytes() == np.asarray(state_of(step)["w"]).tobytes()
    assert int(state["step"]) == step
    return step


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from pathlib import Path
from orbax.checkpoint import v1 as ocp
from jaxrl_llm.checkpoint import folder as folders
from jaxrl_llm.checkpoint.manifest import fingerprint
from jaxrl_llm.checkpoint import state as module

where, run_dir = sys.argv[1], Path(sys.argv[2])
state_of = lambda step: {"w": jax.random.normal(jax.random.key(step), (50_000,)), "step": jnp.int32(step)}
saver = module.Checkpointer(module.CheckpointConfig(keep=1), run_dir)
saver.save(1, state_of(1), {}, {})
saver.wait()
die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
if where == "before the manifest":
    module.write_manifest = die
elif where == "before the rename":
    folders.commit = die
elif where == "while the old one is deleted":
    rmtree = folders.shutil.rmtree
    def half(path, ignore_errors=False):
        if path.name == "1.tmp":
            (path / "manifest.json").unlink()
            die()
        rmtree(path, ignore_errors)
    folders.shutil.rmtree = half
saver.save(2, state_of(2), {}, {})
if where == "while Orbax writes":
    die()
saver.wait()
"""


@pytest.mark.parametrize(
    "where, step",
    [
        ("while Orbax writes", 1),
        pytest.param("before the manifest", 1, marks=pytest.mark.slow),
        pytest.param("before the rename", 1, marks=pytest.mark.slow),
        ("while the old one is deleted", 2),
    ],
)
def test_killed_inside_a_save(tmp_path, capfd, where, step):
    end = Running(["-c", KILLED, where, str(tmp_path)]).end()
    assert end.code == -signal.SIGKILL, end.stderr
    folder = tmp_path / "checkpoints"
    left = sorted(p.name for p in folder.iterdir())
    assert str(step) in left
    assert restored(tmp_path) == step
    assert sorted(p.name for p in folder.iterdir()) == [str(step)]
    removed = [name for name in left if ".tmp" in name]
    report = capfd.readouterr().err
    assert report.splitlines() == [
        f"checkpoint: removed {name}, left by a save that was cut off" for name in removed
    ]
    saver = Checkpointer(CheckpointConfig(), tmp_path)
    assert saver.save(step + 1, state_of(step + 1), META, {})
    saver.close()
    assert restored(tmp_path) == step + 1


def test_a_file_that_the_disk_does_not_read_is_a_damaged_one(two_saved, capsys, monkeypatch):
    read = manifest._crc32

    def fails(path):
        if "2" in path.parts:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(manifest, "_crc32", fails)
    assert restored(two_saved.parent) == 1
    assert "cannot be read: Input/output error" in capsys.readouterr().err


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failed_save(tmp_path, monkeypatch):
    """As on NFS, where a folder with a file that another process reads is not empty."""
    saver = Checkpointer(CheckpointConfig(keep=1), tmp_path)
    assert saver.save(1, state_of(1), META, {})
    saver.wait()
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if Path(path).name == "1.tmp":
            if not ignore_errors:
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            return
        remove(path, ignore_errors)

    monkeypatch.setattr(folders.shutil, "rmtree", busy)
    assert saver.save(2, state_of(2), META, {})
    saver.close()
    assert saver.steps() == [2]
    monkeypatch.undo()
    assert restored(tmp_path) == 2 and [path.name for path in saver.folder.iterdir()] == ["2"]


def test_killed_in_the_first_save_is_a_fresh_start(tmp_path):
    (tmp_path / "checkpoints/1.tmp.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (tmp_path / "checkpoints/1.tmp").mkdir()
    assert Checkpointer(CheckpointConfig(), tmp_path).restore(target()) is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_bit(folder: Path) -> str:
    path = largest(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return f"{path.relative_to(folder)} is corrupt: crc32 "


def truncate(folder: Path) -> str:
    path = largest(folder)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"{path.relative_to(folder)} has {size - 1} bytes instead of {size}"


def delete_item(folder: Path) -> str:
    shutil.rmtree(folder / "state")
    return "state/"


def delete_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def change_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3').replace('"step": 1', '"step": 3'))
    return "manifest.json is corrupt: its own crc32 differs"


def cut_manifest(folder: Path) -> str:
    os.truncate(folder / "manifest.json", 100)
    return "manifest.json is corrupt: not the JSON that was written"


def change_meta(folder: Path) -> str:
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    return "meta.json is corrupt: crc32 "


def manifest_is_a_folder(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    return "manifest.json cannot be read: Is a directory"


def manifest_is_other_json(folder: Path) -> str:
    (folder / "manifest.json").write_text("[[1], 2]")
    return "manifest.json is corrupt: not the JSON that was written"


def manifest_is_deep(folder: Path) -> str:
    (folder / "manifest.json").write_text("[" * 100_000)
    return "manifest.json is corrupt: not the JSON that was written"


def manifest_of_another_version(folder: Path) -> str:
    body = {"step": 2, "chunks": []}
    (folder / "manifest.json").write_text(json.dumps({"crc32": fingerprint(body), **body}))
    return "manifest.json was written by another version of this program: ['chunks', 'step']"


DAMAGES = [
    *(flip_a_bit, truncate, delete_item, delete_manifest, change_manifest, cut_manifest, change_meta),
    *(manifest_is_a_folder, manifest_is_other_json, manifest_is_deep, manifest_of_another_version),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_previous_checkpoint_used(two_saved, capsys, damage):
    reason = damage(two_saved / "2")
    assert restored(two_saved.parent) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"checkpoint: step 2 cannot be used: {two_saved / '2'}: {reason}")
    assert second == "checkpoint: going back to step 1"
    # The damaged one is kept under another name, for inspection, until the step is saved again.
    assert sorted(p.name for p in two_saved.iterdir()) == ["1", "2.rejected"]
    saver = Checkpointer(CheckpointConfig(), two_saved.parent)
    assert saver.save(2, state_of(2), META, {})
    saver.close()
    assert sorted(p.name for p in two_saved.iterdir()) == ["1", "2"]
    assert restored(two_saved.parent) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_good_checkpoint_is_an_error_every_time(two_saved, capsys, damage):
    reasons = {step: damage(two_saved / str(step)) for step in (1, 2)}
    for _ in range(2):  # running again must not turn it into a fresh start
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be used"):
            Checkpointer(CheckpointConfig(), two_saved.parent).restore(target())
        report = capsys.readouterr().err
        assert all(f"{two_saved / str(step)}: {reason}" in report for step, reason in reasons.items())


@pytest.mark.parametrize("content", [b"{", b"[1]", b"[" * 100_000, b"\xff"])
def test_a_damaged_meta_file_that_nobody_verified_is_named(two_saved, content):
    file = two_saved / "2/meta.json"
    file.write_bytes(content[: file.stat().st_size].ljust(file.stat().st_size))
    with pytest.raises(UserError, match=r"2/meta\.json is damaged: "):
        Checkpointer(CheckpointConfig(verify=False), two_saved.parent).restore(target())


def test_without_verify_sizes_are_still_checked(two_saved):
    truncate(two_saved / "2")
    saver = Checkpointer(CheckpointConfig(verify=False), two_saved.parent)
    assert saver.restore(target())[0] == 1


@pytest.mark.parametrize("on_full_disk", ["continue", "stop"])
def test_no_room_is_seen_before_anything_is_written(two_saved, capsys, monkeypatch, on_full_disk):
    saver = Checkpointer(CheckpointConfig(on_full_disk=on_full_disk), two_saved.parent)
    monkeypatch.setattr(folders, "free_bytes", lambda folder: 1_000_000)
    if on_full_disk == "stop":
        with pytest.raises(OSError, match="step 3 is NOT saved: it needs 1 MB and 1 MB are free") as error:
            saver.save(3, state_of(3), META, {})
        assert error.value.errno == errno.ENOSPC
    else:
        assert not saver.save(3, state_of(3), META, {})
        assert capsys.readouterr().err == (
            f"checkpoint: step 3 is NOT saved: it needs 1 MB and 1 MB are free ({two_saved}); the newest "
            "checkpoint is 2; saves given up so far: 1. Free some space, or lower --checkpoint.keep.\n"
        )
    assert saver.failures == 1
    assert sorted(p.name for p in two_saved.iterdir()) == ["1", "2"]
    monkeypatch.undo()
    assert saver.save(3, state_of(3), META, {})
    saver.close()
    assert restored(two_saved.parent) == 3


@pytest.fixture
def small_disk():
    """A tmpfs of 4 MB."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tempfile.mkdtemp()
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=4m") != 0:
        os.rmdir(folder)
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield Path(folder)
    libc.umount2(folder.encode(), 2)
    os.rmdir(folder)


@pytest.mark.parametrize("async_save", [True, False])
def test_disk_that_fills_up_in_a_save(small_disk, capsys, monkeypatch, async_save):
    monkeypatch.setattr(folders, "free_bytes", lambda folder: 1 << 40)
    saver = Checkpointer(CheckpointConfig(async_save=async_save), small_disk)
    assert saver.save(1, state_of(1), META, {})
    saver.wait()
    saver.save(2, state_of(2, 2_000_000), META, {})
    saver.wait()
    report = capsys.readouterr().err
    assert report.startswith(
        f"checkpoint: step 2 is NOT saved: the disk is full ({saver.folder}); the newest checkpoint is 1;"
    )
    assert report.count("\n") == 1 and saver.failures == 1
    assert [p.name for p in saver.folder.iterdir()] == ["1"]
    assert shutil.disk_usage(small_disk).used < 1_000_000
    assert saver.save(3, state_of(3), META, {})
    saver.close()
    assert restored(small_disk) == 3


@pytest.mark.parametrize("async_save", [True, False])
def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path, capsys, async_save):
    """As `ulimit -f` sets it: the run goes on with the checkpoint before."""
    saver = Checkpointer(CheckpointConfig(async_save=async_save), tmp_path)
    assert saver.save(1, state_of(1), META, {})
    saver.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        saver.save(2, state_of(2, 2_000_000), META, {})
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.startswith(
        f"checkpoint: step 2 is NOT saved: a file reached its size limit (ulimit -f) ({saver.folder});"
    )
    assert saver.steps() == [1] and saver.failures == 1
    left = saver.folder / "2.tmp.orbax-checkpoint-tmp"  # by a writer that ends after the save has failed
    left.mkdir(exist_ok=True)
    assert saver.save(3, state_of(3), META, {})
    saver.close()
    assert {p.name for p in saver.folder.iterdir()} == {"1", "3"}


def test_disk_that_fills_up_stops_the_run_if_asked(small_disk, monkeypatch):
    monkeypatch.setattr(folders, "free_bytes", lambda folder: 1 << 40)
    saver = Checkpointer(CheckpointConfig(on_full_disk="stop"), small_disk)
    saver.save(1, state_of(1, 2_000_000), META, {})
    with pytest.raises(OSError, match=r"the disk is full .*there is no checkpoint") as error:
        saver.wait()
    assert error.value.errno == errno.ENOSPC
    assert list(saver.folder.iterdir()) == []


def test_another_failure_of_a_save_is_not_taken_for_a_full_disk(two_saved, monkeypatch):
    saver = Checkpointer(CheckpointConfig(), two_saved.parent)

    def broken(*args, **settings):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("jaxrl_llm.checkpoint.state.write_manifest", broken)
    saver.save(3, state_of(3), META, {})
    with pytest.raises(SaveError, match=r"the checkpoint of step 3 failed: .*Input/output error") as error:
        saver.wait()
    assert isinstance(error.value, RunError)  # printed as one message
    assert saver.failures == 0
    assert sorted(p.name for p in two_saved.iterdir()) == ["1", "2"]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(
        ValueError, match=r"cannot be written to .*/run/checkpoints: Not a directory. Set --run_dir"
    ):
        Checkpointer(CheckpointConfig(), tmp_path / "run")
