"""Batches: a function of seed and step, epochs, mixing, over-long rows, held-out sets, flags."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import tyro

from jaxrl_llm.builders.data import try_first_rows
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data import template
from jaxrl_llm.data.config import ChatConfig, DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.rendering import TemplateProcess
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import problems

PLAIN = ChatConfig(render="plain")
TOKENIZER = make_tokenizer()


def write(path, prompts, **columns):
    path.write_text("".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts))
    return str(path)


@pytest.fixture
def seven(tmp_path):
    return write(tmp_path / "seven.jsonl", "abcdefg", response="ok")


def loader(path="", seed=0, split="train", max_prompt_tokens=64, *, max_tokens=None, **config):
    return Loader(
        DataConfig(path=path, **config),
        TOKENIZER,
        seed,
        max_prompt_tokens,
        split=split,
        max_tokens=max_tokens,
    )


def texts(prompts):
    return [prompt.example.text for prompt in prompts]


def test_a_step_is_the_same_whatever_was_read_before(seven):
    fresh, used = loader(seven), loader(seven)
    for step in (9, 2, 0):
        used.batch(step, 4)
        used.supervised_batch(step, 3)
    for step in (0, 5, 1000):
        a, b = fresh.batch(step, 4), used.batch(step, 4)
        assert [(p.example, p.ids.tolist(), p.index) for p in a] == [
            (p.example, p.ids.tolist(), p.index) for p in b
        ]
        assert [p.index for p in a] == [step * 4 + i for i in range(4)]


def test_every_epoch_holds_every_row_in_another_order(seven):
    epochs = [texts(loader(seven).batch(step, 7)) for step in range(4)]
    assert all(sorted(epoch) == list("abcdefg") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert texts(loader(seven, seed=1).batch(0, 7)) != epochs[0]


def test_steps_cut_one_stream(seven):
    assert texts(loader(seven).batch(0, 12)) == [
        t for step in range(3) for t in texts(loader(seven).batch(step, 4))
    ]


def test_without_shuffle_rows_come_in_order(seven):
    assert "".join(texts(loader(seven, shuffle=False).batch(1, 5))) == "fgabc"


def test_sources_are_mixed_by_weight(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", [name] * n) for name, n in (("a", 3), ("b", 50), ("c", 7))]
    weights = (0.5, 0.3, 0.2)
    train = tuple(SourceConfig(path=p, weight=w * 4) for p, w in zip(paths, weights, strict=True))
    drawn = loader(train=train)
    counts = Counter(texts(drawn.batch(0, 1000)))
    assert {name: abs(counts[name] - 1000 * w) <= 2 for name, w in zip("abc", weights, strict=True)} == {
        "a": True,
        "b": True,
        "c": True,
    }
    assert set(texts(drawn.batch(7, 10))) == {"a", "b", "c"}  # interleaved, not in blocks
    assert drawn.stats()["rows"] == 60


@pytest.fixture
def mixed_lengths(tmp_path):
    return write(tmp_path / "m.jsonl", ["a", "bb", "ccccc", "dd", "eeeeee"], response="ok")


def test_overlong_prompts_are_replaced_and_counted(mixed_lengths):
    drawn = loader(mixed_lengths, max_prompt_tokens=2)
    counts = Counter(texts(drawn.batch(0, 600)))
    assert set(counts) == {"a", "bb", "dd"} and min(counts.values()) > 150  # no row is favoured
    assert drawn.stats() == {"rows": 5, "bad_rows": 0, "overlong": 2}
    assert texts(loader(mixed_lengths, max_prompt_tokens=2).batch(3, 7)) == texts(drawn.batch(3, 7))
    in_order = loader(mixed_lengths, max_prompt_tokens=2, shuffle=False)
    assert texts(in_order.batch(0, 5)) == ["a", "bb", "dd", "dd", "a"]


@pytest.mark.parametrize("side, kept", [("left", "23"), ("right", "12")])
def test_overlong_prompts_are_cut(tmp_path, side, kept):
    drawn = loader(write(tmp_path / "a.jsonl", ["123"]), max_prompt_tokens=2, overlong="cut", cut_side=side)
    assert TOKENIZER.decode(drawn.batch(0, 1)[0].ids) == kept
    assert drawn.stats()["overlong"] == 1


def test_overlong_prompts_are_refused(mixed_lengths):
    with pytest.raises(ValueError, match=r"m.jsonl:3: 5 tokens, more than 2; --data.overlong filter"):
        loader(mixed_lengths, max_prompt_tokens=2, overlong="fail", shuffle=False).batch(0, 5)


def test_nothing_fits(mixed_lengths):
    with pytest.raises(
        UserError, match=r"0 of 5 rows fit --max_prompt_tokens 0; the shortest prompt has 1 tok"
    ):
        loader(mixed_lengths, max_prompt_tokens=0).batch(0, 1)


def test_supervised_batch(seven):
    ids, mask = loader(seven, shuffle=False).supervised_batch(0, 2)[1]
    assert TOKENIZER.decode(ids) == "bok<|im_end|>" and mask.tolist() == [0, 1, 1, 1]
    assert (ids.dtype, mask.dtype) == (np.int32, np.int8)


def test_supervised_limit(mixed_lengths):
    drawn = loader(mixed_lengths, max_tokens=5, shuffle=False)
    assert [len(ids) for ids, _ in drawn.supervised_batch(0, 5)] == [4, 5, 5, 5, 4]
    cut = loader(mixed_lengths, max_tokens=4, shuffle=False, overlong="cut").supervised_batch(0, 5)
    assert [TOKENIZER.decode(ids)[:2] for ids, _ in cut] == ["ao", "bo", "co", "do", "eo"]
    # Cut on the right, the long ones have nothing left to learn and give way to the next row.
    cut = loader(
        mixed_lengths, max_tokens=4, shuffle=False, overlong="cut", cut_side="right"
    ).supervised_batch(0, 5)
    assert [TOKENIZER.decode(ids) for ids, _ in cut[2:]] == ["ddok", "ddok", "aok<|im_end|>"]
    assert all(mask.any() for _, mask in cut)


def test_eval_set_is_spread_over_rows_and_sources_for_every_seed(tmp_path, seven):
    ten = write(tmp_path / "ten.jsonl", map(str, range(10)))
    config = {"path": seven, "eval": (SourceConfig(path=ten), SourceConfig(path=seven))}
    assert texts(loader(split="eval", **config).eval_set(8)) == ["0", "2", "5", "7", "a", "b", "d", "f"]
    assert texts(loader(split="eval", seed=3, **config).eval_set(5)) == ["0", "3", "6", "a", "d"]
    assert len(loader(split="eval", **config).eval_set(100)) == 17


def test_eval_set_leaves_out_overlong_prompts(mixed_lengths):
    drawn = loader(eval=(SourceConfig(path=mixed_lengths),), split="eval", max_prompt_tokens=2)
    assert texts(drawn.eval_set(5)) == ["a", "bb", "dd"] and drawn.stats()["overlong"] == 2


def test_no_eval_source(seven):
    empty = loader(seven, split="eval")
    assert empty.eval_set(5) == [] and empty.stats() == {"rows": 0, "bad_rows": 0, "overlong": 0}
    with pytest.raises(ValueError, match=r"give --data.eval_path FILE"):
        empty.batch(0, 1)


def test_generated_training_sources_are_evaluated_on_their_held_out_part():
    config = {"path": "task:arithmetic", "chat": PLAIN}
    evaluation = loader(split="eval", **config)
    held_out = {prompt.example.messages[0]["content"] for prompt in evaluation.eval_set(50)}
    trained = {
        prompt.example.messages[0]["content"]
        for step in range(10)
        for prompt in loader(**config).batch(step, 50)
    }
    assert len(held_out) > 40 and not held_out & trained
    again = loader(split="eval", seed=9, eval=(SourceConfig(path="task:arithmetic"),), chat=PLAIN).eval_set(
        50
    )
    assert {
        prompt.example.messages[0]["content"] for prompt in again
    } == held_out  # also where named, for every seed
    assert TOKENIZER.decode(evaluation.eval_set(1)[0].ids).endswith("=")


def test_path_takes_the_place_of_the_sources(seven):
    first = SourceConfig(path="task:arithmetic", options='{"digits": 1}', answer_key="gold", split="train")
    config = DataConfig(train=(first, SourceConfig(path="task:reverse")), path=seven, eval_path="e.jsonl")
    assert config.sources("train") == (dataclasses.replace(first, path=seven, options=""),)
    wanted = dataclasses.replace(first, path="e.jsonl", options="", split="test")
    assert config.sources("eval") == (wanted,)
    assert DataConfig(train=(first,)).sources("eval") == (dataclasses.replace(first, split="test"),)
    assert DataConfig(path=seven).sources("eval") == ()


@pytest.mark.parametrize("missing", [None, [], "", "[]", "null", float("nan")])
def test_empty_tools_of_a_row_do_not_hide_the_tools_of_the_run(tmp_path, missing):
    own, tokenizer = [{"name": "own"}], make_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[0].content }}"
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [{"role": "user", "content": "a"}], "tools": tools} for tools in (missing, own)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), shuffle=False)
    prompts = Loader(config, tokenizer, 0, 64, columns={"tools": [{"name": "run"}]}).batch(0, 2)
    assert [tokenizer.decode(prompt.ids) for prompt in prompts] == ["runa", "owna"]


def test_no_source_at_all():
    with pytest.raises(ValueError, match=r"give --data.path FILE"):
        loader()


def test_bad_rows_are_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", ["a", "", "b"])
    assert loader(path, bad_rows="skip").stats() == {"rows": 2, "bad_rows": 1, "overlong": 0}
    with pytest.raises(ValueError, match=r"a.jsonl:2: prompt is empty"):
        loader(path)


def test_flags(capsys):
    args = (
        "--overlong cut --train.0.path x.jsonl --train.0.weight 2 --chat.render plain --path y --no-shuffle"
    )
    config = tyro.cli(DataConfig, args=args.split())
    assert (config.overlong, config.path, config.shuffle, config.chat.render) == ("cut", "y", False, "plain")
    assert config.train == (SourceConfig(path="x.jsonl", weight=2.0),)
    with pytest.raises(SystemExit):
        tyro.cli(DataConfig, args=["--help"])
    shown = capsys.readouterr().out
    assert "--bad-rows" in shown or "--bad_rows" in shown


def test_the_stream_never_changes():
    drawn = loader("task:arithmetic", seed=7, chat=PLAIN)
    assert [TOKENIZER.decode(prompt.ids) for prompt in drawn.batch(3, 3)] == ["65+66=", "87+75=", "69+39="]


def test_row_order_never_changes(seven):
    assert "".join(texts(loader(seven, seed=7).batch(0, 14))) == "afgcebdcdebagf"


def test_each_source_is_shuffled_by_itself(seven, tmp_path):
    paths = seven, write(tmp_path / "upper.jsonl", "ABCDEFG")
    drawn = "".join(texts(loader(train=tuple(SourceConfig(path=path) for path in paths)).batch(0, 14)))
    lower, upper = ("".join(filter(test, drawn)) for test in (str.islower, str.isupper))
    assert sorted(lower) == list("abcdefg") and sorted(upper) == list("ABCDEFG")
    assert lower != upper.lower()


def test_prompts_by_position_are_those_of_the_steps(seven):
    drawn = loader(seven)
    whole = drawn.prompts(0, 20)
    assert [p.index for p in whole] == list(range(20))
    assert texts(drawn.batch(2, 5)) == texts(whole[10:15])
    used, position = [], 0  # a run that uses 3, 1, 4, ... prompts a step loses none
    for count in (3, 1, 4, 1, 5, 6):
        used += texts(drawn.prompts(position, count))
        position += count
    assert used == texts(whole) and sorted(used[:7]) == list("abcdefg")


def test_a_prompt_limit_that_nothing_fits_is_found_before_the_run(tmp_path):
    path = write(tmp_path / "long.jsonl", ["x" * (31 + i % 9) for i in range(500)], response="ok")
    drawn = loader(path, max_prompt_tokens=16, max_tokens=20)
    with pytest.raises(UserError) as error:
        drawn.check_first_rows()
    assert str(error.value) == (
        f"{path}: 0 of 500 rows fit --max_prompt_tokens 16; the shortest prompt has 31 tokens. "
        "Set --max_prompt_tokens 31 or more, or --data.overlong cut."
    )
    with pytest.raises(
        UserError, match=r"0 of 500 rows fit the 20 tokens of .*; the shortest has 34. Set them to"
    ):
        drawn.check_first_rows("tokens")
    assert loader(path, max_prompt_tokens=31).check_first_rows()[0].text == "x" * 31
    assert len(loader(path, max_prompt_tokens=16, overlong="cut").check_first_rows()) == 1


def test_one_row_of_each_source_is_tried_as_the_algorithm_reads_it(tmp_path, seven):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    drawn = loader(train=(SourceConfig(path=str(pairs)), SourceConfig(path=seven, teacher=1)))
    assert [(e.text, e.teacher) for e in drawn.check_first_rows()] == [("a", 0), ("a", 1)]
    with pytest.raises(UserError, match=rf"{seven}:1: not a pair"):
        drawn.check_first_rows("pairs")
    with pytest.raises(UserError, match=rf"{seven}:1: no label"):
        drawn.check_first_rows("labels")
    assert loader("task:steps", chat=PLAIN).check_first_rows("steps")[0].steps
    assert loader(seven, split="eval").check_first_rows() == []


def test_spread_rows_are_of_all_sources_and_of_all_parts_of_each(tmp_path, seven):
    """Of seven rows 3 are i * 7 // 3 = 0, 2, 4; a source of one row gives that one."""
    one = write(tmp_path / "one.jsonl", "z")
    drawn = loader(train=(SourceConfig(path=seven), SourceConfig(path=one)))
    assert [row.text for row in drawn.spread_rows(3)] == ["a", "z", "c", "e"]


