"""The kinds of servers, by the name of their engine (--rollout.engine)."""

from __future__ import annotations

from jaxrl_llm.bridge.servers import ServerKind
from jaxrl_llm.bridge.sglang import SGLang
from jaxrl_llm.bridge.vllm import VLLM

KINDS: dict[str, ServerKind] = {"sglang": SGLang(), "vllm": VLLM()}
