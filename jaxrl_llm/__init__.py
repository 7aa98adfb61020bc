"""Reinforcement-learning post-training of language models in JAX.

    import jaxrl_llm

    result = jaxrl_llm.run("grpo_tiny.py", reward=my_reward, data=my_rows, steps=50)
    responses = jaxrl_llm.generate(result.model, ["1 + 1 ="], max_tokens=16)

Importing the package imports nothing else, so that reward workers start without jax.
"""

from __future__ import annotations

from typing import Any

__all__ = ["generate", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jaxrl_llm import api

        return getattr(api, name)
    raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}; it has {', '.join(__all__)}")
