"""The held-out split of files, and steps from epochs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.builders.data import open_loaders, steps_of_epochs, with_steps
from jaxrl_llm.config import EvalConfig, ModelConfig, TrainConfig, TransformerConfig, WarmStartConfig
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.holdout import choose_prompts, prompt_hash, split_sources
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.load import with_settings

TOKENIZER = make_tokenizer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(opened):
    return [example.text for _, source in opened for example in (source[i] for i in range(len(source)))]


@pytest.fixture
def hundred(tmp_path):
    return write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "answer": str(i)} for i in range(100)])


def test_a_number_of_rows_is_held_out_by_the_seed_and_no_other_is_lost(hundred):
    split = split_sources(DataConfig(path=hundred, holdout=20), 0)
    assert (len(prompts(split.train)), len(prompts(split.eval))) == (80, 20)
    assert {*prompts(split.train), *prompts(split.eval)} == {f"p{i}" for i in range(100)}
    assert prompts(split_sources(DataConfig(path=hundred, holdout=20), 0).eval) == prompts(split.eval)
    assert prompts(split_sources(DataConfig(path=hundred, holdout=20), 1).eval) != prompts(split.eval)
    assert len(prompts(split_sources(DataConfig(path=hundred, holdout=0.07), 0).eval)) == 7


def test_the_split_does_not_depend_on_the_order_of_rows_or_files(hundred, tmp_path):
    rows = [json.loads(line) for line in Path(hundred).read_text().splitlines()]
    halves = [write(tmp_path / f"{k}.jsonl", rows[k::2][::-1]) for k in (0, 1)]
    two = DataConfig(train=tuple(SourceConfig(path=path) for path in halves), holdout=20)
    one = split_sources(DataConfig(path=hundred, holdout=20), 0)
    assert sorted(prompts(split_sources(two, 0).eval)) == sorted(prompts(one.eval))


def test_rows_of_one_prompt_stay_together_over_all_files(tmp_path):
    """30 prompts; each has 1 row, and every third 4 more in another file."""
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(30)]
    again = [
        {"prompt": [{"role": "user", "content": f"p{i}"}], "chosen": "c", "rejected": "d"} for i in range(30)
    ]
    first = write(tmp_path / "a.jsonl", rows + [row for row in rows[::3] for _ in range(4)])
    second = write(tmp_path / "b.jsonl", again)  # chats are other prompts than plain texts
    data = DataConfig(train=(SourceConfig(path=first), SourceConfig(path=second)), holdout=25)
    split = split_sources(data, 3)
    sides = [
        Counter(prompt_hash(s[i], 0) for _, s in side for i in range(len(s)))
        for side in (split.train, split.eval)
    ]
    assert not sides[0].keys() & sides[1].keys()
    assert (sides[0].total(), sides[1].total()) == (75, 25)


@pytest.mark.parametrize(
    ("hashes", "holdout", "chosen"),
    [
        ([5, 3, 9, 1], 2, [1, 3]),
        ([5, 3, 9, 1], 0.5, [1, 3]),
        ([1, 1, 1, 5, 9, 9], 2, [5]),  # 1 has three rows, 9 would make three with 5
        ([1, 1, 1, 5, 7, 9], 2, [5, 7]),
        ([2, 2, 8, 8], 3, [2]),  # at most
    ],
)
def test_prompts_are_held_out_by_their_hashes(hashes, holdout, chosen):
    assert choose_prompts(np.array(hashes, np.uint64), holdout).tolist() == chosen


@pytest.mark.parametrize(
    ("hashes", "holdout", "message"),
    [
        (
            [1, 2, 3],
            3,
            "--data.holdout 3: the files have 3 rows, of which none would be left to train on. Set",
        ),
        ([1, 2, 3], 200, "--data.holdout 200: the files have 3 rows, of which none"),
        (
            [1, 1, 2, 2],
            1,
            "of 4 rows no prompt can be held out; rows with the same prompt stay together, and",
        ),
        ([1, 2, 3], 0.01, "Set --data.holdout 1 or more."),
        ([7] * 50, 0.1, "only one prompt (rows: 50), and rows with the same prompt stay together. Set"),
        ([7] * 50, 50, "--data.holdout 50: the files have only one prompt (rows: 50)"),
        ([7], 1, "Set --data.holdout 0 and --data.eval_path FILE"),
    ],
)
def test_too_few_rows_to_hold_out(hashes, holdout, message):
    with pytest.raises(UserError) as error:
        choose_prompts(np.array(hashes, np.uint64), holdout)
    assert message in str(error.value)


def test_the_prompt_of_a_row_is_what_the_policy_reads():
    user, system = {"role": "user", "content": "1+1"}, {"role": "system", "content": "Add."}
    answer = {"role": "assistant", "content": "2"}
    hashed = lambda *chat, **fields: prompt_hash(Example(chat or None, None if chat else "", **fields), 0)
    assert hashed(user) == hashed(user, answer) == hashed({**user, "content": " 1+1\n"}, response="3")
    assert len({hashed(user), hashed(system, user), hashed(user, answer, user)}) == 3
    assert hashed(response="a text to learn") != hashed(response="another")
    assert prompt_hash(Example(None, "1+1"), 0) != prompt_hash(Example(None, "1+1"), 1)


def config_of(tmp_path, **fields) -> TrainConfig:
    model = ModelConfig(architecture=TransformerConfig(max_position=64), tokenizer="tiny")
    config = TrainConfig(
        run_dir=str(tmp_path / "run"), max_prompt_tokens=16, max_response_tokens=16, model=model
    )
    return replace(config, eval=EvalConfig(every=1, prompts=5), **fields)


def held_out(config):
    return sorted(p.example.text for p in open_loaders(config, TOKENIZER, {})["eval"].eval_set(1000))


def test_a_resumed_run_holds_out_the_same_prompts_though_its_file_has_grown(hundred, tmp_path):
    config = config_of(tmp_path, data=DataConfig(path=hundred, holdout=20))
    before = held_out(config)
    rows = [{"prompt": f"new{i}"} for i in range(400)]
    with open(hundred, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert held_out(config) == before and len(before) == 20
    other = replace(config, run_dir=str(tmp_path / "other"))
    assert set(held_out(other)) != set(before)
    train = open_loaders(config, TOKENIZER, {})["train"]
    assert train.stats()["rows"] == 480
    assert not {p.example.text for p in train.prompts(0, 480)} & set(before)


@pytest.mark.parametrize("text", ['{"prompts": ["00', "[]", '{"prompts": [7]}', "\\xff"])
def test_a_damaged_record_of_the_held_out_prompts_is_an_error(hundred, tmp_path, text):
    config = config_of(tmp_path, data=DataConfig(path=hundred, holdout=20))
    held_out(config)
    (record,) = (tmp_path / "run/eval").glob("holdout_*.json")
    record.write_text(text)
    with pytest.raises(UserError, match=r"eval/holdout_\w+.json, the record .* cannot be used"):
        held_out(config)


def test_the_sft_warm_up_reads_no_held_out_prompt(hundred, tmp_path):
    lines = [{"prompt": f"p{i}", "response": "x"} for i in range(100)]
    own = SourceConfig(path=write(tmp_path / "warm.jsonl", lines))
    config = config_of(tmp_path, data=DataConfig(path=hundred, holdout=20))
    for sources, name in (((own,), "own"), ((), "shared")):
        warm = replace(
            config, warm_start=WarmStartConfig(steps=1, sources=sources), run_dir=str(tmp_path / name)
        )
        loaders = open_loaders(warm, TOKENIZER, {})
        assert loaders["warm_start"].stats()["rows"] == loaders["train"].stats()["rows"] == 80
        read = {p.example.text for p in loaders["warm_start"].prompts(0, 80)}
        assert not read & {p.example.text for p in loaders["eval"].eval_set(20)}


def test_generated_sources_beside_a_file_keep_their_own_held_out_part(hundred):
    data = DataConfig(train=(SourceConfig(path=hundred), SourceConfig(path="task:arithmetic")), holdout=3)
    split = split_sources(data, 0)
    assert [(own.path, own.split, len(source)) for own, source in split.eval] == [
        (hundred, "train", 3), ("task:arithmetic", "test", 1_000_000),
    ]  # fmt: skip
    assert [len(source) for _, source in split.train] == [97, 1_000_000]


def test_held_out_rows_take_the_place_of_the_recipes_evaluation(hundred):
    recipe = DataConfig(
        train=(SourceConfig(path="hub:x/y"),), eval=(SourceConfig(path="hub:x/y", split="test"),)
    )
    split = split_sources(replace(recipe, path=hundred, holdout=3), 0)
    assert [own.path for own, _ in split.eval] == [hundred]


def test_held_out_files_with_prompts_of_the_training_files_are_warned_of(hundred, tmp_path, caplog):
    mixed = [*({"prompt": f"p{i}", "answer": "1"} for i in range(3)), {"prompt": "new", "answer": "1"}]
    config = TrainConfig(
        model=ModelConfig(architecture=TransformerConfig(), tokenizer="tiny"), eval=EvalConfig(1, prompts=2)
    )

    def warnings(data):
        caplog.clear()
        open_loaders(replace(config, data=data), TOKENIZER, {})
        return [record.getMessage() for record in caplog.records]

    [all_shared] = warnings(DataConfig(path=hundred, eval_path=hundred))
    assert all_shared.startswith("100 of 100 held-out rows have a prompt that is trained on, too")
    [some] = warnings(DataConfig(path=hundred, eval_path=write(tmp_path / "b.jsonl", mixed)))
    assert some.startswith("3 of 4 held-out rows")
    assert not warnings(DataConfig(path=hundred, eval_path=write(tmp_path / "c.jsonl", mixed[-1:] * 2)))
    assert not warnings(DataConfig(path=hundred, holdout=20))
    assert not warnings(DataConfig(path="task:arithmetic"))


def test_sources_with_few_held_out_rows_leave_their_share_to_others(hundred, tmp_path):
    two = write(tmp_path / "two.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    sources = (SourceConfig(path=two), SourceConfig(path=hundred))
    loader = Loader(DataConfig(path=hundred, eval=sources), TOKENIZER, 0, 16, split="eval")
    texts = [p.example.text for p in loader.eval_set(10)]
    assert len(texts) == 10 and texts[:2] == ["x", "y"]


# Epochs


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [
        (1, 100, 10, 10),
        (1.5, 100, 10, 15),
        (1, 101, 10, 11),
        (1.1, 100, 10, 11),
        (0.1, 3, 10, 1),
        (3, 7, 4, 6),
    ],
)
def test_epochs_are_steps_rounded_up(epochs, rows, batch, steps):
    assert steps_of_epochs(epochs, rows, batch) == steps


def test_every_row_is_read_in_each_epoch_and_the_last_step_is_filled(tmp_path):
    path = write(tmp_path / "seven.jsonl", [{"prompt": x} for x in "abcdefg"])
    config = config_of(
        tmp_path, data=DataConfig(path=path), epochs=3.0, prompts_per_step=4, responses_per_prompt=2
    )
    train = Loader(config.data, TOKENIZER, 0, 16)
    config = with_steps(config, train)
    assert config.steps == 6  # 21 rows in steps of 4
    read = Counter(p.example.text for step in range(6) for p in train.batch(step, 4))
    assert set(read) == set("abcdefg") and min(read.values()) == 3 and read.total() == 24
    assert train.epochs(0) == {"epoch": 0.0} and train.epochs(24) == {"epoch": 24 / 7}
    assert Loader(DataConfig(path="task:arithmetic"), TOKENIZER, 0, 16).epochs(24) == {}


def test_a_profile_is_within_the_steps_of_the_epochs(tmp_path):
    """The recipe's own steps, which the epochs take the place of, say nothing of it."""
    path = write(tmp_path / "seven.jsonl", [{"prompt": x} for x in "abcdefg"])
    sizes = {"epochs": 3.0, "steps": 2, "prompts_per_step": 4, "responses_per_prompt": 2}
    config = config_of(tmp_path, data=DataConfig(path=path), profile="5:6", **sizes)
    train = Loader(config.data, TOKENIZER, 0, 16)
    assert not list(config.problems()) and with_steps(config, train).steps == 6
    with pytest.raises(ConfigError, match="--profile is '5:7': the run has 6 steps, from 1 to 6"):
        with_steps(replace(config, profile="5:7"), train)


