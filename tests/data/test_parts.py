"""Rows whose every part reaches the model, and those that are refused: parts of messages, and columns."""

import dataclasses
import logging

import pytest

from jaxrl_llm.data import parts
from jaxrl_llm.data.chat import encode_conversation, encode_prompt, encode_supervised
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.observation import RewrittenHistory, encode_observation
from jaxrl_llm.data.parts import find_parts, mark_parts
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import RowError
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = HEAD + "{{ m.content }}" + TAIL
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
THINKS = (  # like Qwen3: thoughts of earlier turns are left out
    "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    + HEAD
    + "{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in text %}{% set thought = text.split('</think>')[0].split("
    "'<think>')[-1] %}{% set text = text.split('</think>')[-1] %}{% endif %}{% if m.role == 'assistant' %}"
    "{% generation %}{% if thought and loop.index0 > n.last %}<think>{{ thought | trim }}</think>{% endif %}"
    "{{ text | trim }}<|im_end|>{% endgeneration %}{% else %}{{ text }}<|im_end|>{% endif %}"
    + TAIL.replace("<|im_end|>\n", "{{ '\n' }}")
)
SKIPS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}"
)
R1 = (  # calls are written beside null alone
    HEAD + "{% if m.content is none %}{% for c in m.tool_calls %}{{ 'CALL ' + c.function.name + ' ' + "
    "c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}" + TAIL
)
VISION = (
    HEAD
    + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    + TAIL
)
CALL = {"function": {"name": "add", "arguments": {"a": 2}}}
U = {"role": "user", "content": "Hi"}
A = {"role": "assistant", "content": "Yes"}


