"""Example -> token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrl_llm.data.rows import Example


@dataclass(frozen=True)
class ChatConfig:
    """How an example becomes tokens."""

    render: Literal["auto", "chat", "plain"] = "auto"
    """auto: messages go through the chat template, plain text as it is. chat: plain text becomes a user
    message. plain: no template, the contents joined by blank lines (base models)."""
    system_prompt: str = ""
    """System message put before chats that have none."""
    chat_template: str = ""
    """File with a Jinja chat template; empty: the tokenizer's own."""
    template_options: str = ""
    """Arguments of the chat template, as a JSON object: '{"enable_thinking": false}'."""
    loss: Literal["all", "last"] = "all"
    """Supervised training learns all assistant turns, or the last."""
    parse_control_tokens: bool = False
    """True: plain-text prompts are rendered already, so '<|im_start|>' in them is the control token."""


def encode_prompt(tokenizer: Any, example: Example, config: ChatConfig) -> np.ndarray:
    """Prompt token ids, int32 [.], up to where the policy starts to write."""
    raise NotImplementedError


def encode_supervised(tokenizer: Any, example: Example, config: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [.], mask int8 [.]); mask 1 = learn to write this token (assistant turns and their ends)."""
    raise NotImplementedError
