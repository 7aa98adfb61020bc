"""Tools of a Model Context Protocol server: an extra, `pip install 'jaxrl-llm[mcp]'`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.errors import UserError
from jaxrl_llm.loop_thread import LoopThread

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

SECONDS = 60.0  # that a server may take to start, and to answer a call
CLOSE_SECONDS = 15.0  # more than the SDK gives a server to end before it kills it


class McpServer:
    """A server started by `command`, reached over its standard input and output; `tools` are its tools.

    It runs with your rights, outside any sandbox; of the environment variables it gets only PATH, HOME and a
    few more. It ends with this process. The connection has a separate thread, so its tools serve any event
    loop.

    Raises:
        UserError: the SDK is not installed, or the server does not start or answer.
    """

    def __init__(self, command: str, seconds: float = SECONDS):
        self._thread = LoopThread("mcp")
        try:
            self.tools = self._thread.run(self._start(command, seconds))
        except ImportError:
            self.close()
            raise UserError("tools of an MCP server need its SDK: pip install 'jaxrl-llm[mcp]'") from None
        except Exception as error:  # any error of the SDK: the server did not start
            self.close()
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            why = f"no answer in {seconds:g} s" if isinstance(error, TimeoutError) else error
            raise UserError(f"the MCP server {command!r} does not start: {why}") from error

    def close(self) -> None:
        """End the server."""
        self._thread.close(CLOSE_SECONDS)

    async def _start(self, command: str, seconds: float) -> list[McpTool]:
        """Return the tools of the server, whose connection another task holds."""
        started = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(command, seconds, started))
        await asyncio.wait({started, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        return await (started if started.done() else self._serving)

    async def _serve(self, command: str, seconds: float, started: asyncio.Future) -> None:
        """Hold the connection until the end: the SDK requires that one task opens and closes it."""
        from mcp import Client, StdioServerParameters

        program, *arguments = shlex.split(command)
        server = StdioServerParameters(command=program, args=arguments)
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(seconds):
                client = await stack.enter_async_context(Client(server, read_timeout_seconds=seconds))
                tools = [McpTool(_schema(tool), client, self._thread) async for tool in _list(client)]
            started.set_result(tools)
            await asyncio.Event().wait()  # until `close` cancels it


@dataclass(frozen=True)
class McpTool:
    """One tool of a server."""

    schema: dict[str, Any]
    client: Client
    thread: LoopThread

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return `result_text` of the server's result."""
        request = self.client.call_tool(self.schema["name"], arguments)
        try:
            answer = await asyncio.wrap_future(self.thread.start(request))
        except Exception as error:  # any error of the SDK: an invalid reply, a server that has ended
            raise ToolError(f"the tool did not answer: {error or type(error).__name__}") from error
        text = result_text(answer)
        if answer.is_error:
            raise ToolError(text)
        return text


def result_text(answer: CallToolResult) -> str:
    """Return a result as text for the model.

    An embedded resource is its text, a link its URI, structured content without text its JSON; images and
    sounds, which no model here reads, are named by kind.
    """
    parts = [_block_text(block) for block in answer.content]
    has_text = any(block.type == "text" and block.text for block in answer.content)
    if answer.structured_content is not None and not has_text:
        parts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    return "\n".join(filter(None, parts))


def _block_text(block: Any) -> str:
    if block.type == "resource":
        return getattr(block.resource, "text", f"[resource {block.resource.uri}]")
    return str(block.uri) if block.type == "resource_link" else getattr(block, "text", f"[{block.type}]")


def _schema(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}


async def _list(client: Client):
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if not cursor:
            return