def make(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def read(row, **source):
    return read_example(row, "f:1", SourceConfig(**source))


def text(row, template=CHATML, learn=False, chat=None, **source):
    tokenizer, config = make(template), ChatConfig(**(chat or {}))
    encode = encode_supervised if learn else encode_prompt
    ids = encode(tokenizer, read(row, **source), config)
    return tokenizer.decode(ids[0] if learn else ids).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


SYSTEM_TEXT, TOOL_TEXT = "Be brief", {"role": "tool", "content": "4"}
FIRST = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[0] }}")
LAST = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
LOST = {
    "developer": (
        [{"role": "developer", "content": SYSTEM_TEXT}, U, A],
        SKIPS,
        "what the role developer says",
    ),
    "system": ([{"role": "system", "content": SYSTEM_TEXT}, U, A], SKIPS, "what the role system says"),
    "tool": ([U, A, TOOL_TEXT, A], SKIPS, r"what the role tool says in message 2 \('4'\)"),
    "call": ([U, {"role": "assistant", "content": None, "tool_calls": [CALL]}], CHATML, "the tool call"),
    "old call": ([U, {**A, "function_call": CALL["function"]}], CHATML, "the tool call .*'add'"),
    "OLMo's call": (
        [U, A | {"content": None, "function_calls": "add(a=2)"}],
        CHATML,
        "the tool call in mess",
    ),
    "OLMo's tools": ([U | {"functions": '[{"name": "add"}]'}, A], CHATML, "a tool .*add"),
    "tools of a message": ([U | {"tools": [{"name": "add"}]}, A], CHATML, "a tool .'add'"),
    "thought": ([U, {**A, "reasoning_content": "why"}], CHATML, "what the assistant thinks .*'why'"),
    "details": ([U, A | {"reasoning_details": [{"text": "why"}]}], CHATML, "the assistant thinks .*'why'"),
    "other thought": ([U, {**A, "thinking": "why", "reasoning_content": "x"}], THINKS, "thinks .*'why'"),
    "refusal": ([U, {**A, "refusal": "I will not"}], CHATML, "what the role assistant says .*'I will not'"),
    "end of a text": ([U, A | {"content": "<think>a</think>b"}], FIRST, "says .*'b'"),
    "inline thought": ([U, A | {"content": "<think>\na\n</think>b"}], LAST, "thinks"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_part_that_the_template_leaves_out_is_named(name):
    messages, template, what = LOST[name]
    rows = [{"messages": messages}]
    if messages[-1]["role"] == "assistant":
        rows.append({"prompt": messages[:-1], "completion": messages[-1:]})
        rows.append({"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [A | {"content": "No"}]})
    for row in rows:
        with pytest.raises(RowError, match=rf"^f:1: the tokenizer's chat template leaves out .*{what}"):
            text(row, template, learn=True)
    if messages[-2]["role"] != "user":
        with pytest.raises(RowError, match="leaves out"):
            text({"messages": messages[:-1]}, template)
    with pytest.raises(RowError, match="leaves out"):
        encode_conversation(make(template), read(rows[0]), ChatConfig())


def test_what_a_template_strips_escapes_or_moves_is_in_the_text():
    template = (
        "{{ messages[-1].content | trim }}{% for m in messages[:-1] %}{{ m.content | tojson }}{% endfor %}"
    )
    said = [
        {"role": "user", "content": '  a "b"\n<c>\u00e9 '},
        {**A, "content": "\n\n<think>\n\n</think>\n\n4 "},
    ]
    assert text({"messages": said}, "{% generation %}" + template + "{% endgeneration %}", learn=True)
    for odd in (
        "+",
        "\U0001f44d",
        "/no_think",
        "\uf000\U000f0000\U000f0001",
        "<b>",
        "[INST]",
        "x" * 9999,
        "   a",
    ):
        assert text({"messages": [{"role": "user", "content": odd}, A]}, CHATML, learn=True)


def test_forms_of_messages_that_other_templates_read():
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = {"messages": [U, called, {"role": "tool", "content": "4"}, A]}
    assert 'CALL add {"a": 2}>' in text(row, R1, learn=True)
    assert text({"messages": [U, A]}, VISION, learn=True) == "<user\nHi>\n<assistant\nYes>"
    shows = (
        HEAD
        + "{% if m.content is string and '</think>' in m.content %}x{% else %}{{ m.content }}{% endif %}"
        + TAIL
    )
    asks, calls = U | {"functions": '[{"name": "add"}]'}, A | {"content": None, "function_calls": "add(a=2)"}
    olmo = CHATML.replace("{{ m.content }}", "{{ m.content or '' }}{{ m.functions }}{{ m.function_calls }}")
    assert text({"messages": [asks, calls]}, olmo, learn=True).endswith('add"}]>\n<assistant\nadd(a=2)>')
    details = A | {"reasoning_details": [{"text": "why"}], "reasoning_content": "why"}
    assert text({"messages": [U, details]}, THINKS, learn=True).endswith("<think>why</think>Yes>")
    with pytest.raises(RowError, match="leaves out"):  # a list of parts in Python's words is no text
        text({"messages": [U, A | {"content": "<think>a</think>b"}]}, shows, learn=True)


def test_thoughts_of_earlier_turns_are_left_out_where_they_are_not_learned(caplog):
    thought = A | {"reasoning_content": "why"}
    inline = A | {"content": "<think>why</think>Yes"}
    follows = "<user\nHi>\n<assistant\nYes>\n<user\nHi>\n<assistant\n"
    for first in (thought, inline):
        for template in (THINKS, CHATML) if first is thought else (THINKS,):
            assert text({"messages": [U, first, U]}, template) == follows
        row = {"messages": [U, first, U, A]}
        assert text(row, THINKS, learn=True, chat={"loss": "last"}) == follows + "Yes>"
        assert not caplog.messages
    with pytest.raises(RowError, match="leaves out what the assistant thinks in message 1"):  # of this turn
        text({"messages": [U, thought, {"role": "tool", "content": "4"}]}, CHATML)


def test_thoughts_of_earlier_turns_that_were_to_be_learned_are_warned_of_once(caplog):
    row = {"messages": [U, A | {"reasoning_content": "why"}, U, A]}
    tokenizer = make(THINKS)
    tokenizer.name_or_path = "hub/once"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            encode_supervised(tokenizer, read(row), ChatConfig())
    (message,) = caplog.messages
    assert (
        "hub/once leaves out the thought of a turn once more turns follow" in message
        and "loss last" in message
    )
    with pytest.raises(RowError, match="leaves out what the assistant thinks in message 1"):
        text(row, CHATML, learn=True)  # this template shows no thought at all


def test_what_an_environment_says_reaches_the_policy():
    tokenizer, messages = make(SKIPS), [U, A, {"role": "tool", "content": "4"}]
    with pytest.raises(UserError, match=r"leaves out what the role tool says in message 2 \('4'\)"):
        encode_observation(
            tokenizer, read({"messages": [U]}), messages, 1, config=ChatConfig(), end="<|im_end|>"
        )


def test_a_turn_without_a_thought_hides_no_rewritten_turn():
    said = [U, A, U, A | {"content": "<think>why</think>Yes"}, U]
    about = make(THINKS), read({"messages": [U]}), said
    with pytest.raises(RewrittenHistory):
        encode_observation(*about, 3, config=ChatConfig(), end="<|im_end|>")
    plain = encode_observation(
        make(THINKS), read({"messages": [U]}), [U, A, U, A, U], 3, config=ChatConfig(), end=""
    )
    assert make(THINKS).decode(plain) == "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_of_a_row_are_shown_or_refused():
    """The tools of the run may be described elsewhere; a system prompt may describe a row's."""
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    shows = "{% for t in tools or [] %}{{ (t.function or t).name | upper }} {% endfor %}" + CHATML
    for given in (tools, [tools[0]["function"]]):
        row = {"messages": [U], "tools": given}
        assert text(row, shows).startswith("ADD <user")
        with pytest.raises(RowError, match=r"leaves out a tool \('add'\)"):
            text(row)
        assert text(row | {"system": "Call add."})
        for plain, chat in ((row, ChatConfig()), ({"prompt": "q", "tools": given}, ChatConfig())):
            own = dataclasses.replace(read(plain), tools_of_run=True)
            assert len(encode_prompt(make(CHATML), own, chat))
        with pytest.raises(RowError, match="no template shows the tools add: give messages"):
            text({"prompt": "q", "tools": given})
        assert text({"prompt": "Call add.", "tools": given})


def test_a_call_without_words_is_found_by_its_id():
    """As Kimi-K2's template writes calls: the id, which holds the name, and the arguments."""
    call = {"id": "functions.add:0", "function": {"name": "add", "arguments": {}}}
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].id if m.tool_calls }}")
    row = {"messages": [U, {**A, "tool_calls": [call]}]}
    assert text(row, template, learn=True).endswith("Yesfunctions.add:0>")


def test_a_template_that_counts_letters_is_compared_by_its_text():
    marked, _, parts = mark_parts([U, A], None, "")
    shown = "".join(message["content"] for message in marked)
    assert find_parts("HiYes", shown, parts) == ([], [(1, 0), (3, 1)])
    assert find_parts("HiYes3", shown + "4", parts) == ([], None)
    assert find_parts("Hi 3", shown[:3] + " 4", parts) == ([parts[1]], None)
    counts = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content | length }}")
    assert text({"messages": [U, A]}, counts, learn=True).endswith("Yes3>")
    marks = counts.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    with pytest.raises(RowError, match="turns to learn cannot be told from the others"):
        text({"messages": [U, A, U, A]}, marks, learn=True, chat={"loss": "last"})


