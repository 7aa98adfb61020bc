"""Checks that a run may continue from a checkpoint, made before any array is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import jax

from jaxrl_llm.addresses import MASKED
from jaxrl_llm.checkpoint.manifest import array_type
from jaxrl_llm.errors import UserError
from jaxrl_llm.removed import removed_key

MAX_SHOWN = 20  # lines of a difference that are printed

FIXED = (
    *("seed", "model.path", "model.adapter", "model.architecture", "model.yarn_factor"),
    *("model.yarn_original", "model.tokenizer", "model.dtype", "reference.path", "critic.path", "lora"),
    "data",
    *("optim.name", "optim.moments", "optim.store_param_remainders", "optim.ema"),
    "max_prompt_tokens",  # decides which prompts are filtered, and so all that follow
    "rollout.sampling.kept_sets",  # unfinished responses of a checkpoint have sets or none
    "rollout.oversample",  # a saved draw is one prompt with oversampling, else all prompts of a step
    "prompts_per_step",  # step s reads prompts from s * prompts_per_step on
)
"""Keys, with all keys below them, that a run can never change: they give its checkpoints their meaning."""

FIXED_FROM_STEP_1 = ("warm_start.steps",)
"""Keys that a run keeps once it has taken a step: step s would belong to another stage."""

FIXED_IN_WARM_UP = ("warm_start.sources", "warm_start.examples_per_step")
"""Keys that a run keeps until its SFT warm-up is over: they decide which examples a step reads."""

ABSENT = "(absent)"


def check_resume(old: dict[str, Any], new: dict[str, Any], step: int) -> list[str]:
    """Compare two resolved configs.

    Args:
        old: of the run that wrote the checkpoint.
        new: of the run that is to continue it.
        step: of the checkpoint.

    Returns: one line for each harmless change, to be printed ("optim.learning_rate: was 1e-06, now 2e-06").
        A setting that only one of them has (another version of the program wrote it) is harmless. A masked
        secret may have changed.

    Raises:
        UserError: another algorithm, a fixed key changed, or a removed key had an effect; lists all of them.
    """
    # Keys that this run cannot change, by its step.
    _check_algorithm(old, new)
    fixed_keys = FIXED + (FIXED_FROM_STEP_1 if step else ())
    if 0 < step < old.get("warm_start", {}).get("steps", 0):
        fixed_keys += FIXED_IN_WARM_UP
    # Sort each change into harmless and refused.
    harmless, refused = [], []
    stored = bool(new.get("model", {}).get("path"))  # whose files say the architecture
    for key, was, now in _changes("", old, json.loads(json.dumps(new))):
        if stored and key.startswith("model.architecture"):
            continue
        row = removed_key(key) if now == ABSENT else None
        if row and was == row.neutral:
            continue
        if row:
            lines = harmless if row.continues else refused
            lines.append(f"{key}: was {_spell(was)}; this key was removed. {row.instead}")
            continue
        fixed = any(key == name or key.startswith(f"{name}.") for name in fixed_keys)
        lines = refused if fixed and ABSENT not in (was, now) else harmless
        lines.append(f"{key}: was {_spell(was)}, now {_spell(now)}")
    if refused:
        raise UserError(
            f"the checkpoints in {new.get('run_dir', 'run_dir')} were made with other settings, which a run "
            f"cannot change:{_shown(refused)}\n"
            "Put the old values back, or start a new run with another --run_dir."
        )
    return harmless


SAME_SETTINGS = "Put the settings it was saved with back, or start a new run with another --run_dir."


def check_arrays(
    folder: Path, saved: dict[str, str], needed: dict[str, jax.ShapeDtypeStruct], fix: str = SAME_SETTINGS
) -> None:
    """Compare the arrays of a checkpoint ("params.layers.q" -> "float32[2,8]") with the arrays of this run.

    Raises:
        UserError: lists each array that one of them lacks or that has another shape or type.
    """
    now = {path: array_type(leaf) for path, leaf in needed.items()}
    lines = []
    for path in sorted(saved.keys() | now.keys()):
        if path not in saved:
            lines.append(f"{path}: not in the checkpoint, this run needs {now[path]}")
        elif path not in now:
            lines.append(f"{path}: saved {saved[path]}, this run has no such array")
        elif saved[path] != now[path]:
            lines.append(f"{path}: saved {saved[path]}, this run needs {now[path]}")
    if lines:
        raise UserError(f"{folder} holds the state of another model or optimizer:{_shown(lines)}\n{fix}")


def _check_algorithm(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse another algorithm: the state of a checkpoint belongs to the algorithm that made it."""
    was, now = (_algorithm(config) for config in (old, new))
    if was and now and was != now:
        run_dir = str(new.get("run_dir", "run_dir"))
        raise UserError(
            f"{run_dir} holds a run of {was}, and this one is of {now}: another algorithm needs another "
            f"run directory. Add --run_dir {run_dir.rstrip('/')}_{now}."
        )


def _algorithm(config: dict[str, Any]) -> str:
    """Return the name of the algorithm, of a user's own file without its folder: files move."""
    name = str(config.get("algo", {}).get("name", ""))
    return PurePath(name).stem if name.endswith(".py") else name


def _changes(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old, new) of each differing leaf."""
    prefix = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _changes(f"{prefix}{name}", old.get(name, ABSENT), new.get(name, ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{prefix}{i}", *pair)
    elif old != new and not _same_but_masked(old, new):
        yield key, old, new


def _same_but_masked(old: Any, new: Any) -> bool:
    """Return whether two texts are equal up to their masked parts: secrets are rotated."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    fits = lambda masked, text: re.fullmatch(".*".join(map(re.escape, masked.split(MASKED))), text, re.S)
    return (MASKED in old and bool(fits(old, new))) or (MASKED in new and bool(fits(new, old)))


def _shown(lines: list[str]) -> str:
    more = [f"... and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:MAX_SHOWN] + more)


def _spell(value: Any) -> str:
    return value if value == ABSENT else json.dumps(value)
