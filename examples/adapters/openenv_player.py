"""Plays episodes of an OpenEnv server over its WebSocket; the reward is the sum of the steps' rewards.

    python examples/adapters/openenv_player.py http://127.0.0.1:8001 --gateway http://127.0.0.1:8000

The messages of a row come first, then the observations. Its column `reset` has the arguments of reset;
without one a seed is drawn from the row, so that all responses to a row play the same episode. The policy's
turn is the action: a field of text, if the server's schema asks for one field, else a JSON object.
"""

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from gateway_worker import EpisodeError, LimitError, RemoteTrajectory, parser, run_worker

SECONDS = 60.0  # limit of a reply, and of the wait for room on a server
FULL = ("CAPACITY_REACHED", 1000)  # the code of an error, or of a connection that is closed without one
HIDDEN = ("done", "reward", "metadata")


class OpenEnvServer:
    """One OpenEnv server; `show` is the format of an observation, "" = its only field, or JSON."""

    def __init__(self, url: str, show: str):
        self.url, self.show = url.rstrip("/"), show

    async def play(self, trajectory: RemoteTrajectory) -> float | None:
        """Play an episode, and return the sum of its rewards; None without any."""
        drawn = zlib.crc32(json.dumps(trajectory.row, sort_keys=True).encode()) >> 1
        reset = trajectory.row.get("reset") or {"seed": drawn}
        try:
            async with aiohttp.ClientSession(raise_for_status=True) as http, AsyncExitStack() as sockets:
                async with http.get(f"{self.url}/schema") as reply:
                    field = only_field((await reply.json())["action"])
                connect = lambda: sockets.enter_async_context(http.ws_connect(f"{self.url}/ws"))
                socket, seen = await self._begin(connect, reset)
                return await self._talk(socket, trajectory, seen, field=field)
        except (aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as error:
            raise EpisodeError(f"OpenEnv at {self.url}: {type(error).__name__} {error}") from error

    async def _begin(
        self, connect: Callable[[], Awaitable], reset: dict[str, Any]
    ) -> tuple[aiohttp.ClientWebSocketResponse, dict]:
        """Return a connection and its first observation; wait while the server is full."""
        end, pause = asyncio.get_running_loop().time() + SECONDS, 0.1
        while True:
            socket = await connect()
            kind, data = await self._ask(socket, "reset", reset)
            if kind == "observation":
                return socket, data
            await socket.close()
            if data.get("code") not in FULL or asyncio.get_running_loop().time() > end:
                raise EpisodeError(f"OpenEnv at {self.url}: reset: {kind} {data}"[:500])
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _talk(
        self, socket: aiohttp.ClientWebSocketResponse, trajectory: RemoteTrajectory, seen: dict, *, field: str
    ) -> float | None:
        """Let policy and server answer each other until the episode ends."""
        messages, rewards, done = [*trajectory.row.get("messages", ())], [seen["reward"]], seen["done"]
        shown = self._show(seen["observation"])
        while not done:
            messages.append({"role": "user", "content": shown})
            try:
                messages.append(await trajectory.chat(messages))
            except LimitError:
                break
            text = messages[-1]["content"].strip()
            try:
                action = {field: text} if field else json.loads(text)
            except ValueError as error:
                kind, data = "error", {"code": "INVALID_JSON", "message": f"write a JSON object: {error}"}
            else:
                kind, data = await self._ask(socket, "step", action)
            if kind == "observation":
                rewards, done = [*rewards, data["reward"]], data["done"]
                shown = self._show(data["observation"])
            elif data.get("code") in ("VALIDATION_ERROR", "INVALID_JSON"):  # the policy may try again
                shown = f"error: {data.get('errors') or data.get('message')}"[:500]
            else:
                raise EpisodeError(f"OpenEnv at {self.url}: step {len(rewards)}: {kind} {data}"[:500])
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None

    async def _ask(self, socket: aiohttp.ClientWebSocketResponse, kind: str, data: Any) -> tuple[str, dict]:
        """Return type and data of the reply to a message; "closed" and the code if the server closed."""
        await socket.send_json({"type": kind, "data": data})
        reply = await socket.receive(SECONDS)
        if reply.type is not aiohttp.WSMsgType.TEXT:
            return "closed", {"code": socket.close_code}
        message = json.loads(reply.data)
        return message["type"], message["data"]

    def _show(self, observation: dict[str, Any]) -> str:
        fields = {name: value for name, value in observation.items() if name not in HIDDEN}
        text = next(iter(fields.values())) if len(fields) == 1 else json.dumps(fields)
        return self.show.format(**fields) if self.show else str(text)


def only_field(schema: dict[str, Any]) -> str:
    """Return the name of the action's only field if its value is text; "" if it is an object to write."""
    fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    name, value = next(iter(fields.items()), ("", {}))
    defined = schema.get("$defs", {}).get(value.get("$ref", "").rpartition("/")[2], value)
    return name if len(fields) == 1 and defined.get("type") == "string" else ""


if __name__ == "__main__":
    words = parser(__doc__)
    words.add_argument("url", help="address of the OpenEnv server")
    words.add_argument("--show", default="", help='format of an observation, such as "{x},{y}"')
    given = words.parse_args()
    run_worker(OpenEnvServer(given.url, given.show).play, given)
