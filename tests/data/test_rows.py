"""Every row shape that other systems use, as it is, and every way a row can be bad."""

import json
import subprocess
import sys

import pytest

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import Example

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}]


def read(row, **config) -> Example:
    return read_example(row, "f.jsonl:12", SourceConfig(**config))


SHAPES = {
    "rl2 text": ({"prompt": "2+2?", "extra_info": {"answer": "4"}}, {"text": "2+2?", "answer": "4"}),
    "rl2 chat": ({"messages": [USER], "answer": "4"}, {"messages": (USER,), "answer": "4"}),
    "rl2 sft": ({"prompt": "2+2?", "response": "4"}, {"text": "2+2?", "response": "4", "answer": None}),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 7, "answer": "two and two is 4"},
        },
        {"messages": (USER,), "answer": "4", "source": "openai/gsm8k"},
    ),
    "trl prompt": ({"prompt": "2+2?", "solution": "4"}, {"text": "2+2?", "answer": "4"}),
    "trl chat prompt": ({"prompt": [USER], "ground_truth": 4}, {"messages": (USER,), "answer": 4}),
    "trl completion": ({"prompt": "2+2?", "completion": " 4"}, {"text": "2+2?", "response": " 4"}),
    "trl chat completion": (
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": (USER,), "response": "4"},
    ),
    "trl long completion": (
        {"prompt": [USER], "completion": [ASSISTANT, USER, ASSISTANT]},
        {"messages": (USER, ASSISTANT, USER, ASSISTANT), "response": None},
    ),
    "trl messages": ({"messages": [USER, ASSISTANT]}, {"messages": (USER, ASSISTANT), "response": None}),
    "trl text": ({"text": "all of it"}, {"text": "", "response": "all of it"}),
    "openrlhf": ({"input": "2+2?", "label": "4"}, {"text": "2+2?", "answer": "4"}),
    "openrlhf chat": ({"input": [USER], "label": "4"}, {"messages": (USER,), "answer": "4"}),
    "openrlhf sft": ({"input": "2+2?", "output": "4"}, {"text": "2+2?", "response": "4"}),
    "gsm8k": (
        {"question": "2+2?", "answer": "2+2=<<2+2=4>>4,000\n#### 4,000"},
        {"messages": (USER,), "answer": "4000", "response": "2+2=<<2+2=4>>4,000\n#### 4,000"},
    ),
    "gsm8k, several numbers": (
        {"question": "2+2?", "answer": "#### x=1, y=2,345"},
        {"messages": (USER,), "answer": "x=1, y=2345", "response": "#### x=1, y=2,345"},
    ),
    "math": (
        {"problem": "2+2?", "solution": "It is \\boxed{4}", "answer": "4"},
        {"messages": (USER,), "answer": "4", "response": "It is \\boxed{4}"},
    ),
    "alpaca": ({"instruction": "2+2?", "output": "4"}, {"messages": (USER,), "response": "4"}),
    "alpaca with input": (
        {"instruction": "Add", "input": "2, 2", "output": "4"},
        {"messages": ({"role": "user", "content": "Add\n\n2, 2"},), "response": "4"},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": (USER, ASSISTANT)},
    ),
    "sharegpt with system": (
        {"system": "Be brief", "conversations": [{"from": "human", "value": "2+2?"}]},
        {"messages": ({"role": "system", "content": "Be brief"}, USER)},
    ),
    "content in parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
            ]
        },
        {"messages": (USER,)},
    ),
    "arrow's nulls": (
        {"prompt": [{**USER, "tool_calls": None}], "completion": None, "answer": "4"},
        {"messages": (USER,), "answer": "4", "response": None},
    ),
    "tool calls in JSON text": (
        {"messages": [{**ASSISTANT, "tool_calls": json.dumps(CALLS)}, {**USER, "tool_calls": ""}]},
        {"messages": ({**ASSISTANT, "tool_calls": CALLS}, USER)},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name):
    row, wanted = SHAPES[name]
    example = read(row)
    assert example.where == "f.jsonl:12"
    assert {key: getattr(example, key) for key in wanted} == wanted


def test_named_keys_come_first_and_reach_into_columns():
    row = {"prompt": "no", "meta": {"q": "2+2?", "gold": "4"}, "a.b": "why", "answer": "5"}
    example = read(row, prompt_key="meta.q", answer_key="meta.gold", response_key="a.b")
    assert (example.text, example.answer, example.response) == ("2+2?", "4", "why")


