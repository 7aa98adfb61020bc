"""Checkpoints of a run: asynchronous, complete or absent, verified before use, the same on any mesh.

Orbax writes run_dir/checkpoints/<step>.tmp; meta.json and the manifest with its checksums follow; then
one rename makes the checkpoint exist. The state is stored as a flat dict from path ("params.layers.q")
to array, so that a checkpoint does not depend on the classes of its tree.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxrl_llm.checkpoint import folder as folders
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.manifest import array_type, flatten_state, read_manifest, read_meta, write_manifest
from jaxrl_llm.checkpoint.resume import check_arrays, check_resume
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.host.processes import agree, on_first, print_on_first
from jaxrl_llm.user_file import did_you_mean

HELD_OUT = "eval/"  # how names of held-out metrics begin
_OK, _DISK_FULL, _FAILED = 0, 1, 2  # how a save ended, worst last


class SaveError(OSError, RunError):
    """A checkpoint could not be written."""


class DiskFullError(SaveError):
    """The disk is full, and `on_full_disk` is "stop"."""


class Checkpointer:
    """Saves and restores the state of one run. In a multi-process run every process makes every call.

    Attributes:
        failures: saves given up because the disk was full.
        longest_save: seconds from `save` until the checkpoint existed, of the slowest save so far.

    Raises:
        UserError: the folder cannot be written to.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path):
        self.config = config
        self.folder = Path(run_dir).resolve() / "checkpoints"
        self.failures = 0
        self.longest_save = 0.0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[float]] | None = None
        self._warned: set[str] = set()
        on_first(lambda: folders.make_writable(self.folder))

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        metrics: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> bool:
        """Start saving. The arrays are copied before this returns, so that they may be donated.

        Args:
            step: its number; a step that has a checkpoint is not saved again.
            state: pytree of jax.Array of any sharding; across processes, of global arrays.
            meta: JSON-able. `meta["config"]` is the resolved config, `meta["model"]` the dict of the
                TransformerConfig.
            metrics: of this step, for `best_metric`; only finite numbers are kept.
            files: further files of the checkpoint, by name; process 0 writes them.

        Returns: whether the save started; False if this step is saved already, or the disk has no space.

        Raises:
            RunError: an array is not finite (other than of the optimizer, which may start with infinity).
            DiskFullError: this or the previous save did not fit, and `on_full_disk` is "stop".
            SaveError: this or the previous save failed for another reason.
        """
        self.wait()
        arrays = saved_arrays(self.config, state)
        meta = json.loads(json.dumps(meta))  # a copy, which fails here if it is not JSON-able
        metrics = {name: float(x) for name, x in metrics.items() if x is not None and np.isfinite(x)}
        if on_first(lambda: self._exists(step)):
            return False
        # Refuse what could not be restored or written.
        self._refuse_non_finite(step, arrays)
        self._warn_unranked(step, metrics)
        size = sum(x.nbytes for x in arrays.values()) + sum(map(len, files.values()))
        needed = int(1.05 * size) + 2**20
        free = on_first(lambda: folders.free_bytes(self.folder))
        if free < needed:
            self._give_up(step, f"it needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free")
            return False
        start = time.monotonic()
        try:
            with _uncompressed():
                response = ocp.save_async(folders.temporary(self.folder, step), arrays)
        except (OSError, ValueError) as error:  # Orbax raises either when the disk is full
            self._settle(step, error)
            return False
        # The rest is done in the background.
        shapes = {path: array_type(x) for path, x in arrays.items()}
        finishing = self._thread.submit(
            self._finish, step, start, response, shapes, meta=meta, metrics=metrics, files=files
        )
        self._saving = step, finishing
        if not self.config.async_save:
            self.wait()
        return True

    def wait(self) -> None:
        """Block until the save under way, if any, has ended.

        Raises:
            SaveError: as `save`.
        """
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        if self._settle(step, future.exception()):
            self.longest_save = max(self.longest_save, future.result())

    def close(self) -> None:
        """Wait for the save under way and end the background thread, also after a save that failed."""
        with self._thread:
            self.wait()

    def has(self, step: int) -> bool:
        """Return whether this step has a checkpoint, as process 0 sees it. A collective."""
        return on_first(lambda: step in self.steps())

    def file(self, step: int, name: str) -> bytes:
        """Return one of the further files of a checkpoint, or b"".

        Every process reads the file: it may have hundreds of MB, too many for the coordinator.
        """
        folder = self.folder / str(step)
        return (folder / name).read_bytes() if name in read_manifest(folder).files else b""

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        return folders.steps(self.folder)

    def latest(self) -> int | None:
        """Return the newest step that has a checkpoint."""
        return max(self.steps(), default=None)

    def restore(
        self, target: Any | Callable[[int], Any], compatible: dict[str, Any] | None = None
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Load the newest valid checkpoint; each newer one that is damaged is reported.

        Args:
            target: pytree of jax.ShapeDtypeStruct with shardings, which decide the layout, not the
                mesh that it was saved from; or the function of a checkpoint's step that returns it.
            compatible: resolved config of this run, compared with the checkpoint's by `check_resume`.

        Returns: (step, state, meta), or None if the run has no checkpoint yet. Optimizer state that was not
            saved (`CheckpointConfig.optimizer`) stays as in `target`.

        Raises:
            UserError: no checkpoint is valid, or the config or the state does not fit.
        """
        self.wait()
        step = on_first(self._choose)
        if step is None:
            return None
        folder = self.folder / str(step)
        if not folder.is_dir():
            raise UserError(
                f"process {jax.process_index()} does not see {folder}: set --run_dir to storage that all "
                "processes share."
            )
        meta = read_meta(folder)
        if compatible is not None:
            for line in check_resume(meta.get("config", {}), compatible, step):
                print_on_first(f"checkpoint: resuming with {line}")
        if isinstance(target, FunctionType):  # a model can be called, too
            target = target(step)
        saved_moments = any(map(is_moment_path, read_manifest(folder).arrays))
        return step, load_arrays(folder, target, optional_moments=not saved_moments), meta

    def _choose(self) -> int | None:
        """Delete partial checkpoints, choose one and set damaged newer ones aside.

        Raises:
            UserError: all are damaged.
        """
        for name in folders.remove_temporary(self.folder):
            print_on_first(f"checkpoint: removed {name}, left by a save that was cut off")
        step, rejected = folders.newest_valid(self.folder, self.steps(), self.config.verify)
        if step is None and rejected:
            raise UserError(
                f"no checkpoint in {self.folder} can be used (each is named above with its fault). "
                "Put a good copy there, or move the folder away to start the run from its beginning."
            )
        for damaged in rejected:  # only now: with no good one left, nothing may look like a fresh start
            folders.set_aside(self.folder, damaged)
        return step

    def _exists(self, step: int) -> bool:
        """Return whether a step is saved; deletes partial files of killed or failed saves."""
        folders.remove_temporary(self.folder)
        return step in self.steps()

    def _refuse_non_finite(self, step: int, arrays: dict[str, jax.Array]) -> None:
        checked = {
            path: _is_finite(x)
            for path, x in arrays.items()
            if "opt_state" not in path.split(".") and jax.dtypes.issubdtype(x.dtype, np.inexact)
        }
        bad = [path for path, finite in jax.device_get(checked).items() if not finite]
        if bad:
            names = f"{', '.join(bad[:8])}{' ...' * (len(bad) > 8)}"
            raise RunError(
                f"step {step} is NOT saved: {len(bad)} of {len(checked)} arrays hold NaN or Inf ({names}); "
                f"{self._newest()}. Lower --optim.learning_rate and run the same command again."
            )

    def _warn_unranked(self, step: int, metrics: dict[str, float]) -> None:
        """Print why a save cannot be the best if its step has no `best_metric`, each reason once."""
        metric = self.config.best_metric
        if not metric or metric in metrics:
            return
        if metric.startswith(HELD_OUT) and not any(name.startswith(HELD_OUT) for name in metrics):
            why = "it was not evaluated. Saves on evaluated steps are ranked, which --eval.every sets."
        else:
            why = f"it has no such number; metrics.jsonl has the names.{did_you_mean(metric, metrics)}"
        if why not in self._warned:
            name = f"{metric} (--checkpoint.best_metric)"
            print_on_first(f"checkpoint: step {step} is not ranked by {name}: {why}")
        self._warned.add(why)

    def _finish(
        self, step: int, start: float, response: Any, shapes: dict, *, meta: dict, metrics: dict, files
    ) -> float:
        """Wait in the background for Orbax in all processes; then process 0 makes the checkpoint exist.

        Older ones are deleted only after that. Returns the seconds since `start`.
        """
        response.result()
        if jax.process_index() == 0:
            folder = folders.temporary(self.folder, step)
            for name, data in files.items():
                if data:
                    (folder / name).write_bytes(data)
            write_manifest(folder, step, shapes, meta, metrics=metrics)
            folders.commit(self.folder, step)
            newest = self.steps()[-self.config.keep :]
            ranked = folders.rank_steps(self.folder, self.config.best_metric, self.config.best_mode)
            folders.prune(self.folder, keep={*newest, *ranked[: self.config.keep_best]})
        return time.monotonic() - start

    def _settle(self, step: int, error: BaseException | None) -> bool:
        """Agree on how a save ended and clean up after a failure. Return whether it succeeded."""
        outcome = agree(_OK if error is None else _DISK_FULL if folders.is_disk_full(error) else _FAILED)
        if outcome == _DISK_FULL:
            limit = "a file reached its size limit (ulimit -f)"
            self._give_up(step, limit if folders.TOO_LARGE in str(error) else "the disk is full")
        if outcome == _FAILED:
            self._sweep()
            where = f"{self.folder / str(step)}: {error}" if error else "in another process"
            raise SaveError(f"the checkpoint of step {step} failed: {where}") from error
        return outcome == _OK

    def _give_up(self, step: int, reason: str) -> None:
        """Delete the partial files of a save that does not fit; the previous checkpoint stays."""
        self._sweep()
        self.failures += 1
        message = (
            f"step {step} is NOT saved: {reason} ({self.folder}); {self._newest()}; saves given up so far: "
            f"{self.failures}. Free some space, or lower --checkpoint.keep."
        )
        if self.config.on_full_disk == "stop":
            raise DiskFullError(errno.ENOSPC, message)
        print_on_first(f"checkpoint: {message}")

    def _newest(self) -> str:
        latest = self.latest()
        return "there is no checkpoint" if latest is None else f"the newest checkpoint is {latest}"

    def _sweep(self) -> None:
        """Delete partial files of a failed save; its other writers may still be writing for a moment."""
        tries = 50 if jax.process_index() == 0 else 0
        while tries and folders.remove_temporary(self.folder):
            tries -= 1
            time.sleep(0.02)


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def _uncompressed() -> ocp.Context:
    """Return the settings of a save: weights hardly compress (12%, for several times the CPU time)."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def saved_arrays(config: CheckpointConfig, state: Any) -> dict[str, Any]:
    """Return path -> array of a state, without the optimizer's arrays if checkpoints have none."""
    arrays = flatten_state(state).items()
    return {path: x for path, x in arrays if config.optimizer or not is_moment_path(path)}


def is_moment_path(path: str) -> bool:
    """Return whether an array of a state is the optimizer's; averages of the weights are not."""
    parts = path.split(".")
    return "opt_state" in parts and "ema" not in parts


def load_arrays(
    folder: Path, target: Any, prefix: str = "", on_host: bool = False, *, optional_moments: bool = False
) -> Any:
    """Return the part of a checkpoint below `prefix`, as a tree like `target`.

    Args:
        optional_moments: optimizer state may be missing; its leaves are unchanged.

    Raises:
        UserError: the checkpoint has other arrays.
    """
    leaves = {prefix + path: leaf for path, leaf in flatten_state(target).items()}
    needed = {path: x for path, x in leaves.items() if not (optional_moments and is_moment_path(path))}
    saved = read_manifest(folder).arrays
    check_arrays(folder, {path: x for path, x in saved.items() if path.startswith(prefix)}, needed)
    read = lambda path: np.ndarray if on_host else needed[path]
    loaded = ocp.load(folder, {path: read(path) if path in needed else ocp.PLACEHOLDER for path in saved})
    tree = [loaded[path] if path in needed else leaf for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(target), tree)
