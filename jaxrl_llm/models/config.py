"""TransformerConfig: the architecture of a decoder, dense or with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.mixer_config import (
    ATTENTION,
    MLP_KINDS,
    PER_LAYER,
    RECURRENT_KINDS,
    ConvConfig,
    DeltaConfig,
    IndexConfig,
    LayerKind,
    MambaConfig,
    MLAConfig,
    Norms,
    Size,
    alibi_problems,
    index_problems,
    kind_problems,
    rope_problems,
    shared_kv_problems,
)
from jaxrl_llm.ranges import Count, Range, problems

Factor = Annotated[float, Range(0.0, 1e6, open_low=True)]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the context extensions that HF defines for it.

    HF spells these `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
    """

    theta: Annotated[float, Range(1.0, 1e15, open_low=True, usual="1e4 to 1e6 is usual")] = 10_000.0
    """Base of the frequencies."""
    scaling: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    """Context extension beyond the pretraining length; "proportional": frequency 0 after `partial_rotary`."""
    factor: Factor = 1.0
    """Ratio of the extended context to the original one (every scaling but "default")."""
    original_max_position: Count | None = None
    """Pretraining length (yarn, llama3, longrope); None = `max_position` of the model."""
    attention_factor: Factor | None = None
    """Multiplies cos and sin (yarn, longrope); None = from factor, and from mscale and mscale_all_dim (yarn)
    or the original length (longrope)."""
    beta_fast: Factor = 32.0
    """Pairs with more rotations than this over the original length keep their frequency (yarn)."""
    beta_slow: Factor = 1.0
    """Pairs with fewer rotations than this have their frequency divided by `factor` (yarn)."""
    mscale: Annotated[float, Range(0.0, 1e6)] | None = None
    """Weight of log(factor) in the numerator of the attention factor (yarn; DeepSeek checkpoints)."""
    mscale_all_dim: Annotated[float, Range(0.0, 1e6)] | None = None
    """Weight of log(factor) in the denominator; used only if `mscale` is set too."""
    truncate: bool = True
    """Round the bounds between kept and interpolated pairs outwards to integers (yarn)."""
    low_freq_factor: Factor = 1.0
    """Frequencies of wavelengths above original length / this are divided by `factor` (llama3)."""
    high_freq_factor: Factor = 4.0
    """Wavelengths below original length / this are unchanged (llama3)."""
    short_factor: tuple[Factor, ...] | None = None
    """Divisors of the frequencies, one a pair, for sequences up to the original length (longrope)."""
    long_factor: tuple[Factor, ...] | None = None
    """Divisors of the frequencies for longer sequences (longrope)."""
    is_long: bool = False
    """The divisors are `long_factor`; `attention.for_length` decides it by the longest sequence of a run."""
    partial_rotary: Annotated[float, Range(0.0, 1.0, open_low=True)] = 1.0
    """Fraction of a head's dims that RoPE rotates, from the first on (HF `partial_rotary_factor`), or with
    "proportional" scaling of its pairs."""
    query_growth: Annotated[float, Range(0.0, 1e3)] = 0.0
    """b: queries at position p are multiplied by 1 + b log(1 + floor(p / original length)), after RoPE
    (Ministral 3, HF `llama_4_scaling_beta`)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for frequency bounds in the wrong order."""
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield (
                "high_freq_factor",
                f"is {self.high_freq_factor}: it must be above low_freq_factor, {self.low_freq_factor}.",
            )


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: a router sends each token to a few of many feed-forward networks."""

    num_experts: Annotated[int, Range(2, 2**16)] = 8
    """Experts of a layer."""
    experts_per_token: Annotated[int, Range(1, 2**8)] = 2
    """Experts per token."""
    expert_size: Size = 768
    """Width inside each expert."""
    shared_size: Annotated[int, Range(0, 2**24)] = 0
    """Width of the shared expert, which computes every token; 0 = none."""
    normalize: bool = True
    """Divide the router's scores of the chosen experts by their sum."""
    added_to_sum: Annotated[float, Range(0.0, 1.0)] = 1e-20
    """Added to that sum, since sigmoids may all be 0 (HF; MiniMax-M2 adds 0)."""
    shared_gate: bool = True
    """Multiply the shared expert's output by a sigmoid gate (Qwen2-MoE)."""
    branches: bool = False
    """Experts, shared expert and router read the residual stream through a norm each; outputs of experts and
    shared expert are normalised before their sum, and each expert's weight has a trained factor (Gemma 4)."""
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Scores from the router's logits: softmax over all experts, sigmoid (DeepSeek-V3), or softmax over the
    chosen experts."""
    scale: Annotated[float, Range(0, 1e6, open_low=True, usual="1 to 2.5 is usual")] = 1.0
    """Multiplies the weights of the chosen experts (HF `routed_scaling_factor`)."""
    groups: Annotated[int, Range(1, 2**16)] = 1
    """Groups of consecutive experts; a token chooses experts in `groups_kept` groups (arXiv 2412.19437)."""
    groups_kept: Annotated[int, Range(1, 2**16)] = 1
    """Groups kept: the groups whose two best experts have the largest sum; not used with one group."""
    selection_bias: bool = False
    """Add a bias to the scores by which experts are chosen, not to their weights (arXiv 2408.15664)."""
    bias: bool = False
    """Biases on the router and on the three projections of each expert (gpt-oss)."""
    swiglu_limit: Factor | None = None
    """c: an expert computes g sigmoid(swiglu_alpha g) (u + 1) with its gate g up to c and its up projection u
    within -c and c (gpt-oss); None = activation(g) u."""
    swiglu_alpha: Factor = 1.702
    """Factor inside the sigmoid, if swiglu_limit is set."""
    dense_layers: Annotated[int, Range(0, 10_000)] = 0
    """Leading layers with a dense feed-forward of width mlp_size instead of experts."""
    latent_size: Annotated[int, Range(0, 2**24)] = 0
    """Width of the inputs and outputs of the experts, not of router and shared expert: tokens are projected
    to it before the experts, and back after their sum (Nemotron 3 Super, HF `moe_latent_size`); 0 =
    hidden_size."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for too many experts per token, and for uneven groups."""
        if self.experts_per_token > self.num_experts:
            yield (
                "experts_per_token",
                f"is {self.experts_per_token}: there are {self.num_experts} experts (num_experts).",
            )
        if self.groups > 1:
            yield from self._group_problems()
        if self.branches and (not self.shared_size or self.shared_gate or self.latent_size):
            yield "branches", "is True: it needs shared_size above 0, no shared_gate and no latent_size."
        if self.score == "softmax_of_chosen" and (self.groups > 1 or self.selection_bias):
            yield "score", "is softmax_of_chosen: groups and selection_bias need softmax or sigmoid."

    def _group_problems(self) -> Iterator[tuple[str, str]]:
        if self.num_experts % self.groups or self.num_experts < 2 * self.groups:
            yield (
                "groups",
                f"is {self.groups}: it must divide {self.num_experts} experts into groups of at least 2.",
            )
        elif self.groups_kept > self.groups:
            yield "groups_kept", f"is {self.groups_kept}: there are {self.groups} groups (groups)."
        elif self.experts_per_token > (inside := self.groups_kept * (self.num_experts // self.groups)):
            yield (
                "experts_per_token",
                f"is {self.experts_per_token}: the groups kept have {inside} experts (groups_kept).",
            )


@dataclass(frozen=True)
class TransformerConfig:
    """The architecture of a decoder; Qwen, Llama, Mistral and the others differ only in these fields."""

    lora = None  # a field of AdaptedConfig alone
    quantize = "none"  # a field of QuantizedConfig and of AdaptedConfig.lora
    family: str = "qwen3"
    """HF `model_type`; selects the names of weights on import and export."""
    vocab_size: Size = 151_936
    """Rows of the embedding and of the head."""
    hidden_size: Size = 1024
    """Width of the residual stream."""
    mlp_size: Size = 3072
    """Width inside the gated feed-forward of layers without experts."""
    moe: MoEConfig | None = None
    """Experts instead of the feed-forward, except in leading dense layers; None = a dense model."""
    num_layers: Annotated[int, Range(1, 10_000)] = 28
    """Decoder layers."""
    num_heads: Annotated[int, Range(1, 2**16)] = 16
    """Query heads."""
    num_kv_heads: Annotated[int, Range(1, 2**16)] = 8
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: Annotated[int, Range(2, 2**13, usual="64 or 128 is usual")] = 128
    """Size of one head; need not be hidden_size / num_heads. With `mla` nope_dim + rope_dim."""
    mla: MLAConfig | None = None
    """Multi-head latent attention (DeepSeek-V3); None = keys and values are projected directly."""
    index: IndexConfig | None = None
    """The sparse indexer of latent attention (DeepSeek-V3.2, GLM-5); None = all earlier tokens are read."""
    index_layers: tuple[bool, ...] | None = None
    """False for each layer that reuses the choice of the last indexer before it (GLM-5); None = no layer."""
    delta: DeltaConfig | None = None
    """The gated delta rule of the layers that `layer_kinds` names; None = no such layers."""
    conv: ConvConfig | None = None
    """The short convolution of the layers that `layer_kinds` names; None = no such layers."""
    mamba: MambaConfig | None = None
    """Mamba-2 of the layers that `layer_kinds` names; None = no such layers."""
    layer_kinds: tuple[LayerKind, ...] | None = None
    """Kind of each layer: attention, a kind with a state, or with `one_branch` a feed-forward; None = all
    attention."""
    global_heads: GlobalHeads | None = None
    """Heads of the layers without a sliding window; None = all layers have the same heads."""
    keys_as_values: bool = False
    """Values are the projected keys, before their norm and RoPE; there is no value projection (Gemma 4)."""
    shared_kv_layers: Annotated[int, Range(0, 10_000)] = 0
    """Last layers without keys and values: each reads the keys and values of the last earlier layer that
    has both, and a window if it has one (Gemma 4 E2B)."""
    wide_shared_mlp: bool = False
    """The feed-forward of these layers is twice as wide."""
    one_branch: bool = False
    """A layer either mixes tokens or has a feed-forward, as `layer_kinds` says, not both (Nemotron-H)."""
    attention_gate: bool = False
    """Multiply the output of attention by a sigmoid of a further projection of its input (Qwen3-Next)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on the attention output projection (Llama with `attention_bias`)."""
    mlp_bias: bool = False
    """Biases on the three feed-forward projections of a dense model."""
    qk_norm: bool = True
    """RMSNorm over head_dim of queries and keys before RoPE (Qwen3)."""
    qk_norm_over_heads: bool = False
    """`qk_norm` normalises all heads together, before the split, instead of each head (OLMoE)."""
    qk_norm_after_rope: bool = False
    """`qk_norm` comes after RoPE (Hunyuan)."""
    value_norm: bool = False
    """Divide the values of each head by the root of their mean square (Gemma 4)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    """Activation of the feed-forward gate; relu2 = the square of max(x, 0)."""
    mlp_gate: bool = True
    """Feed-forward and experts compute down(activation(gate x) * up x); False = down(activation(up x)), as in
    Nemotron-H."""
    norms: Norms = "before"
    """Norms of the residual stream: before attention and feed-forward, after them on what they add to the
    stream (OLMo 3), or both (Gemma). Layers with the delta rule have `DeltaConfig.norms`."""
    norm_offset: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Added to the weights of RMSNorms: 1 if weights are stored as w and multiply as 1 + w (Gemma)."""
    norm_eps: Annotated[float, Range(0.0, 1.0, usual="1e-6 is usual")] = 1e-6
    """Added to the mean square in every RMSNorm."""
    embedding_multiplier: Factor = 1.0
    """Multiplies embeddings, rounded to the type of activations; sqrt(hidden_size) in Gemma."""
    residual_multiplier: Factor = 1.0
    """Multiplies what attention and feed-forward add to the residual stream (Granite)."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this, in the final norm, whose float32 weights it divides (Granite)."""
    per_layer_inputs: Annotated[int, Range(0, 2**16, usual="256 is usual")] = 0
    """Size of a vector of each token for each layer, made of the token's row in a second embedding and a
    projection of the first; 0 = none (Gemma 4 E2B)."""
    layer_scalar: bool = False
    """Multiply the residual stream after each layer by a stored number, which is not trained (Gemma 4)."""
    tie_embeddings: bool = True
    """The LM head is the embedding."""
    normalize_head: bool = False
    """Divide each row of the LM head by its length (Baichuan 2)."""
    rope: RopeConfig = RopeConfig(theta=1_000_000.0)
    """Rotary position embedding."""
    local_rope: RopeConfig | None = None
    """Rotary position embedding of the layers with a sliding window; None = `rope` (Gemma 3, OLMo 3)."""
    rope_layers: tuple[bool, ...] | None = None
    """False for each layer without rotary position embedding; None = all layers have one (SmolLM3)."""
    max_position: Count = 40_960
    """Maximum sequence length (HF `max_position_embeddings`)."""
    sliding_window: Count | None = None
    """Tokens that a token attends to, including itself; None = all earlier tokens."""
    window_layers: tuple[bool, ...] | None = None
    """True for each layer that uses the sliding window; None = all layers."""
    alibi: bool = False
    """Scores fall with distance, by a slope of the head (ALiBi, arXiv 2108.12409), instead of RoPE."""
    attention_sinks: bool = False
    """A learnt score per head in the denominator of attention's softmax (gpt-oss)."""
    attention_multiplier: Factor | None = None
    """Multiplies attention scores; None = 1 / sqrt(head_dim). For Gemma 3 it is the -0.5th power of
    `query_pre_attn_scalar`."""
    attention_softcap: Factor | None = None
    """c: attention scores become c tanh(score / c) (Gemma 2)."""
    logit_softcap: Factor | None = None
    """c: logits become c tanh(logit / c). Applied where log-probs are computed, not in the decoder."""
    value_head: bool = False
    """Add a head with one scalar per token: for critics, reward models, a policy with a shared critic."""
    initializer_range: Annotated[float, Range(0.0, 10.0, usual="0.02 is usual")] = 0.02
    """Standard deviation of random weights."""

    @property
    def kind(self) -> LayerKind:
        """Return the kind of the layers of a stack (`stacks.layer_stacks`)."""
        return self.layer_kinds[0] if self.layer_kinds else ATTENTION

    @property
    def recurrent_kind(self) -> LayerKind | None:
        """Return the kind of the model's layers that have a state; None = it has no such layers."""
        return next((kind for kind in self.layer_kinds or () if kind in RECURRENT_KINDS), None)

    @property
    def num_recurrent_layers(self) -> int:
        """Return the number of layers with a state."""
        return self.layer_kinds.count(self.recurrent_kind) if self.layer_kinds else 0

    @property
    def mixes(self) -> bool:
        """Return whether the layers of a stack mix tokens, by attention or a state."""
        return self.kind not in MLP_KINDS

    @property
    def has_mlp(self) -> bool:
        """Return whether the layers of a stack have a feed-forward, dense or of experts."""
        return not (self.one_branch and self.mixes)

    @property
    def num_sparse_layers(self) -> int:
        """Return the number of layers with experts."""
        if self.moe is None:
            return 0
        if self.one_branch:
            return self.layer_kinds.count("experts")
        return self.num_layers - self.moe.dense_layers

    @property
    def num_attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_layers if self.layer_kinds is None else self.layer_kinds.count(ATTENTION)

    @property
    def num_kv_layers(self) -> int:
        """Return the number of layers with keys and values, which caches hold."""
        return self.num_attention_layers - self.shared_kv_layers

    @property
    def has_kv(self) -> bool:
        """Return whether the layers of a stack have keys and values."""
        return self.kind == ATTENTION and self.num_kv_layers > 0

    @property
    def expert_width(self) -> int:
        """Width of the inputs and outputs of the experts of a model that has them."""
        return self.moe.latent_size or self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that RoPE rotates."""
        if self.mla:
            return self.mla.rope_dim
        if self.rope.scaling == "proportional":
            return self.head_dim
        return int(self.head_dim * self.rope.partial_rotary)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for sizes that do not match."""
        if self.mla:
            yield from self.mla.problems_in(self)
        # Attention heads.
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"is {self.num_kv_heads}: it must divide num_heads, {self.num_heads}."
        for name in ("qk_norm_over_heads", "qk_norm_after_rope"):
            if getattr(self, name) and not self.qk_norm:
                yield name, "is True: it says which norm qk_norm is, so that must be True, too."
        yield from rope_problems(self)
        for name in PER_LAYER:
            layers = getattr(self, name)
            if layers is not None and len(layers) != self.num_layers:
                yield name, f"has {len(layers)} entries: it must have one a layer, {self.num_layers}."
        if self.global_heads:
            yield from self.global_heads.problems_in(self)
        yield from alibi_problems(self)
        if self.normalize_head and self.tie_embeddings:
            yield "normalize_head", "is True: with tie_embeddings it must be False."
        # Layers of other kinds than attention.
        yield from kind_problems(self)
        yield from index_problems(self)
        yield from shared_kv_problems(self)
        if self.mla and (self.layer_kinds or self.attention_gate):
            yield "mla", "is set: layer_kinds and attention_gate are for attention without latents."
        # Experts.
        if self.moe and self.mlp_bias:
            yield "mlp_bias", "is true: with moe it must be false; the biases of experts are moe.bias."
        if self.moe and (dense := self.moe.dense_layers) >= self.num_layers:
            yield "num_layers", f"is {self.num_layers}: it must be above moe.dense_layers, {dense}."


def check_model_config(config: TransformerConfig, where: str) -> None:
    """Refuse an invalid TransformerConfig that does not come from a recipe.

    Args:
        where: file or argument of the config, for the message.

    Raises:
        UserError: one line that names every bad field.
    """
    parts = {"": config, "rope.": config.rope, "local_rope.": config.local_rope}
    parts |= {
        f"{name}.": getattr(config, name)
        for name in ("moe", "mla", "index", "global_heads", *RECURRENT_KINDS)
    }
    found = ((f"{key}{name}", text) for key, part in parts.items() if part for name, text in problems(part))
    if wrong := [f"{name} {text}" for name, text in found]:
        raise UserError(f"{where}: no model can have this architecture: {' '.join(wrong)}")
