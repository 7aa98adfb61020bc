"""Pairs, labels, steps, judgements, scores: the shapes other systems write, their tokens, what is refused."""

import json

import numpy as np
import pytest

from jaxrl_llm.data.config import ChatConfig, DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.preference import mismatched, pairwise_prompt, read_example
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.rewards.load import resolve_reward

TOKENIZER = make_tokenizer()
PLAIN = ChatConfig(render="plain")
ASK, GOOD, BAD = [
    {"role": role, "content": c} for role, c in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5"))
]
END = "<|im_end|>"
MARK = "\u043a\u0438"  # Math-Shepherd's


def example(row, **settings):
    return read_example(row, "rows.jsonl:3", SourceConfig(**settings))


def loader(
    tmp_path, rows, chat=PLAIN, max_prompt_tokens=64, *, max_tokens=None, overlong="filter", **settings
):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train=(SourceConfig(path=str(file), **settings),), chat=chat, shuffle=False, overlong=overlong
    )
    return Loader(config, TOKENIZER, 0, max_prompt_tokens, max_tokens=max_tokens)


def shown(ids, mask):
    """Text of a sequence with what is learned after a bar."""
    first = int(mask.argmax())
    assert mask[:first].sum() == 0 and mask[first:].all() and mask.dtype == np.int8 and ids.dtype == np.int32
    return TOKENIZER.decode(ids[:first]) + "|" + TOKENIZER.decode(ids[first:])


@pytest.mark.parametrize(
    "row",
    [  # the fourth is UltraFeedback's
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},  # TRL, explicit prompt
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},  # TRL, OpenRLHF, RL2: prompt shared
        {"messages": [ASK], "chosen": "4", "rejected": "5"},  # RL2
        {"prompt": "2+2?", "messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"question": "2+2?", "chosen": "4", "rejected": "5"},
        {
            "chosen": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
            "rejected": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "5"}],
        },
    ],
)
def test_chats_of_every_shape_are_one_prompt_and_two_responses(row):
    made = example(row)
    assert made.messages == made.rejected.messages == (ASK,)
    assert (made.response, made.rejected.response, made.margin) == ("4", "5", 0.0)
    assert made.where == made.rejected.where == "rows.jsonl:3"


Q1, X, Q2 = [{"role": role, "content": c} for role, c in (("user", "q1"), ("assistant", "x"), ("user", "q2"))]
LONG = {"chosen": [Q1, X, Q2, GOOD], "rejected": [Q1, X, Q2, BAD]}
SHORT = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (SHORT | {"messages": [ASK, BAD]}, "messages"),
        (SHORT | {"messages": [Q1]}, "messages"),
        (SHORT | {"messages": [SYSTEM, ASK, GOOD]}, "messages"),
        (SHORT | {"conversations": [{"from": "human", "value": "3+3?"}]}, "conversations"),
        (LONG | {"messages": [Q1]}, "messages"),
        (LONG | {"messages": [Q1, X, Q2, BAD]}, "messages"),
        *((SHORT | {key: "3+3?"}, key) for key in ("question", "problem", "text", "instruction", "prompt")),
        (SHORT | {"response": "6"}, "response"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "output": "c"}, "output"),
        ({"prompt": "q", "question": "r", "chosen": "a", "rejected": "b"}, "question"),
        # Rows that are no pairs.
        ({"prompt": "q", "question": "r", "completion": "a"}, "question"),
        ({"question": "q", "problem": "r", "answer": "4"}, "problem"),
        ({"prompt": "q", "query": "r", "completion": "a"}, "query"),
        ({"prompt": "q", "conversation": [Q1, X], "completion": "a"}, "conversation"),
        ({"prompt": "q", "completion": "a", "response": "b"}, "response"),
        ({"prompt": "q", "completion": "", "output": "b"}, "output"),
        ({"instruction": "q", "output": "a", "text": "### q ### b"}, "text"),
        ({"messages": [ASK, GOOD], "text": "2+2? 5"}, "text"),
        ({"messages": [ASK, GOOD], "conversations": [{"from": "human", "value": "2+2?"}, BAD]}, "messages"),
    ],
)
def test_columns_that_claim_another_prompt_or_response_are_refused(row, column):
    with pytest.raises(ValueError, match=rf"^rows.jsonl:3: the column {column} is .*--data.train.0"):
        example(row)


