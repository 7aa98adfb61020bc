"""Files of model folders that are damaged or made up: each is refused with its name."""

import copy
import dataclasses
import json
import random
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm import __main__ as cli
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.folder import read_headers
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import (
    generation_config,
    generation_end_ids,
    load_tokenizer,
    vocabulary_difference,
)
from jaxrl_llm.models import init

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EVERY_KEY = {
    **BASE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "layer_types": ["full_attention"],
    "num_labels": 2,
    "id2label": {"0": "a", "1": "b"},
    "quantization_config": None,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True,
    },
}  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
JUNK = [
    *(None, True, False, 0, -1, 1, 3, 10**30, 1.5, -0.5, 1e39, float("nan"), float("inf"), float("-inf")),
    *("", "two", "x" * 10_000, "\0", "../..", [], [1], ["a", None], [[[[[]]]]], {}, {"a": 1}),
    *({"rope_type": ["yarn"]}, {"type": None, "factor": {}}, {"0": {"1": {"2": []}}}),
]


def places(tree, path=()):
    """Paths of everything inside a JSON value."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(tree, path, value):
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


def mutations(tree, count, each=True, seed=0):
    """Each place with each kind of junk in turn, and `count` random combinations."""
    rng = random.Random(seed)
    for path in places(tree) if each else ():
        for junk in JUNK:
            yield changed(tree, path, junk)
    for _ in range(count):
        many = tree
        for _ in range(rng.randrange(2, 5)):
            many = changed(many, rng.choice(list(places(many))), rng.choice(JUNK))
        yield many


def outcomes(attempt, cases):
    """(accepted, messages of the refused); any other exception is a failure."""
    accepted, messages = 0, []
    for case in cases:
        try:
            attempt(case)
            accepted += 1
        except UserError as error:
            messages.append(str(error))
    return accepted, messages


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "baichuan"])
def test_a_config_of_wrong_types_is_refused_by_file_and_key(tmp_path, family):
    """A thousand mutations of every key for one family, a hundred for the others."""
    file = tmp_path / "config.json"

    def attempt(raw):
        file.write_text(json.dumps(raw))
        read_config(tmp_path)

    one = family == "qwen3"
    accepted, messages = outcomes(attempt, mutations({**EVERY_KEY, "model_type": family}, 100, each=one))
    assert accepted > 0 and len(messages) > (600 if one else 60)
    assert all(
        message.startswith(f"{file}: ") and len(message) < 600 + len(str(file)) for message in messages
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two' must be a whole number from 1 to 10,000"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole number"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be a whole number from 1 to"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number from 0 to 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act=.'silu'. is not supported"),
        ({"architectures": 7}, "architectures=7 must be a list of names"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor='4' must be a number"),
        ({"num_attention_heads": 32, "head_dim": None}, "hidden_size=16 is less than num_attention_heads=32"),
        ({"num_key_value_heads": 3}, "no model can have this architecture: num_kv_heads is 3: it must"),
    ],
)
def test_what_is_wrong_with_a_key(change, message):
    with pytest.raises(UserError, match=f"config.json: {message}"):
        read_config({**BASE, **change})


def test_files_that_are_no_json(tmp_path):
    file = tmp_path / "config.json"
    for content, message in [
        (b"[" * 100_000, "cannot be read: .*recursion"),
        (b'{"a": ' * 100_000, "cannot be read: .*recursion"),
        (b"\xff\xfe{}", "not JSON: .*utf-8"),
        (b'{"a": 1', "not JSON"),
        (b"null", "must hold a JSON object, not NoneType"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: .*4300 digits"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"config\.json: {message}"):
            read_json(file)
    file.unlink()
    file.symlink_to(file)  # a loop
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_json(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_json(file)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody_of_that_name/model", "\udcff"])
def test_names_that_no_folder_has(name):
    with pytest.raises(UserError):
        resolve_model(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of two small files, and its config."""
    folder = tmp_path_factory.mktemp("model")
    config = read_config(BASE)
    save_model(
        init(config, jax.random.key(0)),
        config,
        folder / "hf",
        make_tokenizer(),
        dtype="float32",
        max_shard_bytes=10_000,
    )
    assert len(list((folder / "hf").glob("*.safetensors"))) > 1
    return folder / "hf", config


