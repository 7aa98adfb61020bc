"""Configs of the ways in which layers mix tokens, and the kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from jaxrl_llm.ranges import Range

if TYPE_CHECKING:
    from jaxrl_llm.models.config import TransformerConfig

Size = Annotated[int, Range(1, 2**24)]
"""A dimension of a weight."""


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are projections of one small latent."""

    kv_rank: Size = 512
    """Size of the latent of a token's keys and values (HF `kv_lora_rank`)."""
    q_rank: Annotated[int, Range(0, 2**24)] = 1536
    """Size of the latent of a token's queries (HF `q_lora_rank`); 0 = none."""
    nope_dim: Size = 128
    """Leading dims of a head of queries and keys, which RoPE does not rotate."""
    rope_dim: Size = 64
    """Last dims of a head, which RoPE rotates; all heads share these dims of the key."""
    value_dim: Size = 128
    """Dims of a head of values."""
    interleaved: bool = True
    """RoPE rotates neighbouring dims, 2i and 2i + 1, not i and i + rope_dim / 2."""

    def problems_in(self, c: TransformerConfig) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for an architecture that cannot have these latents."""
        size = self.nope_dim + self.rope_dim
        if c.head_dim != size:
            yield "head_dim", f"is {c.head_dim}: it must be mla.nope_dim + mla.rope_dim, {size}."
        if c.num_kv_heads != c.num_heads:
            yield "num_kv_heads", f"is {c.num_kv_heads}: with mla it must be num_heads, {c.num_heads}."
        if self.value_dim > size:
            yield "head_dim", f"is {c.head_dim}: it must be at least mla.value_dim, {self.value_dim}."
        if c.qk_norm:
            yield "qk_norm", "is true: with mla it must be false."
        if c.rope.partial_rotary != 1.0:
            yield "rope", f"has partial_rotary {c.rope.partial_rotary}: with mla it must be 1."


@dataclass(frozen=True)
class IndexConfig:
    """The sparse indexer of latent attention (DeepSeek-V3.2, arXiv 2512.02556; GLM-5): a token attends to the
    earlier tokens with the highest index scores. Its weights are frozen."""

    topk: Size = 2048
    """Tokens that a token attends to, itself included if it is among the highest."""
    heads: Annotated[int, Range(1, 2**16)] = 64
    """Heads of index queries; there is one index key a token."""
    head_dim: Annotated[int, Range(2, 2**13)] = 128
    """Size of an index key, of which RoPE rotates the first mla.rope_dim dims."""
    interleaved: bool = False
    """RoPE rotates neighbouring dims of it (GLM-5), not halves (DeepSeek-V3.2)."""


Norms = Literal["before", "after", "both"]
Projections = Literal["qkv", "qkvz", "separate"]


@dataclass(frozen=True)
class DeltaConfig:
    """Layers with the gated delta rule (arXiv 2412.06464) in place of attention (Qwen3-Next, Qwen3.5)."""

    key_heads: Annotated[int, Range(1, 2**16)] = 16
    """Heads of queries and keys."""
    value_heads: Annotated[int, Range(1, 2**16)] = 32
    """Heads of values and of the state; each key head serves value_heads / key_heads of them."""
    key_dim: Annotated[int, Range(1, 2**13)] = 128
    """Size of one head of queries and keys."""
    value_dim: Annotated[int, Range(1, 2**13)] = 128
    """Size of one head of values."""
    conv_width: Annotated[int, Range(2, 64)] = 4
    """Tokens of the causal convolution of queries, keys and values."""
    projections: Projections = "qkv"
    """Matrices of a layer's input: one of queries, keys and values, and one each of gate, beta and decay; or
    "qkvz": one with the query, key, values and gates of each key head, and one with its betas and decays
    (Qwen3-Next); or "separate": one each, and three convolutions (OLMo-hybrid)."""
    norms: Norms = "before"
    """Norms of the residual stream of these layers; `TransformerConfig.norms` has those of attention."""
    norm_eps: Annotated[float, Range(0.0, 1.0)] | None = None
    """Added to the mean square in the norm of the output; None = `TransformerConfig.norm_eps`."""
    negative_eigenvalues: bool = False
    """beta is 2 sigmoid, up to 2, so that the state may change its sign (arXiv 2411.12537; OLMo-hybrid)."""

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for heads that do not match."""
        if self.value_heads % self.key_heads:
            yield "key_heads", f"is {self.key_heads}: it must divide value_heads, {self.value_heads}."