def test_columns_that_repeat_the_pair_are_not_in_its_way():
    for more in ({"messages": [ASK]}, {"messages": [ASK, GOOD]}, {"response": "4\n"}, {"completion": [GOOD]}):
        assert example({**SHORT, "question": "2+2?", **more}).response == "4"
    for more in ({"messages": [Q1, X, Q2]}, {"prompt": "q1"}, {"prompt": [Q1]}, {"text": "q1"}):
        assert example(LONG | more).messages == (Q1, X, Q2)
    both = {"conversations": [{"from": "human", "value": "2+2?"}, GOOD], "messages": [ASK, GOOD]}
    assert example({**both, "system": "S", "text": "<S> 2+2? <4>"}).messages == (SYSTEM, ASK, GOOD)


def test_a_named_prompt_is_the_prompt_of_the_pair():
    with pytest.raises(ValueError, match="the column question is not in the prompt"):
        example(SHORT | {"question": "3+3?"}, prompt_key="question")
    assert example(SHORT | {"question": "3+3?"}, prompt_key="chosen").messages == (ASK,)
    named = example(
        {"prompt": "q", "question": "r", "completion": "a", "output": "b"},
        prompt_key="question",
        response_key="output",
    )
    assert (named.messages[0]["content"], named.response) == ("r", "b")


def test_text_of_every_shape():
    beside = example({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 1.5})
    assert (beside.text, beside.response, beside.rejected.response, beside.margin) == ("2+2=", "4", "5", 1.5)
    start = "\n\nHuman: hi\n\nAssistant:"  # HH: the whole dialogue on both sides
    whole = example({"chosen": f"{start} Yes, sir", "rejected": f"{start} Yesterday"})
    assert (whole.text, whole.response, whole.rejected.response) == (start, " Yes, sir", " Yesterday")
    named = example(
        {"q": "2+2=", "better": "4", "worse": "5"},
        prompt_key="q",
        response_key="better",
        rejected_key="worse",
    )
    assert (named.text, named.response, named.rejected.response) == ("2+2=", "4", "5")


def test_dialogues_differ_in_their_last_turns():
    turns = [ASK, BAD, {"role": "user", "content": "sure?"}]
    made = example({"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    assert made.messages == tuple(turns) and made.response == "4"
    tool = [{"role": "assistant", "content": "let me see"}, {"role": "tool", "content": "4"}]
    made = example({"prompt": [ASK], "chosen": [*tool, GOOD], "rejected": [*tool, BAD]})
    assert made.messages == (ASK, *tool, GOOD) and made.rejected.messages == (ASK, *tool, BAD)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, {}, "chosen and rejected are the same"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [BAD]},
            {},
            "must both be text or both messages, got str and list",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, {}, "the rejected response is empty"),
        (
            {"chosen": [ASK, GOOD], "rejected": [ASK, {**BAD, "content": ""}]},
            {},
            "the rejected response is empty",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"},
            {},
            "margin must be a number, got 'big'",
        ),
        (
            {"prompt": "a", "chosen": "b"},
            {"rejected_key": "worse", "response_key": "chosen"},
            "a pair needs chosen and worse",
        ),
        ({"chosen": "b", "rejected": "c"}, {}, "prompt is empty"),
        (
            {"prompt": "a", "completions": ["b"], "labels": [1, 0]},
            {},
            "1 steps and 2 labels: each step needs one",
        ),
        ({"prompt": "a", "completions": [], "labels": []}, {}, "0 steps and 0 labels"),
        (
            {"prompt": "a", "completions": ["b"], "labels": [2]},
            {},
            "a label must be a number from 0 to 1, got 2",
        ),
        ({"prompt": "a", "completions": [7], "labels": [1]}, {}, r"completions\[0\] must be text"),
        ({"input": f"a {MARK}"}, {"step_mark": MARK}, "steps need one of labels, label, values, value"),
        ({"input": f"a {MARK}", "label": "b +"}, {"step_mark": MARK}, "step 0 does not"),
        (
            {"prompt": "a", "response": "b", "score": "5"},
            {"score_key": "score"},
            "must hold a number, got '5'",
        ),
        ({"prompt": "a", "response": "b"}, {"score_key": "score"}, "must hold a number, got None"),
    ],
)
def test_rows_that_lack_something_are_refused_with_their_place(row, settings, message):
    with pytest.raises(ValueError, match=rf"^rows.jsonl:3.*{message}"):
        example(row, **settings)


