"""Models of the commands: weights of a folder or of a run, the tokenizer of a run, and `--dtype auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels.chips import lacks_bfloat16
from jaxrl_kernels.dispatch import device
from jaxrl_llm import models
from jaxrl_llm.build.models import check_frozen, load_model_config
from jaxrl_llm.checkpoint.params import SavedParams
from jaxrl_llm.config import ChatConfig, ModelConfig
from jaxrl_llm.data.template import set_template
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.sharding.rules import Rules
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.config import Dtype
from jaxrl_llm.tools.output import print_progress


def pick_dtype(dtype: Dtype) -> str:
    """Return the dtype; "auto" = float32 on CPU, where bfloat16 is slow, float16 on GPUs without units for
    bfloat16, else bfloat16."""
    if dtype != "auto":
        return dtype
    platform, kind = device()
    return "float32" if platform == "cpu" else "float16" if lacks_bfloat16(kind) else "bfloat16"


def load_sharded(folder: Path, config: TransformerConfig, mesh: Mesh, rules: Rules, dtype: str) -> Params:
    """Return the weights; each device reads only its shard."""
    print_progress(f"loading {folder} as {dtype} on {mesh.size} {mesh.devices.flat[0].platform} device(s)")
    return load_params(folder, config, models.shardings(config, mesh, rules), jnp.dtype(dtype))


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
