"""Tokenizers of GGUF files against llama.cpp."""

import json
import os
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf")
from gguf_vocabularies import BYTE_LEVEL, GOLDEN, SENTENCEPIECE, TOKENS, reader  # noqa: E402

from jaxrl_llm.errors import UserError  # noqa: E402
from jaxrl_llm.hf.gguf_tokenizer import RULES, end_ids, make_gguf_tokenizer  # noqa: E402

LLAMA_CPP_VOCABULARIES = os.environ.get("JAXRL_GGUF_VOCABULARIES", "")


def ids_of(metadata, texts):
    tokenizer = make_gguf_tokenizer(reader(metadata))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_the_vocabulary_shows_cuts():
    """No two rows of the table give the same ids for all texts."""
    assert len({json.dumps(ids) for ids in GOLDEN["ids"].values()}) == len(RULES) == len(GOLDEN["ids"])


@pytest.mark.parametrize("names", list(RULES), ids=lambda names: names.split()[0])
def test_ids_are_those_of_llama_cpp(names):
    first, *others = names.split()
    expected = dict(zip(GOLDEN["texts"], GOLDEN["ids"][first], strict=True))
    if first in ("tekken", "gpt-4o"):  # llama.cpp cuts before marks here, other than the models' tokenizers
        marks = next(text for text in expected if "\u093f" in text)
        expected[marks] = GOLDEN["ids"]["qwen35"][GOLDEN["texts"].index(marks)]
    for name in (first, *others[:1]):
        ids = ids_of(BYTE_LEVEL | {"ggml.pre": name}, expected)
        assert dict(zip(expected, ids, strict=True)) == expected


def test_digits_of_smollm2_are_cut_first():
    """llama.cpp reads "\\n\\n1" as two tokens, and GPT-2's rules alone as three."""
    (ids,) = ids_of(BYTE_LEVEL | {"ggml.pre": "smollm"}, ["\n\n1"])
    assert [TOKENS[number] for number in ids] == ["\u010a\u010a", "1"]
    (ids,) = ids_of(BYTE_LEVEL | {"ggml.pre": "gpt-2"}, ["\n\n1"])
    assert [TOKENS[number] for number in ids] == ["\u010a", "\u010a", "1"]


@pytest.mark.parametrize("name, merged", [("llama-bpe", False), ("tekken", False), ("qwen2", True)])
def test_a_piece_that_is_a_token_needs_no_merges(name, merged):
    (ids,) = ids_of(BYTE_LEVEL | {"ggml.pre": name}, [" unmerged"])
    assert (TOKENS.index("\u0120unmerged") in ids) is not merged


@pytest.mark.parametrize("key, has_space", [(True, True), (None, True), (False, False)])
def test_word_starts_are_those_of_llama_cpp(key, has_space):
    """Each part of a text after a special token starts a word: "<s>[INST] hi" has the token of " [INST]"."""
    metadata = SENTENCEPIECE | ({} if key is None else {"ggml.add_space_prefix": key})
    expected = GOLDEN["with_space" if has_space else "without_space"]
    assert ids_of(metadata, GOLDEN["sentences"]) == expected
    tokenizer = make_gguf_tokenizer(reader(metadata))
    assert tokenizer.decode(tokenizer.encode("hello hi", add_special_tokens=False)) == "hello hi"
    first = tokenizer.convert_ids_to_tokens(expected[0])[:2]
    assert first == (["<s>", "\u2581[INST]"] if has_space else ["<s>", "[INST"])