def test_an_index_of_any_shape_is_refused(model):
    folder, config = model
    file = folder / "model.safetensors.index.json"
    before = file.read_text()
    index = json.loads(before)
    index["weight_map"] = dict(list(index["weight_map"].items())[:4])
    others = [
        file.name,
        "config.json",
        "a\0.safetensors",
        "x" * 300 + ".safetensors",
        "..safetensors",
        "\udcff",
    ]
    names = [{"weight_map": dict.fromkeys(index["weight_map"], name)} for name in others]

    def attempt(raw):
        file.write_text(json.dumps(raw))
        read_headers(folder, config)

    accepted, messages = outcomes(attempt, [*mutations(index, 100), *names])
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(UserError, match="no weights; looked for"):
        read_headers(folder, config)
    file.unlink()
    file.write_text(before)
    assert accepted == 0 and len(messages) > 200
    assert all(str(folder) in message for message in messages)


def test_headers_of_random_bytes_are_refused(model):
    folder, config = model
    (file, *_) = sorted(folder.glob("*.safetensors"))
    before = file.read_bytes()
    length = struct.unpack("<Q", before[:8])[0]
    rng = random.Random(0)

    def attempt(case):
        data = bytearray(before)
        if case % 2:
            data[:8] = struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**40, 2**63]))
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(8 + length)] = rng.randrange(256)
        file.write_bytes(bytes(data))
        read_headers(folder, config)

    try:
        _, messages = outcomes(attempt, range(200))
    finally:
        file.write_bytes(before)
    assert len(messages) > 190  # a changed space is no damage
    assert all(str(folder) in message for message in messages)