def test_pairs_as_tokens(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no", "margin": i} for i in range(3)]
    (chosen, rejected, margin), *_ = loader(tmp_path, rows).pair_batch(0, 1)
    assert (shown(*chosen), shown(*rejected), margin) == (f"0+1=|1{END}", f"0+1=|no{END}", 0.0)
    assert [margin for *_, margin in loader(tmp_path, rows).pair_batch(1, 2)] == [2.0, 0.0]


def test_pairs_in_a_chat_share_their_prompt(tmp_path):
    chosen, rejected, _ = loader(
        tmp_path, [{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}], ChatConfig()
    ).pair_batch(0, 1)[0]
    head = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (shown(*chosen), shown(*rejected)) == (f"{head}|4{END}", f"{head}|5{END}")


def test_a_pair_of_which_one_is_too_long_is_left_out(tmp_path):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c" * 50},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    short = loader(tmp_path, rows, max_tokens=10)
    assert [shown(*chosen) for chosen, _, _ in short.pair_batch(0, 2)] == [f"d|e{END}"] * 2
    assert short.stats()["overlong"] == 1
    cut = loader(tmp_path, rows, max_tokens=10, overlong="cut").pair_batch(0, 1)[0]
    assert [len(ids) for ids, _ in cut[:2]] == [3, 10]


def test_pairs_also_serve_as_prompts_and_as_demonstrations(tmp_path):
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    both = loader(tmp_path, rows)
    assert TOKENIZER.decode(both.batch(0, 1)[0].ids) == "2+2="
    assert shown(*both.supervised_batch(0, 1)[0]) == f"2+2=|4{END}"


def test_labels_with_the_response_to_the_next_row(tmp_path):
    rows = [
        {"prompt": "a", "completion": "one", "label": True},
        {"prompt": "bb", "completion": "two", "label": 0},
        {"prompt": "c", "chosen": "yes", "rejected": "no"},  # a pair is two responses
    ]
    got = loader(tmp_path, rows).label_batch(0, 3)
    assert [(shown(*mine), shown(*theirs), label) for mine, theirs, label in got] == [
        (f"a|one{END}", f"a|two{END}", 1.0),
        (f"bb|two{END}", f"bb|yes{END}", 0.0),
        (f"c|yes{END}", f"c|one{END}", 1.0),
        (f"c|no{END}", f"c|one{END}", 0.0),
    ]


def test_mismatched_sequences_keep_to_the_limit():
    prompt_and = lambda n, m: (np.arange(n + m, dtype=np.int32), np.array([0] * n + [1] * m, np.int8))
    (ids, mask), _ = mismatched([prompt_and(3, 1), prompt_and(1, 4)], [1, 0], max_tokens=5)
    assert ids.tolist() == [0, 1, 2, 1, 2] and mask.tolist() == [0, 0, 0, 1, 1]


def test_labels_are_refused_with_their_place(tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a label must be true or false, 1 or 0, got 0.5"):
        loader(tmp_path, [{"prompt": "a", "completion": "b", "label": 0.5}]).label_batch(0, 2)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no label: a row needs prompt, completion and label"):
        loader(tmp_path, [{"prompt": "a", "completion": "b"}]).label_batch(0, 2)
    with pytest.raises(ValueError, match="at least 2 rows a step"):
        loader(tmp_path, [{"prompt": "a", "completion": "b", "label": 1}]).label_batch(0, 1)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not a pair: a row needs chosen and rejected"):
        loader(tmp_path, [{"prompt": "a", "completion": "b"}]).pair_batch(0, 1)
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: no steps: a row needs prompt, completions and labels"
    ):
        loader(tmp_path, [{"prompt": "a", "completion": "b"}]).step_batch(0, 1)


def test_steps_are_labelled_at_the_token_that_follows(tmp_path):
    row = {"prompt": "1+1+1=", "completions": ["2", "4\n"], "labels": [True, 0.25]}
    ids, mask, labels = loader(tmp_path, [row]).step_batch(0, 1)[0]
    assert TOKENIZER.decode(ids) == f"1+1+1=2\n4\n{END}"
    assert mask.tolist() == [0] * 8 + [1, 0, 1] and labels.tolist() == [0] * 8 + [1, 0, 0.25]
    assert (ids.dtype, mask.dtype, labels.dtype) == (np.int32, np.int8, np.float32)


@pytest.mark.parametrize(
    "labels",
    [
        {"label": "1+1=? S1: 2 +\nS2: 3 -"},
        {"values": ["+", "-"]},
        {"labels": [1, 0]},
        {"label": [True, False]},
    ],
)
def test_steps_with_a_mark(tmp_path, labels):
    """Math-Shepherd's and OpenRLHF's form; the mark itself is taken out."""
    row = {"input": f"1+1=? S1: 2 {MARK}\nS2: 3 {MARK}", **labels}
    ids, mask, found = loader(tmp_path, [row], step_mark=MARK).step_batch(0, 1)[0]
    assert TOKENIZER.decode(ids) == f"1+1=? S1: 2 \nS2: 3 {END}"
    assert np.flatnonzero(mask).tolist() == [12, len(ids) - 1] and found[mask > 0].tolist() == [1.0, 0.0]


def test_teachers_are_those_of_the_sources(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}]
    got = loader(tmp_path, rows, teacher=2)
    ids, mask, teacher = got.teacher_batch(0, 1)[0]
    assert shown(ids, mask) == f"a|b{END}" and teacher == 2
    assert got.batch(0, 1)[0].example.teacher == 2


