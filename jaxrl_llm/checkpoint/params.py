"""Weights of a checkpoint without the rest of its state, for tools."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.checkpoint import folder as folders
from jaxrl_llm.checkpoint.manifest import read_manifest, read_meta
from jaxrl_llm.checkpoint.state import load_arrays
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import AdaptedConfig, TransformerConfig, abstract, lora, named_leaves
from jaxrl_llm.structs import Params


class SavedParams(NamedTuple):
    """The weights of a checkpoint."""

    step: int
    params: Params  # tree of `models.init` with numpy leaves as they were saved
    config: TransformerConfig
    frozen: str  # `models.lora.frozen_fingerprint` of the weights that are not saved; "" = all are


def restore_params(run_dir: Path, step: int | None = None, ema: bool = False) -> SavedParams:
    """Return the weights as numpy arrays on the host, and the config of their model. Changes nothing.

    Of a run with adapters these are the trained weights alone (`models.lora.split_params`).

    Args:
        run_dir: of the training run.
        step: which checkpoint; None = the newest valid one.
        ema: return their exponential moving averages (`optim.ema`).

    Raises:
        UserError: no such checkpoint, it is damaged, or it has no averages.
    """
    folder = find_checkpoint(run_dir, step)
    meta, saved = read_meta(folder), read_manifest(folder).arrays
    config = transformer_config(meta["model"], str(folder))
    prefixes = ("opt_state.ema.", "opt_state.inner.ema.") if ema else ("params.",)
    prefix = next((p for p in prefixes if any(path.startswith(p) for path in saved)), None)
    if prefix is None:
        raise UserError(f"{folder} has no averages of the weights: the run was without --optim.ema")
    target = lora.split_params(abstract(config))[0]
    leaves = [
        jax.ShapeDtypeStruct(x.shape, saved.get(f"{prefix}{name}", "float32").split("[")[0])
        for name, x in named_leaves(target)
        if x is not None  # frozen: not in the checkpoint
    ]
    target = jax.tree.unflatten(jax.tree.structure(target), leaves)
    params = load_arrays(folder, target, prefix, on_host=True)
    return SavedParams(int(folder.name), params, config, meta.get("frozen", ""))


def find_checkpoint(run_dir: Path, step: int | None = None, checksums: bool = True) -> Path:
    """Return the folder of a run's checkpoint, which is valid.

    Args:
        step: which checkpoint; None = the newest valid one.
        checksums: read every byte; otherwise only that the files are there with their sizes.

    Raises:
        UserError: no such checkpoint, or it is damaged.
    """
    folder = Path(run_dir).resolve() / "checkpoints"
    there = folders.steps(folder)
    if not there:
        above = next((p for p in folder.parent.parents if folders.steps(p / "checkpoints")), None)
        such = f": {above}" if above else ""
        raise UserError(f"{folder}: no checkpoint; give the run_dir of a run that has saved one{such}")
    if step is not None and step not in there:
        raise UserError(f"{folder}: no checkpoint of step {step}; there are {there}")
    chosen = folders.newest_valid(folder, there if step is None else [step], checksums).step
    if chosen is None:
        raise UserError(f"{folder}: no checkpoint can be used (each is named above with its fault)")
    return folder / str(chosen)


def transformer_config(fields: dict[str, Any], where: str = "model") -> TransformerConfig:
    """Return a config from its dict as JSON gives it back: Configs in it are dicts, tuples are lists.

    Args:
        where: it was read from, for the message.

    Raises:
        UserError: a field that this version does not have.
    """
    cls = AdaptedConfig if "lora" in fields else TransformerConfig
    parts = {name: part for name, part in _parts(cls).items() if fields.get(name)}
    unknown = _unknown(cls, fields)
    unknown += [f"{name}.{key}" for name, part in parts.items() for key in _unknown(part, fields[name])]
    if unknown:
        raise UserError(f"{where}: its model is of another version of this program: {', '.join(unknown)}")
    as_tuples = lambda values: {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return cls(**as_tuples(fields) | {name: part(**as_tuples(fields[name])) for name, part in parts.items()})


def _parts(cls: type) -> dict[str, type]:
    """Return the fields that are Configs, or None, with the class of each."""
    classes = {name: (hint, *typing.get_args(hint)) for name, hint in typing.get_type_hints(cls).items()}
    return {name: part for name, found in classes.items() for part in filter(dataclasses.is_dataclass, found)}


def _unknown(cls: type, fields: dict[str, Any]) -> list[str]:
    """Return the fields that a dataclass does not have."""
    return sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
