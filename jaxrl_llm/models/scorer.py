"""Log-probs of given tokens under a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.sharding.compile import compiler_options
from jaxrl_llm.sharding.rules import logprob_specs


def make_scorer(config: TransformerConfig, temperature: float, dtype: str, mesh: Mesh):
    """Return a jitted (params, tokens [B, T], lengths [B], routes = None) -> log-probs [B, T], nats.

    Position t has the log-prob of tokens[:, t + 1]. Routes [B, T, L, K] are the experts that tokens pass
    (`moe.route_spec`); None = the routers choose.
    """

    def forward(params, tokens, lengths, routes=None):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)
        hidden = params(tokens, positions, segments, routes, dtype=jnp.dtype(dtype))
        head = params.head.astype(hidden.dtype)
        return linear_logprob(
            hidden,
            head,
            jnp.roll(tokens, -1, axis=1),
            temperature=temperature,
            softcap=config.logit_softcap,
            with_entropy=False,
            partition_specs=logprob_specs(hidden, head),
        )[0]

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        forward, out_shardings=replicated, compiler_options=compiler_options(mesh, gathers_weights=True)
    )