def test_passes_over_several_sources_follow_their_weights(tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", [{"prompt": "x"}] * n) for n in (30, 10)]
    sources = (SourceConfig(path=paths[0], weight=3.0), SourceConfig(path=paths[1]))
    assert Loader(DataConfig(train=sources), TOKENIZER, 0, 16).passes(80) == {paths[0]: 2.0, paths[1]: 2.0}


def test_steps_or_epochs(hundred, tmp_path):
    recipe = config_of(tmp_path, data=DataConfig(path=hundred), steps=100)
    changed = lambda base, **settings: with_settings(base, settings).config
    assert changed(recipe, epochs=2).epochs == 2.0
    with_epochs = replace(recipe, epochs=2.0)
    assert (changed(with_epochs, steps=7).steps, changed(with_epochs, steps=7).epochs) == (7, 0.0)
    with pytest.raises(ConfigError, match="--steps and --epochs are both given"):
        changed(recipe, steps=7, epochs=2)
    assert changed(with_epochs, steps=7, epochs=0).steps == 7


def test_more_sources_beside_the_path_of_the_first(hundred, tmp_path):
    """The first keeps the recipe's keys but not its options; other sources of the recipe are dropped."""
    recipe = config_of(
        tmp_path,
        data=DataConfig(
            train=(
                SourceConfig(path="task:arithmetic", options="{}", answer_key="gold"),
                SourceConfig(path="b"),
            ),
            eval=(SourceConfig(path="c"),),
        ),
    )
    settings = {"data.path": hundred, "data.train.1.path": "two.jsonl", "data.train.1.weight": 0.5}
    data = with_settings(recipe, settings).config.data
    two = SourceConfig(path="two.jsonl", weight=0.5)
    assert data.sources("train") == (SourceConfig(path=hundred, answer_key="gold"), two)
    data = with_settings(recipe, {"data.eval_path": "d", "data.eval.1.path": "e"}).config.data
    assert [own.path for own in data.sources("eval")] == ["d", "e"]
    assert [
        own.path for own in with_settings(recipe, {"data.path": hundred}).config.data.sources("train")
    ] == [hundred]
