"""Tools of an MCP server that runs for real; skipped where its SDK is not installed."""

import asyncio
import importlib.util
import shlex
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.envs.tools.mcp_server import McpServer, result_text

needs_sdk = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the MCP SDK is not installed")
SERVER = """
import os, time
from mcp.server import MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents

server = MCPServer("test")


@server.tool()
def add(a: int, b: int = 1) -> str:
    "Adds two integers."
    return str(a + b)


@server.tool()
def fail() -> str:
    raise ValueError("no such thing")


@server.tool()
def secrets() -> str:
    return str("HF_TOKEN" in os.environ)


@server.tool()
def leave() -> str:
    os._exit(1)


@server.tool()
def measure() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"degrees": 21.5, "place": "Malm\u00f6"})


@server.tool()
def read() -> CallToolResult:
    notes = TextResourceContents(uri="file:///notes.txt", text="sunny")
    link = ResourceLink(type="resource_link", name="map", uri="https://maps.test/1")
    return CallToolResult(content=[EmbeddedResource(type="resource", resource=notes), link])


server.run("stdio")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "secret")
        started = McpServer(f"{shlex.quote(sys.executable)} {shlex.quote(str(file))}")
    yield {tool.schema["name"]: tool for tool in started.tools}
    started.close()


@needs_sdk
def test_its_tools_are_tools(server):
    assert sorted(server) == ["add", "fail", "leave", "measure", "read", "secrets"]
    schema = server["add"].schema
    assert schema["description"] == "Adds two integers."
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    assert schema["parameters"]["required"] == ["a"]

    async def several():
        return await asyncio.gather(*(server["add"].call({"a": i}) for i in range(5)))

    assert asyncio.run(several()) == asyncio.run(several()) == ["1", "2", "3", "4", "5"]
    assert asyncio.run(server["secrets"].call({})) == "False"
    assert asyncio.run(server["measure"].call({})) == '{"degrees": 21.5, "place": "Malm\u00f6"}'
    assert asyncio.run(server["read"].call({})) == "sunny\nhttps://maps.test/1"


TEXT = SimpleNamespace(type="text", text="21.5")
NOTES = SimpleNamespace(type="resource", resource=SimpleNamespace(uri="file:///n.txt", text="sunny"))
SCAN = SimpleNamespace(type="resource", resource=SimpleNamespace(uri="file:///n.png", blob="aGk="))
LINK = SimpleNamespace(type="resource_link", uri="https://maps.test/1", name="map")
IMAGE = SimpleNamespace(type="image", data="aGk=")


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([TEXT], {"degrees": 21.5}, "21.5"),  # servers send both; the text is meant for models
        ([], {"degrees": 21.5}, '{"degrees": 21.5}'),
        ([SimpleNamespace(type="text", text="")], {"a": []}, '{"a": []}'),
        ([IMAGE], {"a": "\u00e9"}, '[image]\n{"a": "\u00e9"}'),
        ([NOTES, SCAN, LINK, TEXT], None, "sunny\n[resource file:///n.png]\nhttps://maps.test/1\n21.5"),
        ([], None, ""),
    ],
)
def test_every_kind_of_result_is_text(content, structured, text):
    assert result_text(SimpleNamespace(content=content, structured_content=structured)) == text


@needs_sdk
def test_the_example_searches_a_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "Paris", "text": "Capital of France."}\n')
    example = Path(__file__).parents[2] / "examples/search_server.py"
    server = McpServer(shlex.join([sys.executable, str(example), str(tmp_path / "a.jsonl")]))
    (tool,) = server.tools
    assert tool.schema["name"] == "search" and tool.schema["parameters"]["required"] == ["query"]
    assert asyncio.run(tool.call({"query": "FRANCE"})) == "[1] Paris\nCapital of France."
    with pytest.raises(ToolError, match="no passage has any of these words"):
        asyncio.run(tool.call({"query": "Rome"}))
    server.close()


@needs_sdk
def test_what_goes_wrong_is_answered(server):
    for name, arguments, said in (
        ("fail", {}, "Error executing tool fail"),
        ("add", {"a": "x"}, "valid integer"),
    ):
        with pytest.raises(ToolError, match=said):
            asyncio.run(server[name].call(arguments))
    assert asyncio.run(server["add"].call({"a": 1, "b": 2})) == "3"
    with pytest.raises(ToolError, match="the tool did not answer"):
        asyncio.run(asyncio.wait_for(server["leave"].call({}), 30))


@needs_sdk
@pytest.mark.parametrize("command", ["/no/such/program", "true", "sleep 99"])
def test_a_server_that_does_not_start_is_an_error(command):
    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(ValueError, match=r"the MCP server .* does not start"):
        McpServer(command, seconds=3.0)
    assert time.monotonic() - started < 30
    while threading.active_count() > before:
        time.sleep(0.05)


@pytest.mark.skipif(importlib.util.find_spec("mcp") is not None, reason="the MCP SDK is installed")
def test_without_the_sdk_the_error_names_the_extra():
    with pytest.raises(ValueError, match=r"pip install 'jaxrl-llm\[mcp\]'"):
        McpServer("true")
