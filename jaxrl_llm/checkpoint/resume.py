"""May a run go on from a checkpoint? Settings and arrays are compared before any array is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoint.manifest import describe
from jaxrl_llm.errors import UserError

SHOWN = 20  # lines of a difference that are printed

FIXED = (
    "seed",
    "model.path",
    "model.architecture",
    "model.tokenizer",
    "model.dtype",
    "data",
    "max_prompt_tokens",  # decides which prompts are filtered, and so all that follow
    "prompts_per_step",  # step s reads prompts from s * prompts_per_step on
)
"""Keys, with all below them, that a run keeps for life: a checkpoint means nothing under others."""

ABSENT = "(absent)"


def check_resume(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare two resolved configs.

    Args:
        old: of the run that wrote the checkpoint.
        new: of the run that wants to continue it.

    Returns: one line for each harmless change, to be printed ("optim.learning_rate: was 1e-06, now 2e-06").
        A setting that only one of them has (another version of the program wrote it) is harmless.

    Raises:
        ValueError: a key of FIXED changed; lists all of them, old and new.
    """
    harmless, refused = [], []
    for key, was, now in _changes("", old, json.loads(json.dumps(new))):
        fixed = any(key == name or key.startswith(f"{name}.") for name in FIXED)
        lines = refused if fixed and ABSENT not in (was, now) else harmless
        lines.append(f"{key}: was {_spell(was)}, now {_spell(now)}")
    if refused:
        raise UserError(
            "the checkpoints in this run directory were made with other settings, which a run cannot change:"
            f"{_shown(refused)}\nPut the old values back, or start a new run with another --run_dir."
        )
    return harmless


def check_same(folder: Path, saved: dict[str, str], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Hold the arrays of a checkpoint ("params.layers.q" -> "float32[2,8]") against those to be filled.

    Raises:
        ValueError: lists each array that one of them lacks or that has another shape or type.
    """
    now = {path: describe(leaf) for path, leaf in wanted.items()}
    lines = []
    for path in sorted(saved.keys() | now.keys()):
        if path not in saved:
            lines.append(f"{path}: not in the checkpoint, this run wants {now[path]}")
        elif path not in now:
            lines.append(f"{path}: saved {saved[path]}, this run has no such array")
        elif saved[path] != now[path]:
            lines.append(f"{path}: saved {saved[path]}, this run wants {now[path]}")
    if lines:
        raise UserError(
            f"{folder} holds the state of another model or optimizer:{_shown(lines)}\n"
            "Put the settings it was saved with back, or start a new run with another --run_dir."
        )


def _changes(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of each differing leaf."""
    inside = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _changes(f"{inside}{name}", old.get(name, ABSENT), new.get(name, ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{inside}{i}", *pair)
    elif old != new:
        yield key, old, new


def _shown(lines: list[str]) -> str:
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:SHOWN] + more)


def _spell(value: Any) -> str:
    return value if value == ABSENT else json.dumps(value)
