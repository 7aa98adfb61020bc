"""Stands between a pool and a real server; it can spoil what the server answers, or keep it."""

from __future__ import annotations

import asyncio
import json
import threading

import aiohttp
from aiohttp import web


class Proxy:
    """A server in a thread of its own that passes everything on to `target`.

    Attributes:
        spoil: what becomes of an answer to /generate, but for probes: other JSON, or a web.Response.
        hangs: nothing is answered to /generate and /health, but for probes.
    """

    def __init__(self, target: str):
        self.target, self.spoil, self.hangs = target, None, False
        self._loop, self._started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._session = aiohttp.ClientSession()
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        writes = request.path == "/generate" and b'"sampling_seed"' in body
        if self.hangs and (writes or request.path == "/health"):
            await asyncio.sleep(600)
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type")}
        async with self._session.request(
            request.method, self.target + request.path_qs, data=body or None, headers=headers
        ) as answer:
            said = await answer.read()
        if (spoil := self.spoil) and writes and answer.status == 200:
            other = spoil(json.loads(said))
            return other if isinstance(other, web.Response) else web.json_response(other)
        return web.Response(body=said, status=answer.status, content_type=answer.content_type)
