"""Hugging Face folders of a run: at its end, and every n steps."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import algos, models
from jaxrl_llm.checkpoint import folder as checkpoint_folder
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.config import HubConfig, TrainConfig
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.carried import Carried, may_carry, nothing_carried
from jaxrl_llm.hf.config import WHOLE
from jaxrl_llm.hf.export import check_export_folder, save_model
from jaxrl_llm.hf.folder import read_carried
from jaxrl_llm.hf.hub import PushError, hub_model, push_folder
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.peft import save_adapter, unread_by_peft
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.host.files import load_object
from jaxrl_llm.host.processes import on_first, print_on_first
from jaxrl_llm.learn.optim_states import averaged_weights
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.report.jsonl import Row, read_rows
from jaxrl_llm.sharding.rules import on_device
from jaxrl_llm.structs import Params, TrainState

EXPORTS = "exports"
EMA = "_ema"  # after the names of folders with averaged weights


def check_export_folders(config: TrainConfig) -> None:
    """Refuse export folders that hold anything else, or the model of a run that can no longer be continued.

    Raises:
        UserError: the message names the files.
    """
    run_dir = Path(config.run_dir)
    for suffix in ("", EMA)[: 2 if config.optim.ema else 1]:
        check_export_folder(run_dir / f"hf{suffix}")
        if config.lora.rank:
            check_export_folder(run_dir / f"adapter{suffix}", "adapter_config.json")
    if (run_dir / "hf/config.json").exists() and not checkpoint_folder.steps(run_dir / "checkpoints"):
        raise UserError(
            f"{run_dir}/hf: the model of a finished run, which has no checkpoint any more in "
            f"{run_dir}/checkpoints. This run would start over and replace model and metrics: set another "
            f"--run_dir, or move {run_dir} away."
        )


def export_due(config: CheckpointConfig, done: int) -> bool:
    """Return whether to export after a step: every n steps, the last one included, for a run may go on."""
    return bool(config.hf_every) and done % config.hf_every == 0


def kept_exports(config: CheckpointConfig, steps: int) -> int:
    """Return how many of the exports in between a run of so many steps leaves on the disk."""
    count = steps // config.hf_every if config.hf_every else 0
    return min(count, config.hf_keep) if config.hf_keep else count


def export_models(config: TrainConfig, tokenizer: Any, state: TrainState, folder: Path) -> None:
    """Write the model, its adapters merged, to folder/hf, and its adapters to folder/adapter. A collective.

    Averages of the weights (`optim.ema`) are written to hf_ema and adapter_ema.

    Raises:
        OSError, UserError, RunError: as `save_model`.
    """
    _export(config, tokenizer, state.params, folder)
    if (averages := averaged_weights(state.opt_state)) is not None:
        averages = jax.tree.map(lambda e: jax.device_put(e, on_device(e.sharding)), averages)
        frozen = lora.split_params(state.params)[1]
        _export(config, tokenizer, lora.join_params(averages, frozen), folder, suffix=EMA)


def export_step(config: TrainConfig, tokenizer: Any, state: TrainState, step: int) -> None:
    """Export to run_dir/exports/<step>, then delete older ones (`checkpoint.hf_keep`). A collective.

    If the disk is full the run continues, unless `checkpoint.on_full_disk` is "stop".

    Raises:
        UserError, RunError: as `save_model`, whose OSError becomes a RunError.
    """
    folder = Path(config.run_dir) / EXPORTS
    try:
        export_models(config, tokenizer, state, folder / str(step))
    except (OSError, UserError) as error:
        if config.checkpoint.on_full_disk == "stop":
            if isinstance(error, UserError):
                raise
            raise RunError(f"step {step} is not exported: {error}") from error
        print_on_first(f"step {step} is NOT exported: {error}")
    on_first(lambda: _prune(folder, config.checkpoint.hf_keep))


def _export(config: TrainConfig, tokenizer: Any, params: Params, folder: Path, *, suffix: str = "") -> None:
    if algos.requirements(config.algo).logprobs:  # other models keep their value head
        params = models.without_value_head(params)
    base = lora.base_config(params.config)
    carried = carried_parts(config.model.path, base)
    hf = folder / f"hf{suffix}"
    save_model(params, base, hf, tokenizer, dtype=config.model.dtype, carried=carried)
    if params.config.lora:
        is_part = on_first(lambda: _sees_images(config.model.path))
        save_adapter(params, folder / f"adapter{suffix}", config.model.path, is_part=is_part)
        if config.model.yarn_factor:
            print_on_first(
                f"{folder / f'adapter{suffix}'}: trained with YaRN, which PEFT's files lack: load it on "
                f"a base whose config.json has the rope_parameters of {hf / 'config.json'}"
            )
        if unread := unread_by_peft(params.config):
            print_on_first(f"{folder / f'adapter{suffix}'}: {unread}")


def _sees_images(path: str) -> bool:
    """Return whether PEFT loads a run's base model with its vision tower; no if the base cannot be read."""
    with contextlib.suppress(UserError):
        return bool(path) and read_json(resolve_model(path) / "config.json").get("model_type") in WHOLE
    return False