def test_text_column_as_prompt():
    example = read({"text": "2+2?", "answer": "4"}, prompt_key="text")
    assert (example.text, example.response) == ("2+2?", None)


def test_input_template_replaces_only_its_braces():
    example = read({"question": "is {x} 1?"}, input_template="Q: {}\nA:")
    assert (example.text, example.messages) == ("Q: is {x} 1?\nA:", None)


def test_columns_hold_everything_but_the_prompt():
    row = {"prompt": "2+2?", "answer": "4", "difficulty": 3, "note": None}
    assert read(row).columns == {"answer": "4", "difficulty": 3, "note": None}


@pytest.mark.parametrize(
    "config, source",
    [
        ({"path": "a/b.jsonl"}, ""),
        ({"path": "hub:openai/gsm8k"}, "openai/gsm8k"),
        ({"path": "b.jsonl", "name": "math"}, "math"),
    ],
)
def test_source_picks_the_verifier(config, source):
    assert read({"prompt": "x"}, **config).source == source


BAD = {
    "not an object": ([1], {}, "a row must be an object with named columns, got list"),
    "unknown shape": (
        {"q": "x", "gold": 1},
        {},
        "no prompt: the columns are gold, q, expected one of conversations, messages, prompt, question, "
        "problem, instruction, input, text; --data.train.0.prompt_key names another in training",
    ),
    "misspelt": (
        {"promt": "x", "gold": 1},
        {},
        "input, text; --data.train.0.prompt_key promt takes that column in training",
    ),
    "null": (
        {"prompt": None, "text": float("nan"), "gold": 1},
        {},
        "are gold, prompt (null), text (null), exp",
    ),
    "missing key": (
        {"prompt": "x"},
        {"prompt_key": "q"},
        "no prompt_key 'q' (--data.train.0.prompt_key). The columns are prompt",
    ),
    "misspelt key": (
        {"prompt": "x", "solution": "y"},
        {"prompt_key": "promt"},
        "no prompt_key 'promt' (--data.train.0.prompt_key). Did you mean prompt? The columns are prompt, ",
    ),
    "missing answer": ({"prompt": "x"}, {"answer_key": "gold"}, "no answer_key 'gold'"),
    "missing response": ({"prompt": "x"}, {"response_key": "out"}, "no response_key 'out'"),
    "number": ({"prompt": 7}, {}, "prompt must be text, got int"),
    "blank": ({"prompt": " \n"}, {}, "prompt is empty"),
    "no messages": ({"messages": []}, {}, "messages is empty"),
    "blank messages": ({"messages": [{"role": "user", "content": ""}]}, {}, "messages is empty"),
    "only an answer": ({"messages": [ASSISTANT]}, {}, "messages is empty"),
    "message is text": (
        {"messages": ["hi"]},
        {},
        "messages[0] must be an object with role and content, got str",
    ),
    "no role": ({"messages": [{"content": "hi"}]}, {}, "messages[0] has no known role"),
    "strange speaker": ({"conversations": [{"from": "bard", "value": "x"}]}, {}, "'from': 'bard'"),
    "no content": (
        {"messages": [USER, {"role": "user"}]},
        {},
        "messages[1].content must be text, got NoneType",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {},
        "parts that are not text",
    ),
    "NUL": ({"prompt": "a\0b"}, {}, "prompt holds a NUL character"),
    "lone surrogate": ({"messages": [{"role": "user", "content": "a\ud800"}]}, {}, "lone surrogate"),
    "NUL in the answer": ({"prompt": "x", "answer": "\0"}, {}, "answer holds a NUL character"),
    "response is a number": ({"prompt": "x", "completion": 4}, {}, "completion must be text, got int"),
    "chat target of a text": (
        {"prompt": "x", "completion": [USER, ASSISTANT]},
        {},
        "the prompt is plain text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_row_names_its_place_and_the_reason(name):
    row, config, message = BAD[name]
    with pytest.raises(ValueError) as error:
        read(row, **config)
    assert str(error.value).startswith("f.jsonl:12") and message in str(error.value)


def test_no_jax_is_imported():
    script = "import sys, jaxrl_llm.data.rows, jaxrl_llm.data.tasks; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
