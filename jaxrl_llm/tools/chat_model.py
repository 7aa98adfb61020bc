"""The model of a conversation: loaded from anywhere, with few compiled programs, its text streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.build.models import with_new_adapters
from jaxrl_llm.checkpoint.params import restore_params
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.peft import load_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import text_of
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.models import load_sharded, run_tokenizer, with_base
from jaxrl_llm.tools.output import print_progress
from jaxrl_llm.user_file import expand_home

TOKENS_A_CALL = 4
"""Tokens decoded per device call, after which they are shown."""
INCOMPLETE = "\ufffd"
"""Decoded in place of a character of which some bytes are not generated yet."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, which could change the terminal -> what is printed."""


class ChatModel(NamedTuple):
    """A model to talk to."""

    architecture: TransformerConfig
    tokenizer: Any
    params: Params
    end_ids: tuple[int, ...]  # of generation_config.json


def open_chat_model(name: str, step: int | None, adapter: str, mesh: Mesh, dtype: str) -> ChatModel:
    """Return the model of a folder, GGUF file, hub name or run, with adapters.

    Args:
        step: of the run's checkpoint; None = the newest.
        adapter: PEFT folder or hub name; "" = none.

    Raises:
        UserError: it cannot be used, with the fix.
    """
    path = expand_home(name)
    if (path / "checkpoints").is_dir():
        saved = restore_params(path, step)
        print_progress(f"step {saved.step} of {path}")
        params = models.without_value_head(jax.tree.map(jnp.asarray, with_base(path, saved)))
        tokenizer, ends = run_tokenizer(path, lora.base_config(saved.config)), ()
    else:
        if step is not None:
            raise UserError(f"--step {step}: {path} is no directory of a run, which has checkpoints")
        folder = resolve_model(name)
        architecture = read_config(folder)
        tokenizer, ends = load_tokenizer(folder, architecture), generation_end_ids(folder)
        params = load_sharded(folder, architecture, mesh, TRAIN, dtype)
    if params.config.value_head:
        raise UserError(f"--model {name}: a model with a score head, such as a reward model, cannot talk")
    if adapter:
        params = with_adapter(params, adapter, mesh)
    return ChatModel(params.config, tokenizer, params, ends)


def with_adapter(params: Params, name: str, mesh: Mesh) -> Params:
    """Return the model with the adapters of a PEFT folder.

    Raises:
        UserError: they do not fit the model.
    """
    folder = resolve_model(name, adapter=True)
    if params.config.lora is not None:
        raise UserError(f"--adapter {name}: the run has adapters of its own; give its base model")
    config = lora.with_lora(params.config, read_adapter_config(folder, params.config.moe is not None))
    weights = load_adapter(folder, config)
    return lora.replace_weights(with_new_adapters(params, config, mesh, seed=0), weights)


def chat_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh over as many devices as its sizes need; over all where one of them is -1."""
    sizes = config.sizes.values()
    return make_mesh(config, jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)])


class ConversationEngine(NativeEngine):
    """Engine for one answer at a time, whose shapes are those of the longest conversation from the start.

    So its programs are few, one a rung of each ladder, and a turn compiles at most the next rung.
    """

    def __init__(self, model: ChatModel, mesh: Mesh, dtype: str, context: int, max_tokens: int):
        rollout = RolloutConfig(slots=1, chunk=TOKENS_A_CALL, dtype=dtype)
        super().__init__(rollout, model.architecture, mesh, model.tokenizer, model.end_ids)
        self._shapes = self._make_shapes(context, max_tokens, turns=True)
        self.publish(model.params, version=0)


class TextStream:
    """Text of tokens as they come, written once it cannot change: whole characters of UTF-8."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]):
        self.tokenizer, self.write, self.shown = tokenizer, write, ""

    def update(self, ids: Sequence[int], final: bool = False) -> None:
        """Write what is new in the text of all tokens so far; `final` = no more will come."""
        text = text_of(self.tokenizer, ids)
        text = text if final else text.rstrip(INCOMPLETE)
        if text.startswith(self.shown):
            self.write(text[len(self.shown) :].translate(CONTROLS))
            self.shown = text
