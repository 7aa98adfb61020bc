"""Requests to a server over HTTP: what comes back is what was asked for, or an error that says which kind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from types import MappingProxyType

import aiohttp

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import ServerError, UnreachableError
from jaxrl_llm.rollout.sglang import auth
from jaxrl_llm.rollout.sglang.server import Server, error_of

JSON = {"Content-Type": "application/json"}
IDLE = 2.0
"""Seconds after which an unused connection is closed. SGLang closes them after 5: a request that meets that
would say that the server is down."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Client:
    """A session; made and used in one event loop.

    Args:
        timeout: seconds that a request may take if it has no limit of its own.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE))

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        server: Server,
        path: str,
        body: Json | AsyncIterable[bytes | memoryview] | None = None,
        timeout: float = 0.0,
        headers: Mapping[str, str] = NOTHING,
    ) -> Json:
        """The JSON object that the server answers to a POST, or to a GET where there is no body.

        Args:
            body: a dict, or JSON piece by piece, where it is too large to be built.

        Raises:
            ServerError: no JSON object; and as `ask_text`.
        """
        text = await self.ask_text(server, path, body, timeout, headers)
        try:
            said = (json.loads(text) if text else None) or {}
        except ValueError as error:
            raise ServerError(f"{server.url}{path}: no JSON ({error}): {text:.100}") from None
        if not isinstance(said, dict):
            raise ServerError(f"{server.url}{path}: no JSON object: {text:.100}")
        return said

    async def ask_text(
        self,
        server: Server,
        path: str,
        body: Json | AsyncIterable[bytes | memoryview] | None = None,
        timeout: float = 0.0,
        headers: Mapping[str, str] = NOTHING,
    ) -> str:
        """As `ask`, whatever the text is.

        Raises:
            RefusedError: the request is wrong, or the key.
            BusyError: status 429 or 503.
            UnreachableError: no answer in time, or one that says that the server failed.
        """
        limit = aiohttp.ClientTimeout(total=timeout or self.timeout)
        sent = {"json": body} if body is None or isinstance(body, dict) else {"data": body}
        request = self._session.request(
            "GET" if body is None else "POST",
            server.url + path,
            **sent,
            timeout=limit,
            headers={**(JSON if "data" in sent else {}), **auth.headers(path), **headers},
            allow_redirects=False,  # a key is for this server alone
        )
        try:
            async with request as answer:
                text = await answer.text(errors="replace")
        except TimeoutError:
            raise UnreachableError(f"{server.url}: no answer to {path} in {limit.total:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise UnreachableError(f"{server.url}{path}: {type(error).__name__} {error}") from None
        if answer.status != 200:
            raise error_of(server.url, path, answer.status, text)
        return text
