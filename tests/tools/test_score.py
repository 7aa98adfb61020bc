import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.learn.scoring import BucketedScorer
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.tools import generate, score
from jaxrl_llm.tools.scoring import Sequences, logprobs_of

CONFIG = models.TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(models.init(CONFIG, jax.random.key(0)), CONFIG, folder, make_tokenizer(), dtype="float32")
    return folder


def run(folder, tmp_path, lines, *arguments):
    data, out = tmp_path / "t.jsonl", tmp_path / "o.jsonl"
    data.write_text("".join(line + "\n" for line in lines))
    argv = ["--model", str(folder), "--data", str(data), "--out", str(out), *arguments]
    assert score.main(argv) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_logprobs_in_order_of_the_rows_whatever_their_lengths(folder, tmp_path):
    params = load_params(folder, CONFIG)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 128, n).tolist() for n in (3, 100, 1, 64)]
    found = run(folder, tmp_path, [json.dumps({"tokens": row}) for row in rows], "--temperature", "0.8")
    for row, line in zip(rows, found, strict=True):
        hidden = params(jnp.asarray([row]), jnp.arange(len(row))[None])
        expected = np.asarray(jax.nn.log_softmax(hidden[0] @ params.head.T / 0.8))
        assert line["tokens"] == row
        np.testing.assert_allclose(line["logprobs"], expected[np.arange(len(row) - 1), row[1:]], atol=2e-5)


@pytest.mark.parametrize(
    "batch_tokens",
    [
        pytest.param(8192, id="in one row", marks=pytest.mark.slow),
        pytest.param(64, id="in rows of one or two"),
    ],
)
def test_responses_read_their_prompt_once(folder, batch_tokens):
    """Prompts of 40 and 7 tokens with 3 and 2 responses, one of them empty, and a sequence by itself."""
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, 128, n).tolist()
    prompts = ids(40), ids(7)
    groups = [
        Sequences([prompts[0] + ids(n) for n in (12, 0, 20)], 40),
        Sequences([ids(30)]),
        Sequences([prompts[1] + ids(n) for n in (3, 50)], 7),
    ]
    params, mesh = load_params(folder, CONFIG), make_mesh(MeshConfig(), jax.devices()[:1])
    step = StepConfig(64, 1, temperature=0.8, share_prefixes=True)
    steps = step, dataclasses.replace(step, share_prefixes=False)
    shared, alone = (BucketedScorer(step, mesh, batch_tokens) for step in steps)
    found, wanted = (logprobs_of(scorer, params, groups) for scorer in (shared, alone))
    for group, got, expected in zip(groups, found, wanted, strict=True):
        assert [len(x) + 1 for x in got] == [len(x) + 1 for x in expected] == list(map(len, group.tokens))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
    if batch_tokens == 8192:  # 40 + 13 + 1 + 21 tokens; 7 + 4 + 51, and 30: (tokens, rows)
        assert set(shared.scorers) == {(96, 1), (64, 2)}


def test_log_probs_that_json_cannot_hold_end_the_command(folder, tmp_path):
    """A last norm of 3e38 is finite; the logits are not."""
    *leaves, norm = jax.tree.leaves(load_params(folder, CONFIG))
    structure = jax.tree.structure(models.abstract(CONFIG))
    params = jax.tree.unflatten(structure, [*leaves, jnp.full_like(norm, 3e38)])
    save_model(params, CONFIG, tmp_path / "huge", make_tokenizer(), dtype="float32")
    with pytest.raises(RunError, match=r"huge computes log-probs that are NaN or infinite"):
        run(tmp_path / "huge", tmp_path, ['{"tokens": [1, 2, 3]}'])


def test_a_file_without_rows_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"t\.jsonl has no rows"):
        run(folder, tmp_path, [])


