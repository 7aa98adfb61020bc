"""Tool calls: each format read and written, and what is broken answered with what is wrong."""

import functools
import json
import random
import string
import time

import pytest

from jaxrl_llm.envs.calls import (
    FORMATS,
    InvalidToolCall,
    ToolCall,
    check_arguments,
    parse_calls,
    render_call,
    schema_problem,
)
from jaxrl_llm.envs.formats import MAX_SHOWN
from jaxrl_llm.thoughts import MARKS

ADD = ToolCall("add", {"a": 1, "b": {"c": [1.5, None, True]}})
SAY = ToolCall("say", {"text": 'braces } { and "quotes" \\ </tool_call> \n <|python_tag|> </function>'})


def problem(text, format="hermes"):
    (bad,) = parse_calls(text, format)
    assert isinstance(bad, InvalidToolCall), bad
    return bad.problem


def test_hermes_reads_several_calls_and_the_text_around_them():
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> then <tool_call>'
    text += '{"name":"say","arguments":{"text":"} </tool_call> {"}}</tool_call>'
    assert parse_calls(text, "hermes") == [
        ToolCall("add", {"a": 1}),
        ToolCall("say", {"text": "} </tool_call> {"}),
    ]
    assert parse_calls("no call at all", "hermes") == []


def test_json_variants():
    assert parse_calls('<tool_call>{"name": "now"}</tool_call>', "hermes") == [ToolCall("now", {})]
    told = '<tool_call>{"type": "function", "name": "f", "parameters": "{\\"x\\": 1}"}</tool_call>'
    assert parse_calls(told, "hermes") == [ToolCall("f", {"x": 1})]
    assert parse_calls('<tool_call>{"name": "f", "arguments": {}}', "hermes") == [
        ToolCall("f", {})
    ]  # a stop string


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "f", "arguments": {"x": }}</tool_call>', "broken at its character 33"),
        ('{"name": "f", "arguments": {"x": 1}', "cut off: it has no </tool_call>"),
        ("", "cut off"),
        ('["f"]</tool_call>', 'a JSON object with "name" and "arguments"'),
        ('{"name": "f", "args": {}}</tool_call>', "unknown key 'args'"),
        ('{"arguments": {}}</tool_call>', '"name" must be'),
        ('{"name": 3, "arguments": {}}</tool_call>', '"name" must be'),
        ('{"name": "f", "arguments": [1]}</tool_call>', '"arguments" must be an object'),
        ('{"name": "f", "arguments": "x"}</tool_call>', "a string that is not JSON"),
        ('{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', "not both"),
        ('{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "not JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('{"name": "f", "arguments": {"x": %s}}</tool_call>' % ("9" * 5000), "4300 digits"),
        ('{"name": "f", "arguments": {}}}</tool_call>', "'}</tool_call>' after the call"),
        ('{"name": "f", "arguments": {"x": %s}}</tool_call>' % ("[" * 100_000), "nested too deeply"),
    ],
)
def test_broken_json_says_what_is_wrong(text, said):
    assert said in problem(f"<tool_call>{text}")


def test_a_bad_call_leaves_the_next_one_good():
    bad, good = parse_calls('<tool_call>{"name": }</tool_call><tool_call>{"name": "f"}</tool_call>', "hermes")
    assert isinstance(bad, InvalidToolCall) and bad.text.startswith('<tool_call>{"name": }')
    assert good == ToolCall("f", {}) and len(bad.text) <= MAX_SHOWN


def test_llama():
    one = '{"name": "f", "parameters": {"x": "} {"}}'
    expected = ToolCall("f", {"x": "} {"})
    assert parse_calls(one, "llama") == [expected]
    assert parse_calls(f"  {one}; {one}\n{one}<|eot|>", "llama") == [expected] * 3
    assert parse_calls(f"I look. <|python_tag|>{one}<|python_tag|>{one}", "llama") == [expected] * 2
    assert parse_calls("The set {1, 2} and {3}.", "llama") == parse_calls("{1, 2}", "llama") == []
    assert "broken" in problem("<|python_tag|>print(1)", "llama")
    assert "broken" in problem('{"name": "f", "parameters": {"x": ', "llama")


