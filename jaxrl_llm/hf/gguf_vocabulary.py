"""Tokenizers of transformers as the metadata of GGUF files: the inverse of `hf.gguf_tokenizer`.

A GGUF file has no rules but the names and switches that `make_gguf_tokenizer` reads. A tokenizer with other
rules is refused, and each tokenizer's metadata is read back and compared on sample texts.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GPT2,
    NORMAL,
    RULES,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    end_ids,
    make_gguf_tokenizer,
)
from jaxrl_llm.hf.tokenizer import sample_texts, text_ends, vocabulary_of

_SPACE = "\u2581"
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_IS_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_END_KEYS = ("ggml.eot_token_id", "ggml.eom_token_id")
"""Keys of end tokens besides eos."""


def gguf_vocabulary(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer: (key after "tokenizer.") -> value.

    Args:
        tokenizer: of transformers, with a pipeline of the library tokenizers.
        vocab_size: rows of the model's embedding; rows without a token get an unused one.

    Raises:
        UserError: a GGUF file cannot express a rule of the tokenizer; names the rule.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(f"{type(tokenizer).__name__} has no pipeline of the library tokenizers")
    raw = json.loads(backend.to_str())
    model = raw["model"]
    _check_model(model, tokenizer)
    # The rules, the tokens and their types.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    steps = _steps(raw["pre_tokenizer"], "pretokenizers")
    is_bytes = any(step["type"] == "ByteLevel" for step in steps)
    tokens, types = _tokens(tokenizer, vocab_size, None if is_bytes else model["unk_token"])
    keys: dict[str, Any] = {"ggml.model": "gpt2" if is_bytes else "llama"}
    if is_bytes:
        keys |= {"ggml.pre": _rules_name(raw, steps), "ggml.merges": [" ".join(merge) for merge in merges]}
    else:
        keys |= {"ggml.pre": "default", "ggml.add_space_prefix": _has_space_prefix(raw, steps)}
        keys |= {"ggml.scores": _scores(merges, tokens, types)}
    keys |= {"ggml.tokens": tokens, "ggml.token_type": types}
    # Special tokens and the chat template.
    ids = {key: getattr(tokenizer, f"{name}_id", None) for name, (key, _) in SPECIAL.items()}
    keys |= {f"ggml.{key}": number for key, number in ids.items() if number is not None}
    keys |= _around(tokenizer)
    keys |= _further_ends(tokenizer, keys)
    if tokenizer.chat_template:
        keys["chat_template"] = tokenizer.chat_template
    _check_ids(tokenizer, keys)
    return keys


def _refused(problem: str) -> UserError:
    return UserError(f"export: a GGUF file cannot express this tokenizer: {problem}")


def _check_model(model: dict[str, Any], tokenizer: Any) -> None:
    """Refuse other models than plain BPE, and tokens that match more than their text."""
    if model["type"] != "BPE":
        raise _refused(f"its model is {model['type']}; supported: BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"its model has {key}={model[key]!r}; supported: none")
    for token in tokenizer.added_tokens_decoder.values():
        if wide := [flag for flag in ("lstrip", "rstrip", "single_word") if getattr(token, flag)]:
            raise _refused(f"its token {str(token)!r} has {wide[0]}; supported: tokens without it")


def _steps(stage: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return the steps of a stage of tokenizer.json: those of a Sequence, one, or none."""
    if stage is None:
        return []
    return stage[members] if stage["type"] == "Sequence" else [stage]


def _tokens(tokenizer: Any, vocab_size: int, unknown: str | None) -> tuple[list[str], list[int]]:
    """Return the token of each row of the embedding, and its type.

    Args:
        unknown: the unknown token of a SentencePiece vocabulary; None = bytes have no unknown token.
    """
    texts = {number: token for token, number in vocabulary_of(tokenizer).items()}
    if max(texts) >= vocab_size:
        raise _refused(f"it has the id {max(texts)}, but the model's vocab_size is {vocab_size}")
    added = {number: token.special for number, token in tokenizer.added_tokens_decoder.items()}

    def type_of(number: int, text: str) -> int:
        if number not in texts:
            return UNUSED
        if text == unknown:
            return UNKNOWN
        if number in added:
            return CONTROL if added[number] else USER_DEFINED
        return BYTE if unknown is not None and _IS_BYTE.fullmatch(text) else NORMAL

    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    return tokens, [type_of(number, text) for number, text in enumerate(tokens)]


