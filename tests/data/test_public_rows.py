"""Rows as well-known public datasets have them: what is read of them, and that nothing else refuses them."""

import json

import pytest

from jaxrl_llm.data.chat import encode_prompt, encode_supervised
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.parts import thoughts_and_texts
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import RowError
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer

SHOWS = (  # content and calls, as most templates write them
    "{% for t in tools or [] %}{{ (t.function or t).name }} {% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
CHAT = "<user\nq>\n<assistant\na>"


def read(row, **source):
    return read_example(row, "f:1", SourceConfig(**source))


def text(row, render="auto", **source):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHOWS
    ids, _ = encode_supervised(tokenizer, read(row, **source), ChatConfig(render=render))
    return tokenizer.decode(ids).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


META = {
    "id": "x",
    "source": "s",
    "category": "c",
    "score": 1.0,
    "dataset": "d",
    "split": "train",
    "tools": None,
}
ROWS = {
    "gsm8k": {"question": "q", "answer": "a"},
    "ultrachat": {"prompt": "q", "prompt_id": "x", "messages": [U, A]},
    "ultrafeedback": {
        "prompt": "q",
        "chosen": [U, A],
        "rejected": [U, A | {"content": "b"}],
        "messages": [U, A],
    },
    "tulu": {"id": "x", "messages": [U, A], "source": "s"},
    "openorca": {"id": "x", "system_prompt": "", "question": "q", "response": "a"},
    "dolly": {"instruction": "q", "context": "", "response": "a", "category": "open_qa"},
    "alpaca": {
        "instruction": "q",
        "input": "",
        "output": "a",
        "text": "Below is an instruction\n\n### I:\nq\n\n### R:\na",
    },
    "sharegpt": {"id": "x", "conversations": [HUMAN | {"markdown": None}, GPT]},
    "slimorca": {"conversations": [HUMAN | {"weight": 0.0}, GPT | {"weight": 1.0}]},
    "numina": {"source": "s", "problem": "q", "solution": "a", "messages": [U, A]},
    "openr1": {"problem": "q", "solution": "s", "answer": "4", "generations": ["g"], "messages": [U, A]},
    "helpsteer3": {"context": [U], "response1": "a", "response2": "b", "overall_preference": -2},
    "multiple choice": {"messages": [U, A], "choices": {"label": ["1", "2"], "text": ["q", "a"]}},
    "letters": {"question": "q", "choices": ["A", "B", "C", "D"], "output": "a"},
    "nemotron": {"messages": [{"role": "system", "content": ""}, U, A], "system_prompt": ""},
    "wildchat": {"messages": [U | {"language": "English", "constraints": [], "training_source": "s"}, A]},
}


@pytest.mark.parametrize("name", ROWS)
def test_ordinary_rows_are_read(name):
    row = META | ROWS[name]
    keys = {"prompt_key": "context", "response_key": "response1", "rejected_key": "response2"}
    source = keys if name == "helpsteer3" else {"response_key": "answer"} if name == "gsm8k" else {}
    expected = "<system\n>\n" + CHAT if name == "nemotron" else CHAT
    assert text(row, render="chat", **source) == expected


# Roles by other names.


@pytest.mark.parametrize("name", ["gpt", "model", "bot", "ai", "Assistant", "ASSISTANT "])
def test_a_turn_of_the_policy_by_another_name_is_learned_and_is_no_prompt(name):
    """Else its answer stays in the prompt, before the turn that is asked for."""
    row = {"messages": [U | {"role": "Human"}, A | {"role": name}]}
    assert text(row) == CHAT
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHOWS
    prompt = tokenizer.decode(encode_prompt(tokenizer, read(row), ChatConfig()))
    assert prompt == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    pair = read({"chosen": [U, A | {"role": name}], "rejected": [U, A | {"role": name, "content": "b"}]})
    assert [pair.response, pair.rejected.response] == ["a", "b"]


@pytest.mark.parametrize("key", ["role", "from"])
def test_calls_and_results_as_roles_are_turns_of_the_policy_and_of_tools(key):
    """As in ms-swift and LLaMA-Factory."""
    said = "content" if key == "role" else "value"
    turns = [("user", "q"), ("tool_call", '{"name": "add", "arguments": {}}'), ("tool_response", "1")]
    chat = [{key: role, said: words} for role, words in [*turns, ("assistant", "a")]]
    shown = '<assistant\n<call>{"name": "add", "arguments": {}}</call>>\n<tool\n1>\n<assistant\na>'
    assert text({"messages": chat}) == "<user\nq>\n" + shown
    with pytest.raises(RowError, match=rf"messages\[1\].{said} must be JSON text of a call"):
        read({"messages": [U, {key: "function_call", said: "add(1)"}, A]})
    for own in ("observation", "ipython"):  # names that templates have
        assert f"<{own}\n1>" in text({"messages": [U, A, {"role": own, "content": "1"}, A]})


# Answers and system prompts that a row has twice.


def test_a_chat_that_ends_with_its_answer_is_followed_by_no_other():
    """NuminaMath and OpenR1-Math have a solution beside the chat."""
    assert text({"messages": [U, A], "solution": "other", "problem": "q"}) == CHAT
    assert text({"messages": [U, A], "response": "a\n"}) == CHAT
    with pytest.raises(RowError, match=r"^f:1: the chat ends with an answer.*response_key COLUMN"):
        read({"messages": [U, A], "output": "b"})
    assert text({"messages": [U, A], "output": "b"}, response_key="output") == CHAT + "\n<assistant\nb>"
    assert text({"messages": [U], "solution": "a"}) == CHAT


def test_a_system_prompt_is_one_whatever_its_white_space():
    system = {"role": "system", "content": "S "}
    assert text({"messages": [system, U, A], "system": "S\n"}) == "<system\nS >\n" + CHAT
    assert text({"messages": [system | {"content": " "}, U, A], "system": "S"}) == "<system\nS>\n" + CHAT
    assert text({"system": "S\n", "text": "S: q"}) == "S: q>"


# Tools.


def test_calls_of_llama_factory_and_tools_as_json_text():
    """As in APIGen-MT, the glaive sets of LLaMA-Factory, and When2Call."""
    call = {"name": "add", "arguments": {"x": 1}}
    result = {"from": "observation", "value": "1"}
    for said in (call, [call]):
        asks = {"from": "function_call", "value": json.dumps(said)}
        row = {"conversations": [HUMAN, asks, result, GPT], "tools": json.dumps(TOOLS)}
        shown = '<assistant\n<call>{"name": "add", "arguments": {"x": 1}}</call>>\n<tool\n1>\n<assistant\na>'
        assert text(row) == "add <user\nq>\n" + shown
    assert text({"messages": [U, A], "tools": [json.dumps(tool) for tool in TOOLS]}) == "add " + CHAT
    for bad in ("add(1)", '{"arguments": {}}', "[1]", None):
        with pytest.raises(RowError, match=r"conversations\[1\].value must be JSON text of a call"):
            read({"conversations": [HUMAN, {"from": "function_call", "value": bad}]})
    with pytest.raises(RowError, match="leaves out the tool call"):
        text({"messages": [U, A | {"content": None, "function_call": call}]})


def test_tools_beside_plain_text_name_the_key_that_shows_them():
    row = {"query": "q", "answers": "a", "tools": json.dumps(TOOLS)}  # xlam's
    keys = {"prompt_key": "query", "response_key": "answers"}
    with pytest.raises(RowError, match=r"no template shows the tools add: .* --data.chat.render chat"):
        text(row, **keys)
    assert text(row, render="chat", **keys) == "add " + CHAT


# Text that stands for something else.


def test_chats_that_tables_keep_as_json_text():
    """As in orca-agentinstruct; a response may be such text itself."""
    chat, answer = json.dumps([U, A]), json.dumps([A])
    assert text({"messages": chat}) == text({"conversations": json.dumps([HUMAN, GPT])}) == CHAT
    assert text({"prompt": json.dumps([U]), "completion": answer}) == CHAT
    assert text({"chosen": chat, "rejected": json.dumps([U, A | {"content": "b"}])}) == CHAT
    assert text({"prompt": "q", "completion": answer}) == f"q{answer}>"
    assert text({"text": chat}) == chat + ">"
    for key in ("messages", "prompt", "chosen"):  # pandas writes lists of a CSV file so
        row = {"prompt": "q", "chosen": "a", "rejected": "b"} | {key: str([U, A])}
        with pytest.raises(RowError, match=f"^f:1: {key} is a chat as Python prints it: write JSON"):
            read(row)
    for other in ('[{"role": "cook", "content": "x"}]', "[1]", "[", "[]"):
        assert text({"prompt": other, "completion": "a"}) == f"{other}a>"


# What would be lost without a word.


@pytest.mark.parametrize("key", ["loss_mask", "train", "weights"])
def test_a_column_of_masks_beside_a_chat_is_refused(key):
    with pytest.raises(RowError, match=f"^f:1: the column {key} would be left out: give each message a"):
        read({"messages": [U, A], key: [0, 1]})
    assert read({"messages": [U, A], key: 1.0})


def test_media_inside_messages_are_refused():
    part = {"type": "image", "image": "a.png", "text": ""}
    for message, what in (
        (U | {"images": ["a.png"]}, r"messages\[0\].images would be left out"),
        (U | {"content": [part, {"type": "text", "text": "q"}]}, "has parts that are not text"),
    ):
        with pytest.raises(RowError, match=what):
            read({"messages": [message, A]})
    parts = [{"type": kind, "text": "q"} for kind in ("text", "input_text", "output_text")]
    assert read({"messages": [U | {"content": parts, "images": []}, A]}).messages[0]["content"] == "qqq"


def test_each_of_several_thoughts_and_texts_of_a_turn_has_to_be_shown():
    said = "Well<think>x</think>y<think>z</think>"
    assert thoughts_and_texts(said) == [
        ("text", "Well"),
        ("thought", "<think>x</think>"),
        ("text", "y"),
        ("thought", "<think>z</think>"),
    ]
    assert thoughts_and_texts("x</think>y") == [("thought", "x</think>"), ("text", "y")]
    assert thoughts_and_texts("y<think>x") == [("text", "y"), ("thought", "<think>x")]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHOWS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    config = ChatConfig()
    for content, lost in (("<think>x</think>y<think>z</think>w", "x"), ("y</think>w", "y")):
        row = {"messages": [U, A | {"content": content}]}
        with pytest.raises(RowError, match=f"leaves out what the assistant thinks in message 1 .'{lost}'"):
            encode_supervised(tokenizer, read(row), config)
    first = SHOWS.replace("{{ m.content }}", "{{ m.content.split('</think>')[0] }}{{ m.content[-1] }}")
    tokenizer.chat_template = first
    row = {"messages": [U, A | {"content": "<think>x</think>yes<think>z</think>w"}]}
    with pytest.raises(RowError, match=r"leaves out what the role assistant says in message 1 .'yes'"):
        encode_supervised(tokenizer, read(row), config)
    assert encode_prompt(tokenizer, read({"messages": [U]}), config).size


def test_a_thought_under_another_name_is_lost_only_where_the_text_lacks_it():
    """Trajectories of SWE-agent have the thought in the text, and beside it once more."""
    assert text({"messages": [U, A | {"thought": "a"}]}) == CHAT
    with pytest.raises(RowError, match="leaves out what the assistant thinks"):
        text({"messages": [U, A | {"thought": "why"}]})


def test_a_chat_may_begin_with_the_assistant():
    """As in ShareGPT; Qwen2.5's template needs a first message, Llama 3's begins the text with it."""
    first = "{% if messages[0].role != 'system' %}<|im_start|>system\nS<|im_end|>\n{% endif %}"
    tokenizer = make_tokenizer()
    chat = {"conversations": [GPT, HUMAN, GPT | {"value": "b"}]}
    starts = SHOWS.replace("<|im_start|>{{ m.role", "{{ '</s>' if loop.first }}<|im_start|>{{ m.role")
    for template, begin in ((first + SHOWS, "<system\nS>\n"), (SHOWS, ""), (starts, "</s>")):
        tokenizer.chat_template = template
        ids, mask = encode_supervised(tokenizer, read(chat), ChatConfig())
        shown = tokenizer.decode(ids).replace("<|im_start|>", "<").replace("<|im_end|>", ">")
        assert shown == begin + "<assistant\na>\n<user\nq>\n<assistant\nb>"
        assert tokenizer.decode(ids[mask == 1]) == "a<|im_end|>b<|im_end|>"
    tokenizer.chat_template = first + SHOWS.replace("<|im_start|>assistant", "<|im_start|>model")
    with pytest.raises(RowError, match="has no element 0"):  # it writes another header than it asks for
        encode_supervised(tokenizer, read(chat), ChatConfig())