def test_xml_reads_values_as_they_stand():
    text = (
        "Now.\n<tool_call>\n<function=python>\n<parameter=code>\nif a < b:\n    print('</function>')\n\n"
        "</parameter>\n<parameter=n>3</parameter>\n</function>\n</tool_call>\n<function=now></function>"
    )
    code = "if a < b:\n    print('</function>')\n"
    assert parse_calls(text, "xml") == [ToolCall("python", {"code": code, "n": "3"}), ToolCall("now", {})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<function=f>\n<parameter=x>\n1", "parameter x has no </parameter>"),
        ("<function=f>\n<parameter=x>\n1\n</parameter>", "no </function>"),
        ("<function=f>{}</function>", "where <parameter=NAME> or </function> belongs"),
        ("<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>", "given twice"),
        ("<function=>", "begins with <function=NAME>"),
        ("<function=a b></function>", "begins with <function=NAME>"),
        ('<tool_call>{"name": "f"}</tool_call>', "begins with <function=NAME>"),
    ],
)
def test_broken_xml_says_what_is_wrong(text, said):
    assert said in problem(text, "xml")


def test_pythonic():
    text = "[f(x='a)]', n=-1), api.g(y={'k': [1, None, True]})]"
    expected = [ToolCall("f", {"x": "a)]", "n": -1}), ToolCall("api.g", {"y": {"k": [1, None, True]}})]
    assert parse_calls(text, "pythonic") == expected
    assert parse_calls(f"Well: <|python_start|>{text}<|python_end|>", "pythonic") == expected
    assert parse_calls("[1, 2] is a list", "pythonic") == parse_calls("[a, b]", "pythonic") == []
    assert "every argument with its name" in problem("[f(1)]", "pythonic")
    assert "no variables" in problem("[f(x=__import__('os'))]", "pythonic")
    assert "JSON" in problem("[f(x={1, 2})]", "pythonic")
    assert "never closed" in problem("[f(x=1", "pythonic")
    assert "longer than" in problem("[f(x='" + "a" * 30_000 + "')]", "pythonic")


def test_calls_in_a_thought_are_none():
    call = render_call(ADD, "hermes")
    assert parse_calls(f"<think>maybe {call}</think>{call}", "hermes") == [ADD]
    assert parse_calls(f"maybe {call}</think> no", "hermes") == []  # the template opened the thought
    assert parse_calls(f"<think>maybe {call}", "hermes") == []
    for opening, closing in MARKS.items():
        assert parse_calls(f"\n{opening}maybe {call}{closing}\n{call}", "hermes") == [ADD]
        assert parse_calls(f"{opening}maybe {call}", "hermes") == []


def test_xml_calls_of_seed_oss_have_another_tag_around_them():
    written = render_call(ADD, "xml").replace("tool_call>", "seed:tool_call>")
    assert parse_calls(written, "xml") == parse_calls(render_call(ADD, "xml"), "xml")
    assert "a call begins with <function=NAME>" in problem("<seed:tool_call>\nadd</seed:tool_call>", "xml")


def test_too_many_calls_are_cut():
    calls = parse_calls(render_call(ADD, "hermes") * 1000, "hermes")
    assert calls[:32] == [ADD] * 32 and "more than 32 calls" in calls[32].problem and len(calls) == 33


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        *("<tool_call>", '<tool_call>{"name":', "<tool_call>{", '{"name":', "[f(", "[", "<function=", "{"),
        *("<|python_tag|>", "<function=f><parameter=x>", "<tool_call> ", "<|python_start|>[f(x=", "-", "\\"),
        *('{"name":"f","parameters":{}};', "<function=f></function>", '"', "\n", "not ", "f(x="),
    ],
)
def test_no_text_takes_long_or_raises(format, piece):
    for text in (piece * (500_000 // len(piece)), "<think>" + piece * 1000, "[f(x=" + piece * 2000):
        started = time.process_time()
        assert len(parse_calls(text, format)) <= 33
        assert time.process_time() - started < 2.0


TAGS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
    *("<think>", "</think>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
]
PIECES = [
    *(*TAGS, *"[]{}()'\":,;f1 *-\n\\", '"name"', '"arguments"', '"parameters"', "x=", "\\u", "\ud800", "\0"),
    *('{"name": "f", "arguments": {"x": 1}}', "[f(x=1)]", "f(x=1)", "null", "lambda:", "\u00e9", "0x"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # of Python's own parser
def test_random_text_never_raises(format):
    rng = random.Random(0)
    kinds = set()
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 25)))
        for call in parse_calls(text, format):
            kinds.add(type(call))
            assert (isinstance(call, InvalidToolCall) and call.problem) or (
                isinstance(call, ToolCall) and call.name
            )
    assert kinds == {ToolCall, InvalidToolCall}


LETTERS = [*string.printable, "\u00e9", "\u2028", "\0", "\U0001f600", *TAGS]


def random_value(rng, depth=2):
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, -1, 7, 10**30, 1.5, -2e-9, 1e300])
    if kind < 5:
        return "".join(
            rng.choices([*string.printable, *"\u00e9\u2028\0", "\U0001f600", *TAGS], k=rng.randint(0, 12))
        )
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(LETTERS): random_value(rng, depth - 1) for _ in range(2)}


