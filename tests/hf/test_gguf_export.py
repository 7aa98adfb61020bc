"""Written GGUF files: read back bit for bit, by transformers, with llama.cpp's ids; clear refusals.

llama.cpp itself reads such files in tests/clients/test_gguf_real.py.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
from gguf_vocabularies import BYTE_LEVEL, GOLDEN, SENTENCEPIECE, TOKENS, reader  # noqa: E402
from hf_tensors import tensors_of  # noqa: E402
from random_weights import random_params  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import AddedToken, PreTrainedTokenizerFast  # noqa: E402

from jaxrl_llm import __main__ as cli  # noqa: E402
from jaxrl_llm.checkpoint.config import CheckpointConfig  # noqa: E402
from jaxrl_llm.checkpoint.state import Checkpointer  # noqa: E402
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer  # noqa: E402
from jaxrl_llm.errors import RunError, UserError  # noqa: E402
from jaxrl_llm.hf.config import read_config  # noqa: E402
from jaxrl_llm.hf.gguf import convert_gguf  # noqa: E402
from jaxrl_llm.hf.gguf_export import check_gguf_file, modelfile_path, save_gguf, write_modelfile  # noqa: E402
from jaxrl_llm.hf.gguf_tokenizer import RULES, make_gguf_tokenizer  # noqa: E402
from jaxrl_llm.hf.gguf_vocabulary import gguf_vocabulary  # noqa: E402
from jaxrl_llm.hf.load import load_params  # noqa: E402
from jaxrl_llm.models import RopeConfig, TransformerConfig  # noqa: E402
from jaxrl_llm.models.config import MoEConfig  # noqa: E402

VOCABULARY = len(TOKENS) + 4  # of which four rows have no token
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(1e6, "yarn", 4.0, original_max_position=32, beta_fast=16.0)
SHARP_YARN = dataclasses.replace(YARN, attention_factor=2.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def of_family(family, **changes):
    """A tiny model; its heads are wider than hidden_size / num_heads."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "mlp_size": 64,
        "num_layers": 2,
        "max_position": 128,
    }
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "initializer_range": 0.3}
    fixed = {"qkv_bias": family == "qwen2", "qk_norm": "qwen3" in family, "rope": RopeConfig(5e4)}
    if family == "qwen3_moe":
        fixed["moe"] = MoEConfig(6, 2, 768)  # the size that transformers takes of a file's experts
    return TransformerConfig(family=family, **sizes | heads | fixed | changes)


MODELS = [
    of_family("llama", rope=LLAMA3, qkv_bias=True, out_bias=True, tie_embeddings=False),
    of_family("mistral", rope=RopeConfig(1e4, "linear", 2.0)),
    of_family("qwen2", head_dim=8, rope=YARN, tie_embeddings=False),
    of_family("qwen3"),
    of_family("qwen3_moe", tie_embeddings=False),
]


def byte_level(pre="llama-bpe"):
    return make_gguf_tokenizer(reader(BYTE_LEVEL | {"ggml.pre": pre}))