def test_a_file_that_the_command_did_not_write_is_refused_before_weights_are_loaded(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("jaxrl_llm.tools.models.StoredModel.load", lambda *_: pytest.fail("they are loaded"))
    (tmp_path / "o.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match="exists, and is not this command's output"):
        run(folder, tmp_path, ['{"tokens": [1, 2]}'])


def test_messages_are_templated_whole(folder, tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    [line] = run(folder, tmp_path, [json.dumps({"messages": messages})])
    [told] = run(folder, tmp_path, [json.dumps({"messages": messages, "system": "S"})], "--resume", "False")
    assert len(told["tokens"]) > len(line["tokens"])
    text = make_tokenizer().decode(line["tokens"])
    assert "hi<|im_end|>" in text and "ok<|im_end|>" in text
    assert len(line["logprobs"]) == len(line["tokens"]) - 1


def test_responses_of_samples_pairs_and_generate_are_scored_behind_their_prompt(folder, tmp_path):
    """Their tokens are those of the whole chat, which ends with the end token."""
    question = {"role": "user", "content": "hi"}
    chat = lambda text: {"messages": [question, {"role": "assistant", "content": text}]}
    rows = [
        {"prompt": "hi", "messages": [question], "response": "ok", "reward": 1.0},  # of samples.jsonl
        {"prompt": [question], "responses": [{"text": "ok", "tokens": [5]}, {"text": "no"}]},  # of generate
        {"prompt": [question], "chosen": "ok", "rejected": "no"},
        {"prompt": "hi", "response": ""},  # stopped at once
        chat("ok"),
        chat("no"),
    ]
    sample, several, pair, empty, ok, no = run(folder, tmp_path, [json.dumps(row) for row in rows])
    tokenizer = make_tokenizer()
    for one, whole, text in (
        (sample, ok, "ok"),
        (several["responses"][0], ok, "ok"),
        (several["responses"][1], no, "no"),
        (pair["chosen"], ok, "ok"),
        (pair["rejected"], no, "no"),
    ):
        count = len(one["tokens"])
        assert one["tokens"] == whole["tokens"][:count]
        assert tokenizer.decode(one["tokens"][one["prompt_tokens"] :]) == f"{text}<|im_end|>"
        np.testing.assert_allclose(one["logprobs"], whole["logprobs"][: count - 1], atol=2e-5)
    assert tokenizer.decode(empty["tokens"]) == "hi<|im_end|>" and empty["prompt_tokens"] == 2


def test_responses_of_generate_are_scored_in_their_own_tokens(folder, tmp_path):
    """Cut off, sampled in other pieces, or stopped: their log-probs are the ones that `generate` wrote."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    words = ("--prompts", str(prompts), "--out", str(tmp_path / "g.jsonl"), "--n", "6", "--max_tokens", "5")
    assert generate.main(["--model", str(folder), *words]) == 0
    line = (tmp_path / "g.jsonl").read_text().strip()
    sampled = json.loads(line)["responses"]
    (scored,) = run(folder, tmp_path, [line])
    for one, own in zip(scored["responses"], sampled, strict=True):
        assert one["tokens"][one["prompt_tokens"] :] == own["tokens"]
        np.testing.assert_allclose(one["logprobs"][one["prompt_tokens"] - 1 :], own["logprobs"], atol=2e-5)
    assert {own["finish"] for own in sampled} >= {"length"}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"ids": [1]}', r't.jsonl:1: a row needs "tokens"'),
        ('{"prompt": "hi"}', r't.jsonl:1: a row needs "tokens" .* with responses: nothing to reward'),
        ('{"tokens": []}', r"t.jsonl:1: .tokens. must be a list of at least one integer"),
        ('{"tokens": [1, "2"]}', r"t.jsonl:1: .tokens. must be a list"),
        ('{"tokens": [1, 128]}', r"t.jsonl:1: token 128 is outside the model's vocabulary of 128"),
        (json.dumps({"tokens": [1] * 257}), r"t.jsonl:1: 257 tokens exceed the model's 256 positions"),
        ('{"messages": [{"role": "user"}]}', r"t.jsonl:1: messages"),
        ('{"prompt": "hi", "responses": []}', r't.jsonl:1: .* "responses" is an empty list'),
    ],
)
def test_bad_rows_are_named(folder, tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path, [line])


def test_a_row_of_no_responses_cannot_be_rewarded(tmp_path):
    data = tmp_path / "t.jsonl"
    data.write_text(
        '{"prompt": "hi", "answer": "4", "responses": ["4"]}\n{"prompt": "hi", "responses": []}\n'
    )
    with pytest.raises(UserError, match=r't.jsonl:2: "responses" is an empty list'):
        score.main(["--reward.name", "exact", "--data", str(data), "--out", str(tmp_path / "o.jsonl")])


def test_temperature_zero_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"--temperature is 0.0: it must be at least 0.01"):
        run(folder, tmp_path, ['{"tokens": [1, 2]}'], "--temperature", "0")