def test_a_template_that_refuses_everything_is_found_before_the_run(tmp_path, seven):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('not mine') }}")
    chat = ChatConfig(render="chat", chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(
        UserError, match=r"seven.jsonl:1: the chat template .*t.jinja cannot render .*: not mine"
    ):
        loader(seven, chat=chat).check_first_rows()
    with pytest.raises(UserError, match=r"0 of 7 rows can be used; the last: .*seven.jsonl:7: .*not mine"):
        loader(seven, chat=chat, bad_rows="skip").check_first_rows()
    (tmp_path / "t.jinja").write_text(
        "{{ raise_exception('not mine') if messages[0].content < 'x' else messages[0].content }}"
    )
    mixed = write(tmp_path / "mixed.jsonl", [31 * "x", "a", "b", "c"])
    with pytest.raises(
        UserError, match=r"overlong cut. 3 more cannot be used; the last: .*jsonl:4: .*not mine"
    ):
        loader(mixed, chat=chat, bad_rows="skip", max_prompt_tokens=16).check_first_rows()


def test_a_template_that_never_ends_stops_a_run_that_skips_bad_rows(tmp_path, seven, monkeypatch):
    process = TemplateProcess(seconds=0.1)
    monkeypatch.setattr(template, "PROCESS", process)
    (tmp_path / "t.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    chat = ChatConfig(render="chat", chat_template=str(tmp_path / "t.jinja"))
    drawn = loader(seven, chat=chat, bad_rows="skip")
    with pytest.raises(UserError, match=r"t.jinja takes more than 0.1 s"):
        drawn.check_first_rows()
    process.close()


def test_plain_text_for_a_chat_model_is_said_once(seven, caplog):
    """Training and held-out rows are both plain text."""

    def try_rows(path, **config):
        caplog.clear()
        try_first_rows(
            TrainConfig(), {s: loader(path, eval_path=path, split=s, **config) for s in ("train", "eval")}
        )
        return caplog.messages

    (warning,) = try_rows(seven)
    assert "seven.jsonl:1: the prompt is plain text" in warning
    assert try_rows(seven, chat=PLAIN) == try_rows("task:arithmetic") == []


def test_rows_that_only_the_warm_up_cannot_read_name_its_key(tmp_path):
    """A recipe for generated sums keeps its supervised warm-up with prompts of one's own."""
    path = write(tmp_path / "a.jsonl", "ab", answer="1")
    loaders = {name: loader(path, chat=PLAIN) for name in ("train", "warm_start")}
    with pytest.raises(UserError, match=r"nothing to learn: .*: --warm_start.steps 0 goes without"):
        try_first_rows(TrainConfig(), loaders)


def test_fewer_eval_prompts_than_asked_for_are_said(tmp_path, mixed_lengths, caplog):
    drawn = loader(eval=(SourceConfig(path=mixed_lengths),), split="eval", max_prompt_tokens=2)
    sizes = lambda limit: [rows for *_, rows in drawn.eval_parts(limit)]
    assert len(drawn.eval_set(3)) == 3 and sizes(3) == [3]
    assert not caplog.messages
    assert len(drawn.eval_set(100)) == 3 and sizes(100) == [5]
    assert caplog.messages == [
        f"--eval.prompts 100: {used} are used; the held-out data has 5 rows, 2 rows too long so far, 0 bad"
        for used in ("3 prompts", "5 rows")
    ]


@pytest.mark.parametrize(
    ("config", "field", "text"),
    [
        (SourceConfig(path="a", weight=0), "weight", "is 0: it must be above 0 and at most 1,000,000,000."),
        (SourceConfig(path="a", weight=float("nan")), "weight", "is nan: it must be above 0"),
        (SourceConfig(path="a", teacher=-1), "teacher", "is -1: it must be at least 0 and at most 1000."),
        (
            SourceConfig(path="a", options="{}"),
            "options",
            "is '{}': only task: and gym: sources have options.",
        ),
        (SourceConfig(path="task:x", options="[1]"), "options", "is '[1]': it must be a JSON object."),
        (SourceConfig(path="task:x", options="{"), "options", "is '{', which is not JSON: "),
        (SourceConfig(input_template="Q:"), "input_template", "is 'Q:': it must hold {}, for the prompt."),
        (SourceConfig(rejected_key="x"), "response_key", "is empty: it must name the chosen response"),
        (
            SourceConfig(judge=True, step_mark="x"),
            "judge",
            "is true: it must be false if step_mark is set",
        ),
        (ChatConfig(template_options="[" * 10**5), "template_options", "is '[["),
        (ChatConfig(date="27 Nov 2026"), "date", "is '27 Nov 2026': it must be a date such as 2026-11-27."),
        (ChatConfig(date="20261127"), "date", "is '20261127': it must be a date such as 2026-11-27."),
        (
            ChatConfig(template_options='{"tools": []}'),
            "template_options",
            "is '{\"tools\": []}': it may not set to",
        ),
        (
            ChatConfig(render="plain", chat_template="f"),
            "chat_template",
            "is 'f': it must be empty where render",
        ),
        (DataConfig(), "path", "is empty: set a file or folder, hub:OWNER/NAME"),
        (DataConfig(train=()), "path", "is empty: set a file or folder"),
    ],
)
def test_wrong_settings_are_named(config, field, text):
    ((found, problem),) = problems(config)
    assert found == field and problem.startswith(text)


def test_usual_settings_have_no_problem():
    source = SourceConfig(path="task:arithmetic", options='{"digits": 2}', weight=31, teacher=2)
    for config in (
        source,
        ChatConfig(template_options='{"enable_thinking": false}'),
        DataConfig(train=(source,)),
    ):
        assert list(problems(config)) == []