def test_judgements_of_labelled_rows(tmp_path):
    asked = "Question:\n2+2?\n\nAnswer:\n{4}\n\nIs the answer right? Reply with Yes or No."
    for label, verdict in ((True, "Yes"), (0, "No")):
        made = example({"prompt": "2+2?", "completion": "{4}", "label": label}, judge=True)
        assert made.messages == ({"role": "user", "content": asked},) and made.text is None
        assert (made.response, made.answer) == (verdict, verdict)


def test_judgements_of_pairs_have_the_better_answer_on_either_side(tmp_path):
    rows = [
        {"chosen": [ASK, {**GOOD, "content": str(i)}], "rejected": [ASK, {**BAD, "content": "bad"}]}
        for i in range(40)
    ]
    made = [read_example(row, f"f:{i}", SourceConfig(judge=True)) for i, row in enumerate(rows)]
    for i, one in enumerate(made):
        content = one.messages[0]["content"]
        a, b = (str(i), "bad") if one.response == "A" else ("bad", str(i))
        assert content == pairwise_prompt("2+2?", a, b) and one.rejected is None
    assert 10 < sum(one.response == "A" for one in made) < 30
    dialogue = example({"chosen": [ASK, BAD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]}, judge=True)
    assert "Question:\nuser: 2+2?\n\nassistant: 5\n\nuser: 2+2?\n\n" in dialogue.messages[0]["content"]
    task = open_source(SourceConfig(path="task:preference", judge=True), seed=0)
    assert {task[i].response for i in range(20)} == {"A", "B"}
    assert (
        resolve_reward("auto", task[0].source, task[0].columns) == "verdict"
    )  # not that of the sums in the prompt


def test_scores_are_told_at_the_end_of_the_prompt():
    text = example({"prompt": "hi", "completion": "yo", "score": 5}, score_key="score")
    assert text.text == "hi <rm_score>: 5.00" and text.response == "yo"
    chat = example({"messages": [ASK, GOOD], "score": -1.5}, score_key="score")
    assert chat.messages == ({**ASK, "content": "2+2? <rm_score>: -1.50"}, GOOD)


def test_all_of_a_plain_text_is_learned(tmp_path):
    """Continued pre-training: no prompt, the end token last."""
    ids, mask = loader(tmp_path, [{"text": "abc"}]).supervised_batch(0, 1)[0]
    assert TOKENIZER.decode(ids) == f"abc{END}" and mask.all()
