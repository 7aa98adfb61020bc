"""Rewards of responses by `generate` and `score`, and the rows to train on that they select."""

import contextlib
import dataclasses
import datetime
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.__main__ import main
from jaxrl_llm.data.chat import encode_supervised
from jaxrl_llm.data.config import ChatConfig, DataConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.learn import scoring
from jaxrl_llm.rewards.config import RewardConfig, RewardModelConfig
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.tools import generate, score
from jaxrl_llm.tools import output as output_files
from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.config import GenerateArguments, ScoreArguments, SelectConfig
from jaxrl_llm.tools.output import ResumableOutput, settings_of, with_date
from jaxrl_llm.tools.response_rewards import ResponseRewarder
from jaxrl_llm.tools.scoring import NO_SOURCE
from jaxrl_llm.tools.selection import RewardedResponse, base_row, selected_rows

CONFIG = models.TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=512,
)  # fmt: skip
TOKENIZER = make_tokenizer()
VALUES = jax.jit(lambda weights, tokens, positions: weights.values(weights(tokens, positions)))
QUESTION = {"role": "user", "content": "2 + 2"}
LENGTH = "def reward(sample):\n    return float(len(sample.response))\n"
SMALL = ["--mesh.data", "1", "--mesh.fsdp", "8", "--batch_tokens", "512"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "model"
    save_model(random_params(CONFIG), CONFIG, folder, TOKENIZER, dtype="float32")
    return str(folder)


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """Folders and weights of two reward models."""
    config = dataclasses.replace(CONFIG, value_head=True, tie_embeddings=True)
    results = []
    for seed in (1, 2):
        params, folder = random_params(config, seed), tmp_path_factory.mktemp("judge") / "hf"
        save_model(params, config, folder, TOKENIZER, dtype="float32")
        results.append((str(folder), jax.tree.map(jnp.asarray, params)))
    return results


@pytest.fixture
def write(tmp_path):
    def to_file(name, content):
        lines = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(lines)
        return str(tmp_path / name)

    return to_file


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def value(weights, example, response):
    """The value after the last token of a response as reward models are trained to read it."""
    return values(weights, example, response)[-1]


def values(weights, example, response):
    """The value after each token; causal, so all texts can have one length."""
    ids, _ = encode_supervised(TOKENIZER, dataclasses.replace(example, response=response), ChatConfig())
    tokens = jnp.zeros((1, 96), jnp.int32).at[0, : len(ids)].set(ids)
    return np.asarray(VALUES(weights, tokens, jnp.arange(96)[None]))[0, : len(ids)]


def rows_of(**settings):
    example = read_example({"messages": [QUESTION], "answer": "4", "level": 3}, "f:1", NO_SOURCE)
    rewards = {"a": 1.0, "b": 3.0, "c": None, "d": 2.0, "e": 3.0, "f": -1.0}
    responses = [RewardedResponse(text, reward) for text, reward in rewards.items()]
    return list(selected_rows(example, responses, SelectConfig(**settings), ChatConfig()))


def test_the_best_of_n_and_what_a_threshold_leaves():
    base = {"prompt": "2 + 2", "messages": [QUESTION], "answer": "4", "level": 3}
    assert rows_of(select="best") == [base | {"response": "b", "reward": 3.0}]  # the first of equals
    assert [row["response"] for row in rows_of(select="best", keep=3)] == ["b", "e", "d"]
    assert rows_of(select="best", threshold=3.5) == []
    assert [row["response"] for row in rows_of(select="filter")] == ["a", "b", "d", "e", "f"]
    assert [row["response"] for row in rows_of(select="filter", threshold=2.0)] == ["b", "d", "e"]


def test_pairs_are_the_best_against_the_worst_with_a_margin():
    (row,) = rows_of(select="pairs")
    assert (row["chosen"], row["rejected"], row["chosen_reward"], row["rejected_reward"]) == ("b", "f", 3, -1)
    assert rows_of(select="pairs", margin=4.0) and not rows_of(select="pairs", margin=4.1)
    assert rows_of(select="pairs", threshold=3.0) and not rows_of(select="pairs", threshold=3.1)


def test_both_responses_of_a_pair_in_channels_are_messages():
    example = Example((QUESTION,), None, where="x:1")
    responses = [RewardedResponse(CHANNELS, 1.0), RewardedResponse("3", 0.0)]
    (row,) = selected_rows(example, responses, SelectConfig(select="pairs"), ChatConfig())
    assert row["chosen"] == [{"role": "assistant", "content": "2", "thinking": "1+1"}]
    assert row["rejected"] == [{"role": "assistant", "content": "3"}]
    assert read_example(row, "x:1", NO_SOURCE).rejected is not None


def test_empty_responses_are_never_selected_for_training_refuses_them():
    """The worst one, of a policy that stops at once, and the best one, where a reward likes brevity."""
    example = read_example({"prompt": "Q:"}, "f:1", NO_SOURCE)
    responses = [RewardedResponse("", 9.0), RewardedResponse("a", 1.0), RewardedResponse("b", 2.0)]
    responses.append(RewardedResponse("", -9.0))
    for select, expected in (("best", {"b"}), ("filter", {"a", "b"}), ("conditional", {"a", "b"})):
        rows = list(selected_rows(example, responses, SelectConfig(select), ChatConfig()))
        assert {row["response"] for row in rows} == expected
    (pair,) = selected_rows(example, responses, SelectConfig("pairs"), ChatConfig())
    assert (pair["chosen"], pair["rejected"]) == ("b", "a")


def test_conditional_rows_have_the_reward_at_the_end_of_the_prompt():
    row = rows_of(select="conditional")[1]
    assert row["messages"][-1]["content"] == "2 + 2 <rm_score>: 3.00" and row["response"] == "b"
    plain = next(selected_rows(
        Example(None, "Q:"), [RewardedResponse("x", 0.5)], SelectConfig("conditional"), ChatConfig()
    ))  # fmt: skip
    assert plain == {"prompt": "Q: <rm_score>: 0.50", "response": "x", "reward": 0.5}


def test_columns_of_tables_become_json():
    columns = {
        "date": datetime.date(2026, 1, 2),
        "nan": float("nan"),
        "deep": [{"x": (1, b"b")}],
        "prompt": "p",
    }
    row = base_row(Example(None, "p", columns=columns), ChatConfig())
    assert row == {"date": "2026-01-02", "nan": None, "deep": [{"x": [1, "b'b'"]}], "prompt": "p"}


@pytest.mark.slow
def test_a_verifier_and_two_models_are_added_by_their_weights(judges, write, tmp_path):
    """Responses of `generate`, a single one, a pair and a chat: numbers are those of the models alone."""
    data = [
        {"prompt": "1+2=", "answer": "3", "responses": [{"text": "3", "finish": "stop"}, {"text": "33"}]},
        {"messages": [QUESTION], "response": "4"},
        {"prompt": "5+5=", "chosen": "10", "rejected": "a long one"},
        {"messages": [QUESTION, {"role": "assistant", "content": "5!"}]},
    ]
    (first, weights), (second, others) = judges
    out = tmp_path / "out.jsonl"
    flags = ["--reward.name", write("length.py", LENGTH), "--reward.weight", "0.1"]
    flags += ["--reward.models.0.path", first, "--reward.models.0.weight", "2"]
    flags += [
        "--reward.models.1.path",
        second,
        "--reward.models.1.mean",
        "1",
        "--reward.models.1.weight",
        "0.25",
    ]
    argv = ["--data", write("data.jsonl", data), "--out", str(out), *flags, *SMALL, "--window", "3"]
    assert score.main(argv) == 0
    rows = read(out)
    total = lambda example, text: (
        0.1 * len(text) + 2 * value(weights, example, text) + (value(others, example, text) - 1) / 4
    )
    sums, chat = Example(None, "1+2="), Example((QUESTION,), None)
    expected = [total(sums, "3"), total(sums, "33")]
    np.testing.assert_allclose([r["reward"] for r in rows[0]["responses"]], expected, atol=1e-4)
    assert rows[0]["responses"][0]["finish"] == "stop" and rows[0]["answer"] == "3"
    assert rows[1]["reward"] == pytest.approx(total(chat, "4"), abs=1e-4)
    assert rows[1]["rewards"][first] == pytest.approx(value(weights, chat, "4"), abs=1e-4)
    assert rows[1]["rewards"][flags[1]] == 1.0 and rows[1]["outcome"] == "correct"
    tens = Example(None, "5+5=")
    assert rows[2]["chosen_reward"] == pytest.approx(total(tens, "10"), abs=1e-4)
    assert rows[2]["rejected_reward"] == pytest.approx(total(tens, "a long one"), abs=1e-4)
    assert rows[3]["reward"] == pytest.approx(total(chat, "5!"), abs=1e-4)


@pytest.mark.slow
def test_a_reward_model_reads_a_prompt_once_for_its_responses(judges, monkeypatch):
    """Rewards are those of one response at a time, and tokens those of one row for each prompt, by hand.

    The tiny tokenizer has a token a character; a response has its end besides, and one token after it.
    """
    (folder, weights), _ = judges
    reward = RewardConfig(name="none", models=(RewardModelConfig(path=folder),))
    examples = [Example(None, question) for question in ("1+2=" * 10, "a prompt" * 4) for _ in range(16)]
    texts = [chr(97 + i % 16) * 10 for i in range(32)]
    put, computed, closing = scoring.put_rows, [], contextlib.ExitStack()

    def counted(mesh, batch):
        computed.append((batch.segments > 0).sum())
        return put(mesh, batch)

    monkeypatch.setattr(scoring, "put_rows", counted)
    rewarder = ResponseRewarder(
        reward, MeshConfig(data=1, fsdp=8), "float32", 3072, chat=ChatConfig(), closing=closing
    )
    rewarder.open(examples)
    rewarded = rewarder.score_texts(examples, texts)
    expected = [value(weights, e, t) for e, t in zip(examples, texts, strict=True)]
    np.testing.assert_allclose([r.reward for r in rewarded], expected, rtol=1e-5, atol=1e-5)
    assert sum(computed) == 40 + 32 + 32 * 12 + 2 * 15  # each other one copies the last token of the prompt


@pytest.mark.slow
def test_a_process_model_ranks_by_the_worst_step(judges, write, tmp_path):
    (folder, weights), _ = judges
    out, text = tmp_path / "out.jsonl", "a\nb"
    data = write("data.jsonl", [{"prompt": "p", "response": text}])
    flags = ["--reward.models.0.path", folder, "--reward.models.0.kind", "process"]
    assert score.main(["--data", data, "--out", str(out), *flags, *SMALL]) == 0
    after = values(weights, Example(None, "p"), text)
    (row,) = read(out)
    np.testing.assert_allclose(row["steps"], after[[2, 3]], atol=1e-4)  # the newline, "b"; no end token
    assert row["reward"] == pytest.approx(min(after[2], after[3]), abs=1e-4)


def test_score_counts_rows_without_an_answer(write, tmp_path, capsys):
    row = {"prompt": "1+1=", "response": "2"}
    args = ["--out", str(tmp_path / "o.jsonl"), "--reward.name", "exact", "--reward.workers", "1"]
    data = write("d.jsonl", [{**row, "answer": "2"}, row, {**row, "answer": "3"}])
    assert score.main(["--data", data, *args]) == 0
    assert "d.jsonl:2: no answer for the reward to compare with, as in 1 of 3 rows" in capsys.readouterr().err
    assert [r["reward"] for r in read(tmp_path / "o.jsonl")] == [1.0, None, 0.0]
    with pytest.raises(UserError, match="as in 2 of 2 rows"):
        score.main(["--data", write("e.jsonl", [row, row]), *args, "--resume", "False"])


CHANNELS = "<|channel|>analysis<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>2"


def test_score_reads_what_follows_the_thought(write, tmp_path):
    """Rows as `generate` writes them, of gpt-oss and of a template that opens the thought."""
    row = {"prompt": [QUESTION], "answer": "2"}
    texts = [CHANNELS, "2</think>3", "<think>3</think>2"]
    rows = [{**row, "responses": [{"text": text} for text in texts]}]
    rows += [{**row, "opens_thought": True, "responses": [{"text": "so 2"}, {"text": "3</think>2"}]}]
    args = ["--out", str(tmp_path / "o.jsonl"), "--reward.name", "exact", "--reward.workers", "1"]
    assert score.main(["--data", write("d.jsonl", rows), *args]) == 0
    found = [[r["reward"] for r in row["responses"]] for row in read(tmp_path / "o.jsonl")]
    assert found == [[1.0, 0.0, 1.0], [0.0, 1.0]]
    select = [*args[:1], str(tmp_path / "best.jsonl"), *args[2:], "--select", "best"]
    assert score.main(["--data", write("d.jsonl", rows), *select]) == 0
    first, second = read(tmp_path / "best.jsonl")
    assert first["response"] == [{"role": "assistant", "content": "2", "thinking": "1+1"}]
    assert second["response"] == "3</think>2" and second["opens_thought"] is True


def test_relabelled_pairs_swap_where_the_rejected_one_is_better(write, tmp_path):
    data = [
        {"prompt": "p", "chosen": "a", "rejected": "bbb"},
        {"prompt": "q", "chosen": "cc", "rejected": "d"},
    ]
    out = tmp_path / "out.jsonl"
    argv = ["--data", write("d.jsonl", data), "--out", str(out), "--reward.name", write("length.py", LENGTH)]
    assert score.main([*argv, "--select", "pairs", "--margin", "2"]) == 0
    assert read(out) == [
        {"prompt": "p", "chosen": "bbb", "rejected": "a", "chosen_reward": 3.0, "rejected_reward": 1.0}
    ]


@pytest.mark.slow
def test_generated_rows_load_in_sft_and_dpo_and_in_score(policy, write, tmp_path, capsys):
    """Pairs by one command; all responses, then the best of them, by two."""
    prompts = write("p.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"messages": [QUESTION], "answer": "4"}])
    rewards = ["--reward.name", write("length.py", LENGTH)]
    pairs, every, best = (tmp_path / name for name in ("pairs.jsonl", "all.jsonl", "best.jsonl"))
    argv = ["--model", policy, "--prompts", prompts, "--n", "4", "--max_tokens", "5", "--slots", "8", *SMALL]
    assert generate.main([*argv, "--out", str(pairs), "--select", "pairs", *rewards]) == 0
    assert generate.main([*argv, "--out", str(every)]) == 0
    assert "2/2 prompts" in capsys.readouterr().err
    assert score.main(["--data", str(every), "--out", str(best), *rewards, "--select", "best"]) == 0
    for row, pair, group in zip(read(best), read(pairs), read(every), strict=True):
        texts = sorted((r["text"] for r in group["responses"]), key=len)
        assert row["reward"] == pair["chosen_reward"] == len(texts[-1])
        assert row["response"] == pair["chosen"] and len(pair["rejected"]) == len(texts[0])
        assert row["answer"] == pair["answer"] == group["answer"]
    load = lambda file, kind: Loader(
        DataConfig(path=str(file)), TOKENIZER, 0, 200, split="train", max_tokens=300
    ).check_first_rows(kind)
    assert load(best, "tokens")[0].response == read(best)[0]["response"]
    assert load(pairs, "pairs")[0].rejected.response == read(pairs)[0]["rejected"]


def test_a_killed_command_continues_behind_the_last_window(write, tmp_path, monkeypatch, capsys):
    data = write("d.jsonl", [{"prompt": f"p{i}", "response": "x" * i} for i in range(1, 8)])
    out = tmp_path / "o.jsonl"
    rewards = ["--reward.name", write("length.py", LENGTH)]
    argv = ["--data", data, "--out", str(out), *rewards, "--window", "2"]
    append, calls = ResumableOutput.append, []

    def append_twice(self, rows, rows_done):
        calls.append(rows_done)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(self, rows, rows_done)

    monkeypatch.setattr(ResumableOutput, "append", append_twice)
    with pytest.raises(KeyboardInterrupt):
        score.main(argv)
    assert len(read(out)) == 4 and (tmp_path / ".o.jsonl.progress").exists()
    partial = f"{out} is not complete: 4 rows of the input are done. The same command continues after them."
    assert capsys.readouterr().err.endswith(f"\n{partial}\n")
    with out.open("a") as file:
        file.write('{"prompt": "p5", "resp')  # cut short
    with pytest.raises(UserError, match=r"another select\. Repeat that command"):
        score.main([*argv, "--select", "best"])
    record = tmp_path / ".o.jsonl.progress"
    record.write_text(json.dumps({**json.loads(record.read_text()), "date": "2020-02-29"}))
    calls[:] = [0, 0, 0]
    assert score.main(argv) == 0
    assert calls[3:] == [6, 7]  # input rows done
    assert [row["reward"] for row in read(out)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert "not complete" not in capsys.readouterr().err
    assert json.loads(record.read_text())["date"] == "2020-02-29"  # of all its rows


def test_a_partial_output_may_be_continued_in_other_windows_and_batches(tmp_path):
    """They are how many rows a write, and how many tokens a forward pass, has: not what is computed."""
    args = ScoreArguments(data=tmp_path / "d.jsonl", out=tmp_path / "o.jsonl")
    settings = lambda **changed: settings_of(dataclasses.replace(args, **changed), args.data)
    assert settings(window=3) == settings(batch_tokens=16) == settings()
    assert settings(temperature=0.5) != settings() != settings(adapter="adapter")


def test_one_date_for_all_rows_of_an_output(tmp_path):
    """A template that writes the date would give the rows after midnight another prompt."""
    args = ScoreArguments(data=tmp_path / "d.jsonl", out=tmp_path / "o.jsonl")
    before, dated = str(datetime.date.today()), with_date(args)
    assert before <= dated.chat.date <= str(datetime.date.today()) and with_date(dated) == dated
    ResumableOutput(args.out, {}, date="2020-02-29").append(["row\n"], 1)
    assert with_date(args).chat.date == "2020-02-29"
    assert with_date(dataclasses.replace(args, resume=False)).chat.date >= before
    ResumableOutput(args.out, {}).finish()
    assert with_date(args).chat.date >= before  # the next output is another one


def write_output(out, settings, rows, resume=True):
    with ResumableOutput(out, settings, resume) as output:
        for i, row in enumerate(rows):
            output.append([row], i + 1)
        output.finish()


def test_a_complete_file_is_kept_until_there_are_rows(tmp_path):
    """A model that cannot be loaded, or a kill before the first window, loses no earlier output."""
    out = tmp_path / "o.jsonl"
    write_output(out, {}, ["earlier\n"])
    with pytest.raises(KeyboardInterrupt), ResumableOutput(out, {}):
        raise KeyboardInterrupt
    assert out.read_text() == "earlier\n"
    write_output(out, {}, ["new\n", "rows\n"])
    assert out.read_text() == "new\nrows\n"


def test_a_file_that_the_command_did_not_write_is_kept(tmp_path):
    """A data set, labels added by hand to an output, or the output of other settings."""
    out, other = tmp_path / "o.jsonl", r"o\.jsonl: exists, and is not this command's output, or was changed"
    out.write_text("mine\n")
    with pytest.raises(UserError, match=rf"{other} since\. Set another --out, or --resume False to write"):
        ResumableOutput(out, {"n": "1"})
    assert out.read_text() == "mine\n"
    write_output(out, {"n": "1"}, ["a\n"], resume=False)
    with pytest.raises(UserError, match=r"o\.jsonl: output of a command with another n\. Set another --out"):
        ResumableOutput(out, {"n": "2"})
    write_output(out, {"n": "1"}, ["b\n"])
    assert out.read_text() == "b\n"
    out.write_text("c\n")  # by hand, of the same size
    os.utime(out, ns=(0, 1))
    with pytest.raises(UserError, match=other):
        ResumableOutput(out, {"n": "1"})
    out.write_text("")
    write_output(out, {"n": "1"}, ["d\n"])
    assert out.read_text() == "d\n"


def test_the_same_command_replaces_its_output_of_an_input_that_has_grown(tmp_path):
    out = tmp_path / "o.jsonl"
    write_output(out, {"n": "1", "size of the input": "10"}, ["a\n"])
    write_output(out, {"n": "1", "size of the input": "20"}, ["a\n", "b\n"])
    assert out.read_text() == "a\nb\n"


def test_a_command_killed_in_its_first_window_is_repeated(tmp_path, monkeypatch):
    out = tmp_path / "o.jsonl"

    def kill(file):
        file.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output_files, "sync_to_disk", kill)
        write_output(out, {}, ["half"])
    assert out.read_text() == "half"
    write_output(out, {}, ["whole\n"])
    assert out.read_text() == "whole\n"


def test_a_failed_verifier_leaves_the_response_without_a_reward(write, tmp_path):
    broken = "def reward(sample):\n    return 1.0 if sample.response != 'b' else float('nan')\n"
    data = write("d.jsonl", [{"prompt": "p", "responses": ["a", "b", "c"]}])
    out = tmp_path / "o.jsonl"
    assert score.main(["--data", data, "--out", str(out), "--reward.name", write("f.py", broken)]) == 0
    first, second, _ = read(out)[0]["responses"]
    assert (first["reward"], first["outcome"]) == (1.0, "correct")
    assert (second["reward"], second["outcome"]) == (None, "failed") and "nan" in second["failure"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "neither is given"),
        (["--model", "m", "--reward.name", "exact"], "both are given"),
        (["--model", "m", "--select", "best"], "--select best: nothing rewards the responses"),
        (["--reward.nam", "exact"], r"--reward.nam: unknown key. Did you mean --reward.name"),
        (["--reward.name", "exat"], 'reward.name is "exat": unknown. Did you mean exact'),
        (["--reward.name", "exact", "--margin", "0"], "--margin is 0.0: it must be above 0"),
        (["--reward.name", "exact"], r"d.jsonl:2: nothing to reward"),
    ],
)
def test_wrong_settings_are_named(write, tmp_path, flags, message):
    data = write("d.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "c"}])
    with pytest.raises(UserError, match=message):
        score.main(["--data", data, "--out", str(tmp_path / "o"), *flags])


def test_reward_flags_are_those_of_training():
    line = ["--model", "m", "--prompts", "p", "--n", "2", "--reward.models.0.path", "a", "--reward.keep_env"]
    args = parse_arguments(GenerateArguments, [*line, "K", "L", "--out=o"], "generate")
    assert (args.n, args.out) == (2, Path("o"))
    config = args.reward
    assert config.models[0].path == "a" and config.keep_env == ("K", "L") and config.name == "none"
    with pytest.raises(ConfigError):
        parse_arguments(GenerateArguments, ["--reward.timeout", "soon"], "generate")


@pytest.mark.slow
def test_two_commands_make_data_and_train_on_it(policy, write, tmp_path):
    prompts = write("p.jsonl", [{"prompt": f"{i}+1="} for i in range(8)])
    rewards = ["--reward.name", write("length.py", LENGTH)]
    for select, recipe in (("best", "sft_tiny.py"), ("pairs", "dpo_tiny.py"), ("conditional", "sft_tiny.py")):
        out, run_dir = str(tmp_path / f"{select}.jsonl"), tmp_path / select
        argv = ["generate", "--model", policy, "--prompts", prompts, "--out", out, "--n", "4"]
        assert main([*argv, "--max_tokens", "5", "--slots", "8", "--select", select, *rewards, *SMALL]) == 0
        data = [
            "--data.path",
            out,
            "--data.chat.render",
            "plain",
            "--eval.every",
            "0",
            "--steps",
            "2",
            "--warm_start.steps",
            "0",
        ]
        assert main(["train", "--config", recipe, *data, "--run_dir", str(run_dir)]) == 0
        assert np.isfinite(read(run_dir / "metrics.jsonl")[-1]["loss"])
