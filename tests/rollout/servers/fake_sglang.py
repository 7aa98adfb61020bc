"""A fake server with SGLang's JSON that computes with the native engine and can misbehave on demand.

As a script it is what `python -m sglang.launch_server` would be: see stub/sglang/launch_server.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from pathlib import Path

import jax
import numpy as np
from aiohttp import web
from fake_weights import FakeWeights

from jaxrl_llm.bridge.delta import Shadow
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


class FakeServer(FakeWeights):
    """One server in a thread of its own.

    Attributes:
        deaf: says that it took the weights, and keeps its own. refuses: says that it did not.
        breaks_after: tokens after which a response is broken off, once a response. down: answers 500.
        pace: seconds a token takes, however many responses are written.
        holds_after: tokens after which a response waits until everything is aborted; 0 = never.
        misses_stops: no stop string ends a response.
        seen: bodies of /generate. calls: (route, its body) of the others. held: responses that wait.
        spoil: what becomes of an answer to /generate, but for probes: other JSON, or a web.Response.
        hangs: nothing is answered to /generate and /health, but for probes.
        keys: of the routes for all, and for admins; "" = none needed.
        replies: route -> JSON that it answers instead.
    """

    def __init__(self, port: int = 0, model_path: Path | None = None):
        self.model_path = model_path
        self.pace = float(os.environ.get("FAKE_SGLANG_PACE", "0"))
        self._aborts = self.held = 0
        self.seen: list[dict] = []
        self.calls: list[tuple[str, dict]] = []
        self.headers: list[dict] = []
        self.behave()
        self.mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self.score = sequence_scorer("float32", self.mesh)
        self.label, self.engine = "default", None
        self.turn = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        threading.Thread(target=self._serve, args=(port,), daemon=True).start()
        self._started.wait()
        self.url = f"http://127.0.0.1:{self.port}"

    def behave(self) -> None:
        """Serve requests from now on."""
        self.deaf = self.refuses = self.down = self.hangs = False
        self.spoil_adapter = None
        self.breaks_after = self.holds_after = 0
        self.misses_stops = False
        self.spoil, self.keys, self.replies = None, ("", ""), {}
        self.seen.clear()
        self.calls.clear()
        self.headers.clear()

    def restart(self) -> None:
        """As if the process had been: the weights are gone."""
        self.label, self.engine, self.shadow = "default", None, Shadow()
        self.down = self.paused = self.open = False
        self.adapters.clear()

    def _serve(self, port: int) -> None:
        async def start():
            app = web.Application(client_max_size=1 << 30)
            app.router.add_get("/model_info", self._answer(lambda body: {"weight_version": self.label}))
            for route, work in self.weight_routes():
                app.router.add_route("*", route, self._answer(work))
            app.router.add_post("/generate", self._hold(self._answer(self._generate)))
            app.router.add_post("/abort_request", self._answer(self._abort))
            app.router.add_get("/health", self._answer(lambda body: {}))
            for route in ("flush_cache", "release_memory_occupation", "resume_memory_occupation"):
                app.router.add_post(f"/{route}", self._answer(lambda body: None))
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            self._started.set()

        self._loop.create_task(start())
        self._loop.run_forever()

    def _answer(self, work):
        def guarded(body):
            with self.turn:
                return work(body)

        async def handle(request):
            body = await request.json() if request.body_exists else {}
            writes = request.path == "/generate" and "sampling_seed" in body["sampling_params"]
            if request.path != "/generate":
                self.calls.append((request.path, body))
            self.headers.append(dict(request.headers))
            key = self.keys[request.path not in auth.API_ROUTES]
            if key and request.headers.get("Authorization") != f"Bearer {key}" and request.path != "/health":
                return web.Response(status=401, text="Unauthorized")
            if self.down:
                return web.Response(status=500, text="out of order")
            if self.hangs and (writes or request.path == "/health"):
                await asyncio.sleep(600)
            if request.path in self.replies:
                return web.json_response(self.replies[request.path])
            said = await asyncio.to_thread(guarded, body)
            if writes and (spoil := self.spoil):  # read once: the test may set it to None meanwhile
                said = spoil(said)
            return said if isinstance(said, web.Response) else web.json_response(said)

        return handle

    def _hold(self, answer):
        """Aborts break off what waits; the rest is written when nothing is to be held any more."""

        async def handle(request):
            name = (await request.json()).get("lora_path")
            self.using[name] += 1
            try:
                return await hold(request)
            finally:
                self.using[name] -= 1

        async def hold(request):
            said = await answer(request)
            if self.pace:
                await asyncio.sleep(self.pace * len(json.loads(said.body)["output_ids"]))
            aborts, waited = self._aborts, False
            while self.holds_after and self._aborts == aborts and b'"abort"' in said.body:
                self.held, waited = self.held + (not waited), True
                await asyncio.sleep(0.01)
            self.held -= waited
            return said

        return handle

    def _abort(self, body):
        self._aborts += 1

    def _generate(self, body):
        self.turn.wait_for(lambda: not self.paused)
        self.seen.append(body)
        ids, wanted = np.array(body["input_ids"], np.int32), body["sampling_params"]
        engine, params = self.model_of(body)
        engine.eos_ids = tuple(wanted.get("stop_token_ids", ()))
        most = wanted["max_new_tokens"]
        tokens = min(most, self.breaks_after or self.holds_after or most)
        stops = () if self.misses_stops else tuple(wanted.get("stop", ()))
        sampling = SamplingConfig(temperature=wanted["temperature"], stop=stops)
        request = Request(ids, wanted.get("sampling_seed", 0), 1, tokens)
        (made,) = engine.generate([request], sampling, jax.random.key(0))
        broken = made.finish == "length" and tokens < most
        finish = "length" if len(made.response_ids) == most else made.finish  # SGLang looks at it first
        self.breaks_after = 0 if broken else self.breaks_after
        pairs = zip(made.logprobs.tolist(), made.response_ids.tolist(), strict=True)
        meta = {
            "id": body.get("rid"),
            "prompt_tokens": len(ids),
            "completion_tokens": len(made.response_ids),
            "weight_version": self.label,
            "finish_reason": {"type": "abort" if broken else finish},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        if body.get("logprob_start_len") == 0:
            said = self.score(params, ids)
            meta["input_token_logprobs"] = [[None, int(ids[0]), None]] + [
                [float(x), int(i), None] for x, i in zip(said, ids[1:], strict=True)
            ]
        if body.get("return_routed_experts"):
            meta["routed_experts"] = encode_routes(made.routes[body["routed_experts_start_len"] : -1])
        return {"output_ids": made.response_ids.tolist(), "meta_info": meta}


def encode_routes(routes):
    """Routes [N, L, K] of a model without dense layers, as SGLang sends them."""
    return base64.b64encode(routes[..., ::-1].astype("<i4").tobytes()).decode()
