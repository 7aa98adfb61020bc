"""Log-probs over the kept sets of the rollout: the tokens that its top-k, top-p and min-p kept."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.chunks import map_chunks
from jaxrl_llm.sharding.rules import look_up
from jaxrl_llm.structs import Batch, Params

if TYPE_CHECKING:
    from jaxrl_llm.learn.update import StepConfig


def kept_logprobs(
    params: Params, hidden: Float[Array, "B T D"], batch: Batch, config: StepConfig
) -> Float[Array, "B T"]:
    """Return the log-prob of each target under the softmax over its kept set, float32 nats; 0 without a set.

    Reads only the head's rows of the sets. The ratio of two such log-probs is the ratio of the distributions
    that the tokens were drawn from, before and after an update (arXiv 2512.02556, section 3.1).
    """
    temperature, softcap = config.temperature, params.config.logit_softcap

    def plain(hidden, head, targets, kept):
        @jax.checkpoint
        def one(hidden, targets, kept):
            ids = jnp.maximum(kept, 0)
            rows = look_up(head, ids.reshape(len(ids), -1), hidden.dtype).reshape(*ids.shape, -1)
            logits = jnp.einsum("btd,btkd->btk", hidden, rows, preferred_element_type=jnp.float32)
            logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
            return batch_invariant.set_logprob(logits, targets, kept, temperature)

        return map_chunks(one, config.chunk, hidden, targets, kept)

    def exact(hidden, head, targets, kept):
        head = batch_invariant.rounded(head, hidden.dtype)

        def one(hidden, targets, kept):
            logits = batch_invariant.map_tokens(batch_invariant.logits_fn(softcap), head, hidden)
            return batch_invariant.map_tokens(
                batch_invariant.kept_logprob, jnp.float32(temperature), logits, targets, kept
            )

        return map_chunks(one, config.chunk, hidden, targets, kept)

    compute = functools.partial(batch_invariant.straight_through, plain, exact) if config.strict else plain
    return compute(hidden, params.head, batch.targets, batch.kept)
