"""The engine of a conversation, with few compiled programs, and its text, streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import text_of
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.placement import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.thoughts import readable
from jaxrl_llm.tools.models import StoredModel

TOKENS_A_CALL = 4
"""Tokens decoded per device call, after which they are shown."""
INCOMPLETE = "\ufffd"
"""Decoded in place of a character of which some bytes are not generated yet."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, which could change the terminal -> printed text."""


def chat_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh over as many devices as its sizes need; over all devices if a size is -1."""
    sizes = config.sizes.values()
    devices = open_devices()
    return make_mesh(config, devices if -1 in sizes else devices[: math.prod(sizes)])


def conversation_engine(
    model: StoredModel, tokenizer: Any, *, mesh: Mesh, dtype: str, context: int, max_tokens: int
) -> NativeEngine:
    """Return an engine for one answer at a time, with the shapes of the longest conversation.

    So it has few programs, one per rung of each ladder, and a turn compiles at most the next rung.
    """
    rollout = RolloutConfig(slots=1, chunk=TOKENS_A_CALL, dtype=dtype)
    engine = NativeEngine(rollout, model.config, mesh, tokenizer, model.end_ids)
    engine.set_lengths(context, max_tokens, turns=True)
    engine.publish(model.load(mesh, TRAIN, dtype), version=0)
    return engine


class TextStream:
    """Text of tokens as they come, written once it cannot change: whole characters of UTF-8."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], end_ids: Sequence[int] = ()):
        self.tokenizer, self.write, self.end_ids, self.shown = tokenizer, write, end_ids, ""

    def update(self, ids: Sequence[int], final: bool = False) -> None:
        """Write the new part of the text of all tokens so far; `final` = no more tokens will come."""
        text = readable(text_of(self.tokenizer, ids, self.end_ids))
        text = text if final else text.rstrip(INCOMPLETE)
        if text.startswith(self.shown):
            self.write(text[len(self.shown) :].translate(CONTROLS))
            self.shown = text