def read_back(file):
    """Return the config of a file and its tensors in the names of Hugging Face."""
    folder = convert_gguf(file)
    config = read_config(folder)
    return config, tensors_of(config, load_params(folder, config))


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.family)
def test_files_read_back(config, tmp_path):
    """float32 is exact, bfloat16 and float16 are rounded once, q8_0 is the library's quantization."""
    params = random_params(config)
    expected = tensors_of(config, params)
    same = dataclasses.replace(config, family={"mistral": "llama"}.get(config.family, config.family))
    for dtype in ("float32", "bfloat16", "float16", "q8_0") if config in MODELS[::4] else ("float32",):
        file = save_gguf(params, config, tmp_path / f"{dtype}.gguf", byte_level(), dtype=dtype)
        found, tensors = read_back(file)
        assert dataclasses.replace(found, initializer_range=0.3) == same
        assert tensors.keys() == expected.keys()
        for name, exact in expected.items():
            if dtype != "float32" and exact.ndim == 2 and ".mlp.gate." not in name:
                kind = {"bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}[dtype]
                kind = gguf.GGMLQuantizationType[kind]
                exact = gguf.dequantize(gguf.quantize(exact, kind), kind)
            np.testing.assert_array_equal(tensors[name], exact, err_msg=f"{dtype} {name}")
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "qwen3_moe", pytest.param("qwen2", marks=pytest.mark.slow)]
)
def test_logits_of_transformers(family, tmp_path):
    """transformers reads the files itself; it takes 128 as the size of a head of Qwen3."""
    from hf_oracle import our_logits, random_tokens, torch
    from transformers import AutoModelForCausalLM

    config = of_family(family, head_dim=128 if "qwen3" in family else 8, tie_embeddings=family == "qwen3")
    params = random_params(config)
    save_gguf(params, config, tmp_path / "m.gguf", byte_level(), dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ids = random_tokens(2, 9)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert np.abs(expected).max() > 1  # else agreement would say little
    np.testing.assert_allclose(our_logits(params, ids), expected, atol=2e-4)


@pytest.mark.parametrize("names", list(RULES), ids=lambda names: names.split()[0])
def test_byte_level_vocabularies(names):
    """Every set of rules is found by its regular expressions, and the tokens are those that were read."""
    first = names.split()[0]
    metadata = gguf_vocabulary(byte_level(first), VOCABULARY)
    assert metadata["ggml.pre"] == first
    assert metadata["ggml.merges"] == GOLDEN["merges"]
    assert metadata["ggml.tokens"] == [*TOKENS, *(f"[PAD{len(TOKENS) + i}]" for i in range(4))]
    assert metadata["ggml.token_type"] == [1] * (len(TOKENS) - 4) + [3, 3, 4, 3] + [5] * 4
    assert metadata["ggml.add_bos_token"] is (first in ("llama-bpe", "tekken"))
    special = {key: value for key, value in metadata.items() if key.endswith("_id")}
    assert special == {key: value for key, value in BYTE_LEVEL.items() if key.endswith("_id")}


@pytest.mark.parametrize("has_space", [True, False])
def test_sentencepiece_vocabularies(has_space):
    """The scores, which a tokenizer of transformers lacks, give llama.cpp's ids."""
    tokenizer = make_gguf_tokenizer(reader(SENTENCEPIECE | {"ggml.add_space_prefix": has_space}))
    metadata = gguf_vocabulary(tokenizer, len(SENTENCEPIECE["ggml.tokens"]))
    assert metadata["ggml.token_type"] == SENTENCEPIECE["ggml.token_type"]
    assert metadata["ggml.add_space_prefix"] is has_space and metadata["ggml.add_bos_token"]
    read = make_gguf_tokenizer(reader(metadata))
    ids = [read.encode(text, add_special_tokens=False) for text in GOLDEN["sentences"]]
    assert ids == GOLDEN["with_space" if has_space else "without_space"]


def test_special_tokens_and_templates(tmp_path):
    tokenizer = byte_level("qwen2")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [32, 33]}')
    tokenizer.name_or_path = str(tmp_path)
    config = of_family("qwen3")
    file = save_gguf(random_params(config), config, tmp_path / "m.gguf", tokenizer)
    fields = gguf.GGUFReader(file).fields
    value = lambda key: fields[f"tokenizer.{key}"].contents()
    assert value("ggml.padding_token_id") == TOKENS.index("[PAD]")
    assert [value("ggml.eot_token_id"), value("ggml.eom_token_id")] == [
        32,
        33,
    ]  # llama.cpp does not know their text
    assert [value("chat_template"), value("chat_template.tools")] == ["{{ messages }}", "{{ tools }}"]
    text = write_modelfile(file, tokenizer, 0.75, ("\n\n",)).read_text()
    stops = "".join(f'PARAMETER stop "{end}"\n' for end in (*TOKENS[32:34], "<|im_end|>"))
    assert text == f'FROM ./m.gguf\nPARAMETER temperature 0.75\n{stops}PARAMETER stop """\n\n"""\n'


UNIGRAM = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)])))
OTHER_RULES = Tokenizer(models.BPE({"a": 0}, []))
OTHER_RULES.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)


def with_wide_token():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<wide>", rstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (make_tokenizer, "its model is WordLevel; supported: BPE"),
        (lambda: UNIGRAM, "its model is Unigram"),
        (lambda: SimpleNamespace(), "SimpleNamespace has no pipeline"),
        (
            lambda: PreTrainedTokenizerFast(tokenizer_object=OTHER_RULES),
            r'its pre-tokenizer {"type": "Split"',
        ),
        (with_wide_token, "its token '<wide>' has rstrip"),
    ],
)
def test_refused_tokenizers(tokenizer, message):
    with pytest.raises(UserError, match=message):
        gguf_vocabulary(tokenizer(), VOCABULARY)


def test_merges_that_scores_cannot_order_are_refused():
    """llama.cpp merges "l" + "l" wherever "ll" is a token; a tokenizer of merges need not."""
    tokenizer = make_gguf_tokenizer(reader(SENTENCEPIECE))
    text = tokenizer.backend_tokenizer.to_str()
    cut = text.index('"merges":[') + len('"merges":[')
    removed = text[:cut] + text[text.index("],", cut) + 2 :]  # the first merge
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(removed), eos_token="</s>")
    with pytest.raises(UserError, match=r"it has no merge of .*, but the token"):
        gguf_vocabulary(other, len(SENTENCEPIECE["ggml.tokens"]))


