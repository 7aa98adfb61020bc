"""Requests to a server over HTTP: a reply of the expected form, or one of the errors of errors.py."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any

import aiohttp

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import InvalidReplyError, LostError, UnreachableError
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.server import Server, error_from_status

HEADERS = {"Accept-Encoding": "identity"}  # a compressed reply has no size that could be limited
JSON = {"Content-Type": "application/json"}
KEEP_ALIVE = 2.0
"""Seconds after which an unused connection is closed. SGLang closes them after 5: a request sent just then
would look like one to a server that is down."""
MAX_REPLY_BYTES = 16 * 2**20
MAX_ERROR_BYTES = 64 * 2**10  # read of a reply with an error status


class Client:
    """An HTTP session, made and used in one event loop.

    Args:
        timeout: default time limit of a request, seconds.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def close(self) -> None:
        await self._session.close()

    async def request(self, server: Server, path: str, *args: Any, **options: Any) -> Json:
        """Return the JSON object of a reply. The arguments are those of `request_bytes`.

        Raises:
            InvalidReplyError: the reply is too long, or not a JSON object.
            ServerError: as `request_bytes`.
        """
        reply = await self.request_bytes(server, path, *args, **options)
        try:
            value = (json.loads(reply) if reply else None) or {}
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON ({error})"
            raise InvalidReplyError(f"{server.url}{path}: {problem}: {reply[:100]!r}") from None
        if not isinstance(value, dict):
            raise InvalidReplyError(f"{server.url}{path}: no JSON object: {reply[:100]!r}")
        return value

    async def request_bytes(
        self,
        server: Server,
        path: str,
        body: Json | AsyncIterable[bytes | memoryview] | None = None,
        timeout: float = 0.0,
        *,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> bytes:
        """Return the reply to a POST, or to a GET without a body.

        Args:
            body: a dict, or JSON in pieces if it is too large for memory.
            max_bytes: of the reply; a longer one is not read to its end.

        Raises:
            InvalidReplyError: the reply is too long.
            RefusedError: the request or the key is wrong.
            BusyError: status 429 or 503.
            LostError: the connection failed.
            UnreachableError: no reply in time, or the reply reports a failure of the server.
        """
        # Keys go only to this server: redirects are not followed.
        limit = aiohttp.ClientTimeout(total=timeout or self.timeout)
        content = {"json": body} if body is None or isinstance(body, dict) else {"data": body}
        kind = JSON if "data" in content else {}
        request = self._session.request(
            "GET" if body is None else "POST",
            server.url + path,
            **content,
            timeout=limit,
            headers={**HEADERS, **kind, **auth.request_headers(path), **(headers or {})},
            allow_redirects=False,  # a key is for this server alone
        )
        try:
            async with request as response:
                if response.status != 200:
                    text = await _read(response, MAX_ERROR_BYTES)
                    raise error_from_status(server.url, path, response.status, text.decode(errors="replace"))
                reply = await _read(response, max_bytes + 1)
        except TimeoutError:
            setting = " (--servers.timeout)" * (limit.total == self.timeout)
            raise UnreachableError(
                f"{server.url}: no answer to {path} in {limit.total:g} s{setting}"
            ) from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            kind = UnreachableError if isinstance(error, ValueError) else LostError  # the first: no address
            raise kind(f"{server.url}{path}: {type(error).__name__} {error}") from None
        # A longer reply is not parsed.
        if len(reply) > max_bytes:
            raise InvalidReplyError(f"{server.url}{path}: a reply of more than {max_bytes:,} bytes")
        return reply


async def _read(response: aiohttp.ClientResponse, count: int) -> bytes:
    """Return the first `count` bytes of a body, or all of it; the connection ends with a rest."""
    pieces, left = [], count
    while left > 0 and (piece := await response.content.read(min(left, 2**20))):
        pieces.append(piece)
        left -= len(piece)
    if left <= 0:
        response.close()
    return b"".join(pieces)