@pytest.mark.parametrize("format", ["hermes", "llama", "pythonic"])
def test_what_is_written_is_read_back(format):
    rng = random.Random(1)
    for _ in range(3000):
        calls = [
            ToolCall(f"tool_{i}", {f"arg{j}": random_value(rng) for j in range(rng.randint(0, 3))})
            for i in range(rng.randint(1, 3))
        ]
        assert parse_calls("\n".join(render_call(call, format) for call in calls), format) == calls


KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def test_what_is_written_in_xml_is_read_back_by_its_schema():
    rng = random.Random(2)
    for _ in range(3000):
        call = ToolCall("f", {f"arg{j}": random_value(rng) for j in range(rng.randint(0, 4))})
        types = {name: {"type": KINDS.get(type(value), "null")} for name, value in call.arguments.items()}
        schema = {"name": "f", "parameters": {"type": "object", "properties": types}}
        try:
            text = render_call(call, "xml")
        except ValueError as error:
            assert "</think>" in str(error)
            continue
        (read,) = parse_calls(f"Well. {text}\n", "xml")
        assert check_arguments(read, schema) == call


def test_what_a_format_cannot_write_is_refused():
    for call in (ToolCall("f", {"x": "</parameter>"}), ToolCall("f g", {}), ToolCall("f", {"a>": 1})):
        with pytest.raises(ValueError, match="xml call"):
            render_call(call, "xml")
    for call in (ToolCall("f", {"class": 1}), ToolCall("f-g", {}), ToolCall("f", {"a b": 1})):
        with pytest.raises(ValueError, match="pythonic call"):
            render_call(call, "pythonic")


SCHEMA = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "unit": {"type": "string", "enum": ["cm", "inch"]},
            "tags": {"type": "array", "items": {"type": "number"}},
            "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "any": {},
            "true": True,
            "list": {"type": "array", "items": True},
            "unknown": {"type": "any"},
        },
        "required": ["n"],
    },
}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"n": 3}, {"n": 3}),
        ({"n": "3", "tags": "[1, 2.5]", "deep": '{"on": "True"}'},
         {"n": 3, "tags": [1, 2.5], "deep": {"on": True}}),
        ({"n": 3.0, "maybe": None, "any": [1, "x"]}, {"n": 3, "maybe": None, "any": [1, "x"]}),
        ({"n": 3, "maybe": "4", "unit": "cm"}, {"n": 3, "maybe": 4, "unit": "cm"}),
        ({"n": 3, "true": 1, "list": [None], "unknown": "1"},
         {"n": 3, "true": 1, "list": [None], "unknown": "1"}),
    ],
)  # fmt: skip
def test_arguments_become_what_the_schema_wants(given, kept):
    assert json.dumps(check_arguments(ToolCall("f", given), SCHEMA).arguments) == json.dumps(kept)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "f: arguments must have n"),
        ({"n": "three"}, "f: n must be integer, not the text 'three'"),
        ({"n": 3.5}, "f: n must be integer, not 3.5"),
        ({"n": 3, "tags": ["NaN"]}, "f: tags[0] must be number, not the text 'NaN'"),
        ({"n": 3, "tags": ["1e999"]}, "f: tags[0] must be number, not the text '1e999'"),
        ({"n": True}, "f: n must be integer, not true"),
        ({"n": 1, "unit": "m"}, 'f: unit must be one of ["cm", "inch"]'),
        ({"n": 1, "tags": [1, "x"]}, "f: tags[1] must be number, not the text 'x'"),
        ({"n": 1, "deep": {}}, "f: deep must have on"),
        ({"n": 1, "maybe": "x"}, "f: maybe must be integer, not the text 'x', or maybe must be null"),
        ({"n": 1, "m": 2}, "f: arguments may not have 'm', only n, unit, tags, deep, maybe, any,"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given, said):
    bad = check_arguments(ToolCall("f", given), SCHEMA)
    assert isinstance(bad, InvalidToolCall) and bad.problem.startswith(said)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, ""),
        (SCHEMA["parameters"], ""),
        ({"properties": {"required": {"type": "boolean"}, "enum": True}, "items": [3]}, ""),
        ({"$defs": {"A": {"items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"}, ""),  # it has itself
        ({"properties": [1]}, "properties is [1], which"),
        ({"required": 7}, "required is 7, which"),
        ({"required": [{}]}, "required and type must hold names, not [{}]"),
        ({"type": ["string", 3]}, "required and type must hold names"),
        ({"properties": {"n": {"enum": 3}}}, "enum is 3, which"),
        ({"items": {"anyOf": [{"oneOf": {}}]}}, "oneOf is {}, which"),
        ({"properties": {"n": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"allOf": "x"}}}, "allOf is 'x', which"),
    ],
)
def test_a_schema_that_cannot_be_read_is_named(parameters, said):
    assert schema_problem(parameters).startswith(said) and bool(schema_problem(parameters)) == bool(said)