def _rules_name(raw: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Return the name of the rules that split text into the pieces of a byte-level tokenizer."""
    normalizers = [step["type"] for step in _steps(raw["normalizer"], "normalizers")]
    if other := [kind for kind in normalizers if kind != "NFC"]:
        raise _refused(f"its normalizer is {other[0]}; supported: none, or NFC, which llama.cpp leaves out")
    splits = tuple(itertools.chain.from_iterable(map(_splits, steps)))
    ignore_merges = bool(raw["model"].get("ignore_merges"))
    for names, rules in RULES.items():
        if (rules.splits, rules.ignore_merges) == (splits, ignore_merges):
            return names.split()[0]
    raise _refused(f"llama.cpp has no name for its rules {splits} with ignore_merges={ignore_merges}")


def _splits(step: dict[str, Any]) -> list[str]:
    """Return the regular expressions by which a pre-tokenizer splits text."""
    kind = step["type"]
    if kind == "Digits" and step["individual_digits"]:
        return [r"\p{N}"]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [GPT2] * step["use_regex"]
    cuts = (step.get("behavior"), step.get("invert"))
    if kind == "Split" and "Regex" in step["pattern"] and cuts in (("Isolated", False), ("Removed", True)):
        return [step["pattern"]["Regex"]]
    raise _refused(f"its pre-tokenizer {json.dumps(step)} is none that llama.cpp has")


def _has_space_prefix(raw: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Return whether a SentencePiece tokenizer begins a text with a space.

    Raises:
        UserError: it has other rules than to mark spaces.
    """
    if not raw["model"].get("byte_fallback"):
        raise _refused("it has no tokens for bytes (ByteLevel or byte_fallback)")
    normalizers = _steps(raw["normalizer"], "normalizers")
    is_metaspace = lambda step: step["type"] == "Metaspace" and step["replacement"] == _SPACE
    others = [step for step in normalizers if step not in (_PREPEND, _REPLACE)]
    others += [step for step in steps if not is_metaspace(step) or step.get("split", True)]
    if others:
        raise _refused(f"its step {json.dumps(others[0])} is none that llama.cpp has for SentencePiece")
    return _PREPEND in normalizers or any(step["prepend_scheme"] != "never" for step in steps)


def _scores(merges: list[list[str]], tokens: list[str], types: list[int]) -> list[float]:
    """Return the scores of a SentencePiece vocabulary, by which llama.cpp orders merges.

    Raises:
        UserError: scores cannot give this order, since llama.cpp merges whatever makes a token.
    """
    made = [left + right for left, right in merges]
    ranks = {token: rank for rank, token in reversed(list(enumerate(made)))}
    if len(ranks) != sum(1 for _ in itertools.groupby(made)):
        raise _refused("the merges that make one token are not next to one another")
    known, vocabulary = {tuple(merge) for merge in merges}, set(tokens)
    for token, kind in zip(tokens, types, strict=True):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token) * (kind == NORMAL)))
        if missing := [cut for cut in cuts if vocabulary.issuperset(cut) and cut not in known]:
            raise _refused(f"it has no merge of {missing[0]}, but the token {token!r}")
    last = -float(len(merges))
    pairs = zip(tokens, types, strict=True)
    return [-float(ranks[token]) if token in ranks else last * (kind == NORMAL) for token, kind in pairs]


def _around(tokenizer: Any) -> dict[str, bool]:
    """Return whether bos and eos are put around a text."""
    inside, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for before, after in itertools.product((False, True), repeat=2):
        if whole == [bos] * before + inside + [eos] * after:
            return {"ggml.add_bos_token": before, "ggml.add_eos_token": after}
    raise _refused(f"it makes {tokenizer.convert_ids_to_tokens(whole)} of 'a'; supported: bos, text, eos")


def _further_ends(tokenizer: Any, keys: dict[str, Any]) -> dict[str, int]:
    """Return the end tokens that llama.cpp does not find by their text."""
    missing = sorted(text_ends(tokenizer) - set(end_ids(keys.get)))
    if len(missing) > len(_END_KEYS):
        texts = tokenizer.convert_ids_to_tokens(missing)
        raise _refused(f"besides the usual ones it has the end tokens {texts}; supported: {len(_END_KEYS)}")
    return dict(zip(_END_KEYS, missing, strict=False))


def _check_ids(tokenizer: Any, keys: dict[str, Any]) -> None:
    """Compare the ids that the metadata gives with the tokenizer's, on sample texts."""
    read = make_gguf_tokenizer(keys.get)
    for text in sample_texts(tokenizer):
        text = unicodedata.normalize("NFC", text)  # what the file leaves out
        ours, theirs = tokenizer.encode(text), read.encode(text)
        if ours != theirs:
            shown = [tokenizer.convert_ids_to_tokens(ids) for ids in (ours, theirs)]
            raise _refused(f"{text[:40]!r} is {shown[0]}, and would be {shown[1]} in llama.cpp")
