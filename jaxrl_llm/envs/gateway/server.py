"""The HTTP server of the gateway: keys, routes, errors, calls that clients repeat."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from jaxrl_llm.data.rows import RowError, check_row
from jaxrl_llm.envs.dialogue import MAX_REWARD, is_reward
from jaxrl_llm.envs.gateway.anthropic import MessagesApi
from jaxrl_llm.envs.gateway.call import MODEL, ApiProtocol, CallError, joined, read_call
from jaxrl_llm.envs.gateway.completions import ChatApi, CompletionsApi
from jaxrl_llm.envs.gateway.responses import ResponsesApi
from jaxrl_llm.envs.gateway.session import AgentSession, End
from jaxrl_llm.envs.gateway.settings import unused_settings
from jaxrl_llm.rollout.config import SamplingConfig

MAX_BODY = 16 << 20  # bytes
NO_KEY = "invalid_api_key"  # OpenAI's code
MAX_NOTED = 50  # settings of calls that the log names
PROTOCOLS: dict[str, ApiProtocol] = {
    "/v1/chat/completions": ChatApi(),
    "/v1/completions": CompletionsApi(),
    "/v1/responses": ResponsesApi(),
    "/v1/messages": MessagesApi(),
}
OPENAI_ERRORS = {429: "rate_limit_error", 500: "server_error"}
ANTHROPIC_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
"""Types of errors by status, as the two APIs document them; of all others "invalid_request_error"."""
log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MalformedRequests(logging.Filter):
    """Turns aiohttp's traceback of each request that is not HTTP into a line with their number, at the
    first, and whenever it has doubled."""

    def __init__(self):
        super().__init__()
        self.count, self.due = 0, 1

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        self.count += 1
        if self.count < self.due:
            return False
        self.due *= 2
        record.msg, record.args = "requests that are not valid HTTP, so far: %d", (self.count,)
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        return True


class GatewayServer:
    """Finds the trajectory of a request by path, header or key, and passes its calls on.

    Args:
        max_tokens: of prompt and response, for programs that ask.
        sampling: of the run, which decides instead of a call.
        claim: returns a trajectory to a program elsewhere, or None.
        run_key: of programs elsewhere, which alone may claim trajectories and end them; "" = none connect.
    """

    def __init__(
        self,
        max_tokens: int,
        sampling: SamplingConfig,
        claim: Callable[[], AgentSession | None] = lambda: None,
        *,
        run_key: str = "",
    ):
        self.max_tokens, self.sampling, self.claim, self.run_key = max_tokens, sampling, claim, run_key
        self._noted: set[str] = set()
        self.address = ""
        self._by_key: dict[bytes, AgentSession] = {}
        self._runner: web.AppRunner | None = None

    def add(self, session: AgentSession) -> None:
        """Accept calls of a trajectory."""
        self._by_key[hash_of(session.key.encode())] = session

    def remove(self, session: AgentSession) -> None:
        """Forget a trajectory."""
        self._by_key.pop(hash_of(session.key.encode()), None)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        for prefix in ("", "/t/{trajectory}"):
            for path, protocol in PROTOCOLS.items():
                app.router.add_post(prefix + path, self._generator(path, protocol))
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/reward", self._reward)
            if self.run_key:
                app.router.add_post(f"{prefix}/done", self._done)
        app.router.add_get("/health", self._health)
        if self.run_key:
            app.router.add_post("/trajectories", self._claim)
        http_log = log.getChild("http")
        http_log.filters = [MalformedRequests()]
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=http_log)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = site._server.sockets[0].getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner:
            await self._runner.cleanup()

    def _session(self, request: web.Request) -> AgentSession:
        """Return the trajectory of a request. Raises CallError (401, 404)."""
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            raise CallError(401, "a key is required: Authorization: Bearer KEY, or x-api-key: KEY", NO_KEY)
        session = self._by_key.get(hash_of(key.encode(errors="replace")))
        if session is None:
            raise CallError(401, "the key is wrong, or its trajectory has ended", NO_KEY)
        named = request.match_info.get("trajectory") or request.headers.get("x-session-id")
        if named and named != session.id:
            raise CallError(404, "the key is of another trajectory")
        return session

    def _generator(self, path: str, protocol: ApiProtocol) -> Handler:
        async def generate(request: web.Request) -> web.StreamResponse:
            # Queue the call.
            session = self._session(request)
            data = await request.read()
            body = _json(data)
            repeats = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            unused = unused_settings(body, protocol.reads, self.sampling)
            make = functools.partial(read_call, protocol, body)
            digest = hash_of(path.encode(), data)
            calls = [session.submit(digest, repeats, make)]
            calls += [session.submit(digest + bytes([i]), repeats, make) for i in range(1, calls[0].choices)]
            self._note(unused)
            is_lost = lambda: request.transport is None or request.transport.is_closing()
            for call in calls:
                call.is_lost = is_lost
            # Wait for the answers, and write them.
            answers = [await asyncio.shield(call.answer) for call in calls]
            if not calls[0].stream:
                written = joined([protocol.write(*pair) for pair in zip(calls, answers, strict=True)])
                reply: web.StreamResponse = web.json_response(written)
                await reply.prepare(request)
            else:
                reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await reply.prepare(request)
                for text in protocol.events(calls[0], answers[0]):
                    await reply.write(text.encode())
            await reply.write_eof()
            if not is_lost():
                for call in calls:
                    call.is_lost = lambda: False
            return reply

        return generate

    def _note(self, unused: dict[str, Any]) -> None:
        """Note settings of a call that are not used, each once in a run."""
        new = sorted(unused.keys() - self._noted)[: MAX_NOTED - len(self._noted)]
        self._noted.update(new)
        if new:
            shown = ", ".join(f"{ascii(name)[1:-1]:.40} {unused[name]!r:.20}" for name in new)
            log.warning("programs ask for %s, not used (docs/agents.md, each noted once)", shown)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": self.max_tokens}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = _json(await request.read())
        given = {name: body[name] for name in ("reward", "turn_reward") if name in body} or {"reward": None}
        for name, value in given.items():
            if not is_reward(value):
                raise CallError(400, f"{name} must be a number within +-{MAX_REWARD:g}")
        if "turn_reward" in given:
            session.rate_turn(float(given["turn_reward"]))
        if "reward" in given:
            session.reward = float(given["reward"])
        return web.json_response(given)

    async def _done(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = _json(await request.read() or b"{}")
        session.end(End(failure=str(body.get("failure") or "")[:500]))
        return web.json_response({"done": True})

    async def _claim(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self.run_key.encode()):
            raise CallError(401, "the key of the run is required: Authorization: Bearer KEY", NO_KEY)
        if (session := self.claim()) is None:
            raise CallError(429, "no trajectory waits for a program now")
        # The address that the program has used: the gateway may listen at 0.0.0.0, or have a proxy in front.
        scheme = request.headers.get("X-Forwarded-Proto", request.scheme)
        base = f"{scheme}://{request.host}/t/{session.id}"
        reply = {"id": session.id, "base_url": f"{base}/v1", "api_key": session.key, "row": session.row}
        return web.Response(text=json.dumps(reply, default=str), content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn refusals into replies of a form that clients of both APIs read, with the type of their API."""
    # Why it is refused.
    try:
        if (request.content_length or 0) > MAX_BODY:  # aiohttp counts what arrives, and waits for the rest
            raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length)
        return await handler(request)
    except CallError as error:
        refused = error
    except RowError as error:
        refused = CallError(400, str(error))
    except web.HTTPRequestEntityTooLarge as error:
        refused = CallError(413, error.text)
    except web.RequestPayloadError as error:
        refused = CallError(400, f"the body cannot be read: {error}")
    except web.HTTPException as error:
        refused = CallError(error.status, f"{error.reason}: {request.method} {request.path}"[:500])
    except ConnectionError:
        refused = CallError(400, "the connection was cut")  # the client has left
    except Exception:  # else the reply would be a page of HTML
        log.exception("the gateway failed in %s", request.path)
        refused = CallError(500, "the gateway failed; the log of the run has the reason")
    # The reply.
    is_anthropic = request.path.endswith("/v1/messages") or "anthropic-version" in request.headers
    kinds = ANTHROPIC_ERRORS if is_anthropic else OPENAI_ERRORS
    kind = kinds.get(refused.status, "invalid_request_error")
    more = {"param": refused.param or None, "code": refused.code or None}
    body = {"type": "error", "error": {"message": str(refused), "type": kind, **more}}
    headers = {"Retry-After": "1"} if refused.status == 429 else {}
    return web.json_response(body, status=refused.status, headers=headers)


def hash_of(*parts: bytes) -> bytes:
    """Return a hash of parts."""
    return hashlib.sha256(b"\0".join(parts)).digest()


def _json(data: bytes) -> dict[str, Any]:
    """Return the object of a body. Raises CallError (400) or RowError."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(body, dict):
        raise CallError(400, "the body must be a JSON object")
    check_row(body, "the body")
    return body
