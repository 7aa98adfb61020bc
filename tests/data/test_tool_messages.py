"""Tool calls and answers in the forms that chat templates accept, against transformers' text."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.messages import argument_forms, with_short_ids
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import Example, RowError
from jaxrl_llm.data.template import ChatRenderer
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer

HEAD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
WALKS = "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }}{% endfor %}"  # Qwen3-Coder
ITEMS = "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"  # GLM-4.5
ADDS = "{{ c.function.name + c.function.arguments }}"  # DeepSeek-V3
WRITES = "{{ c.function | tojson }}"  # Hermes
CHOOSES = "{{ '%' ~ c.function.arguments if c.function.arguments is string else 'object' }}"  # Gemma 4
NINE = (  # Mistral
    "{% if c.id is undefined or c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}({{ c.id }})"
    "{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('length 9!') }}{% endif %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
TAIL = "{% endfor %}{% endfor %}"
ANSWER = {"role": "tool", "name": "f", "content": "sunny"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(*calls, answers=()):
    said = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    return [{"role": "user", "content": "q"}, said, *answers]


def call(arguments, **keys):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **keys}


def render(tokenizer, template, messages):
    tokenizer.chat_template = template
    example = Example(tuple(messages), None, columns={"tools": TOOLS}, where="f.jsonl:1")
    return ChatRenderer(tokenizer, messages, example, ChatConfig()).render()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (WALKS, "<x>2"),
        (ITEMS, "<x>2"),
        (ADDS, 'f{"x": "2"}'),
        (WRITES, '{"name": "f", "arguments": {"x": "2"}}'),
        (CHOOSES, "object"),
    ],
)
@pytest.mark.parametrize("arguments", [{"x": "2"}, '{"x": "2"}'])
def test_objects_and_text_are_both_read_by_every_template(tokenizer, shown, text, arguments):
    assert render(tokenizer, HEAD + shown + TAIL, chat(call(arguments))).endswith(f"[assistant]{text}")


def test_a_template_that_takes_text_alone_gets_it_as_the_row_has_it(tokenizer):
    assert render(tokenizer, HEAD + ADDS + TAIL, chat(call('{"x":"\\u00e9"}'))).endswith('f{"x":"\\u00e9"}')
    assert render(tokenizer, HEAD + ADDS + TAIL, chat(call({"x": "\u00e9"}))).endswith('f{"x": "\u00e9"}')


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{broken", "Expecting property name"),
        ("words", "Expecting value"),
        ('"x"', "is not JSON text of an object"),
        ("5", "is not JSON text of an object"),
        ("null", "is not JSON text of an object"),
        ('{"x": 1, "x": 2}', "an object has the key 'x' twice"),
        ('{"x": NaN}', "must be finite"),
        ([1], "of type list"),
        (5, "of type int"),
    ],
)
def test_arguments_of_a_row_are_an_object(key, arguments, reason):
    """Templates would write other text between quotes, and the model learn it so."""
    said = {
        "role": "assistant",
        key: [call(arguments)] if key == "tool_calls" else call(arguments)["function"],
    }
    asked = {"role": "user", "content": "q"}
    for row, place in (
        ({"messages": [asked, said]}, "messages[1]"),
        ({"prompt": [asked], "completion": [said, {"role": "assistant", "content": "a"}]}, "completion[0]"),
        ({"chosen": [asked, said], "rejected": [asked, {"role": "assistant", "content": "a"}]}, "chosen[1]"),
        ({"messages": [asked, {"role": "assistant", "content": "{broken"}]}, ""),
    ):
        if place:
            with pytest.raises(
                RowError, match=rf"^f:1: {re.escape(place)}: the arguments of f are .*{reason}"
            ):
                read_example(row, "f:1", SourceConfig())
        else:
            assert read_example(row, "f:1", SourceConfig()).messages[-1]["content"] == "{broken"


def test_parameters_of_a_row_are_an_object_too():
    """As Llama 3.1 calls its arguments."""
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "parameters": "{broken"}}]}
    with pytest.raises(RowError, match=r"messages\[1\]: the arguments of f are .*Expecting property name"):
        read_example({"messages": [{"role": "user", "content": "q"}, said]}, "f:1", SourceConfig())


@pytest.mark.parametrize("key", ["value", "text"])
def test_a_message_has_one_text(key):
    said = {"role": "assistant", "content": "a", key: "b"}
    with pytest.raises(RowError, match=rf"messages\[1\]: content and {key} are two texts"):
        read_example({"messages": [{"role": "user", "content": "q"}, said]}, "f:1", SourceConfig())


def test_no_text_is_no_arguments(tokenizer):
    for text in ("", " "):
        shown = render(tokenizer, HEAD + WRITES + TAIL, chat(call(text)))
        assert shown.endswith('{"name": "f", "arguments": {}}')


def test_the_reason_of_a_refusal_is_that_of_the_object(tokenizer):
    both = "{{ raise_exception('text' if c.function.arguments is string else 'object') }}"
    with pytest.raises(RowError, match=r"f\.jsonl:1: .* cannot render this chat: object"):
        render(tokenizer, HEAD + both + TAIL, chat(call('{"x": "2"}')))


def test_one_form_where_there_is_no_choice():
    for messages in (chat(), chat(call("no JSON")), chat("f()"), [ANSWER]):
        assert argument_forms(messages) == [messages]


@pytest.mark.parametrize(
    ("keys", "answered", "short"),
    [
        ({"id": "abcDEF123"}, {"tool_call_id": "abcDEF123"}, "abcDEF123"),
        ({"id": "call_x7Yk0aB3dE"}, {"tool_call_id": "call_x7Yk0aB3dE"}, "7Yk0aB3dE"),  # as vLLM cuts it
        ({"id": "call_1"}, {"tool_call_id": "call_1"}, "74196fe72"),  # of sha256
        ({}, {}, "call00000"),
    ],
)
def test_ids_of_nine_characters_where_a_template_requires_them(tokenizer, keys, answered, short):
    messages = chat(call({}, **keys), answers=[{**ANSWER, **answered}])
    assert render(tokenizer, HEAD + NINE, messages).endswith(f"({short})[tool]sunny({short})")
    kept = f"{keys.get('id', '')}[tool]sunny"  # where nine are not required
    assert render(tokenizer, HEAD + "{{ c.id }}" + TAIL, messages).endswith(kept)


def test_short_ids_pair_answers_with_calls():
    told = with_short_ids(
        [*chat(call({}), call({}), answers=[ANSWER, ANSWER]), *chat(call({}), answers=[ANSWER])]
    )
    assert [c["id"] for m in told for c in m.get("tool_calls", ())] == ["call00000", "call00001", "call00002"]
    assert [m["tool_call_id"] for m in told if m["role"] == "tool"] == ["call00000", "call00001", "call00002"]


def shipped_templates():
    """Return the chat templates of the installed trl."""
    found = importlib.util.find_spec("trl")
    return sorted(Path(found.origin).parent.glob("chat_templates/*.jinja")) if found else []


@pytest.mark.skipif(not shipped_templates(), reason="needs trl")
def test_the_text_is_that_of_transformers_for_every_template_of_trl(tokenizer):
    values = {"city": "Oslo \u00e9", "n": 3, "list": ["a", True, None], "object": {"k": 1.5}}
    asked = chat(call(values, id="abcdefghi"), answers=[{**ANSWER, "tool_call_id": "abcdefghi"}])
    as_text = chat(call(json.dumps(values, ensure_ascii=False), id="abcdefghi"), answers=asked[2:])
    differing, compared = [], 0
    for path in shipped_templates():
        expected = reference(path.read_text(), asked, tokenizer) or reference(
            path.read_text(), as_text, tokenizer
        )
        for messages in (asked, as_text) if expected else ():
            compared += 1
            if render(tokenizer, path.read_text(), messages) != expected:
                differing.append(path.name)
    assert not differing and compared > 80


def reference(template, messages, tokenizer):
    """Return what transformers renders; "" where the template refuses the chat."""
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=template, tools=TOOLS, **tokenizer.special_tokens_map
        )
    except Exception:
        return ""
    return text
