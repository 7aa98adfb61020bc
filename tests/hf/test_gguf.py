"""GGUF files: parity with transformers' reading, every quantization, clear refusals."""

import functools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf.quants import _type_traits as library_types  # noqa: E402

from jaxrl_llm.errors import UserError  # noqa: E402
from jaxrl_llm.hf.config import read_config  # noqa: E402
from jaxrl_llm.hf.gguf import convert_gguf, read_gguf_config  # noqa: E402
from jaxrl_llm.hf.load import load_params  # noqa: E402
from jaxrl_llm.hf.resolve import resolve_model  # noqa: E402
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer  # noqa: E402
from jaxrl_llm.models import RopeConfig  # noqa: E402

HEADS, KV, LAYERS, HIDDEN, MLP, EXPERTS = 4, 2, 2, 64, 96, 6
EXPERT = 768
"""Size of an expert, which transformers does not read from a file."""
TOKENS = [chr(i) for i in range(33, 127)] + ["\u0120", "he", "llo", "<|endoftext|>", "<s>", "<end>", "<turn>"]
MERGES = ["h e", "l l", "ll o"]
TOKENS.insert(0, "ll")
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["\u2581h", "\u2581he", "ll", "llo", "\u2581hello", *(chr(i) for i in range(33, 127)), "\u2581"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<turn>' }}{% endfor %}"
BASE = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50_000.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def layer_shapes(family, hidden=HIDDEN, mlp=MLP, head=16):
    """Return the shapes of a layer's tensors, as the GGUF spells them."""
    shapes = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (HEADS * head, hidden),
        "attn_k.weight": (KV * head, hidden),
        "attn_v.weight": (KV * head, hidden),
        "attn_output.weight": (hidden, HEADS * head),
        "ffn_gate.weight": (mlp, hidden),
        "ffn_up.weight": (mlp, hidden),
        "ffn_down.weight": (hidden, mlp),
    }
    if family == "qwen2":
        sizes = {"q": HEADS * head, "k": KV * head, "v": KV * head}
        shapes |= {f"attn_{name}.bias": (size,) for name, size in sizes.items()}
    if family in ("qwen3", "qwen3moe"):
        shapes |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if family == "qwen3moe":
        for name in ("gate", "up", "down"):
            rows, columns = (EXPERT if n == mlp else n for n in shapes.pop(f"ffn_{name}.weight"))
            shapes[f"ffn_{name}_exps.weight"] = (EXPERTS, rows, columns)
        shapes["ffn_gate_inp.weight"] = (EXPERTS, hidden)
    return shapes


def head_size(family):
    """Return the size of a head; transformers does not read that of a Qwen3 file, it is 128."""
    return 128 if family in ("qwen3", "qwen3moe") else 16


def tensors_of(family, tied=True, **sizes):
    """Return random weights of a model by GGUF name."""
    sizes = {"head": head_size(family)} | sizes
    rng = np.random.default_rng(0)
    hidden, vocabulary = sizes.get("hidden", HIDDEN), sizes.pop("vocabulary", len(TOKENS))
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    shapes |= {} if tied else {"output.weight": (vocabulary, hidden)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer_shapes(family, **sizes).items()}
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def add_tokenizer(writer, pre="default"):
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 4) + [3] * 4)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<s>"))
    writer.add_eos_token_id(TOKENS.index("<end>"))
    writer.add_eot_token_id(TOKENS.index("<turn>"))
    writer.add_chat_template(TEMPLATE)


