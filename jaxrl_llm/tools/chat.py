"""`python -m jaxrl_llm chat --model FOLDER`: a conversation in the terminal; streaming, with commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.ranges import LARGEST, Count, Range
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.config import Dtype, ModelChoice


@dataclass(frozen=True, kw_only=True)
class ChatArguments(ModelChoice, SamplingConfig):
    """Talk to a model in the terminal; /help lists the commands. In a pipe each line of stdin is a message.

    A model without a chat template continues the text (plain).
    """

    model: str
    """Hugging Face folder, GGUF file, hub name, or directory of a run (its newest checkpoint)."""
    temperature: Annotated[float, Range(0.0, 100.0, usual="0.7 is usual, 0 is greedy")] = 0.7
    """0 = greedy."""
    max_tokens: Count = 1024
    """Maximum tokens of an answer."""
    context: Annotated[int, Range(2, LARGEST)] = 8192
    """Maximum tokens of the conversation, limited by the model's positions."""
    seed: Annotated[int, Range(0, LARGEST)] = 0
    """Answer k of a session depends on (seed, k) and the conversation."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, float16 on Turing GPUs, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template, and --chat.system_prompt."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(fsdp=1))
    """Mesh of the devices; the first device by default."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model or setting that cannot be used, with the fix.
    """
    args = parse_arguments(ChatArguments, argv, "chat")
    from jaxrl_llm.tools.chat_session import open_session  # imports jax: --help and bad flags end before

    open_session(args).run()
    return 0
