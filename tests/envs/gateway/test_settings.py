"""Settings of calls in each protocol: used, refused, or noted in the log as not used."""

from pathlib import Path

import pytest
from scripted import END, Program, ScriptedEngine, encode, events_of, open_gateway

from jaxrl_llm.envs.gateway.settings import DECIDED, NEUTRAL, REFUSED
from jaxrl_llm.rollout.config import SamplingConfig

HI = {"role": "user", "content": "hello"}
CALLS = {
    "/chat/completions": {"messages": [HI]},
    "/completions": {"prompt": "Q:"},
    "/responses": {"input": "hello"},
    "/messages": {"messages": [HI]},
}
TEXT = f"one STOP two{END}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.fixture
def gateway(monkeypatch):
    with open_gateway(monkeypatch) as opened:
        yield opened


@pytest.fixture
def program(gateway):
    """A program whose policy writes TEXT at each turn."""
    engine, made = ScriptedEngine(gateway, TEXT), Program(gateway)
    yield made
    made.done()
    assert engine.result()[0].failure == ""


def text_of(reply):
    """Return (text, why it ended) of a reply in any protocol."""
    if "choices" in reply:
        (choice,) = reply["choices"]
        return choice.get("text") or choice["message"]["content"], choice["finish_reason"]
    if "output" in reply:
        return reply["output"][0]["content"][0]["text"], (reply["incomplete_details"] or {}).get("reason")
    return reply["content"][0]["text"], reply["stop_reason"]


@pytest.mark.parametrize(
    ("path", "name", "reason"),
    [
        ("/chat/completions", "max_tokens", "length"),
        ("/chat/completions", "max_completion_tokens", "length"),
        ("/completions", "max_tokens", "length"),
        ("/responses", "max_output_tokens", "max_output_tokens"),
        ("/messages", "max_tokens", "max_tokens"),
    ],
)
def test_a_limit_of_tokens_is_used(program, path, name, reason):
    reply = program.call(path, **CALLS[path], **{name: len(encode("one"))})
    assert text_of(reply) == ("one", reason)
    for wrong in (0, -1, 1.5, "7", True):
        status, refusal = program.send(program.base + path, {**CALLS[path], name: wrong})
        assert status == 400 and f"{name} must be a whole number" in refusal["error"]["message"]


def test_the_smaller_of_two_limits_is_used(program):
    for limits in ((3, 9), (9, 3)):
        both = dict(zip(("max_tokens", "max_completion_tokens"), limits, strict=True))
        reply = program.call("/chat/completions", messages=[HI], **both)
        assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "name", "reason"),
    [
        ("/chat/completions", "stop", "stop"),
        ("/completions", "stop", "stop"),
        ("/messages", "stop_sequences", "stop_sequence"),
    ],
)
def test_stop_strings_are_used(program, path, name, reason):
    reply = program.call(path, **CALLS[path], **{name: ["STOP", "never"]})
    assert text_of(reply) == ("one ", reason)


def test_log_probs_are_of_the_sampled_tokens(program):
    chat = program.call("/chat/completions", **CALLS["/chat/completions"], logprobs=True)["choices"][0]
    plain = program.call("/completions", prompt="Q:", logprobs=1)["choices"][0]["logprobs"]
    include = {"include": ["message.output_text.logprobs"]}
    said = program.call("/responses", input="hello", **include)["output"][0]["content"][0]["logprobs"]
    assert [row["token"] for row in chat["logprobs"]["content"]] == plain["tokens"]
    assert said == chat["logprobs"]["content"]
    assert {row["logprob"] for row in said} == {*plain["token_logprobs"]} == {-0.5}
    streamed = events_of(program.call("/responses", input="hello!", stream=True, **include))
    assert [e["logprobs"] for e in streamed if e["type"] == "response.output_text.delta"] == [said]


NOTED = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 0, "presence_penalty": 0.5,
    "frequency_penalty": -1, "repetition_penalty": 1.1, "tool_choice": "required", "reasoning_effort": "low",
    "parallel_tool_calls": False, "top_logprobs": 3, "min_tokens": 4, "text": {"verbosity": "low"},
    "line\nbreak": "x" * 100,
}  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_settings_that_are_not_used_are_noted_once_each(program, path, caplog):
    assert text_of(program.call(path, **CALLS[path], **NOTED))[0] == "one STOP two"
    program.call(path, **CALLS[path], **NOTED | {"temperature": 0, "seed": 7})
    program.call(path, **CALLS[path], **NOTED | {"thinking": {"type": "enabled", "budget_tokens": 9}})
    first, second = caplog.messages
    shown = first.removeprefix("programs ask for ").removesuffix(" (docs/agents.md, each noted once)")
    assert first != shown
    assert shown == (
        "frequency_penalty -1, line\\nbreak 'xxxxxxxxxxxxxxxxxxx, min_p 0.1, min_tokens 4, "
        "parallel_tool_calls False, presence_penalty 0.5, reasoning_effort 'low', repetition_penalty 1.1, "
        "seed 0, temperature 0.5, text.verbosity 'low', tool_choice 'required', top_k 5, top_logprobs 3, "
        "top_p 0.9, not used"
    )
    assert second.startswith("programs ask for thinking {'type': 'enabled', , not used")


