"""The matrix products of the shared work alone, in float32, as XLA computes them on these cores.

Products with weights, and of attention with the keys that a token sees: norms, activations, softmax, sampling
and the optimizer are left out. Log-probs have one for each weight and two of attention; a train step three
(forward, gradient of the inputs, gradient of the weight), with adapters two, and six of attention; decoding
one a token for all responses, prefill one for the prompts, without their attention. Distinct tokens count
once, and the head multiplies tokens of responses alone.
"""

# ruff: noqa: E402  (stdout is taken before anything can print)
from __future__ import annotations

from serve import open_channel

channel = open_channel()

import os
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import work
from serve import serve
from work import LONG, SMALL, SMOLLM2, Work

MICROBATCH = 1536  # tokens: more at once do not help
Activations = dict[int, jax.Array]  # width -> [tokens, width]
Weight = list[jax.Array]
"""[experts, inputs, outputs] for each choice of a token: all experts, in equal parts."""


def shapes(size: Work, experts: bool) -> list[tuple[int, int, int]]:
    """Return (experts, inputs, outputs) of the weights of all layers and of the head."""
    heads, kv_heads = size.heads * size.head_dim, size.kv_heads * size.head_dim
    attention = [(1, size.width, heads), *[(1, size.width, kv_heads)] * 2, (1, heads, size.width)]
    copies, mlp = (work.EXPERTS, work.EXPERT_SIZE) if experts else (1, size.mlp)
    layer = [*attention, *[(copies, size.width, mlp)] * 2, (copies, mlp, size.width)]
    return layer * size.layers + [(1, size.width, size.vocab)]


def make_weights(size: Work, experts: bool) -> list[Weight]:
    """Return random weights that keep the scale of their inputs."""

    def draw(i: int, shape: tuple[int, int, int]) -> Weight:
        weight = jax.random.normal(jax.random.key(i), shape) / shape[1] ** 0.5
        return jnp.split(weight, work.EXPERTS_PER_TOKEN) if shape[0] > 1 else [weight]

    return [draw(i, shape) for i, shape in enumerate(shapes(size, experts))]


