"""A server with SGLang's JSON that sleeps instead of computing, for soak.py: weights are one number.

    python benchmarks/sleeping_server.py --slots 8 --pace 0.01 --faults FILE

Prints its port. Each token's id is the version of the weights that generated it, so that a false version is
found. A pause keeps the tokens that responses have by then, as SGLang does. A request before the first
weights and their probe is a line BEFORE in FILE; one between later weights and their probe is a line BETWEEN
(the pool waits with its response until the probe has passed). SIGTERM ends the server when it has no requests
left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from pathlib import Path

from aiohttp import web

FIRST_ID, MAX_VERSIONS = 2, 1000
"""Token FIRST_ID + v % MAX_VERSIONS is of the weights of version v."""
PROMPT_TOKENS = 4
BEFORE, BETWEEN = "a request before weights or probe", "a request between weights and probe"


def sleeping_logprob(token: int, version: int) -> float:
    """Return the log-prob of a token under weights of a version, nats."""
    return -1.0 - (7 * token + 13 * version) % 50 / 25


def response_length(seed: int, longest: int) -> int:
    """Return a length with a long tail, tokens: the same for the same seed."""
    return min(longest, max(4, int(random.Random(seed).lognormvariate(4.5, 0.8))))


class SleepingServer:
    """One server."""

    def __init__(self, slots: int, pace: float, faults: Path):
        self.pace, self.faults = pace, faults
        self.slots, self.running = asyncio.Semaphore(slots), asyncio.Event()
        self.running.set()
        self.stops: set[asyncio.Event] = set()  # of responses that are generated
        self.label, self.version, self.aborts, self.requests = "", -1, 0, 0
        self.probed = self.admitted = False  # with the newest weights; with any

    def app(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(client_max_size=1 << 24)
        for route, reply in (
            ("/server_info", lambda body: {"tp_size": 1}),
            ("/health", lambda body: {}),
            ("/pause_generation", lambda body: self._pause()),
            ("/continue_generation", lambda body: self.running.set()),
            ("/abort_request", lambda body: self._abort()),
            ("/update_weights_from_disk", self._load),
        ):
            app.router.add_route("*", route, self._handler(reply))
        app.router.add_post("/generate", self._generate)
        return app

    def _handler(self, reply):
        async def handle(request: web.Request) -> web.Response:
            body = await request.json() if request.body_exists else {}
            return web.json_response(reply(body) or {})

        return handle

    def _pause(self) -> None:
        self.running.clear()
        self._stop()

    def _abort(self) -> None:
        self.aborts += 1
        self._stop()

    def _stop(self) -> None:
        for stop in self.stops:
            stop.set()

    def _load(self, body):
        self.version = json.loads(Path(body["model_path"], "version.json").read_text())
        self.label, self.probed = body["weight_version"], False
        return {"success": True}

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("logprob_start_len") == 0:  # the probe
            self.probed = self.admitted = True
            scores = [[sleeping_logprob(i, self.version), i, None] for i in body["input_ids"]]
            meta = {"weight_version": self.label, "input_token_logprobs": scores}
            return web.json_response({"meta_info": meta})
        if not self.admitted or (not self.probed and self.running.is_set()):
            with self.faults.open("a") as file:
                file.write(f"{BETWEEN if self.admitted else BEFORE}\n")
        self.requests += 1
        try:
            return web.json_response(await self._sleep(body))
        finally:
            self.requests -= 1

    async def _sleep(self, body):
        """Generate until the response is complete or aborted; a pause divides it."""
        sampling, aborts = body["sampling_params"], self.aborts
        done = len(body["input_ids"]) - PROMPT_TOKENS
        count = response_length(sampling["sampling_seed"], done + sampling["max_new_tokens"]) - done
        versions: list[tuple[str, int]] = []
        async with self.slots:
            while len(versions) < count and self.aborts == aborts:
                while not self.running.is_set():
                    await self.running.wait()
                of_weights, left = (self.label, self.version), count - len(versions)
                versions += [of_weights] * await self._tokens(left)
        return self._reply(body, versions, len(versions) == count)

    async def _tokens(self, count: int) -> int:
        """Sleep for `count` tokens or until a pause or an abort. Returns the tokens that were generated."""
        start, stop = time.monotonic(), asyncio.Event()
        self.stops.add(stop)
        try:
            await asyncio.wait_for(stop.wait(), count * self.pace)
        except TimeoutError:
            return count
        finally:
            self.stops.remove(stop)
        return min(count, int((time.monotonic() - start) / self.pace))

    def _reply(self, body, versions: list[tuple[str, int]], complete: bool):
        starts = [i for i, each in enumerate(versions) if i == 0 or each != versions[i - 1]]
        ends = [*starts[1:], len(versions)]
        ids = [(FIRST_ID + version % MAX_VERSIONS, version) for _, version in versions]
        tokens = [(sleeping_logprob(token, version), token) for token, version in ids]
        meta = {
            "id": body["rid"],
            "weight_version": self.label,
            "weight_versions": [
                {"version": versions[s][0], "start": s, "end": e} for s, e in zip(starts, ends, strict=False)
            ],
            "finish_reason": {"type": "stop" if complete else "abort"},
            "output_token_logprobs": [[score, token, None] for score, token in tokens],
        }
        return {"output_ids": [token for _, token in tokens], "meta_info": meta}


async def serve_asleep(options: argparse.Namespace) -> None:
    """Serve until SIGTERM, then until the last request has ended."""
    server, ended = SleepingServer(options.slots, options.pace, options.faults), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await ended.wait()
    while server.requests:
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0.01, help="seconds of a token")
    parser.add_argument("--faults", type=Path, required=True)
    asyncio.run(serve_asleep(parser.parse_args()))
