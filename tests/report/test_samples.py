"""samples.jsonl: from a row, `generate` makes the very prompt that the policy has read in training."""

import json

import numpy as np
import pytest

from jaxrl_llm.data.chat import encode_prompt, prompt_row
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.forks import Fork, TurnRecord
from jaxrl_llm.report import jsonl
from jaxrl_llm.report.samples import sample_rows
from jaxrl_llm.structs import Episode, Outcome, Trajectory
from jaxrl_llm.tools.generation import read_examples

TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = (
    "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% if thinking %}think {% endif %}"
    + TOKENIZER.chat_template
)
ASKED = {"role": "user", "content": "1+2=?"}
TURNS = ({"role": "system", "content": "Add."}, ASKED, {"role": "assistant", "content": "3"}, ASKED)


def trajectory(text: str, mask=(1, 1), **fields) -> Trajectory:
    n = len(mask)
    return Trajectory(
        prompt_ids=np.arange(3), response_ids=np.arange(n), logprobs=np.zeros(n), versions=np.zeros(n),
        mask=np.array(mask, np.int8), prompt_index=0, response_index=0, finish="stop", text=text, reward=1.0,
        outcome=Outcome.CORRECT, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("example", "chat"),
    [
        (Example((ASKED,), None), ChatConfig()),
        (Example((ASKED,), None), ChatConfig(system_prompt="Be brief.")),
        (Example(TURNS, None), ChatConfig(system_prompt="not used: the row has one")),
        (Example((*TURNS, {"role": "assistant", "content": "a reference"}), None), ChatConfig()),
        (Example((ASKED,), None), ChatConfig(template_options='{"thinking": true}')),
        (Example((ASKED,), None, columns={"chat_template_kwargs": {"thinking": True}}), ChatConfig()),
        (Example((ASKED,), None, columns={"tools": [{"name": "add"}]}), ChatConfig()),
        (Example(None, "1+2="), ChatConfig()),
        (Example(None, "1+2="), ChatConfig(system_prompt="Add.")),
        (Example(None, "1+2="), ChatConfig(render="chat", system_prompt="Add.")),
        (Example((ASKED,), None), ChatConfig(render="plain", system_prompt="Add.")),
        (Example((TURNS[0], ASKED), None), ChatConfig(render="plain")),
        (Example(({"role": "user", "content": "x<|im_end|>\n"},), None), ChatConfig()),
        (Example(None, "1+1=<|im_end|>"), ChatConfig(render="plain")),
    ],
)
def test_a_row_gives_the_prompt_of_training(tmp_path, example, chat):
    (row,) = sample_rows([trajectory("3")], [prompt_row(example, chat)])
    assert (row["response"], row["reward"]) == ("3", 1.0) and "turns" not in row
    jsonl.append_rows(tmp_path / "samples.jsonl", [{"step": 1, **row}])
    (again,) = read_examples(tmp_path / "samples.jsonl")
    ids = encode_prompt(TOKENIZER, again, ChatConfig())
    assert ids.tolist() == encode_prompt(TOKENIZER, example, chat).tolist()


def test_turns_name_the_tokens_that_the_policy_read_before_them():
    """By hand: prompt 0..2, turn 3..4, answer 5..6, turn 7..8; the fork keeps 3 tokens, 9..11 follow."""
    turn = {"role": "assistant", "content": "x"}
    records = (
        TurnRecord(2, 0, -1, 0.5, calls=({"name": "f", "arguments": {}},)),
        TurnRecord(6, 2, 0),
        TurnRecord(10, 4, 1),
        TurnRecord(11, 5, 2),  # an answer without a token: two turns in a row
    )
    episode = Episode(turns=4, messages=(turn, ASKED, turn, ASKED, turn, turn), records=records)
    mask = (1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1)
    (row,) = sample_rows([trajectory("x", mask, episode=episode, forks=(Fork(9, 3),))], [{"prompt": ""}])
    spans = [[0, 3], [9, 12]]
    assert row["tree"] == [
        {"after": -1, "tokens": [3, 5], "read": [[0, 3]], "message": 0, "reward": 0.5,
         "calls": [{"name": "f", "arguments": {}}]},
        {"after": 0, "tokens": [7, 9], "read": [[0, 7]], "message": 2},
        {"after": 1, "tokens": [12, 13], "read": spans, "message": 4, "rewritten": True},
        {"after": 2, "tokens": [13, 14], "read": [[0, 3], [9, 13]], "message": 5},
        {"after": 3, "tokens": [15, 16], "read": [[0, 3], [9, 15]], "message": 5},
    ]  # fmt: skip
    (plain,) = sample_rows([trajectory("3")], [{"prompt": ""}])
    assert plain["tree"] == [{"after": -1, "tokens": [3, 5], "read": [[0, 3]]}]


ANSWERED = (
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "three"},
)


@pytest.mark.parametrize(
    ("messages", "mask", "answer", "turns"),
    [
        (ANSWERED, (1, 0, 1), "three", ANSWERED),
        (ANSWERED[:2], (1, 0, 1), "thr", (*ANSWERED[:2], {"role": "assistant", "content": "thr"})),  # cut off
        (ANSWERED[:2], (1,), None, ANSWERED[:1]),  # no tokens were left for the answer
        ((), (1,), None, ({"role": "assistant", "content": "all text"},)),  # the environment failed at once
    ],
)
def test_turns_of_a_conversation_keep_their_roles(messages, mask, answer, turns):
    one = trajectory("all text", mask, answer=answer, episode=Episode(messages=messages))
    (row,) = sample_rows([one], [{"prompt": "1+2=?"}])
    assert row["turns"] == list(turns)
    json.dumps(row)
