"""Tokenizers of GGUF files, with the same token ids as llama.cpp.

A GGUF file has the tokens of a tokenizer and their merges or scores, but only a name (`tokenizer.ggml.pre`)
for the rules that split text before merging. The table below maps names to rules, taken from the models'
tokenizer.json, which llama.cpp adapted too. llama.cpp's rules for "tekken" and "gpt-4o" differ from it for
combining marks after letters, and for upper and lower case outside ASCII.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError

Read = Callable[..., Any]
"""(key after "tokenizer.", value if the file lacks it) -> value."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = "|".join((*_CASES, r"\p{N}", _SIGNS, _SPACES))
_GPT4O = "|".join((*(f"{case}{_CONTRACTIONS}?" for case in _CASES), r"\p{N}{1,3}", _SIGNS, _SPACES))
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that DeepSeek LLM's tokenizer groups: cased letters of an old version of Unicode, without
mathematical letters."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


class _Rules(NamedTuple):
    """Rules that split text before merging, and llama.cpp's other settings for their name."""

    splits: tuple[str, ...]  # regular expressions; each splits the pieces of the previous one
    ignore_merges: bool = False  # a piece that is a token is that token
    add_bos: bool = False


RULES = {
    "default": _Rules((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 mellum a.x-4.0 gigachat granite-docling": _Rules((GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _Rules((r"\p{N}", GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0": _Rules((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe glm4": _Rules((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2"
    " llada-moe": _Rules((_QWEN2,)),
    "qwen35": _Rules((_QWEN35,)),
    "tekken": _Rules((_TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _Rules((_GPT4O,)),
    "seed-coder": _Rules((_SEED,)),
    "falcon": _Rules((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": _Rules((_BLOOM,)),
    "viking": _Rules((_BLOOM, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": _Rules(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)
    ),
    "deepseek-coder": _Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": _Rules(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
}
"""Names of `tokenizer.ggml.pre` with the same rules -> the rules."""

SPECIAL = {
    # transformers: (GGUF, default of SentencePiece vocabularies)
    "bos_token": ("bos_token_id", 1),
    "eos_token": ("eos_token_id", 2),
    "unk_token": ("unknown_token_id", 0),
    "pad_token": ("padding_token_id", None),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<eos>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>"),
    *("<|end_of_text|>", "<end_of_utterance>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}
_FILE_TEXTS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
"""Marks of code models between files, which also end a response."""


def make_gguf_tokenizer(read: Read) -> Any:
    """Return the tokenizer of a GGUF file, a `PreTrainedTokenizerFast`, with its chat template.

    Raises:
        UserError: the kind of tokenizer or the rules are unknown, or the tables do not match.
    """
    from transformers import PreTrainedTokenizerFast

    kind = read("ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"tokenizer.ggml.model={kind!r} is not supported; supported: gpt2, llama")
    tokens = _tokens(read)
    backend, add_bos = _byte_level(read, tokens) if kind == "gpt2" else _sentencepiece(read, tokens)
    special = {name: number for name, number in _special_ids(read, tokens).items() if number is not None}
    _add_whole_tokens(backend, read, tokens)
    adds = {"bos_token": read("ggml.add_bos_token", add_bos), "eos_token": read("ggml.add_eos_token", False)}
    backend.post_processor = _around_texts(
        {name: (tokens[special[name]], special[name]) for name in adds if adds[name] and name in special}
    )
    names = {name: tokens[number] for name, number in special.items()}
    template = read("chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **names,
        **({"chat_template": template} if template else {}),
    )


def end_ids(read: Read) -> list[int]:
    """Return the ids that end a response, found as in llama.cpp: by key, and by the text of the token."""
    ids = {token: number for number, token in enumerate(_tokens(read))}
    ends = {_special_ids(read, list(ids))["eos_token"], *(read(f"ggml.{key}") for key in _END_KEYS)}
    for key, texts in _FILE_TEXTS.items():
        own = read(f"ggml.{key}")
        ends |= {ids.get(text) for text in texts} if own is None else {own}
    ends |= {ids[text] for text in _END_TEXTS & ids.keys()}
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys():
        ends.discard(ids.get("<|end|>"))  # in gpt-oss and Solar the end of a message, not of the response
    return sorted(ends - {None})


def _tokens(read: Read) -> list[str]:
    tokens = read("ggml.tokens")
    if not tokens:
        raise UserError("no tokenizer.ggml.tokens, so it has no tokenizer")
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]


def _byte_level(read: Read, tokens: list[str]) -> tuple[Any, bool]:
    """Return a byte-level tokenizer without special tokens, and whether a text begins with bos."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    rules = _rules(read("ggml.pre", "default"))
    merges = [_halves(merge) for merge in read("ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rules.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rules.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, rules.add_bos


def _rules(name: str) -> _Rules:
    for names, rules in RULES.items():
        if name in names.split():
            return rules
    raise UserError(
        f"tokenizer.ggml.pre={name!r} is not supported, since how this tokenizer cuts text is not known; "
        f"supported: {', '.join(sorted(' '.join(RULES).split()))}"
    )


def _halves(merge: str) -> tuple[str, str]:
    cut = merge.index(" ", 1)  # a token may begin with a space
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(read: Read, tokens: list[str]) -> tuple[Any, bool]:
    """Return a SentencePiece tokenizer without special tokens, and whether a text begins with bos.

    A text, and each part of it after a special token, begins with a space unless the file says otherwise.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = read("ggml.scores") or [0.0] * len(tokens)
    pairs = [
        (-score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges = [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]
    unknown = tokens[_special_ids(read, tokens)["unk_token"] or 0]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_space = read("ggml.add_space_prefix", True)
    first = [normalizers.Prepend("\u2581")] if has_space else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    back += [decoders.Strip(" ", 1, 0)] if has_space else []
    backend.decoder = decoders.Sequence(back)
    return backend, True


def _special_ids(read: Read, tokens: list[str]) -> dict[str, int | None]:
    """Return the ids of special tokens; None = the tokenizer lacks the token.

    Raises:
        UserError: an id is not in the vocabulary.
    """
    ids: dict[str, int | None] = {}
    for name, (key, default) in SPECIAL.items():
        is_default = read("ggml.model") == "llama" and default is not None and default < len(tokens)
        ids[name] = read(f"ggml.{key}", default if is_default else None)
        if ids[name] is not None and not 0 <= ids[name] < len(tokens):
            raise UserError(f"tokenizer.ggml.{key}={ids[name]} is none of its {len(tokens):,} tokens")
    return ids


def _add_whole_tokens(backend: Any, read: Read, tokens: list[str]) -> None:
    """Make the tokenizer find control tokens and user-defined tokens in a text before it splits the rest.

    As in llama.cpp, tokens that end a response are control tokens even if the file has another type for them.
    A token that merges can produce stays text: "</s>" in the vocabularies of Qwen.
    """
    from tokenizers import AddedToken

    types = read("ggml.token_type") or [1] * len(tokens)
    ends = _END_TEXTS.union(*_FILE_TEXTS.values()) - {"".join(_halves(m)) for m in read("ggml.merges", ())}
    is_control = lambda token, kind: kind in (UNKNOWN, CONTROL) or token in ends
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=is_control(token, kind))
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED or is_control(token, kind)
        ]
    )


def _around_texts(used: dict[str, tuple[str, int]]) -> Any:
    """Return the processor that adds tokens before and after a text.

    Args:
        used: "bos_token", "eos_token" -> (token, id) of each token to add.
    """
    from tokenizers.processors import TemplateProcessing

    before, after = ([used[name][0]] if name in used else [] for name in ("bos_token", "eos_token"))
    around = lambda text, kind: [f"{part}:{kind}" for part in (*before, text, *after)]
    return TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=sorted(set(used.values())),
    )
