"""Models of the commands: weights of a folder or of a run, the tokenizer of a run, and `--dtype auto`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels.chips import lacks_bfloat16
from jaxrl_kernels.dispatch import device
from jaxrl_llm import algos, models
from jaxrl_llm.builders.models import load_model_config
from jaxrl_llm.builders.weights import check_frozen, with_new_adapters
from jaxrl_llm.checkpoint.params import SavedParams, restore_params
from jaxrl_llm.config import ChatConfig, ModelConfig
from jaxrl_llm.data.template import set_template
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.peft import load_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.attention import for_length
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.sharding.placement import reshard
from jaxrl_llm.sharding.rules import TRAIN, Rules
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.config import Dtype, ModelChoice
from jaxrl_llm.tools.output import print_progress
from jaxrl_llm.user_file import expand_home


def pick_dtype(dtype: Dtype) -> str:
    """Return the dtype; "auto" = float32 on CPU, where bfloat16 is slow, float16 on GPUs without units for
    bfloat16, else bfloat16."""
    if dtype != "auto":
        return dtype
    platform, kind = device()
    return "float32" if platform == "cpu" else "float16" if lacks_bfloat16(kind) else "bfloat16"


class StoredModel(NamedTuple):
    """A model that a command names; its weights are not read yet."""

    config: TransformerConfig
    read_tokenizer: Callable[[], Any]
    end_ids: tuple[int, ...]  # `generation_end_ids`
    step: int | None  # of the run's checkpoint; None = not a run's model
    load: Callable[[Mesh, Rules, str], Params]  # (mesh, rules, dtype) -> the sharded weights

    def for_length(self, longest: int) -> StoredModel:
        """Return the model for sequences of up to `longest` tokens (`attention.for_length`)."""
        config = for_length(self.config, longest)
        load = lambda *settings: models.with_heads(self.load(*settings), config)
        return self if config == self.config else self._replace(config=config, load=load)


def open_model(name: str, choice: ModelChoice) -> StoredModel:
    """Return the model of a folder, GGUF file, hub name or run, with the adapters of a PEFT folder.

    Raises:
        UserError: it cannot be used, with the fix; `load` raises it of weights.
    """
    path = expand_home(name)
    if (path / "checkpoints").is_dir():
        model = _model_of_run(path, choice.step)
    elif choice.step is not None:
        raise UserError(f"--step {choice.step}: {path} is not a run directory with checkpoints")
    else:
        model = _model_of_folder(resolve_model(name))
    if model.config.value_head:
        raise UserError(f"--model {name}: a model with a score head, such as a reward model, has no text")
    return _with_adapter(model, choice.adapter) if choice.adapter else model


def _model_of_folder(folder: Path) -> StoredModel:
    config = read_config(folder)

    def load(mesh: Mesh, rules: Rules, dtype: str) -> Params:  # each device reads only its shard
        print_progress(
            f"loading {folder} as {dtype} on {mesh.size} {mesh.devices.flat[0].platform} device(s)"
        )
        return load_params(folder, config, models.shardings(config, mesh, rules), jnp.dtype(dtype))

    tokenizer = functools.partial(load_tokenizer, folder, config)
    return StoredModel(config, tokenizer, generation_end_ids(folder), None, load=load)


def _model_of_run(run_dir: Path, step: int | None) -> StoredModel:
    saved = restore_params(run_dir, step)
    print_progress(f"step {saved.step} of {run_dir}")
    config, base = exported_config(run_dir, saved), run_settings(run_dir)["model"]["path"]

    def load(mesh: Mesh, rules: Rules, dtype: str) -> Params:
        params = models.with_heads(with_base(run_dir, saved, mesh, rules), config)
        return cast_weights(jax.device_put(params, models.shardings(config, mesh, rules)), dtype)

    ends = generation_end_ids(resolve_model(base)) if base else ()
    tokenizer = functools.partial(run_tokenizer, run_dir, lora.base_config(config))
    return StoredModel(config, tokenizer, ends, saved.step, load=load)


def exported_config(run_dir: Path, saved: SavedParams) -> TransformerConfig:
    """Return the config of a run's model as the run exports it: a policy has no value head."""
    if not saved.config.value_head:
        return saved.config
    name = run_settings(run_dir)["algo"]["name"]
    is_policy = name not in algos.ALGOS or algos.requirements(algos.ALGOS[name].Config()).logprobs
    return dataclasses.replace(saved.config, value_head=not is_policy)


def run_settings(run_dir: Path) -> dict[str, Any]:
    """Return the config of a run, as nested dicts.

    Raises:
        UserError: its config.json is missing or damaged.
    """
    file = run_dir / "config.json"
    config = read_json(file).get("config")
    if not isinstance(config, dict):
        raise UserError(f'{file}: has no "config", which a run writes')
    return config


def _with_adapter(model: StoredModel, name: str) -> StoredModel:
    """Return the model with the adapters of a PEFT folder."""
    folder = resolve_model(name, adapter=True)
    if model.config.lora is not None:
        raise UserError(f"--adapter {name}: the run already has adapters; give its base model")
    config = lora.with_lora(model.config, read_adapter_config(folder, model.config))
    weights = load_adapter(folder, config)

    def load(mesh: Mesh, rules: Rules, dtype: str) -> Params:
        params = with_new_adapters(model.load(mesh, TRAIN, dtype), config, mesh, seed=0)
        return reshard(lora.replace_weights(params, weights), models.shardings(config, mesh, rules))

    return model._replace(config=config, load=load)


def with_base(run_dir: Path, saved: SavedParams, mesh: Mesh | None = None, rules: Rules = TRAIN) -> Params:
    """Return the model of a run with the pretrained weights that its adapters were trained on; other models
    unchanged.

    Args:
        mesh: of the pretrained weights; None = all on one device.

    Raises:
        UserError: the run started from random weights, which were not saved, or the folder has other weights
            now.
    """
    config = saved.config
    if config.lora is None:
        return saved.params
    settings = run_settings(run_dir)["model"]
    if not (path := settings["path"]):
        raise UserError(
            f"{run_dir}: its adapters belong to random weights, which no checkpoint holds. The run's last "
            f"model, merged, is in {run_dir / 'hf'}."
        )
    folder = resolve_model(path)
    stored = lora.frozen_config(read_config(folder), config.quantize)
    shardings = mesh and models.shardings(stored, mesh, rules)
    base = cast_weights(load_params(folder, stored, shardings), settings["dtype"])  # as it was in the run
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