def activations(weights: list[Weight], tokens: int) -> Activations:
    widths = sorted({width for weight in weights for width in weight[0].shape[1:]})
    return {width: jax.random.normal(jax.random.key(width), (tokens, width)) for width in widths}


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the tokens divided evenly among the experts of w."""
    return x.reshape(w.shape[0], -1, x.shape[1])


class Flow:
    """Activations by width: a product reads its inputs and leaves its outputs.

    Outputs that nothing has read yet are averaged with later ones, so that no product is left out; such
    passes over activations are few: keys with values, and gate with up.
    """

    def __init__(self, x: Activations):
        self.x, self.unread = dict(x), set()

    def read(self, width: int) -> jax.Array:
        self.unread.discard(width)
        return self.x[width]

    def write(self, width: int, results: list[jax.Array]) -> None:
        """Average over the choices of a token, and over results that are unread."""
        results = [y.reshape(self.x[width].shape) for y in results]
        results += [self.x[width]] if width in self.unread else []
        self.x[width] = sum(results) / len(results) if len(results) > 1 else results[0]
        self.unread.add(width)


def forward(weights: list[Weight], x: Activations) -> Activations:
    """Multiply by one weight after the other."""
    flow = Flow(x)
    for weight in weights:
        _, width, out_width = weight[0].shape
        inputs = flow.read(width)
        results = [jnp.einsum("eti,eio->eto", grouped(inputs, w), w) for w in weight]
        flow.write(out_width, results)
    return flow.x


def backward(
    weights: list[Weight], x: Activations, d: Activations, trained: bool
) -> tuple[Activations, list[jax.Array]]:
    """Multiply by the transposed weights in reverse; return also the gradients of trained weights."""
    flow, gradients = Flow(d), []
    for weight in reversed(weights):
        _, width, out_width = weight[0].shape
        d_out = flow.read(out_width)
        for w in weight if trained else ():
            gradients.append(jnp.einsum("eti,eto->eio", grouped(x[width], w), grouped(d_out, w)))
        results = [jnp.einsum("eto,eio->eti", grouped(d_out, w), w) for w in weight]
        flow.write(width, results)
    return flow.x, gradients


class Attended(NamedTuple):
    """Queries of some rows, and as many keys as each of them sees on average."""

    rows: int
    queries: int
    keys: int


def attention_inputs(size: Work, attended: Attended) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q [rows, heads of keys, queries of their heads, E], k [.. E, keys] and v [.. keys, E]."""
    rows, queries, keys = attended
    shapes = (
        (queries * size.heads // size.kv_heads, size.head_dim),
        (size.head_dim, keys),
        (keys, size.head_dim),
    )
    draw = lambda i, shape: jax.random.normal(jax.random.key(i), (rows, size.kv_heads, *shape))
    return tuple(draw(i, shape) for i, shape in enumerate(shapes))


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scores and the outputs."""
    scores = q @ k
    return scores, scores @ v


def attend_both_ways(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return the outputs and the results of the four products of the gradients."""
    scores, out = attend(q, k, v)
    transposed = lambda x: jnp.swapaxes(x, -1, -2)
    d_scores = out @ transposed(v)
    return out, d_scores @ transposed(k), transposed(q) @ d_scores, transposed(scores) @ out


def attention(size: Work, parts: list[Attended], products=attend_both_ways):
    """Return the products of attention of all layers, one row at a time: its scores stay in a core's cache.

    Args:
        products: of a row: `attend_both_ways` of an update, `attend` of a forward pass.
    """
    inputs = [attention_inputs(size, part) for part in parts]
    one_layer = jax.jit(lambda *qkv: jax.lax.map(lambda row: products(*row), qkv))
    return lambda: [jax.block_until_ready(one_layer(*qkv)) for _ in range(size.layers) for qkv in inputs]


def in_microbatches(weights: list[Weight], tokens: int, predicted: int, products):
    """Return products(weights, activations) of so many tokens, with the head of the predicted tokens."""
    runs, step = [], jax.jit(products)
    for part, count in ((weights[:-1], tokens), (weights[-1:], predicted)):
        counts = [MICROBATCH] * (count // MICROBATCH) + [count % MICROBATCH] * (count % MICROBATCH > 0)
        inputs = {count: activations(part, count) for count in set(counts)}
        runs += [(part, inputs[count]) for count in counts]
    return lambda: [jax.block_until_ready(step(*run)) for run in runs]


def train(weights: list[Weight], tokens: int, predicted: int, trained: bool):
    """Return the products with weights of an update on so many tokens."""
    both_ways = lambda weights, x: backward(weights, x, forward(weights, x), trained)
    return in_microbatches(weights, tokens, predicted, both_ways)


def decode(weights: list[Weight], size: Work):
    """Return the products of a rollout: the prompts at once, then a token of each response at a time."""
    prompts = activations(weights[:-1], size.prompts * size.prompt_tokens)
    responses = activations(weights, size.batch)
    inputs = attention_inputs(size, Attended(size.batch, 1, size.prompt_tokens + size.new_tokens // 2))
    caches = [tuple(x + layer for x in inputs) for layer in range(size.layers)]

    @jax.jit
    def generate(weights, caches, prompts, x):
        def step(_, carry):
            x, outs = carry
            layers = zip(
                caches, outs, strict=True
            )  # queries that change, or the loop would compute them once
            return forward(weights, x), [attend(q + 1e-6 * out, k, v)[1] for (q, k, v), out in layers]

        start = x, [jnp.zeros_like(q) for q, _, _ in caches]
        return forward(weights[:-1], prompts), jax.lax.fori_loop(0, size.new_tokens, step, start)

    return lambda: jax.block_until_ready(generate(weights, caches, prompts, responses))


def rollout(size: Work = SMALL, experts: bool = False):
    run = decode(make_weights(size, experts), size)
    return lambda repetition: run()


def score(size: Work = SMALL, experts: bool = False):
    length = size.prompt_tokens + size.new_tokens
    weights = make_weights(size, experts)
    products = in_microbatches(weights, size.batch * length, size.batch * size.new_tokens, forward)
    attended = attention(size, [Attended(size.batch, length, length // 2)], attend)
    return lambda repetition: [products(), attended()]


def train_step(size: Work = SMALL, experts: bool = False, trained: bool = True):
    length = size.prompt_tokens + size.new_tokens
    responses = size.batch * size.new_tokens
    products = train(make_weights(size, experts), size.batch * length, responses, trained)
    attended = attention(size, [Attended(size.batch, length, length // 2)])
    return lambda repetition: [products(), attended()]


def shared_update(weights: list[Weight], size: Work, trained: bool = True):
    """Return the products of an update that computes each prompt once, in two parts."""
    prompt, response = size.prompt_tokens, size.new_tokens
    responses = size.batch * response
    tokens = size.prompts * prompt + responses
    seen = [
        Attended(size.prompts, prompt, prompt // 2),
        Attended(size.batch, response, prompt + response // 2),
    ]
    return train(weights, tokens, responses, trained), attention(size, seen)


def shared_train_step(size: Work):
    parts = shared_update(make_weights(size, experts=False), size)
    return lambda repetition: [part() for part in parts]


def grpo_step(size: Work = SMALL, experts: bool = False, trained: bool = True):
    weights = make_weights(size, experts)
    parts = decode(weights, size), *shared_update(weights, size, trained)
    return lambda repetition: [part() for part in parts]


if __name__ == "__main__":
    serve(
        channel,
        ("jax",),
        {
            "rollout_fixed": rollout,
            "score": score,
            "train_step": train_step,
            "grpo_step": grpo_step,
            "moe_rollout_fixed": lambda: rollout(experts=True),
            "moe_score": lambda: score(experts=True),
            "moe_train_step": lambda: train_step(experts=True),
            "moe_grpo_step": lambda: grpo_step(experts=True),
            "lora_train_step": lambda: train_step(trained=False),
            "lora_grpo_step": lambda: grpo_step(trained=False),
            "long_train_step": lambda: shared_train_step(LONG),
            "smollm2_rollout_fixed": lambda: rollout(SMOLLM2),
            "smollm2_score": lambda: score(SMOLLM2),
            "smollm2_train_step": lambda: train_step(SMOLLM2),
            "smollm2_grpo_step": lambda: grpo_step(SMOLLM2),
        },
    )