POINT = {
    "name": "draw",
    "parameters": {  # as pydantic writes the signature of a tool
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "kind": {"const": "point"}},
                "required": ["x"],
            },
            "Tree": {
                "type": "object",
                "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
            },
            "Circle": {"$ref": "#/$defs/Circle"},
            "a/b": {"type": "integer"},
        },
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Point", "description": "where"},
            "to": {"allOf": [{"$ref": "#/$defs/Point"}], "default": None},
            "from": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/Tree"},
            "circle": {"$ref": "#/$defs/Circle"},
            "odd": {"$ref": "#/$defs/a~1b"},
            "far": {"$ref": "https://schemas.test/far.json"},
            "two": {"const": 2},
            "named": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Point"}},
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            "level": {"enum": [1, True, None, "1.5"]},
        },
        "required": ["at"],
    },
}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"at": '{"x": "3", "kind": "point"}'}, {"at": {"x": 3, "kind": "point"}}),
        ({"at": {"x": 3}, "to": '{"x": 4}', "from": "null"}, {"at": {"x": 3}, "to": {"x": 4}, "from": None}),
        ({"at": {"x": 3}, "from": '{"x": 5}'}, {"at": {"x": 3}, "from": {"x": 5}}),
        ({"at": {"x": 3}, "tree": '{"leaves": [{"leaves": "[]"}]}'},
         {"at": {"x": 3}, "tree": {"leaves": [{"leaves": []}]}}),
        ({"at": {"x": 3}, "circle": "1", "far": "1", "odd": "1"},
         {"at": {"x": 3}, "circle": "1", "far": "1", "odd": 1}),
        ({"at": {"x": 3}, "two": "2", "level": "1"}, {"at": {"x": 3}, "two": 2, "level": 1}),
        ({"at": {"x": 3}, "two": 2, "level": "True"}, {"at": {"x": 3}, "two": 2, "level": True}),
        ({"at": {"x": 3}, "level": "1.5"}, {"at": {"x": 3}, "level": "1.5"}),
        ({"at": {"x": 3}, "named": '{"a": {"x": "4"}}', "pair": '["1", "2"]'},
         {"at": {"x": 3}, "named": {"a": {"x": 4}}, "pair": [1, "2"]}),
        ({"at": "{'x': 3}"}, {"at": {"x": 3}}),  # Seed-OSS's template writes Python's literals
    ],
)  # fmt: skip
def test_references_and_constants_of_a_schema_are_followed(given, kept):
    assert json.dumps(check_arguments(ToolCall("draw", given), POINT).arguments) == json.dumps(kept)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"at": {}}, "draw: at must have x"),
        ({"at": {"x": 1, "kind": "line"}}, 'draw: kind must be "point"'),
        ({"at": "here"}, "draw: at must be object, not the text 'here'"),
        ({"at": {"x": 1}, "to": {"x": "a"}}, "draw: x must be integer, not the text 'a'"),
        ({"at": {"x": 1}, "two": "two"}, "draw: two must be 2"),
        ({"at": {"x": 1}, "two": True}, "draw: two must be 2"),
        ({"at": {"x": 1}, "named": {"a": {"y": 1}}}, "draw: a must have x"),
        ({"at": {"x": 1}, "level": 2}, 'draw: level must be one of [1, true, null, "1.5"]'),
        ({"at": {"x": 1}, "tree": functools.reduce(lambda t, _: {"leaves": [t]}, range(400), {})},
         "draw: the arguments are nested too deeply"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_a_reference_are_named(given, said):
    bad = check_arguments(ToolCall("draw", given), POINT)
    assert isinstance(bad, InvalidToolCall) and bad.problem.startswith(said)


def test_options_within_options_do_not_take_exponential_time():
    """Each level doubles the ways to read the value, which none fits: 2^60 ways."""
    option = functools.reduce(lambda inner, _: {"anyOf": [inner, inner]}, range(60), {"type": "integer"})
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"x": option}}}
    bad = check_arguments(ToolCall("f", {"x": "a"}), schema)
    assert bad.problem == "f: the arguments are nested too deeply for the schema"
    assert check_arguments(ToolCall("f", {"x": "1"}), schema).arguments == {"x": 1}