def add_sentencepiece(writer):
    """Add the tokenizer of a Llama 2 file: merges follow from the scores."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(PIECES) - 259)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259))
    for add, piece in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>")):
        getattr(writer, f"add_{add}_token_id")(PIECES.index(piece))


def write_gguf(path, family="llama", tensors=None, quantize=None, *, keys=None, tokenizer=add_tokenizer):
    """Write a GGUF file; `quantize` = type of the matrices, `keys` = metadata to add, None deletes."""
    writer = gguf.GGUFWriter(path, family)
    heads = ("attention.key_length", "attention.value_length") if family in ("qwen3", "qwen3moe") else ()
    own = dict.fromkeys(heads or ("rope.dimension_count",), head_size(family))
    if family == "qwen3moe":
        own |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT}
    values = {f"{family}.{name}": value for name, value in (BASE | own).items()} | (keys or {})
    for name, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    tokenizer(writer)
    for name, tensor in (tensors or tensors_of(family)).items():
        if quantize is not None and tensor.ndim > 1 and "gate_inp" not in name:
            writer.add_tensor(name, gguf.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "family, quantize, tied",
    [
        ("llama", Type.Q8_0, True),
        ("qwen2", Type.Q4_1, False),
        ("qwen3", None, True),
        ("qwen3moe", Type.Q4_1, False),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, family, quantize, tied):
    from hf_oracle import our_logits, random_tokens, torch
    from transformers import AutoModelForCausalLM

    # MLP rows of 96 are three blocks of 32 numbers.
    file = write_gguf(tmp_path / "m.gguf", family, tensors_of(family, tied), quantize)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    folder = convert_gguf(file)
    config = read_config(folder)
    family = {"qwen3moe": "qwen3_moe"}.get(family, family)
    assert (config.family, config.tie_embeddings, config.rope.theta) == (family, tied, 50_000.0)
    ids = random_tokens(2, 9)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert np.abs(expected).max() > 1  # else agreement would say little
    np.testing.assert_allclose(our_logits(load_params(folder, config), ids), expected, atol=2e-4)


def test_tokens_of_a_converted_file(tmp_path):
    """The ids of tests/hf/test_gguf_tokenizer.py stay the same from the file to the folder."""
    smollm = functools.partial(add_tokenizer, pre="smollm")
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tokenizer=smollm))
    assert folder.name.endswith("-4")  # folders of earlier versions are not used
    tokenizer = load_tokenizer(folder, read_config(folder))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("hello, he said<turn>"))
    assert tokens == ["he", "llo", ",", "\u0120", "he", "\u0120", "s", "a", "i", "d", "<turn>"]
    tensors = tensors_of("llama", vocabulary=len(PIECES))
    folder = convert_gguf(write_gguf(tmp_path / "p.gguf", tensors=tensors, tokenizer=add_sentencepiece))
    tokenizer = load_tokenizer(folder, read_config(folder))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(" hello</s>hello"))
    assert tokens == ["<s>", "\u2581", "\u2581hello", "</s>", "\u2581hello"]


def test_a_file_without_rules_is_read_as_llama_cpp_reads_it(tmp_path, capsys):
    without_rules = functools.partial(add_tokenizer, pre=None)
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tokenizer=without_rules))
    assert "note: " in (note := capsys.readouterr().err) and "gguf-new-metadata --pre-tokenizer NAME" in note
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello!!")) == ["he", "llo", "!", "!"]


@pytest.mark.parametrize("kind", [*library_types, Type.F16], ids=lambda kind: kind.name)
def test_every_type_of_the_library_is_read(tmp_path, kind):
    """Blocks of random bytes below 60, whose float16 scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (64, 256 // block * size), dtype=np.uint8)
    if kind == Type.F16:
        raw = raw.view(np.float16)
    writer_tensors = tensors_of("llama", hidden=256, mlp=64, head=16)
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    keys = BASE | {"embedding_length": 256, "feed_forward_length": 64, "rope.dimension_count": 16}
    for name, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{name}", value)
    add_tokenizer(writer)
    for name, tensor in writer_tensors.items():
        if name == "blk.1.ffn_up.weight":
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = convert_gguf(file)
    up = load_params(folder, read_config(folder)).layers.up[...][1]
    np.testing.assert_array_equal(up.T, gguf.dequantize(raw, kind).astype(np.float32).reshape(64, 256))


def test_values_of_q4_1_by_hand(tmp_path):
    """A block of Q4_1 is scale, minimum and 16 bytes: low halves are its first 16 numbers."""
    scale, minimum = np.float16(0.5), np.float16(-2.0)
    block = np.concatenate([np.array([scale, minimum]).view(np.uint8), np.arange(16, dtype=np.uint8) * 17])
    values = gguf.dequantize(block[None], Type.Q4_1)[0]
    np.testing.assert_array_equal(values[:16], -2.0 + 0.5 * np.arange(16))
    np.testing.assert_array_equal(values[16:], -2.0 + 0.5 * np.arange(16))


def test_a_file_is_converted_once_and_a_changed_one_again(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf")
    folder = resolve_model(file)
    weights = folder / "model.safetensors"
    changed_at = weights.stat().st_mtime_ns
    assert resolve_model(str(file)) == folder and weights.stat().st_mtime_ns == changed_at
    assert folder.parent == tmp_path / "cache/jaxrl_llm/gguf" and folder.name.startswith("m-")
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", folder.name]  # nothing else
    write_gguf(file, tensors={name: 2 * tensor for name, tensor in tensors_of("llama").items()})
    changed = resolve_model(file)
    monkeypatch.setattr("jaxrl_llm.hf.gguf._FORMAT", 10**6)  # rules of another version of the program
    assert len({folder, changed, resolve_model(file)}) == 3


def test_the_architecture_of_a_file_is_read_once_and_of_a_changed_one_again(tmp_path, monkeypatch):
    """A plan asks four times, and each reading of a real file took two seconds."""
    opened, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda file: opened.append(file) or reader(file))
    file = write_gguf(tmp_path / "m.gguf")
    assert read_gguf_config(file) == read_gguf_config(file) and len(opened) == 1
    write_gguf(file, keys={"llama.context_length": 64})
    assert read_gguf_config(file).max_position == 64 and len(opened) == 2


KILLED = """
import os, sys
from pathlib import Path
from jaxrl_llm.hf import gguf
gguf.write_description = lambda *_: os.kill(os.getpid(), 9)
gguf.convert_gguf(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_conversion_that_was_killed_leaves_nothing_once_another_is_made(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    assert subprocess.run([sys.executable, "-c", KILLED, file]).returncode == -9
    cache = tmp_path / "cache/jaxrl_llm/gguf"
    (left,) = cache.glob(".*.partial")
    assert (left / "model.safetensors").is_file()
    folder = convert_gguf(file)
    assert sorted(path.name for path in cache.iterdir()) == [".lock", folder.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"m\.gguf: its conversion cannot be written to .*Not a dir.*XDG"):
        convert_gguf(write_gguf(tmp_path / "m.gguf"))


COUNTS = [key for key, value in BASE.items() if isinstance(value, int)]
COUNTS += ["rope.dimension_count", "attention.key_length", "split.count"]
FRACTIONS = ["rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor", "rope.scale_linear"]


@pytest.mark.parametrize("wrong", ["8", True, 2.5, [8, 8]], ids=str)
def test_metadata_of_other_types_are_refused_by_name(tmp_path, wrong):
    """Every number and text that the architecture is read from."""
    for name in [*COUNTS, *(() if wrong == 2.5 else FRACTIONS)]:
        key = name if name == "split.count" else f"llama.{name}"
        file = write_gguf(tmp_path / "m.gguf", keys={key: wrong})
        with pytest.raises(UserError, match=rf"m\.gguf: {re.escape(key)}=.* is not supported; supported: a "):
            convert_gguf(file)
    if wrong != "8":
        file = write_gguf(tmp_path / "m.gguf", keys={"llama.rope.scaling.type": wrong})
        with pytest.raises(UserError, match=r"rope\.scaling\.type=.* is not supported; supported: text"):
            convert_gguf(file)


def test_a_vocabulary_of_numbers_is_refused_in_one_line(tmp_path):
    def numbers(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_array("tokenizer.ggml.tokens", list(range(100)))
        writer.add_array("tokenizer.ggml.merges", MERGES)

    file = write_gguf(tmp_path / "m.gguf", tokenizer=numbers)
    with pytest.raises(UserError, match=r"m\.gguf: its tokenizer cannot be read [^\n]*$"):
        convert_gguf(file)


def test_chat_template_and_all_end_tokens(tmp_path):
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf"))
    tokenizer = load_tokenizer(folder)
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "user:hi<turn>"
    assert tokenizer.eos_token == "<end>" and tokenizer.bos_token == "<s>"
    assert generation_end_ids(folder) == tuple(map(TOKENS.index, ("<|endoftext|>", "<end>", "<turn>")))


def test_llama3_frequencies(tmp_path):
    """Llama 3.1, 8 pairs, theta 500,000: waves under 2,048 stay, those above 8,192 are 8 times as long."""
    waves = 2 * np.pi * 500_000.0 ** (np.arange(8) / 8)
    between = lambda wave: (8192 / wave - 1) / 3
    factors = [
        1.0 if wave < 2048 else 8.0 if wave > 8192 else 1 / ((1 - between(wave)) / 8 + between(wave))
        for wave in waves
    ]
    tensors = tensors_of("llama") | {"rope_freqs.weight": np.array(factors, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", tensors=tensors, keys={"llama.rope.freq_base": 500_000.0})
    rope = read_config(convert_gguf(file)).rope
    assert (rope.scaling, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (
        "llama3",
        8.0,
        1.0,
        4.0,
    )
    assert rope.original_max_position == 8192


@pytest.mark.parametrize("original", [2048, 4096, 6000, 8192])
def test_original_length_of_llama3(tmp_path, original):
    """llama.cpp's converter writes the factors only; SmolLM2-like heads of 64, theta 10,000 and 4 times."""
    waves = 2 * np.pi * 10_000.0 ** (np.arange(32) / 32)
    between = (original / waves - 1) / 3
    factors = np.where(
        waves < original / 4, 1.0, np.where(waves > original, 4.0, 1 / ((1 - between) / 4 + between))
    )
    tensors = tensors_of("llama", head=64) | {"rope_freqs.weight": factors.astype(np.float32)}
    keys = {"llama.rope.freq_base": 10_000.0, "llama.rope.dimension_count": 64}
    rope = read_config(convert_gguf(write_gguf(tmp_path / "m.gguf", tensors=tensors, keys=keys))).rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("llama3", 4.0, original)


def test_other_frequencies_are_refused(tmp_path):
    tensors = tensors_of("llama") | {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    file = write_gguf(tmp_path / "n.gguf", tensors=tensors, keys={"llama.rope.freq_base": 500_000.0})
    with pytest.raises(UserError, match=r"n\.gguf: rope_freqs\.weight is not the scaling of Llama 3"):
        convert_gguf(file)


@pytest.mark.parametrize(
    "kind, extra", [("linear", {"factor": 4.0}), ("yarn", {"factor": 4.0, "original_max_position": 64})]
)
def test_rope_scaling(tmp_path, kind, extra):
    keys = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
    keys |= {"qwen2.rope.scaling.original_context_length": 64} if kind == "yarn" else {}
    rope = read_config(convert_gguf(write_gguf(tmp_path / "m.gguf", "qwen2", keys=keys))).rope
    assert rope.scaling == kind and {name: getattr(rope, name) for name in extra} == extra


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(tmp_path, name):
    """llama.cpp's default type; rope.scale_linear is the factor of old files."""
    file = write_gguf(tmp_path / "m.gguf", "qwen2", keys={f"qwen2.{name}": 4.0})
    assert read_config(convert_gguf(file)).rope == RopeConfig(50_000.0, "linear", 4.0)
    keys = {f"qwen2.{name}": 4.0, "qwen2.rope.scaling.type": "none"}
    file = write_gguf(tmp_path / "n.gguf", "qwen2", keys=keys)
    assert read_config(convert_gguf(file)).rope == RopeConfig(50_000.0)


def test_bounds_of_yarn(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    scaling |= {"original_context_length": 64, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
    keys = {f"qwen3.rope.scaling.{name}": value for name, value in scaling.items()}
    rope = read_config(convert_gguf(write_gguf(tmp_path / "m.gguf", "qwen3", keys=keys))).rope
    assert rope == RopeConfig(50_000.0, "yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0)


def drop(name):
    return {key: tensor for key, tensor in tensors_of("llama").items() if key != name}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"family": "gemma3"}, r"general\.architecture='gemma3' is not supported; supported: llama, qwen2"),
        ({"keys": {"llama.expert_count": 8}}, r"llama\.expert_count=8 is not supported"),
        ({"keys": {"llama.block_count": None}}, r"no llama\.block_count, which a llama file has"),
        ({"keys": {"llama.attention.key_length": 32}}, r"rope\.dimension_count=16 must be the head size 32"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, r"rope\.scaling\.type='longrope' is not supp"),
        (
            {"keys": {"llama.attention.head_count_kv": 3}},
            r"m\.gguf: its metadata, as config\.json: .*num_kv_heads is 3",
        ),
        ({"keys": {"llama.attention.causal": False}}, r"attention\.causal=False is not supported"),
        (
            {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 1.5}},
            r"rope\.scaling\.yarn_attn_factor=1\.5 is not supported; supported: 1",
        ),
        (
            {
                "keys": {"llama.rope.scaling.factor": 2.0},
                "tensors": tensors_of("llama") | {"rope_freqs.weight": np.ones(8, np.float32)},
            },
            r"rope\.scaling\.type='linear' is not supported; supported: none, beside rope_freqs\.weight",
        ),
        ({"keys": {"split.count": 3}}, r"one of 3 parts; join them with llama-gguf-split --merge"),
        ({"tensors": drop("blk.1.ffn_up.weight")}, r"1 missing: blk\.1\.ffn_up\.weight"),
        ({"tensors": drop("token_embd.weight")}, r"no token_embd\.weight"),
        ({"tensors": tensors_of("llama") | {"extra.weight": np.ones(2, np.float32)}}, r"1 unexpected: extra"),
        (
            {"tensors": tensors_of("llama") | {"blk.0.ffn_up.weight": np.ones((95, 64), np.float32)}},
            r"1 of another shape: blk\.0\.ffn_up\.weight",
        ),
        ({"tokenizer": lambda writer: None}, r"m\.gguf: tokenizer\.ggml\.model=None is not supported"),
        (
            {"tokenizer": functools.partial(add_tokenizer, pre="kimi-k2")},
            r"m\.gguf: tokenizer\.ggml\.pre='kimi-k2' is not supported",
        ),
    ],
)
def test_refusals(tmp_path, arguments, message):
    file = write_gguf(tmp_path / "m.gguf", **arguments)
    with pytest.raises(UserError, match=message) as caught:
        convert_gguf(file)
    assert "m.gguf" in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_damaged_files(tmp_path):
    good = write_gguf(tmp_path / "m.gguf").read_bytes()
    rng = np.random.default_rng(0)
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 20, 500, len(good) // 2, len(good) - 1):
        bad.write_bytes(good[:size])
        with pytest.raises(UserError, match=r"bad\.gguf"):
            convert_gguf(bad)
    for _ in range(20):  # a changed byte is refused, or changes a value only
        broken = bytearray(good)
        broken[rng.integers(0, 2500)] = rng.integers(0, 256)
        bad.write_bytes(broken)
        try:
            convert_gguf(bad)
        except UserError as error:
            assert "bad.gguf" in str(error)


def test_config_json_is_complete(tmp_path):
    raw = json.loads((convert_gguf(write_gguf(tmp_path / "m.gguf")) / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"] and raw["eos_token_id"] == TOKENS.index("<end>")
    assert raw["rms_norm_eps"] == 1e-5 and raw["vocab_size"] == len(TOKENS)