@pytest.mark.parametrize("add_eos", [None, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize(
    "metadata, begins",
    [
        (BYTE_LEVEL | {"ggml.pre": "qwen2"}, False),
        (BYTE_LEVEL | {"ggml.pre": "llama-bpe"}, True),
        (BYTE_LEVEL | {"ggml.pre": "tekken"}, True),
        (SENTENCEPIECE, True),  # of which bos, eos and unk are 1, 2 and 0 where no key says so
    ],
)
def test_tokens_around_a_text(metadata, begins, add_bos, add_eos):
    keys = {"ggml.add_bos_token": add_bos, "ggml.add_eos_token": add_eos}
    keys = {key: value for key, value in keys.items() if value is not None}
    tokenizer = make_gguf_tokenizer(reader(metadata | keys))
    bos = [tokenizer.bos_token_id] if add_bos or (add_bos is None and begins) else []
    eos = [tokenizer.eos_token_id] if add_eos else []
    text = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == bos + text + eos
    assert tokenizer("hi", "hi")["input_ids"] == (bos + text + eos) * 2
    assert tokenizer.bos_token == "<s>"


def test_ends_are_those_of_llama_cpp():
    """By key and by text: llama.cpp's `isEogToken` is true for these two and those two."""
    named = {text: TOKENS.index(text) for text in ("<s>", "<|im_end|>", "<think>", "[PAD]")}
    byte_level = BYTE_LEVEL | {"ggml.pre": "qwen2"}
    assert end_ids(reader(byte_level)) == [named["<|im_end|>"], named["[PAD]"]]
    other = byte_level | {"ggml.eos_token_id": named["<s>"], "ggml.fim_pad_token_id": named["<think>"]}
    assert end_ids(reader(other)) == [named["<s>"], named["<|im_end|>"], named["<think>"]]
    assert end_ids(reader(SENTENCEPIECE)) == [2]
    harmony = [*TOKENS[:-4], "<|end|>", "<|return|>", "<|call|>", "x"]
    ids = end_ids(reader(byte_level | {"ggml.tokens": harmony, "ggml.eos_token_id": len(harmony) - 3}))
    assert [harmony[number] for number in ids] == ["<|return|>", "<|call|>"]


def test_an_end_that_merges_make_stays_text():
    """Qwen's vocabularies have "</s>" as a token of text; llama.cpp takes it whole, transformers does not."""
    tokens, merges = [*TOKENS, "</", "s>", "</s>"], [*GOLDEN["merges"], "< /", "s >", "</ s>"]
    metadata = BYTE_LEVEL | {"ggml.pre": "qwen2", "ggml.tokens": tokens, "ggml.merges": merges}
    (ids,) = ids_of(metadata | {"ggml.token_type": [1] * len(tokens)}, ["</s>"])
    assert [tokens[number] for number in ids] == ["</", "s", ">"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"ggml.pre": "kimi-k2"},
            r"ggml\.pre='kimi-k2' is not supported, since .*supported: a\.x-4\.0, bail",
        ),
        ({"ggml.model": "bert"}, r"ggml\.model='bert' is not supported; supported: gpt2, llama"),
        ({"ggml.tokens": []}, r"no tokenizer\.ggml\.tokens"),
        ({"ggml.eos_token_id": 9999}, r"ggml\.eos_token_id=9999 is none of its 636 tokens"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError, match=message):
        make_gguf_tokenizer(reader(BYTE_LEVEL | changes))


@pytest.mark.skipif(not LLAMA_CPP_VOCABULARIES, reason="JAXRL_GGUF_VOCABULARIES names no folder")
def test_vocabularies_of_llama_cpp():
    """ggml-vocab-*.gguf and their .inp and .out, of the folder `models` of a copy of llama.cpp."""
    compared = 0
    for file in sorted(Path(LLAMA_CPP_VOCABULARIES).glob("*.gguf")):
        fields = gguf.GGUFReader(file).fields
        metadata = {
            key[10:]: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")
        }
        if metadata["ggml.model"] not in ("gpt2", "llama") or not Path(f"{file}.out").is_file():
            continue
        texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = Path(f"{file}.out").read_text().splitlines()
        assert ids_of(metadata, texts[: len(lines)]) == [list(map(int, line.split())) for line in lines], file
        compared += 1
    assert compared
