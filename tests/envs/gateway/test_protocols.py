"""The four protocols of the gateway, its keys, and calls that clients repeat."""

import gzip
import json
import socket

import jax
import pytest
from scripted import END, ROW, RUN, TOKENIZER, Program, ScriptedEngine, encode, events_of, open_gateway

from jaxrl_llm.envs.gateway.server import MAX_BODY
from jaxrl_llm.envs.load import make_requests

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
BAD_SCHEMA = {"properties": {"city": {"enum": 3}}}
BAD_TOOL = {"type": "function", "function": {"name": "weather", "parameters": BAD_SCHEMA}}
HI = {"role": "user", "content": "hello"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
TWO_CALLS = f"look: {CALL % 'Oslo'}{CALL % 'Rome'}{END}"


@pytest.fixture
def gateway(monkeypatch):
    with open_gateway(monkeypatch) as opened:
        yield opened


def test_a_chat_with_thoughts_and_parallel_calls_continues_on_the_policys_own_tokens(gateway):
    engine, program = ScriptedEngine(gateway, f"<think>hm</think>{TWO_CALLS}", f"warm{END}"), Program(gateway)
    assert program.row["answer"] == "42" and program.row["messages"] == [HI]
    reply = program.call("/chat/completions", model="any", messages=[HI], tools=[CHAT_TOOL], logprobs=True)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "look:"
    assert choice["message"]["reasoning_content"] == "hm" and reply["model"] == "any"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    logprobs = choice["logprobs"]["content"]
    assert {row["logprob"] for row in logprobs} == {-0.5}
    assert "".join(row["token"] for row in logprobs) == f"<think>hm</think>{TWO_CALLS}"
    assert reply["usage"]["completion_tokens"] == len(logprobs)
    # The thought is left out, as most clients do, and fields of a client are added.
    own = {k: v for k, v in choice["message"].items() if k != "reasoning_content"} | {"refusal": None}
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "20 C"} for c in calls]
    reply = program.call("/chat/completions", messages=[HI, own, *results], tools=[CHAT_TOOL])
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "warm"}
    assert reply["choices"][0]["finish_reason"] == "stop"
    program.done(reward=0.25)
    episode, text = engine.result()
    assert (episode.failure, episode.reward, episode.turns, episode.tool_calls) == ("", 0.25, 2, 2)
    shown = TOKENIZER.apply_chat_template([HI], tools=[CHAT_TOOL], tokenize=False, add_generation_prompt=True)
    observed = "\n<|im_start|>tool\n20 C<|im_end|>" * 2 + "\n<|im_start|>assistant\n"
    assert text == f"{shown}<think>hm</think>{TWO_CALLS}{observed}warm{END}"


def test_thoughts_and_calls_of_seed_oss_are_no_content(monkeypatch):
    call = "<function=weather>\n<parameter=city>%s</parameter>\n</function>\n</seed:tool_call>"
    said = "<seed:think>or {}</seed:think>\nlook\n\n<seed:tool_call>\n{}{}".format(
        call % "Rome", call % "Oslo", END
    )
    with open_gateway(monkeypatch, format="xml") as gateway:
        engine, program = ScriptedEngine(gateway, said), Program(gateway)
        reply = program.call("/chat/completions", messages=[HI], tools=[CHAT_TOOL])
        program.done()
        assert engine.result()[0].tool_calls == 1
    message = reply["choices"][0]["message"]
    assert message["content"] == "look" and "Rome" in message["reasoning_content"]
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"city": "Oslo"}']


def test_equal_programs_leave_equal_records(gateway):
    """Ids of calls are not random: samples.jsonl has them, and a template may show them to the policy."""
    engine = ScriptedEngine(gateway, TWO_CALLS, f"{CALL % 'Bonn'}{END}", trajectories=2)
    for program in (Program(gateway), Program(gateway)):
        messages = [HI]
        for _ in range(2):
            reply = program.call("/chat/completions", messages=messages, tools=[CHAT_TOOL])
            messages.append(reply["choices"][0]["message"])
            calls = messages[-1]["tool_calls"]
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": "20 C"} for c in calls]
        program.done()
    first, second = (engine.result(name)[0] for name in (0, 1))
    assert first == second
    ids = [call["id"] for record in first.records for call in record.calls]
    assert ids == ["call_000000000", "call_000000001", "call_000001000"]


