"""Rotary position embeddings in HF's config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.families import FAMILIES
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.hf.windows import LAYER_TYPES
from jaxrl_llm.models.config import RopeConfig, TransformerConfig

FACTORS = ("short_factor", "long_factor")
"""Lists of numbers of longrope."""
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "longrope": (*FACTORS, "factor", "original_max_position", "attention_factor"),
    "proportional": ("factor",),
}
"""`rope_type` -> the fields of RopeConfig that it reads. HF's names are the same, except ORIGINAL."""
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
DIMS = "rotary_dim"
PROPORTIONAL = "proportional"
GROWTH = "llama_4_scaling_beta"
"""HF's name of `query_growth`."""
GROWING = ("ministral3", "mistral4")

_REQUIRED = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": FACTORS,
}
_OLD_LONGROPE = ("su", "yarn")
"""Older names of longrope in folders of Phi-3."""


def read_ropes(keys: JsonKeys, family: str, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return (rope, local_rope) as transformers 5 reads them: `rope_scaling`, `rope_parameters`, the
    top-level `rope_theta`. The second is None for families with one RoPE for all layers.

    In families with two, `rope_scaling` belongs to the layers without a window, and OLMo 3's top-level
    `rope_theta` to all layers, as in transformers 4 (5.24 forgets it for the layers with a window).
    """
    facts = FAMILIES[family]
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    if name == "rope_scaling" and not facts.local_theta:
        raise keys.wrong(name, keys.get(name), f"is not supported for {family}; supported: rope_parameters")
    sections = keys.section(name)
    by_type = any(isinstance(value, dict) for value in sections.raw.values())
    if by_type and not facts.rope_by_layer_type:
        raise keys.wrong(name, sections.raw, ": one RoPE for all layers is supported, not one a layer type")
    if not facts.rope_by_layer_type:
        return _read_rope(keys, sections, max_position, family=family), None
    if unknown := set(sections.raw) - set(LAYER_TYPES) if name == "rope_parameters" else set():
        raise keys.wrong(
            name, sections.raw, f"has {sorted(unknown)[0]}: it must have {' and '.join(LAYER_TYPES)}"
        )
    full, local = (sections.section(kind) for kind in LAYER_TYPES)
    if name == "rope_scaling":
        full, local = sections, keys.section("rope_parameters").section(LAYER_TYPES[True])
    ropes = [_read_rope(keys, full, max_position, family=family, theta=facts.local_theta and "rope_theta")]
    ropes += [_read_rope(keys, local, max_position, family=family, theta=facts.local_theta)]
    return ropes[0], ropes[1]


def _read_rope(
    keys: JsonKeys, rope: JsonKeys, max_position: int, *, family: str, theta: str = "rope_theta"
) -> RopeConfig:
    """Return one RoPE.

    Args:
        keys: of config.json.
        rope: its section for this RoPE.
        theta: top-level key of the base, if the section has none; "" = the section must have one.
    """
    # The type and its required keys.
    key = "rope_type" if "rope_type" in rope.raw else "type"
    only_sections = not theta
    known = [name for name in ROPE_FIELDS if name != PROPORTIONAL or only_sections]
    known = ["default", "longrope", *_OLD_LONGROPE] if family == "phi3" else known
    kind = rope.one_of(key, known, "default")
    kind = "longrope" if family == "phi3" and kind in _OLD_LONGROPE else kind
    stretch = _stretch_of_alpha(keys, rope) if family == "hunyuan_v1_dense" and kind == "dynamic" else 1.0
    kind = "default" if stretch != 1.0 else kind
    partial = rope.number(PARTIAL, None, 1e-9, 1.0)
    partial = partial or (None if only_sections else keys.number(PARTIAL, None, 1e-9, 1.0))
    partial = partial or _share_of_rotary_dim(keys, family)
    if family == "mistral4":  # of the latents' heads, a derived key
        partial = partial / _rotated_share(keys) if partial != 1.0 else partial
    if partial != 1.0 and not FAMILIES[family].partial_rotary and kind != PROPORTIONAL:
        raise keys.wrong(PARTIAL, partial, f"is not supported for {family}; supported: 1.0")
    needed = (*_REQUIRED.get(kind, ()), *(("rope_theta",) if only_sections else ()))
    missing = [key for key in needed if key not in rope.raw]
    if missing:
        raise UserError(f"{keys.file}: rope_type={kind!r} needs {missing[0]!r}; found {sorted(rope.raw)}")
    # The fields of this type; the original length may also be a top-level key.
    fields: dict[str, Any] = {"partial_rotary": partial}
    for field in set(ROPE_FIELDS[kind]) & rope.raw.keys():
        if field in FACTORS:
            fields[field] = _read_factors(rope, field)
        elif field == "truncate":
            fields[field] = rope.flag(field)
        else:
            fields[field] = rope.number(field, None, low=0.0 if "mscale" in field else 1e-9)
    growth = rope.number(GROWTH, 0.0, high=1e3)
    if growth and family not in GROWING:
        raise keys.wrong(GROWTH, growth, f"is not supported for {family}; supported: {' and '.join(GROWING)}")
    if "original_max_position" in ROPE_FIELDS[kind]:
        longest = LARGEST["max_position_embeddings"]
        own = keys.optional(ORIGINAL, longest) or rope.optional(ORIGINAL, longest)
        fields["original_max_position"] = own or max_position
    if kind == "longrope":
        if fields["original_max_position"] < 2:
            raise rope.wrong(ORIGINAL, 1, "must be at least 2")
        fields["factor"] = fields.get("factor") or max_position / fields["original_max_position"]
    base = rope.number("rope_theta", None, low=1e-9) or keys.number(theta, None, low=1e-9)
    return RopeConfig((base or 10_000.0) * stretch, kind, **fields, query_growth=growth)


def _stretch_of_alpha(keys: JsonKeys, rope: JsonKeys) -> float:
    """Return the factor of the base that `alpha` of Hunyuan means, which calls itself dynamic."""
    heads = keys.integer("num_attention_heads")
    head_dim = keys.optional("head_dim", 1 << 16) or keys.integer("hidden_size") // heads
    return rope.number("alpha", 1.0, low=1e-9) ** (head_dim / max(head_dim - 2, 1))


def _read_factors(rope: JsonKeys, field: str) -> tuple[float, ...]:
    """Return a list of positive numbers."""
    values = rope.get(field)
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= 1e6
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise rope.wrong(field, values, "must be a list of numbers above 0, at most 1e6")
    return tuple(map(float, values))


def _rotated_share(keys: JsonKeys) -> float:
    """Return the share of a head with latent attention that RoPE rotates."""
    rotated, others = (keys.integer(key, 2**12) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    return rotated / (rotated + others)


def _share_of_rotary_dim(keys: JsonKeys, family: str) -> float:
    """Return the part of a head that RoPE rotates by the older key of MiniMax-M2; 1 without it."""
    if family != "minimax_m2":
        return 1.0
    head_dim = keys.integer("head_dim", 1 << 16)
    return (keys.optional(DIMS, head_dim) or head_dim) / head_dim


def write_ropes(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys that `read_ropes` reads, in both spellings.

    Args:
        config: with fields without effect at their defaults (`canonical_rope`).
    """
    # The keys of transformers 4.
    facts, rope = FAMILIES[config.family], config.rope
    theta = None if facts.null_theta and not any(config.rope_layers or (True,)) else rope.theta
    partial = {PARTIAL: rope.partial_rotary} if facts.partial_rotary else {}
    scaling, has_scaling = {**_section(rope), **partial}, rope.scaling != "default"
    old = {**scaling, "type": rope.scaling}
    if rope.scaling == "longrope":  # transformers 4 takes three keys, and other keys beside them
        partial[ORIGINAL] = rope.original_max_position
        if rope.factor == config.max_position / rope.original_max_position:
            del old["factor"]
        old = {key: x for key, x in old.items() if key not in ("rope_type", ORIGINAL, PARTIAL)}
    keys = {
        **partial,
        **({DIMS: config.rotary_dim} if config.family == "minimax_m2" else {}),
        "rope_theta": theta,
        "rope_scaling": old if has_scaling else None,
    }
    # Sections of transformers 5, one a RoPE.
    full = {**scaling, "rope_theta": theta}
    if not facts.rope_by_layer_type:
        return {**keys, "rope_parameters": full}
    local = config.local_rope or RopeConfig(theta=facts.defaults.get(facts.local_theta, 1e4))
    sections = full, {**_section(local), "rope_theta": local.theta}
    older = {**keys, facts.local_theta: local.theta} if facts.local_theta else {}
    return {**older, "rope_parameters": dict(zip(LAYER_TYPES, sections, strict=True))}


def _section(rope: RopeConfig) -> dict[str, Any]:
    """Return the type of a RoPE and the fields that it reads."""
    section: dict[str, Any] = {"rope_type": rope.scaling}
    for name in ROPE_FIELDS[rope.scaling]:
        if (value := getattr(rope, name)) is not None:
            own = ORIGINAL if name == "original_max_position" else name
            section[own] = list(value) if name in FACTORS else value
    section |= {PARTIAL: rope.partial_rotary} if rope.scaling == PROPORTIONAL else {}
    return {**section, GROWTH: rope.query_growth} if rope.query_growth else section


def canonical_rope(rope: RopeConfig, max_position: int) -> RopeConfig:
    """Reset fields without effect to their defaults, since a config.json lacks them."""
    kept = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.scaling]}
    if "original_max_position" in kept:
        kept["original_max_position"] = kept["original_max_position"] or max_position
    kept |= {"partial_rotary": rope.partial_rotary, "query_growth": rope.query_growth}
    return RopeConfig(theta=rope.theta, scaling=rope.scaling, **kept)
