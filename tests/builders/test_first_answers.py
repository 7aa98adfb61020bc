"""Rows without an answer, found before a model is loaded: one is warned of, a file of them refused."""

import contextlib
import json

import pytest

from jaxrl_llm.builders.rewards import open_rewards
from jaxrl_llm.config import RewardConfig, TrainConfig
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.sample import RewardLoadError

TOKENIZER = make_tokenizer()


def load(path, answers, bad_rows="fail", **source):
    rows = [{"prompt": f"0+{i}=", "level": i, "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (SourceConfig(path=str(path), **source),)
    return Loader(DataConfig(train=sources, bad_rows=bad_rows), TOKENIZER, 0, 64)


def open_exact(loader, run_dir):
    config = TrainConfig(run_dir=str(run_dir), reward=RewardConfig(name="exact", workers=1))
    with contextlib.ExitStack() as closing:
        open_rewards(config, {"train": loader}, None, closing)


def test_the_first_row_alone_does_not_decide(tmp_path, caplog):
    open_exact(load(tmp_path / "a.jsonl", [None, *"1234567"]), tmp_path)
    assert f"{tmp_path}/a.jsonl:1: no answer for the reward to compare with, as in 1 of 8 rows" in caplog.text
    caplog.clear()
    open_exact(load(tmp_path / "a.jsonl", list("01234567")), tmp_path)
    assert not caplog.text


@pytest.mark.parametrize("answer", [None, "", [], " "])
def test_a_file_without_answers_is_refused_with_file_line_and_keys(tmp_path, answer):
    message = r"a.jsonl:1: no answer .* 8 of 8 rows; the columns .* are answer.*, level\. --data"
    with pytest.raises(UserError, match=message):
        open_exact(load(tmp_path / "a.jsonl", [answer] * 8), tmp_path)


def test_a_run_whose_answers_are_objects_ends_at_the_start(tmp_path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(
        RewardLoadError, match=r"a.jsonl:1: .* an object of style: name the part to compare with"
    ):
        open_exact(load(path, [{"style": "rule"}] * 8), tmp_path)
    open_exact(load(path, [{"target": ["Paris"]}] * 8), tmp_path)  # veRL's search rows


@pytest.mark.parametrize("bad", [{"style": "rule"}, {}, {"target": None, "aliases": []}])
def test_one_row_among_many_ends_a_run_or_is_counted(tmp_path, caplog, bad):
    answers = [str(i) for i in range(300)]
    answers[256] = bad
    path = tmp_path / "a.jsonl"
    if "style" in bad:
        with pytest.raises(RewardLoadError, match=r"a.jsonl:257: .* 1 of the 300 rows .*bad_rows skip"):
            open_exact(load(path, answers), tmp_path)
    else:  # no answer at all
        open_exact(load(path, answers), tmp_path)
        assert "a.jsonl:257: no answer" in caplog.text


def test_the_keys_that_are_named_do_what_is_said(tmp_path):
    path, answers = tmp_path / "a.jsonl", [None, None, "2", "3"]
    named = load(path, answers, answer_key="level").spread_rows(4)
    assert [row.answer for row in named] == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"a.jsonl:1: no answer_key 'answer'"):
        load(path, answers, answer_key="answer")
    kept = load(path, answers, answer_key="answer", bad_rows="skip").spread_rows(4)
    assert [row.answer for row in kept] == ["2", "3"]