def test_without_a_template_a_message_is_its_text_alone():
    row = {"messages": [{"role": "system", "content": "S"}, U], "completion": [A]}
    assert text(row, learn=True, chat={"render": "plain"}) == "S\n\nHiYes>"
    for message in (A | {"thinking": "why"}, A | {"tool_calls": [CALL]}):
        with pytest.raises(RowError, match="of a message would be lost: it is read as plain text here"):
            read({"messages": [U, message], "label": True}, judge=True)


# Columns.

SYSTEM = "<system\nS>\n"
SAID = "<user\nq>\n<assistant\n"


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "output": "a"},
        {"question": "q", "answer": "a"},
        {"problem": "q", "solution": "a"},
        {"messages": [U | {"content": "q"}, A]},
        {"prompt": [U | {"content": "q"}], "completion": "a"},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"chosen": [U | {"content": "q"}, A], "rejected": [U | {"content": "q"}, A | {"content": "No"}]},
    ],
)
def test_a_column_of_the_system_prompt_is_used(name, row):
    assert text(row | {name: "S"}) == SYSTEM + SAID
    assert text(row | {name: "S"}, chat={"system_prompt": "another"}) == SYSTEM + SAID
    assert text(row | {name: None}) == text(row | {name: ""}) == SAID


def test_a_system_prompt_beside_text_and_two_of_them():
    assert text({"prompt": "q", "system": "S"}) == "S\n\nq"
    assert text({"prompt": "q", "system": "S"}, chat={"render": "chat"}) == SYSTEM + SAID
    assert text({"system": "S", "text": "S: q"}, learn=True) == "S: q>"
    own = {"messages": [{"role": "system", "content": "S"}, U]}
    assert text(own | {"system": "S"}) == text(own)
    for row in (own | {"system": "T"}, {"question": "q", "system": "S", "system_prompt": "T"}):
        with pytest.raises(RowError, match="two system prompts"):
            read(row)
    with pytest.raises(RowError, match="the column system is not part of text"):
        read({"text": "abc", "system": "S"})


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"choices": ["3", "4"]}, "choices"),
        ({"choices": {"label": ["A", "B"], "text": ["3", "4"]}}, "choices"),
        ({"options": {"A": "3", "B": "4"}}, "options"),
        ({"context": "Rome is in Italy."}, "context"),
        ({"context": {"title": ["Rome"], "sentences": [["It is.", "In Italy."]]}}, "context"),
        ({"documents": [{"title": "Rome", "text": "In Italy."}]}, "documents"),
        ({"history": "Human: hello"}, "history"),
        ({"input": "In Italy."}, "input"),
        ({"article": "Rome is in Italy."}, "article"),
        ({"A": "3", "B": "4"}, "A"),
        ({"opa": "3", "opb": "4"}, "opa"),
        ({"choice1": "3", "choice2": "4"}, "choice1"),
        ({"knowledge": "Rome is in Italy."}, "knowledge"),
        ({"evidence": "In Italy."}, "evidence"),
        ({"table": {"header": ["A"], "rows": [["3"]]}}, "table"),
        ({"prefix": "Rome"}, "prefix"),
        ({"suffix": "4?"}, "suffix"),
        ({"chat_history": ["hello"]}, "chat_history"),
        ({"instructions": "In Italy."}, "instructions"),
    ],
)
def test_columns_that_belong_to_the_question_are_refused_where_it_lacks_them(more, name):
    asked = [{"role": "user", "content": "Which one?"}]
    pair = {"chosen": [*asked, A], "rejected": [*asked, A | {"content": "No"}]}
    texts = {"chosen": "Which one? Yes", "rejected": "Which one? No"}
    for row in (pair, texts)[: 1 + (name != "input")]:  # of texts it is the prompt
        with pytest.raises(
            RowError, match=f"^f:1: the column {name} is not in the prompt.*prompt_key COLUMN"
        ):
            read(row | more)
    for key in ("question", "prompt", "problem"):
        row = {key: "Which one?", "answer": "4"} | more
        with pytest.raises(
            RowError, match=f"^f:1: the column {name} is not in the prompt.*prompt_key COLUMN"
        ):
            read(row)
        assert read(row, prompt_key=key)  # its column is all of the prompt, says the source
    asked = "Rome  is in Italy. It is. In Italy. Human: hello. A 3, B 4?"
    assert read({"question": asked, "answer": "4"} | more)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"train": False}, "train"),
        ({"loss_mask": 0}, "loss_mask"),
        ({"weight": 0.0}, "weight"),
        ({"weight": 0.5}, "weight"),
        ({"weight": "0"}, "weight"),  # as in CSV
        ({"assistant_masks": [0, 1]}, "assistant_masks"),
        ({"loss_weights": [[1.0, 0.5]]}, "loss_weights"),
    ],
)
def test_columns_about_what_is_learned_are_not_left_out(more, name):
    for row, advice in (
        ({"messages": [U]}, "give each message a weight"),
        ({"prompt": "q", "completion": "a"}, "leave out such rows"),
    ):
        with pytest.raises(RowError, match=f"^f:1: the column {name} would be left out: {advice}"):
            read(row | more)