def test_a_stream_of_chat_has_the_same_turn(gateway):
    engine, program = ScriptedEngine(gateway, TWO_CALLS), Program(gateway)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = program.call("/chat/completions", messages=[HI], tools=[CHAT_TOOL], **options)
    first, last, usage = events_of(text)
    assert text.endswith("data: [DONE]\n\n")
    delta = first["choices"][0]["delta"]
    assert delta["content"] == "look:" and [c["index"] for c in delta["tool_calls"]] == [0, 1]
    assert last["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] > 9
    program.done()
    assert engine.result()[0].failure == ""


def test_limits_and_stop_strings_hold_for_their_call(gateway):
    engine, program = ScriptedEngine(gateway, f"one STOP two{END}", f"abcdef{END}"), Program(gateway)
    first = program.call("/chat/completions", messages=[HI], stop=["STOP"])["choices"][0]
    assert (first["message"]["content"], first["finish_reason"]) == ("one ", "stop")
    messages = [HI, first["message"], {"role": "user", "content": "on"}]
    second = program.call("/chat/completions", messages=messages, max_tokens=3)["choices"][0]
    assert (second["message"]["content"], second["finish_reason"]) == ("abc", "length")
    program.done()
    episode, text = engine.result()
    assert episode.failure == "" and "assistant\none STOP<|im_end|>\n<|im_start|>user\non" in text


def test_anthropics_messages(gateway):
    engine, program = (
        ScriptedEngine(gateway, f"<think>hm</think>{CALL % 'Oslo'}{END}", f"warm{END}"),
        Program(gateway),
    )
    tool = {"name": "weather", "description": "d", "input_schema": SCHEMA}
    given = {
        "model": "m",
        "max_tokens": 100_000,
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [tool],
    }
    first = program.call("/messages", messages=[HI], **given)
    assert (first["type"], first["role"], first["stop_reason"]) == ("message", "assistant", "tool_use")
    thinking, use = first["content"]
    assert thinking["thinking"] == "hm" and (use["name"], use["input"]) == ("weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "20 C"}]}
    messages = [HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    text = program.call("/messages", messages=messages, stream=True, **given)
    kinds = [event["type"] for event in events_of(text)]
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events_of(text)[2]["delta"] == {"type": "text_delta", "text": "warm"}
    program.done()
    episode, read = engine.result()
    assert episode.failure == "" and "<|im_start|>system\nbe brief<|im_end|>" in read
    assert "<|im_start|>tool\n20 C<|im_end|>" in read


def test_openais_responses(gateway):
    engine, program = (
        ScriptedEngine(gateway, f"<think>hm</think>look {CALL % 'Oslo'}{END}", f"warm{END}"),
        Program(gateway),
    )
    tool = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
    given = {"model": "m", "instructions": "be brief", "tools": [tool]}
    first = program.call("/responses", input="hello", **given)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    assert first["status"] == "completed" and first["output"][1]["content"][0]["text"] == "look"
    call = first["output"][2]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20 C"}
    given["input"] = [HI, *first["output"], result]
    events = events_of(program.call("/responses", stream=True, **given))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    assert [e["delta"] for e in events if e["type"] == "response.output_text.delta"] == ["warm"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "warm"
    program.done()
    assert engine.result()[0].failure == ""


def test_completions_of_text_and_of_ids(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}", f"two{END}", f"three{END}"), Program(gateway)
    first = program.call("/completions", prompt="Q:", logprobs=0)["choices"][0]
    assert (first["text"], first["finish_reason"]) == ("one", "stop")
    assert first["logprobs"]["token_logprobs"] == [-0.5] * 4
    second = program.call("/completions", prompt="Q:one, then")["choices"][0]
    assert second["text"] == "two"
    program.done()
    assert engine.result() == (engine.replies[0].episode, f"Q:one{END}, thentwo{END}")
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    ids = program.call("/completions", prompt=[5, 6])["choices"][0]["token_ids"]
    assert program.call("/completions", prompt=[5, 6, *ids, 7])["choices"][0]["token_ids"] == ids
    program.done()
    assert engine.result()[0].failure == "" and engine.read[0] == [5, 6, *ids, 7, *ids]


def test_a_key_is_required_and_opens_one_trajectory(gateway):
    engine = ScriptedEngine(gateway, f"one{END}", trajectories=2)
    mine, other = Program(gateway), Program(gateway)
    body = {"messages": [HI]}
    assert mine.send(f"{mine.base}/chat/completions", body, key="")[0] == 401
    assert mine.send(f"{mine.base}/chat/completions", body, key="wrong")[0] == 401
    assert mine.send(f"{other.base}/chat/completions", body)[0] == 404
    assert mine.send("/trajectories", {}, key="wrong")[0] == 401
    assert mine.send("/trajectories", {}, key=RUN)[0] == 429  # none waits
    assert mine.send("/health", {}, key="")[0] == 405
    # The key alone, or with the header, names the trajectory as the path does; Anthropic's header, too.
    assert mine.send("/v1/chat/completions", body)[0] == 200
    name = mine.base.split("/")[-2]
    again = {"messages": [HI, {"role": "assistant", "content": "one"}, HI]}
    assert mine.send("/v1/chat/completions", again, x_session_id="x")[0] == 404
    assert mine.send("/v1/chat/completions", again, key="", x_api_key=mine.key, x_session_id=name)[0] == 200
    for program in (mine, other):
        program.done()
    turns = sorted(engine.result(name)[0].turns for name in (0, 1))
    assert turns == [0, 2]
    assert mine.send(f"{mine.base}/chat/completions", body)[0] == 401  # it has ended


def test_errors_have_the_types_of_their_api(gateway, monkeypatch, caplog):
    """The types that the documentation of each API lists for a status."""
    engine, program = ScriptedEngine(gateway, f"one{END}", trajectories=2), Program(gateway)
    other, asked = Program(gateway), {"messages": [HI]}

    def kinds(body=asked, key=program.key, path=""):
        """Return (status, code, type) in OpenAI's API, and in Anthropic's by its path or header."""
        version = {"anthropic_version": "2023-06-01"}
        replies = [
            program.send(path or f"{program.base}/{api}", body, key=key, **headers)
            for api, headers in (("chat/completions", {}), ("messages", version), ("responses", version))
        ]
        openai, *anthropic = [(status, r["error"]["code"], r["error"]["type"]) for status, r in replies]
        assert anthropic[0] == anthropic[1]
        return *openai, anthropic[0][2]

    assert kinds({}) == (400, None, *["invalid_request_error"] * 2)
    denied = 401, "invalid_api_key", "invalid_request_error", "authentication_error"
    assert kinds(key="wrong") == kinds(key="wrong", path="/trajectories") == denied
    assert kinds(key=other.key) == (404, None, "invalid_request_error", "not_found_error")
    assert kinds(b" " * (MAX_BODY + 1)) == (413, None, "invalid_request_error", "request_too_large")
    assert kinds(key=RUN, path="/trajectories") == (429, None, *["rate_limit_error"] * 2)
    monkeypatch.setattr(type(gateway.server), "_note", lambda *_: 1 / 0)
    assert kinds({**asked, "input": "a"}) == (500, None, "server_error", "api_error")
    assert "ZeroDivisionError" in caplog.text
    for name, one in enumerate((program, other)):
        one.done()
        engine.result(name)


def test_a_path_that_is_not_served_is_named(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    status, reply = program.send(program.base + "/embeddings", {"input": "a"})
    assert status == 404 and reply["error"]["message"].startswith("Not Found: POST /t/")
    program.done()
    engine.result()


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such city", "error: no such city"),
        ([{"type": "text", "text": "Error: 404"}], "Error: 404"),
        (None, "error: "),
    ],
)
def test_anthropics_mark_of_a_failed_tool_reaches_the_policy(gateway, content, shown):
    engine, program = ScriptedEngine(gateway, f"{CALL % 'Oslo'}{END}", f"hm{END}"), Program(gateway)
    given = {"tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}]}
    first = program.call("/messages", messages=[HI], **given)
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "is_error": True}
    messages = [HI, {"role": "assistant", "content": first["content"]}]
    messages.append({"role": "user", "content": [result | ({"content": content} if content else {})]})
    program.call("/messages", messages=messages, **given)
    program.done()
    episode, read = engine.result()
    assert episode.turns == 2 and f"<|im_start|>tool\n{shown}<|im_end|>" in read


def test_a_call_that_a_client_repeats_is_served_again(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}", f"two{END}"), Program(gateway)
    url, body = f"{program.base}/chat/completions", {"messages": [HI]}
    first = program.send(url, body)[1]
    assert program.send(url, body, x_stainless_retry_count="1")[1] == first
    program.call("/chat/completions", messages=[HI, first["choices"][0]["message"], HI])
    program.done()
    episode, text = engine.result()
    assert (episode.failure, episode.turns) == ("", 2) and text.count("one") == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/chat/completions", {}, "messages must be a list"),
        ("/chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, "empty"),
        ("/chat/completions", {"messages": [HI], "tools": [{}]}, "tools must be a list of"),
        ("/chat/completions", {"messages": [HI], "tools": [BAD_TOOL]}, "of the tool weather: enum is 3"),
        ("/responses", {"input": "a", "tools": [{"type": "function", **BAD_TOOL["function"]}]}, "enum is 3"),
        ("/messages", {"messages": [HI], "tools": [{"name": "w", "input_schema": BAD_SCHEMA}]}, "enum is 3"),
        ("/chat/completions", {"messages": [HI], "n": 3, "stream": True}, "n must be 1 in a stream"),
        ("/chat/completions", {"messages": [HI], "stop": [""]}, "stop must be a text"),
        ("/completions", {"prompt": ["a", "b"]}, "prompt must be one text"),
        ("/completions", {"prompt": [10**9]}, "token id 1000000000 is outside"),
        ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "nothing is stored here"),
        ("/responses", {"input": [{"type": "computer_call"}]}, "'computer_call', which is not known"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ("/messages", b"[" * 100_000, "not JSON"),
        ("/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_and_not_repeated(gateway, path, body, message):
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    status, reply = program.send(program.base + path, body)
    assert status == 400 and message in reply["error"]["message"] and reply["type"] == "error"
    program.call("/chat/completions", messages=[HI])
    program.done()
    assert engine.result()[0].failure == ""


def test_a_history_with_a_call_of_another_form_is_refused(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    program.call("/chat/completions", messages=[HI])
    own = {"role": "assistant", "content": "one", "tool_calls": [{"function": "weather"}]}
    status, reply = program.send(f"{program.base}/chat/completions", {"messages": [HI, own, HI]})
    assert status == 400 and "leaves out the tool call in message 1" in reply["error"]["message"]
    program.done()
    assert engine.result()[0].failure == ""


def test_a_body_that_cannot_be_decompressed_is_refused(gateway, caplog):
    """And one that is small until it is decompressed."""
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    url, zipped = f"{program.base}/chat/completions", {"content_encoding": "gzip"}
    status, reply = program.send(url, b"no gzip", **zipped)
    assert status == 400 and "the body cannot be read" in reply["error"]["message"]
    assert program.send(url, gzip.compress(b" " * (MAX_BODY + 1)), **zipped)[0] == 413
    assert program.send(url, gzip.compress(json.dumps({"messages": [HI]}).encode()), **zipped)[0] == 200
    program.done()
    assert engine.result()[0].failure == "" and "Traceback" not in caplog.text


def test_a_failure_without_a_reason_is_none(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    program.call("/chat/completions", messages=[HI])
    program.send(program.base.removesuffix("/v1") + "/reward", {"reward": 1.0})
    program.send(program.base.removesuffix("/v1") + "/done", {"failure": None})
    assert engine.result()[0].failure == ""


def test_a_reward_must_be_a_number_in_range(gateway):
    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    for value in (10**400, float("nan"), 1e7, True, "1"):
        assert program.send(program.base.removesuffix("/v1") + "/reward", {"reward": value})[0] == 400
    program.call("/chat/completions", messages=[HI])
    program.done()
    assert engine.result()[0].reward == 1.0


def test_a_gateway_open_to_the_network_names_the_address_that_the_program_has_used(monkeypatch):
    with open_gateway(monkeypatch, host="0.0.0.0") as opened:
        opened.server.address = opened.server.address.replace("0.0.0.0", "localhost")
        engine, program = ScriptedEngine(opened, f"one{END}"), Program(opened)
        assert program.base.startswith(f"{opened.server.address}/t/")
        program.done()
        engine.result()


def test_process_0_alone_has_the_server(gateway, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    port = int(gateway.server.address.rpartition(":")[2])
    with open_gateway(monkeypatch, port=port) as other:
        (request,) = make_requests(other, [ROW], 1, 5)
        assert other.line == "" and request.opens


def test_models_and_health(gateway):
    import urllib.request

    engine, program = ScriptedEngine(gateway, f"one{END}"), Program(gateway)
    request = urllib.request.Request(
        f"{program.base}/models", headers={"Authorization": f"Bearer {program.key}"}
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["data"][0]["max_model_len"] == 120_000
    with urllib.request.urlopen(f"{gateway.server.address}/health") as reply:
        assert reply.status == 200
    program.done()
    assert engine.result()[0].failure == "the program ended without a call"


def test_a_host_that_others_reach_is_warned_of(gateway, monkeypatch):
    assert "WARNING" not in gateway.line
    with open_gateway(monkeypatch, host="0.0.0.0") as other:
        assert "WARNING: --env.gateway.host 0.0.0.0 is open to the network" in other.line


def test_each_of_several_choices_is_a_turn_that_may_go_on(gateway):
    """The second choice goes on, in the context that it was written in."""
    engine, program = ScriptedEngine(gateway, f"one{END}", f"two{END}", f"three{END}"), Program(gateway)
    reply = program.call("/chat/completions", messages=[HI], n=2)
    choices = [(choice["index"], choice["message"]["content"]) for choice in reply["choices"]]
    assert choices == [(0, "one"), (1, "two")]
    assert reply["usage"]["completion_tokens"] == len(encode(f"one{END}two{END}"))
    messages = [HI, reply["choices"][1]["message"], {"role": "user", "content": "on"}]
    assert program.call("/chat/completions", messages=messages)["choices"][0]["message"]["content"] == "three"
    for wrong in ({"n": 129}, {"n": 2, "best_of": 3}, {"n": 2, "stream": True}):
        assert program.send(f"{program.base}/chat/completions", {"messages": messages, **wrong})[0] == 400
    program.done()
    episode, text = engine.result()
    begun = TOKENIZER.apply_chat_template([HI], tokenize=False, add_generation_prompt=True)
    again = f"{begun[-1]}two{END}\n<|im_start|>user\non{END}\n<|im_start|>assistant\nthree{END}"
    assert episode.turns == 3 and text == f"{begun}one{END}{again}"


def test_requests_that_are_not_http_are_counted_in_few_lines(gateway, caplog):
    port = int(gateway.server.address.rpartition(":")[2])
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/models HTTP/1.1\r\nContent-Length: x\r\n\r\n")
            assert b" 400 " in connection.recv(1 << 16)
    said = "requests that are not valid HTTP, so far: "
    assert caplog.messages == [f"{said}{count}" for count in (1, 2, 4)] and "Traceback" not in caplog.text
