"""`python -m jaxrl_llm export --checkpoint RUN --out DIR`: a Hugging Face folder from a run's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm import models
from jaxrl_llm.build.models import check_frozen, load_model_config
from jaxrl_llm.build.push import model_card
from jaxrl_llm.checkpoint.params import SavedParams, restore_params
from jaxrl_llm.config import ChatConfig, ModelConfig
from jaxrl_llm.data.template import set_template
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.hub import PushError, check_repository, push_folder
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.ranges import CountOrZero
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.arguments import parse_arguments


@dataclass(frozen=True)
class ExportArguments:
    """Write the model of a checkpoint as a Hugging Face folder: weights, config and tokenizer."""

    checkpoint: Path
    """Directory of the run (its --run_dir)."""
    out: Path
    """Folder to write."""
    step: CountOrZero | None = None
    """Step of the checkpoint; None = the newest."""
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """Type of the weights."""
    ema: bool = False
    """Export the exponential moving average of the weights (--optim.ema)."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer, if the run's is missing; "" = the run's."""
    push: str = ""
    """Repository of the Hugging Face hub, ORG/NAME, that the folder is uploaded to, with a model card; the
    token comes from HF_TOKEN."""
    private: bool = False
    """Make a new repository private; an existing one keeps its visibility."""


def main(argv: list[str]) -> int:
    """Write the folder and print its size.

    Raises:
        UserError: there is no usable checkpoint or tokenizer, the folder cannot be written, or the hub
            refuses the repository.
        PushError: the upload failed; the folder is complete.
    """
    args = parse_arguments(ExportArguments, argv, "export")
    if args.push:
        check_repository(args.push, args.private)
    saved = restore_params(args.checkpoint, args.step, args.ema)
    params, config = with_base(args.checkpoint, saved), lora.base_config(saved.config)
    tokenizer = run_tokenizer(args.checkpoint, config, args.tokenizer)
    folder = save_model(params, config, args.out, tokenizer, args.dtype)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"step {saved.step} of {args.checkpoint} -> {folder} ({args.dtype}, {size / 2**20:,.1f} MiB)")
    if args.push:
        card, message = model_card(args.checkpoint, args.push), f"Checkpoint of step {saved.step}"
        try:
            print(f"pushed to {push_folder(folder, args.push, args.private, card, message)}")
        except PushError as error:
            raise PushError(f"{folder} is complete, but is not on the hub: {error}") from error
    return 0


def with_base(run_dir: Path, saved: SavedParams) -> Params:
    """Return the model of a run with the pretrained weights that its adapters were trained on.

    Other models are returned as they are.

    Raises:
        UserError: the run started from random weights, of which there is no copy, or the folder has other
            weights now.
    """
    config = saved.config
    if config.lora is None:
        return saved.params
    settings = read_json(run_dir / "config.json")["config"]["model"]
    if not (path := settings["path"]):
        raise UserError(
            f"{run_dir}: its adapters belong to random weights, which no checkpoint holds. The run's last "
            f"model, merged, is in {run_dir / 'hf'}."
        )
    folder = resolve_model(path)
    stored = lora.frozen_config(read_config(folder), config.quantize)
    base = cast_weights(load_params(folder, stored), settings["dtype"])  # as it was in the run
    trained = jax.tree.map(jnp.asarray, saved.params)
    params = lora.join_params(trained, models.with_heads(base, config))
    check_frozen(saved.frozen, lora.frozen_fingerprint(params), path, run_dir)
    return params


def run_tokenizer(run_dir: Path, config: TransformerConfig, override: str = "") -> Any:
    """Return the tokenizer of a run, which its config.json names.

    Raises:
        UserError: config.json names none.
    """
    name, template = (override, "") if override else _tokenizer_settings(run_dir / "config.json")
    tokenizer = load_model_config(ModelConfig(architecture=config, tokenizer=name))[1]
    set_template(tokenizer, ChatConfig(chat_template=template))
    return tokenizer


def _tokenizer_settings(file: Path) -> tuple[str, str]:
    """Return (name of the tokenizer, file of the chat template or "") of a config.json."""
    try:
        config = read_json(file)["config"]
        name = config["model"]["tokenizer"] or config["model"]["path"]
        return name, config.get("data", {}).get("chat", {}).get("chat_template", "")
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: names no tokenizer. Set --tokenizer to a folder or hub name.") from None