@pytest.mark.parametrize(
    "more",
    [{"loss": 1.3}, {"weights": [2, 3]}, {"target": [0, 1]}, {"train": [{"input": [[0]]}]}, {"weight": 1}],
)
def test_columns_that_only_sound_like_masks_are_kept(more):
    """A loss that was measured, the weights of a knapsack, an answer, the examples of an ARC task."""
    assert read({"messages": [U]} | more).columns == more


@pytest.mark.parametrize("name", ["functions", "available_tools", "candidate_functions", "tool_list"])
def test_functions_of_a_chat_are_tools(name):
    with pytest.raises(RowError, match=f"^f:1: the column {name} would be left out: name it tools"):
        read({"messages": [U], name: [{}]})
    assert read({"messages": [U], name: []})


# Thoughts in columns, and names.


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "cot", "thinking", "Complex_CoT"])
def test_a_thought_beside_a_response_is_the_templates_thought(name):
    thought, asked = {name: "Because it is so"}, {"messages": [U]}
    shown = "<user\nHi>\n<assistant\n<think>Because it is so</think>Yes>"
    rows = {"question": "Hi", "output": "Yes"}, {"problem": "Hi", "solution": "Yes"}
    for row in (asked | {"response": "Yes"}, *rows):
        assert text(row | thought, THINKS, learn=True) == shown
        with pytest.raises(RowError, match=r"leaves out what the assistant thinks .*'Because it is so'"):
            text(row | thought, learn=True)
        assert text(row | thought) == "<user\nHi>\n<assistant\n"  # no part of a rollout's prompt
    said = {"prompt": [U], "completion": "<think>Because it is so</think>Yes"}
    assert text(said | thought, THINKS, learn=True) == shown
    assert text(asked | {"response": "Yes", name: "on"}, learn=True).endswith("Yes>")  # a setting
    with pytest.raises(RowError, match=r"^f:1: the thought in a column of its own would be left out"):
        text({"prompt": "Hi", "completion": "Yes"} | thought, learn=True)
    with pytest.raises(RowError, match="are two thoughts: keep one of them"):
        read(asked | {"response": "Yes", "thoughts": "Or not at all"} | thought)
    with pytest.raises(RowError, match="the thought of neither response is a column"):
        read(asked | {"chosen": "Yes", "rejected": "No"} | thought)
    with pytest.raises(RowError, match="the column of the thought would be left out of the judged response"):
        read(asked | {"response": "Yes", "label": True} | thought, judge=True)