@dataclass(frozen=True)
class ConvConfig:
    """Layers with a gated short convolution in place of attention (LFM2)."""

    conv_width: Annotated[int, Range(2, 64)] = 3
    """Tokens of the causal convolution (HF `conv_L_cache`)."""
    conv_bias: bool = False
    """Biases on the convolution and on the projections before and after it."""


@dataclass(frozen=True)
class MambaConfig:
    """Layers of Mamba-2 in place of attention (arXiv 2405.21060; Nemotron-H)."""

    heads: Annotated[int, Range(1, 2**16)] = 128
    """Heads of inputs and of the state."""
    head_dim: Annotated[int, Range(1, 2**13)] = 64
    """Size P of one head of inputs."""
    state_size: Annotated[int, Range(1, 2**13)] = 128
    """Size N of B and C."""
    groups: Annotated[int, Range(1, 2**16)] = 8
    """Groups of heads that share B and C, and that the norm of the outputs normalises together."""
    conv_width: Annotated[int, Range(2, 64)] = 4
    """Tokens of the causal convolution of inputs, B and C."""
    conv_bias: bool = True
    """Bias on the convolution."""
    bias: bool = False
    """Biases on the projections before and after (HF `use_bias`)."""
    dt_min: Annotated[float, Range(0.0, 1e3)] = 0.001
    """Smallest step size, after softplus (HF `time_step_min`)."""

    @property
    def inner(self) -> int:
        """Return the size of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: inputs, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for heads that do not match."""
        if self.heads % self.groups:
            yield "groups", f"is {self.groups}: it must divide heads, {self.heads}."


ATTENTION = "attention"
PER_LAYER = ("window_layers", "rope_layers", "layer_kinds", "index_layers")
"""Fields of TransformerConfig with one entry for each layer."""
LayerKind = Literal["attention", "delta", "conv", "mamba", "mlp", "experts"]
RECURRENT_KINDS: tuple[LayerKind, ...] = ("delta", "conv", "mamba")
"""Kinds of layers that keep a state of fixed size; a field of TransformerConfig has the name of each."""
MLP_KINDS: tuple[LayerKind, ...] = ("mlp", "experts")
"""Kinds of layers that have a feed-forward, dense or of experts, and do not mix tokens (`one_branch`)."""


def has_indexer(c: TransformerConfig) -> bool:
    """Return whether the layers of a stack have an indexer."""
    return c.index is not None and (c.index_layers or (True,))[0]


def rope_problems(c: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) of rotary position embeddings that do not fit the heads."""
    in_range = 0 < c.rope.partial_rotary <= 1  # else its range is reported
    rotary = c.rotary_dim if in_range else 4
    if rotary % 2 or not rotary:
        part = f", of which partial_rotary {c.rope.partial_rotary} is {rotary}"
        part = "" if c.rope.partial_rotary == 1.0 else part
        yield "head_dim", f"is {c.head_dim}{part}: it must be even, since RoPE rotates pairs."
    if c.local_rope and c.local_rope.scaling in ("dynamic", "longrope"):
        scaling = f"has scaling {c.local_rope.scaling}"
        yield "local_rope", f"{scaling}: it needs a scaling that does not depend on the length."
    if c.rope.scaling == "longrope":
        for name in ("short_factor", "long_factor"):
            if len(getattr(c.rope, name) or ()) != rotary // 2:
                yield "rope", f"has {name}: it must have a number for each pair, {rotary // 2}."
    if not c.global_heads and c.local_rope and c.local_rope.partial_rotary != c.rope.partial_rotary:
        yield (
            "local_rope",
            f"must rotate the same dims as rope: partial_rotary {c.rope.partial_rotary}.",
        )
    if c.rope.scaling == "dynamic" and rotary < 4:
        yield "head_dim", f"is {c.head_dim}: dynamic RoPE scaling needs at least 4."


def alibi_problems(c: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) of a model with ALiBi (`attention.add_alibi`)."""
    if c.alibi and c.max_position > 2**16:
        yield "max_position", f"is {c.max_position}: with alibi it must be at most {2**16} (bfloat16)."
    if c.alibi and (c.mla or c.local_rope or c.global_heads or c.attention_gate):
        yield "alibi", "is True: with mla, local_rope, global_heads, attention_gate it must be False."