@pytest.mark.parametrize(
    "config, dtype, message",
    [
        (of_family("olmoe", moe=MoEConfig(4, 2)), "float32", "family='olmoe' .*: llama, qwen2, .*qwen3_moe"),
        (of_family("qwen3_moe", moe=MoEConfig(4, 2, 8, normalize=False)), "float32", "express moe=.*norm"),
        (of_family("mistral", sliding_window=8), "float32", r"of architecture llama cannot express sliding"),
        (of_family("llama", mlp_bias=True), "float32", r"cannot express mlp_bias=True"),
        (of_family("llama", value_head=True), "float32", r"cannot express value_head=True"),
        (of_family("llama", rope=RopeConfig(1e4, "dynamic", 2.0)), "float32", "rope_type='dynamic'"),
        (of_family("qwen2", head_dim=8, rope=SHARP_YARN), "float32", "cannot express rope="),
        (of_family("qwen2"), "float32", r"head_dim=16 other than .*, 32 / 4"),
        (of_family("qwen3", qkv_bias=True, out_bias=True), "float32", "no qwen3 with attention_bias"),
        (of_family("llama", mlp_size=48), "q8_0", r"blocks of 32 .*mlp\.down_proj.* has 48"),
    ],
)  # fmt: skip
def test_refused_models(config, dtype, message, tmp_path):
    with pytest.raises(UserError, match=message):
        save_gguf(None, config, tmp_path / "m.gguf", byte_level(), dtype=dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["q8_0", "float16"])
def test_weights_that_are_not_finite_leave_an_earlier_file(dtype, tmp_path):
    config = of_family("qwen3")
    params = random_params(config)
    weights = np.array(params.layers.up[...])
    weights[1, 0, 0] = np.nan if dtype == "q8_0" else 1e6
    params.layers.up = type(params.layers.up)(weights)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF of before")
    with pytest.raises(RunError, match=f"1 of .* NaN or Inf as {dtype}: model.layers.1.mlp.up_proj.weight"):
        save_gguf(params, config, file, byte_level(), dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"] and file.read_bytes() == b"GGUF of before"


def test_only_gguf_files_are_replaced(tmp_path):
    file = tmp_path / "m.gguf"
    check_gguf_file(file, overwrite=False)
    modelfile_path(file).write_text("mine")
    with pytest.raises(UserError, match=r"m\.Modelfile exists. Set another --out"):
        check_gguf_file(file, overwrite=False)
    file.write_text("notes")
    with pytest.raises(UserError, match=r"m\.gguf: is not a GGUF file and is not replaced"):
        check_gguf_file(file, overwrite=True)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    """From a checkpoint to a file and its Modelfile; wrong flags are refused before anything is read."""
    config, run = of_family("qwen3"), tmp_path / "run"
    saver = Checkpointer(CheckpointConfig(async_save=False), run)
    params = jax.tree.map(jax.numpy.asarray, random_params(config))
    assert saver.save(1, {"params": params}, {"config": {}, "model": dataclasses.asdict(config)}, {})
    saver.close()
    byte_level().save_pretrained(tmp_path / "tokenizer")
    model = {"path": "", "tokenizer": str(tmp_path / "tokenizer")}
    settings = {"model": model, "rollout": {"sampling": {"temperature": 0.5, "stop": []}}}
    (run / "config.json").write_text(json.dumps({"config": settings}))
    file = tmp_path / "m.gguf"
    argv = ["export", "--checkpoint", str(run), "--out", str(file), "--dtype", "float32"]
    assert cli.main([*argv, "--push", "me/model"]) == 2
    assert cli.main([*argv[:4], str(tmp_path / "m"), "--dtype", "q8_0"]) == 2
    assert "--push uploads a Hugging Face folder" in (told := capsys.readouterr().err)
    assert f"--dtype q8_0 is a type of GGUF files: set --out {tmp_path}/m.gguf" in told
    assert not file.exists()
    assert cli.main(argv) == 0
    assert f"for Ollama: ollama create NAME -f {tmp_path}/m.Modelfile" in capsys.readouterr().out
    assert modelfile_path(file).read_text().startswith("FROM ./m.gguf\nPARAMETER temperature 0.5\n")
    written = read_back(file)[1]
    for name, expected in tensors_of(config, params).items():
        np.testing.assert_array_equal(written[name], expected)
    assert cli.main(argv) == 2 and "--overwrite True" in capsys.readouterr().err
