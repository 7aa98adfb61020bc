"""Token ids of a folder are those of its tokenizer.json as it stands, whatever class the folder names."""

import json

import pytest
import transformers
from family_cases import BASE
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.hf.tokenizer import load_tokenizer, save_tokenizer

WORD = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", WORD, *"Hi[INST]"[:6], "T", "]", WORD + "H", WORD + "Hi"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def llama2():
    """Return a pipeline as in Llama 2's tokenizer.json: each part of a text begins with a space."""
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(PIECES))}
    merges = [(WORD, "H"), (WORD + "H", "i")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(WORD), normalizers.Replace(" ", WORD)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(WORD, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, normalized=False) for token in PIECES[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def digits_first():
    """Return a pipeline that no Qwen model has: digits one by one, then GPT-2's words."""
    tokens = [*BYTES, "\u010a\u010a", "12", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [("\u010a", "\u010a"), ("1", "2")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    return made


def write_folder(folder, made, model_type, **settings):
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_a_llama2_text_keeps_its_spaces(tmp_path, capsys):
    """Class LlamaTokenizer of transformers 5 loses the first of two spaces, and the space after "</s>"."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    folder = write_folder(tmp_path / "m", llama2(), "llama", tokenizer_class="LlamaTokenizer", **names)
    tokenizer = load_tokenizer(folder)
    tokens = lambda text: tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert tokens(" Hi") == ["<s>", WORD, WORD + "Hi"]
    assert tokens("Hi</s>Hi") == ["<s>", WORD + "Hi", "</s>", WORD + "Hi"]
    load_tokenizer(folder)
    (note,) = capsys.readouterr().err.splitlines()  # once for the two
    assert note.startswith(f"note: {folder}: ' Hi' is ['<s>', '{WORD}', '{WORD}Hi'] by its tokenizer.json")
    assert f"but ['<s>', '{WORD}Hi'] by AutoTokenizer" in note and "(LlamaTokenizer)" in note


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", None])
def test_an_export_has_the_pipeline_of_its_base(tmp_path, capsys, name):
    """In a qwen2 folder transformers 5.24 takes Qwen's own pipeline, whatever tokenizer.json has."""
    settings = {"eos_token": "<|endoftext|>"} | ({"tokenizer_class": name} if name else {})
    folder = write_folder(tmp_path / "m", digits_first(), "qwen2", **settings)
    tokenizer = load_tokenizer(folder)
    (tmp_path / "out").mkdir()
    save_tokenizer(tokenizer, tmp_path / "out")
    before, after = (json.loads((path / "tokenizer.json").read_text()) for path in (folder, tmp_path / "out"))
    assert all(
        before[key] == after[key] for key in ("normalizer", "pre_tokenizer", "decoder", "added_tokens")
    )
    exported = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    text = "a\n\n12"
    assert exported.encode(text).tokens == ["a", "\u010a\u010a", "12"]  # Qwen's: "1", "2"
    assert exported.encode(text).ids == tokenizer.encode(text) == digits_first().encode(text).ids
    assert "(Qwen2Tokenizer)" in capsys.readouterr().err


def test_no_line_where_the_ids_are_the_same(tmp_path, capsys):
    folder = write_folder(tmp_path / "m", digits_first(), "llama", eos_token="<|endoftext|>")
    assert load_tokenizer(folder).eos_token == "<|endoftext|>"
    assert not capsys.readouterr().err


def test_special_tokens_that_the_class_has_by_default(tmp_path):
    folder = write_folder(tmp_path / "m", llama2(), "llama", tokenizer_class="LlamaTokenizer")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize("name", ["LlamaTokenizer", "BaichuanTokenizer"])
def test_a_sentencepiece_model_alone_is_read_as_sentencepiece_reads_it(name, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("hello world\nthe quick brown fox  jumps\n[INST] hi [/INST]\n" * 50)
    options = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "bos_id": 1, "eos_id": 2}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    prefix = tmp_path / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(input=tmp_path / "text", model_prefix=prefix, **options)
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": name,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = load_tokenizer(tmp_path)
    for text in ("hello", " hello", "  the  fox ", "a\n\n1 23", "\u00e9\U0001f642", ""):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


@pytest.mark.parametrize("family", ["phi3", "smollm3", "olmo3"])
def test_a_tokenizer_without_padding_has_none_in_transformers(tmp_path, family):
    """Not the family's: 32000 and 128004 are no tokens here, and 1 is another one."""
    config, tokenizer = read_config({"model_type": family, **BASE}), make_tokenizer()
    tokenizer.pad_token = None
    save_description(config, tmp_path / "out", tokenizer)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (theirs.pad_token_id, theirs.eos_token_id) == (None, tokenizer.eos_token_id)