def index_problems(c: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for an architecture that cannot have its indexer."""
    if c.index_layers and not has_indexer(c):
        yield "index_layers", "is set: it needs index, and an indexer in the first layer."
    if c.index is None:
        return
    if not c.mla or not c.mla.q_rank:
        yield "index", "is set: it needs mla with a q_rank, whose latent makes the index queries."
    elif c.index.head_dim < c.mla.rope_dim:
        yield "index", f"has head_dim {c.index.head_dim}: it must be at least mla.rope_dim, {c.mla.rope_dim}."
    if c.sliding_window or c.attention_sinks or c.attention_softcap:
        yield "index", "is set: sliding_window, attention_sinks and attention_softcap must not be."


def kind_problems(c: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for kinds of layers that do not match other fields."""
    kinds = {*(c.layer_kinds or ())}
    for kind in RECURRENT_KINDS:
        if (getattr(c, kind) is None) == (kind in kinds):
            yield kind, f"and layer_kinds must be set together: layer_kinds names the {kind} layers."
    if len(states := {*RECURRENT_KINDS} & kinds) > 1:
        yield "layer_kinds", f"has {' and '.join(sorted(states))}: only one kind can be beside attention."
    if c.delta and c.activation != "silu":
        yield "activation", f"is {c.activation}: with delta it must be silu, as in its convolution."
    if c.one_branch != bool({*MLP_KINDS} & kinds):
        yield "one_branch", "and layer_kinds must be set together: layer_kinds names the feed-forwards."
    if c.one_branch and ("experts" in kinds) != (c.moe is not None):
        yield "moe", "and layer_kinds must be set together: layer_kinds names the layers of experts."
    if c.one_branch and c.moe and c.moe.dense_layers:
        yield "moe", f"has dense_layers {c.moe.dense_layers}: with one_branch it must have 0."
    if not c.mlp_gate and c.moe and (c.moe.bias or c.moe.swiglu_limit):
        yield "mlp_gate", "is False: moe.bias and moe.swiglu_limit are for gated experts."
    if kinds and ATTENTION not in kinds:
        yield "layer_kinds", "has no attention: at least one layer must have it."


def shared_kv_problems(c: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for layers that cannot read the keys and values of earlier ones."""
    if not c.shared_kv_layers:
        if c.wide_shared_mlp:
            yield "wide_shared_mlp", "is True: it is for the layers that shared_kv_layers counts."
        return
    have = f"is {c.shared_kv_layers}"
    if c.shared_kv_layers >= c.num_layers:
        yield "shared_kv_layers", f"{have}: it must be below num_layers, {c.num_layers}."
    elif missing := {*(c.window_layers or ())} - {*(c.window_layers or ())[: -c.shared_kv_layers]}:
        kind = "a" if True in missing else "no"
        yield "shared_kv_layers", f"{have}: no earlier layer with {kind} window has keys for the last layers."
    if {*(c.window_layers or ())} == {True, False} and not c.global_heads:
        yield "shared_kv_layers", f"{have}: if only some layers have a window, it needs global_heads."
    if c.mla or c.layer_kinds or c.alibi or (c.moe and c.moe.dense_layers):
        yield "shared_kv_layers", f"{have}: with mla, layer_kinds, alibi or moe.dense_layers it must be 0."