def carried_parts(path: str, config: TransformerConfig) -> Carried:
    """Return the parts of a run's base folder that its exports copy. A collective.

    If process 0 can no longer read the base, a line says so, and exports are the language model alone.

    Args:
        path: `model.path`; "" = random weights.
        config: of the exported model; a classifier has none.
    """
    none = nothing_carried(config)
    if not path or config.value_head or not may_carry(config.family):
        return none

    def read() -> Carried:
        try:
            return read_carried(resolve_model(path), config)
        except UserError as error:
            parts = "a vision tower and layers of multi-token prediction"
            print_on_first(f"{parts}, if the base has any, are left out of exports: {error}")
            return none

    return on_first(read)


def _prune(folder: Path, keep: int) -> None:
    """Delete all but the newest exports; each is renamed first, so that none is ever there in part."""
    for left in folder.glob(".*.deleted"):
        shutil.rmtree(left, ignore_errors=True)  # NFS keeps files that are being read
    steps = sorted((int(path.parent.name) for path in folder.glob("[0-9]*/hf")), reverse=True)
    for step in steps[keep:] if keep else []:
        os.replace(folder / str(step), folder / f".{step}.deleted")
        shutil.rmtree(folder / f".{step}.deleted", ignore_errors=True)


SHOWN = ("eval/", "reward/mean", "accuracy")
"""Metrics of the model card, or their beginnings."""


def push_run(run_dir: Path, hub: HubConfig) -> None:
    """Upload run_dir/hf at the end of a run, from process 0; does nothing if `push` is empty. A collective.

    Raises:
        PushError: it could not be uploaded; has the command that does it later.
    """
    if not hub.push:
        return
    folder = run_dir / "hf"
    try:
        address = on_first(
            lambda: push_folder(
                folder, hub.push, hub.private, model_card(run_dir, hub.push, folder), message="Trained model"
            )
        )
    except (UserError, RunError) as error:
        words = ["python -m jaxrl_llm export --checkpoint", shlex.quote(str(run_dir)), "--out FOLDER"]
        words += ["--push", shlex.quote(hub.push), *["--private True"] * hub.private]
        raise PushError(
            f"{folder} is complete, but is not on the hub: {error}. Push it with {' '.join(words)}"
        ) from error
    print_on_first(f"pushed to {address}")


def model_card(run_dir: Path, repo: str, export: Path) -> str:
    """Return the model card of a run: its base model, algorithm, recipe and metrics. No local paths.

    Args:
        export: folder that is uploaded; with the vision tower of its base, the model reads images, too.
    """
    described = load_object(run_dir / "config.json")
    config, recipe = described.get("config", {}), Path(str(described.get("recipe") or "")).name
    algorithm = Path(str(config.get("algo", {}).get("name", ""))).stem
    hub = hub_model(str(config.get("model", {}).get("path", "")))
    base = hub.repo if hub else ""
    sees = "vision_config" in load_object(export / "config.json")
    task = "image-text-to-text" if sees else "text-generation"
    header = {"library_name": "transformers", "pipeline_tag": task}
    header |= {"base_model": base} if base else {}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items())]
    lines += ["tags:", *(f"- {tag}" for tag in ("jaxrl_llm", algorithm) if tag), "---", ""]
    lines += [f"# {repo.rpartition('/')[2]}", ""]
    origin = f" from [{base}](https://huggingface.co/{base})" if base else ""
    lines += [f"Trained{origin} with {algorithm or 'jaxrl_llm'} (jaxrl_llm).", ""]
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _settings(config, algorithm, recipe).items()]
    if metrics := _metrics(read_rows(run_dir / "metrics.jsonl")):
        lines += ["", "| metric | first | last |", "|---|---|---|"]
        lines += [f"| {name} | {first:.4g} | {last:.4g} |" for name, (first, last) in metrics.items()]
    return "\n".join(lines) + "\n"


def _settings(config: Mapping[str, Any], algorithm: str, recipe: str) -> dict[str, Any]:
    """Return the settings of the card."""
    lora = config.get("lora", {}).get("rank")
    settings = {
        "algorithm": algorithm,
        "recipe": recipe,
        "steps": config.get("steps"),
        "learning rate": config.get("optim", {}).get("learning_rate"),
        "prompts a step": config.get("prompts_per_step"),
        "responses a prompt": config.get("responses_per_prompt"),
        "LoRA rank": lora or None,
        "seed": config.get("seed"),
    }
    return {name: value for name, value in settings.items() if value not in (None, "")}


def _metrics(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Return the first and last value of each metric of the card, of the run's own steps."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(SHOWN) and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    return {name: (column[0], column[-1]) for name, column in sorted(values.items())}