@pytest.mark.parametrize("path", CALLS)
def test_settings_that_ask_for_what_happens_anyway_are_not_noted(program, path, caplog):
    """Among them is what openai, anthropic, litellm and openai-agents send unasked."""
    same = {
        "model": "m", "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "n": 1, "seed": None,
        "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {},
        "response_format": {"type": "text"}, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "parallel_tool_calls": True, "store": True, "metadata": {"a": "b"}, "user": "u", "stream": False,
        "stop": None, "truncation": "disabled", "include": [], "echo": False, "stream_options": None,
    }  # fmt: skip
    program.call(path, **CALLS[path], **same)
    assert not caplog.messages


@pytest.mark.parametrize("path", CALLS)
def test_settings_of_any_type_are_noted_or_refused(program, path):
    names = [*DECIDED, *NEUTRAL, "text", "output_config", "unknown"]
    for value in (0, -1, 10**30, 1.5, "text", [], [[None]], {"format": []}, {"a": {}}, True, float("nan")):
        for settings in (dict.fromkeys(names, value), {"stream": value}, {"temperature": value}):
            status, reply = program.send(program.base + path, {**CALLS[path], **settings})
            assert status in (200, 400), (settings, reply)
            assert status == 400 or not isinstance(reply, str) or value in (1, True)  # a stream
    status, reply = program.send(program.base + path, {**CALLS[path], "stream": "true"})
    assert (status, reply["error"]["message"]) == (400, "stream must be true or false, not 'true'")


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/chat/completions", {"type": "function", "function": {"name": "look", "strict": True}}),
        ("/responses", {"type": "function", "name": "look", "strict": True}),
        ("/messages", {"name": "look", "input_schema": {}, "strict": True}),
    ],
)
def test_strict_tools_are_noted(program, path, tool, caplog):
    program.call(path, **CALLS[path], tools=[tool])
    assert "programs ask for tools.strict True, not used" in caplog.text


def test_what_the_run_samples_with_is_not_noted(gateway, program, caplog):
    gateway.server.sampling = SamplingConfig(temperature=0.7, top_k=20)
    program.call("/messages", messages=[HI], temperature=0.7, top_k=20)
    assert not caplog.messages
    program.call("/messages", messages=[HI], temperature=1, top_k=-1)
    assert "temperature 1, top_k -1, not used" in caplog.text


def test_few_unknown_names_are_noted(program, caplog):
    for part in range(3):
        program.call("/completions", prompt="Q:", **{f"x{part}_{i}": 1 for i in range(40)})
    assert caplog.text.count("x0_") == 40 and caplog.text.count("x1_") == 10 and "x2_" not in caplog.text


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("name", "value", "param", "message"),
    [
        ("response_format", {"type": "json_object"}, "", "the policy is not shown this format"),
        ("response_format", FORMAT, "", "not forced into one; ask for it in a message"),
        ("text", {"format": FORMAT}, "text.format", "the policy is not shown this format"),
        ("output_config", {"format": FORMAT}, "output_config.format", "the policy is not shown this format"),
        ("guided_json", {"type": "object"}, "", "the policy is not shown this format"),
        ("logit_bias", {"50256": -100}, "", "no token is favoured or banned"),
        ("functions", [{"name": "f"}], "", "send tools and tool_choice"),
        ("echo", True, "", "the prompt is not given back"),
        ("previous_response_id", "resp_1", "", "nothing is stored here; send the whole conversation"),
    ],
)
def test_a_setting_whose_reply_would_not_be_what_was_asked_for_is_refused(
    program, path, name, *, value, param, message
):
    """In the form of OpenAI's errors and of Anthropic's; no such call becomes a turn, and others go on."""
    status, reply = program.send(program.base + path, {**CALLS[path], name: value})
    error = reply["error"]
    assert (status, reply["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert (error["param"], error["code"]) == (param or name, "unsupported_parameter")
    assert error["message"].startswith(f"{param or name}: ") and message in error["message"]
    assert text_of(program.call(path, **CALLS[path]))[0] == "one STOP two"


@pytest.mark.parametrize("path", [path for path in CALLS if path != "/completions"])
def test_tool_choice_none_hides_the_tools(gateway, path):
    schema = {"type": "object", "properties": {}}
    tools = {
        "/chat/completions": [{"type": "function", "function": {"name": "look", "parameters": schema}}],
        "/responses": [{"type": "function", "name": "look", "parameters": schema}],
        "/messages": [{"name": "look", "input_schema": schema}],
    }
    engine, program = ScriptedEngine(gateway, TEXT), Program(gateway)
    choice = {"type": "none"} if path == "/messages" else "none"
    for more in ({"tool_choice": choice}, {}):
        program.call(path, **CALLS[path], tools=tools[path], **more)
    program.done()
    hidden, shown = engine.result()[1].split(TEXT)[:2]
    assert "look" not in hidden and "look" in shown


def test_the_documentation_has_a_row_for_each_setting():
    text = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    names = {*DECIDED, *NEUTRAL, *REFUSED}
    assert {name for name in names if f"`{name.rpartition('.')[2]}`" not in text} == set()
