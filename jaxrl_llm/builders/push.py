"""Upload of a run's model to the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config import HubConfig
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.hub import PushError, parse_hub_name, push_folder
from jaxrl_llm.host.files import load_json
from jaxrl_llm.host.processes import on_first, print_on_first
from jaxrl_llm.report.jsonl import Row, read_rows
from jaxrl_llm.user_file import expand_home

SHOWN = ("eval/", "reward/mean", "accuracy")
"""Metrics of the model card, or their beginnings."""


def push_run(run_dir: Path, hub: HubConfig) -> None:
    """Upload run_dir/hf at the end of a run, from process 0. A collective; nothing where `push` is empty.

    Raises:
        PushError: it could not be uploaded; has the command that does it later.
    """
    if not hub.push:
        return
    folder = run_dir / "hf"
    try:
        address = on_first(
            lambda: push_folder(folder, hub.push, hub.private, model_card(run_dir, hub.push), "Trained model")
        )
    except (UserError, RunError) as error:
        words = ["python -m jaxrl_llm export --checkpoint", shlex.quote(str(run_dir)), "--out FOLDER"]
        words += ["--push", shlex.quote(hub.push), *["--private True"] * hub.private]
        raise PushError(
            f"{folder} is complete, but is not on the hub: {error}. Push it with {' '.join(words)}"
        ) from error
    print_on_first(f"pushed to {address}")


def model_card(run_dir: Path, repo: str) -> str:
    """Return the model card of a run: its base model, algorithm, recipe and metrics. No local paths."""
    described = _read_description(run_dir / "config.json")
    config, recipe = described.get("config", {}), Path(str(described.get("recipe") or "")).name
    algorithm = str(config.get("algo", {}).get("name", ""))
    algorithm = Path(algorithm).stem
    base = _hub_repository(str(config.get("model", {}).get("path", "")))
    header = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    header |= {"base_model": base} if base else {}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items())]
    lines += ["tags:", *(f"- {tag}" for tag in ("jaxrl_llm", algorithm) if tag), "---", ""]
    lines += [f"# {repo.rpartition('/')[2]}", ""]
    origin = f" from [{base}](https://huggingface.co/{base})" if base else ""
    lines += [f"Trained{origin} with {algorithm or 'jaxrl_llm'} (jaxrl_llm).", ""]
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _settings(config, recipe).items()]
    if metrics := _metrics(read_rows(run_dir / "metrics.jsonl")):
        lines += ["", "| metric | first | last |", "|---|---|---|"]
        lines += [f"| {name} | {first:.4g} | {last:.4g} |" for name, (first, last) in metrics.items()]
    return "\n".join(lines) + "\n"


def _settings(config: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """Return the settings of the card."""
    lora = config.get("lora", {}).get("rank")
    settings = {
        "algorithm": Path(str(config.get("algo", {}).get("name", ""))).stem,
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


def _hub_repository(path: str) -> str:
    """Return the repository of a hub name; "" = it is a local folder or file."""
    hub = parse_hub_name(path) if path and not expand_home(path).exists() else None
    return hub.repo if hub else ""


def _read_description(file: Path) -> dict[str, Any]:
    """Return config.json; {} = there is none that can be read."""
    try:
        described = load_json(file.read_text())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}