def test_names_that_a_template_leaves_out_are_warned_of_once(caplog):
    row = {"messages": [U | {"name": "Ann"}, A | {"name": "assistant"}, U | {"name": "Bo"}]}
    named = CHATML.replace("{{ m.role }}", "{{ m.name or m.role }}")
    assert text(row, named).startswith("<Ann\nHi>") and not caplog.records
    assert text(row) == text(row) == "<user\nHi>\n<assistant\nYes>\n<user\nHi>\n<assistant\n"
    (record,) = caplog.records
    assert record.getMessage() == "the tokenizer's chat template leaves out the names of messages (key name)"


def test_a_prompt_beside_a_chat_is_a_part_of_it():
    chat, system = [U, A], {"role": "system", "content": SYSTEM_TEXT}
    for row in ({"messages": chat}, {"chosen": chat, "rejected": [U, A | {"content": "No"}]}):
        assert text(row | {"prompt": " Hi\n"}) == text(row | {"prompt": [U]}) == "<user\nHi>\n<assistant\n"
        for other in ("Bye", [system, U]):
            with pytest.raises(RowError, match=r"^f:1: the column prompt is not in the prompt"):
                read(row | {"prompt": other})


def test_context_of_an_instruction_is_its_input():
    row = {"instruction": "Where is Rome?", "context": "Rome is in Italy.", "response": "There"}  # Dolly's
    assert text(row, learn=True) == "<user\nWhere is Rome?\n\nRome is in Italy.>\n<assistant\nThere>"