def test_ends_of_a_folder_without_generation_config(tmp_path):
    """As transformers has it: config.json names them then, else generation_config.json alone."""
    write_model(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    config = tmp_path / "m/config.json"
    config.write_text(json.dumps(read_json(config) | {"eos_token_id": [5, 7]}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    assert transformers.GenerationConfig.from_model_config(theirs).eos_token_id == [5, 7]
    assert generation_end_ids(tmp_path / "m") == (5, 7)
    tokenizer = load_tokenizer(tmp_path / "m")
    own = tokenizer.eos_token_id
    assert generation_config(tokenizer)["eos_token_id"] == sorted({5, 7, own})
    (tmp_path / "m/generation_config.json").write_text("{}")
    assert generation_end_ids(tmp_path / "m") == () and generation_config(tokenizer) == {}
    (tmp_path / "m/generation_config.json").unlink()
    config.write_text(json.dumps(read_json(config) | {"eos_token_id": own}))
    assert generation_config(tokenizer)["eos_token_id"] == own
    config.write_text(json.dumps(read_json(config) | {"eos_token_id": "</s>"}))
    with pytest.raises(UserError, match=r"config\.json: eos_token_id=\['</s>'\] must be a token id"):
        generation_end_ids(tmp_path / "m")


def test_generation_configs_of_any_shape(tmp_path):
    file = tmp_path / "generation_config.json"
    assert generation_end_ids(tmp_path) == ()
    for value, ids in [(None, ()), (7, (7,)), ([1, 0], (1, 0)), ([], ())]:
        file.write_text(json.dumps({"eos_token_id": value}))
        assert generation_end_ids(tmp_path) == ids

    def attempt(raw):
        file.write_text(json.dumps(raw))
        generation_end_ids(tmp_path)

    _, messages = outcomes(attempt, mutations({"eos_token_id": [1, 2], "temperature": 0.5}, 50))
    assert len(messages) > 30
    assert all(m.startswith(f"{file}: eos_token_id=") and "must be a token id" in m for m in messages)


def test_tokenizer_configs_of_any_shape(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    rng = random.Random(1)
    cases = [changed(settings, path, rng.choice(JUNK)) for path in places(settings) for _ in range(3)]
    cases += [{**settings, "chat_template": junk} for junk in JUNK]

    def attempt(raw):
        file.write_text(json.dumps(raw))
        load_tokenizer(tmp_path)

    accepted, messages = outcomes(attempt, cases)
    assert accepted and len(messages) > 20
    assert all(str(tmp_path) in message for message in messages)


def test_a_tokenizer_file_of_any_shape(tmp_path):
    """Its reader is written in Rust, where a panic is no Exception of Python."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:3])
    paths = [path for path in places(content) if len(path) < 4]
    rng = random.Random(2)

    def attempt(raw):
        file.write_text(json.dumps(raw))
        load_tokenizer(tmp_path)

    _, messages = outcomes(attempt, [changed(content, path, rng.choice(JUNK)) for path in paths])
    assert len(messages) > 10
    assert all(str(tmp_path) in message for message in messages)


# --- numbers


def with_a(value, config, where="norm"):
    params = init(config, jax.random.key(0))
    leaf = getattr(params, where)
    leaf[...] = leaf[...].at[3].set(value)
    return params


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_export_is_refused_and_the_earlier_one_stays(tmp_path, value):
    config = read_config(BASE)
    folder = save_model(init(config, jax.random.key(0)), config, tmp_path / "out", dtype="float32")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        RunError, match=r"1 of 14 tensors of model\.safetensors hold NaN or Inf as float32: model\.norm"
    ):
        save_model(with_a(value, config), config, folder, dtype="float32")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_folder_of_weights_that_are_not_finite_is_refused(tmp_path, value, dtype):
    """Its export is refused, so the file is changed: the embedding's first number."""
    config = read_config(BASE)
    folder = save_model(init(config, jax.random.key(0)), config, tmp_path / "out", dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] = 65_504.0  # the largest float16
    save_file(weights, folder / "model.safetensors")
    load_params(folder, config)
    weights["model.embed_tokens.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: model\.embed_tokens\.weight holds NaN or Inf"):
        load_params(folder, config)


def test_a_run_directory_is_not_a_model_and_its_model_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert resolve_model(tmp_path) == tmp_path
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(
        UserError, match=r"a run directory, of a run that has not exported .* jaxrl_llm export"
    ):
        resolve_model(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"a run directory; its trained model is {tmp_path}/hf$"):
        resolve_model(tmp_path)


def test_an_export_is_refused_where_its_type_is_too_small(tmp_path):
    """70,000 is beyond float16 (65,504), and not beyond bfloat16."""
    config = read_config(BASE)
    params = with_a(70_000.0, config, "embed")
    with pytest.raises(RunError, match=r"hold NaN or Inf as float16: model\.embed_tokens\.weight"):
        save_model(params, config, tmp_path / "out", dtype="float16")
    save_model(params, config, tmp_path / "out", dtype="bfloat16")
    embed = load_params(tmp_path / "out", config).embed[...]
    assert embed[3, 0] == jnp.bfloat16(70_000.0)


def test_the_export_command_refuses_a_checkpoint_that_is_not_finite(tmp_path, monkeypatch, capsys):
    """Such as an older version of the program may have saved."""
    config = read_config(BASE)
    folder = save_model(init(config, jax.random.key(0)), config, tmp_path / "out", dtype="float32")
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(Checkpointer, "_refuse_non_finite", lambda *args: None)
    saver = Checkpointer(CheckpointConfig(async_save=False), tmp_path / "run")
    meta = {"config": {}, "model": dataclasses.asdict(config)}
    assert saver.save(1, {"params": with_a(np.nan, config)}, meta, {})
    saver.close()
    (tmp_path / "run/config.json").write_text('{"config": {"model": {"path": "", "tokenizer": "tiny"}}}')
    argv = ["export", "--checkpoint", str(tmp_path / "run"), "--out", str(folder), "--overwrite", "True"]
    assert cli.main(argv) == 1
    assert capsys.readouterr().err.startswith(
        "error: not exported: 1 of 14 tensors of model.safetensors hold"
    )
    assert (folder / "model.safetensors").read_bytes() == before


# --- vocabularies


def altered(tmp_path, change):
    """The tiny tokenizer with another tokenizer.json."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return load_tokenizer(tmp_path)


def test_vocabularies_are_compared_token_by_token(tmp_path):
    tiny = make_tokenizer()
    assert vocabulary_difference(tiny, make_tokenizer()) == "" and vocabulary_difference(tiny, tiny) == ""

    def swap(content):
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    a, b = tiny.convert_tokens_to_ids(["a", "b"])
    assert vocabulary_difference(tiny, altered(tmp_path / "swapped", swap)) == (
        f"2 tokens differ: 'a' has id {a} and {b}, 'b' has id {b} and {a}"
    )  # as many tokens, and the same ones
    longer = make_tokenizer()
    longer.add_tokens(["<think>"])
    assert vocabulary_difference(tiny, longer) == f"1 tokens differ: '<think>' has id none and {len(tiny)}"
    renamed = make_tokenizer()
    renamed.add_special_tokens({"pad_token": "<|im_end|>"})  # another role of the same token
    assert vocabulary_difference(tiny, renamed) == ""


def test_folders_of_a_run_that_are_no_models_name_what_to_give(tmp_path):
    """Exports, adapters and checkpoints of a run name its model, or the command that makes one."""

    def refused(path, message):
        with pytest.raises(UserError, match=message):
            resolve_model(path)

    for folder in ("checkpoints/30", "exports/10/hf", "exports/10/adapter", "adapter"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("")
    for file in ("exports/10/hf/config.json", "exports/10/adapter/adapter_config.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    refused(tmp_path / "exports/10", rf"not a model, but contains one: {tmp_path}/exports/10/hf$")
    merged = rf"adapters \(PEFT\) .* --adapter in chat, .*; merged they are {tmp_path}/exports/10/hf$"
    refused(tmp_path / "exports/10/adapter", merged)
    refused(
        tmp_path / "adapter",
        r"adapters \(PEFT\) .* --model.adapter in training or --adapter in chat, generate and score$",
    )
    export = rf"a checkpoint of the run {tmp_path}, .*export --checkpoint {tmp_path} --out FOLDER\)"
    refused(tmp_path / "checkpoints", export)
    refused(tmp_path / "checkpoints/30", export)


def write_model(folder, tie=False):
    """Write a folder with one file of weights. Returns its tensors."""
    config = read_config({**BASE, "tie_word_embeddings": tie})
    save_model(init(config, jax.random.key(0)), config, folder, dtype="float32")
    return load_file(folder / "model.safetensors")


def test_a_head_beside_tied_embeddings_is_their_copy(tmp_path):
    """transformers 5 would use another one, 4 would not."""
    tensors = write_model(tmp_path / "m", tie=True)
    embedding = tensors[EMBEDDING]
    config = read_config(tmp_path / "m")
    for head in (embedding, embedding.astype(np.float16).astype(np.float32)):
        save_file(tensors | {"lm_head.weight": head, EMBEDDING: head}, tmp_path / "m/model.safetensors")
        np.testing.assert_array_equal(load_params(tmp_path / "m", config).head, head)
    late = embedding.copy()
    late[-1, -1] += 1e-6
    for head in (late, embedding[:-1], embedding.astype(np.int32)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "m/model.safetensors")
        with pytest.raises(UserError, match=r"lm_head\.weight differs from .*tie_word_embeddings is true"):
            load_params(tmp_path / "m", config)
    classifier = dataclasses.replace(config, value_head=True)  # which no head serves
    save_file(
        tensors | {"lm_head.weight": late, "score.weight": embedding[:1]}, tmp_path / "m/model.safetensors"
    )
    np.testing.assert_array_equal(load_params(tmp_path / "m", classifier).value, embedding[:1])


def test_a_single_file_beside_an_index(tmp_path):
    """`save_pretrained` of one file leaves an earlier index, of several an earlier single file."""
    tensors = write_model(tmp_path / "m")
    config, index = read_config(tmp_path / "m"), tmp_path / "m/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    np.testing.assert_array_equal(load_params(tmp_path / "m", config).embed, tensors[EMBEDDING])
    save_file(tensors, tmp_path / "m/model-00001-of-00001.safetensors")
    with pytest.raises(
        UserError, match=r"both model\.safetensors, .* \(model-00001-of-.* one is stale\. Remove"
    ):
        load_params(tmp_path / "m", config)
    (tmp_path / "m/model.safetensors").unlink()
    np.testing.assert_array_equal(load_params(tmp_path / "m", config).embed, tensors[EMBEDDING])
    (tmp_path / "m/model-00001-of-00001.safetensors").rename(tmp_path / "m/model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    np.testing.assert_array_equal(load_params(tmp_path / "m", config).embed, tensors[EMBEDDING])
