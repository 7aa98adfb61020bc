"""Plays rows of a NeMo Gym resources server over HTTP: with tools and a final verification, or step by step.

    python examples/adapters/nemo_gym_player.py http://127.0.0.1:8001 --gateway http://127.0.0.1:8000

Rows are NeMo Gym's, of `data/*.jsonl`, read with --data.train.0.prompt_key responses_create_params.input. The
session of a rollout is a cookie. A sample that the server masks (`mask_sample`) fails with its reason.
"""

import functools
import json
from typing import Any

import aiohttp
from gateway_worker import EpisodeError, LimitError, RemoteTrajectory, parser, run_worker

SECONDS = aiohttp.ClientTimeout(total=600)


async def play_row(url: str, trajectory: RemoteTrajectory) -> float:
    """Play a row, and return its reward."""
    if not isinstance(trajectory.row.get("responses_create_params"), dict):
        raise EpisodeError("the row has no responses_create_params: it is not of NeMo Gym")
    cookies = aiohttp.CookieJar(unsafe=True)  # the safe one keeps no cookie of an IP address
    try:
        async with aiohttp.ClientSession(cookie_jar=cookies, timeout=SECONDS) as http:
            async with http.get(f"{url}/openapi.json") as reply:
                routes = (await reply.json())["paths"]
            rollout = Rollout(url, http, trajectory)
            return await (rollout.steps() if "/step" in routes else rollout.tools())
    except (aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as error:
        raise EpisodeError(f"NeMo Gym at {url}: {type(error).__name__} {error}"[:500]) from error


class Rollout:
    """One rollout: the conversation, as items of OpenAI's responses, and the session on the server."""

    def __init__(self, url: str, http: aiohttp.ClientSession, trajectory: RemoteTrajectory):
        self.url, self.http, self.trajectory = url, http, trajectory
        self.params = dict(trajectory.row["responses_create_params"])
        given = self.params["input"]
        self.given = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        self.items: list[dict] = []  # after the prompt
        self.last: dict[str, Any] = {}  # the policy's newest response

    async def tools(self) -> float:
        """Let the policy call the row's tools until it answers; return the reward of the verification."""
        await self._post("/seed_session", self.trajectory.row)
        names = {tool["name"] for tool in self.params.get("tools") or ()}
        while await self._generate() and self.last["status"] == "completed":
            calls = [item for item in self.last["output"] if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                output = await self._call(call) if call["name"] in names else '{"error": "no such tool"}'
                self.items.append(
                    {"type": "function_call_output", "call_id": call["call_id"], "output": output}
                )
        return _reward(await self._post("/verify", self._body(self.items)))

    async def steps(self) -> float:
        """Play against /reset and /step; return the sum of the rewards."""
        seen, rewards = await self._post("/reset", self.trajectory.row), []
        ended = False
        while not ended:
            if seen.get("observation"):
                self.items.append({"role": "user", "content": seen["observation"]})
            if not await self._generate():
                break
            seen = await self._post("/step", self._body(self.last["output"]))
            info = seen.get("info") or {}
            rewards.append(_reward({**info, "reward": seen["reward"]}))
            ended = seen["terminated"] or seen["truncated"]
            self.items += [{"type": "function_call_output", **out} for out in info.get("tool_outputs", ())]
        return sum(rewards)

    async def _generate(self) -> bool:
        """Add the policy's next turn; False if the limits of the run allow none."""
        body = {**self.params, "input": [*self.given, *self.items]}
        try:
            self.last = await self.trajectory.generate("/v1/responses", body)
        except LimitError as error:
            if not self.last:
                raise EpisodeError(str(error)) from None
            return False
        self.items += self.last["output"]
        return True

    def _body(self, output: list[dict]) -> dict[str, Any]:
        params, response = {**self.params, "input": self.given}, {**self.last, "output": output}
        return {**self.trajectory.row, "responses_create_params": params, "response": response}

    async def _call(self, call: dict[str, Any]) -> str:
        """Return the reply of a tool; the policy reads refusals of its arguments, too."""
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"the arguments are not JSON: {error}"})
        async with self.http.post(f"{self.url}/{call['name']}", json=arguments) as reply:
            if reply.status >= 500:  # below, it is the policy's error
                raise EpisodeError(f"NeMo Gym: {call['name']}: {reply.status} {await reply.text()}"[:500])
            return await reply.text()

    async def _post(self, path: str, body: dict) -> dict[str, Any]:
        async with self.http.post(f"{self.url}{path}", json=body) as reply:
            if reply.status != 200:
                raise EpisodeError(f"NeMo Gym: {path}: {reply.status} {await reply.text()}"[:500])
            return await reply.json() or {}


def _reward(scored: dict[str, Any]) -> float:
    if scored.get("mask_sample"):
        raise EpisodeError(f"masked by the server: {scored.get('failure_reason') or 'no reason given'}")
    return scored["reward"]


if __name__ == "__main__":
    words = parser(__doc__)
    words.add_argument("url", help="address of the resources server")
    given = words.parse_args()
    run_worker(functools.partial(play_row, given.url.rstrip("/")), given)