@pytest.mark.parametrize("name", ["image", "images", "image_url", "videos", "audio"])
def test_media_are_refused_as_the_model_would_not_see_them(name):
    with pytest.raises(RowError, match=f"^f:1: the column {name} would be left out"):
        read({"prompt": "<image>What is it?", name: [{"bytes": b"x", "path": None}]}, prompt_key="prompt")
    with pytest.raises(RowError, match="would be left out"):
        read({"prompt": "What is it?", name: "a.png"})
    assert read({"prompt": "What is it?", name: "a.png"}, prompt_key="prompt")
    assert read({"prompt": "What is it?", name: []}) and read({"prompt": "?", name: {"path": None}})


def test_metadata_do_not_matter():
    names = (
        "id",
        "source",
        "level",
        "subject",
        "type",
        "url",
        "category",
        "meta",
        "tests",
        "hint",
        "score",
        "n",
    )
    assert read({"question": "q", "options": "fast", "context": None, **dict.fromkeys(names, "x")})


def test_history_takes_the_forms_of_alpaca_rows():
    row = {"instruction": "and?", "history": [["q", "a"], ["q2", "a2"]], "output": "b"}
    turns = "<user\nq>\n<assistant\na>\n<user\nq2>\n<assistant\na2>\n<user\nand?>\n<assistant\n"
    assert text(row) == turns
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert text(row | {"history": spoken}) == "<user\nq>\n<assistant\na>\n<user\nand?>\n<assistant\n"
    assert text(row | {"history": []}) == "<user\nand?>\n<assistant\n"
    for bad in ([["q"]], [["q", 1]], ["q"]):
        with pytest.raises(RowError, match=r"^f:1: history"):
            read(row | {"history": bad})


def test_characters_of_a_text_are_no_marks():
    """The first, third and fifth of the characters that may be marks are in the chat."""
    first = parts.MARKS[0]
    texts = [chr(first) + "a", "b" + chr(first + 2), "c" + chr(first + 4)]
    chat = [{"role": "user", "content": content} for content in texts]
    marked, _, found = mark_parts(chat, None, "".join(texts))
    assert [part.mark for part in found] == [chr(first + i) for i in (1, 3, 5)]
    shown = "".join(message["content"] for message in marked)
    assert find_parts("".join(texts), shown, found) == ([], [(2, 0), (3, 1), (5, 2)])


def test_a_chat_of_too_many_parts_is_refused(monkeypatch):
    monkeypatch.setattr(parts, "MARKS", range(0xF0000, 0xF0003))
    assert len(mark_parts([U, A, U], None, "")[2]) == 3
    with pytest.raises(RowError, match="a chat of more than 3 texts, calls and tools"):
        mark_parts([U, A, U, A], None, "")
    with pytest.raises(RowError, match="a chat of more than 3 texts"):
        mark_parts([U, A, U], [{"name": "x"}], "")
