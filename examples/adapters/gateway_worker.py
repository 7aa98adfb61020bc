"""Plays trajectories of a run, for all adapters in this folder. Standard library alone.

A run gives its trajectories away in two ways (docs/agents.md):

    --env.gateway.port 8000 --env.gateway.reward post, and python ADAPTER.py --gateway http://127.0.0.1:8000
        One process plays many at once. JAXRL_GATEWAY_KEY is in the environment of both.
    --env.gateway.command "python ADAPTER.py"
        A process for each.

An episode that fails has no reward: its trajectory is masked, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

RUN_KEY = "JAXRL_GATEWAY_KEY"
POLL_SECONDS, START_SECONDS, END_SECONDS = 0.1, 900.0, 5.0
LIMITS = ("context_length_exceeded", "max_turns")  # codes of refusals


class EpisodeError(Exception):
    """An episode that cannot be rewarded; the text is the reason."""


class LimitError(Exception):
    """The policy may write no further turn: the episode ends with the rewards so far."""


class RefusalError(Exception):
    """A request that the gateway has refused."""

    def __init__(self, status: int, message: str, code: str):
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


@dataclass(frozen=True)
class RemoteTrajectory:
    """One trajectory of a run: a row of data, and the address and key to call the policy with."""

    base_url: str
    api_key: str
    row: dict[str, Any]

    async def chat(self, messages: list[dict], **more: Any) -> dict[str, Any]:
        """Return the policy's message. Raises LimitError."""
        reply = await self.generate("/v1/chat/completions", {"messages": messages, **more})
        return reply["choices"][0]["message"]

    async def generate(self, path: str, body: dict) -> dict[str, Any]:
        """Return the reply to a call of one of OpenAI's APIs. Raises LimitError."""
        try:
            return await self.post(path, {"model": "policy", **body})
        except RefusalError as error:
            if error.code in LIMITS:
                raise LimitError(str(error)) from None
            raise

    async def post(self, path: str, body: dict) -> dict:
        """Return the reply to a request of this trajectory. Raises RefusalError."""
        return await asyncio.to_thread(_post, self.base_url.removesuffix("/v1") + path, body, self.api_key)


Play = Callable[[RemoteTrajectory], Awaitable[float | None]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of an adapter's command line."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--gateway", default="", help='address of the run; "" = the trajectory of this process')
    made.add_argument("--copies", type=int, default=32, help="trajectories at once")
    return made


def run_worker(play: Play, options: argparse.Namespace) -> None:
    """Play the trajectory of this process, or the trajectories of a run until the run ends.

    Args:
        play: returns the reward of an episode; None = the run's reward functions score it.
        options: of `parser`.
    """
    asyncio.run(_serve(play, options.gateway.rstrip("/"), options.copies))


async def _serve(play: Play, gateway: str, copies: int) -> None:
    # The trajectory of this process.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * copies + 2))
    if not gateway:
        row = await asyncio.to_thread(json.load, sys.stdin)
        own = RemoteTrajectory(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
        if failure := await _end_of(own, play):
            print(failure, file=sys.stderr)
            sys.exit(2)  # 0 and 1 may be rewards
        return
    # The trajectories of a run.
    free, tasks, patience = asyncio.Semaphore(copies), set[asyncio.Task](), START_SECONDS

    async def work(trajectory: RemoteTrajectory) -> None:
        try:
            failure = await _end_of(trajectory, play)
            await trajectory.post("/done", {"failure": failure})
        except (OSError, RefusalError) as error:  # the run has ended the trajectory, or has ended
            print(f"not delivered: {error}", file=sys.stderr)
        finally:
            free.release()

    while True:
        await free.acquire()
        if (trajectory := await _claim(gateway, patience)) is None:
            break
        task, patience = asyncio.create_task(work(trajectory)), END_SECONDS
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _end_of(trajectory: RemoteTrajectory, play: Play) -> str:
    """Play an episode and post its reward; return why it failed, or ""."""
    try:
        reward = await play(trajectory)
        if reward is not None and not math.isfinite(reward):
            raise EpisodeError(f"the environment's reward is {reward}")
        if reward is not None:
            await trajectory.post("/reward", {"reward": float(reward)})
    except EpisodeError as error:
        return str(error) or "the episode failed"
    except Exception as error:  # of a library, or of the user's environment
        return f"{type(error).__name__}: {error}"[:500]
    return ""


async def _claim(gateway: str, patience: float) -> RemoteTrajectory | None:
    """Return the next trajectory; None once nothing has listened for `patience` seconds."""
    loop = asyncio.get_running_loop()
    heard = loop.time()
    while True:
        try:
            given = await asyncio.to_thread(_post, f"{gateway}/trajectories", {}, os.environ.get(RUN_KEY, ""))
            return RemoteTrajectory(given["base_url"], given["api_key"], given["row"])
        except RefusalError as error:
            if error.status != 429:
                raise SystemExit(f"{gateway}: {error} ({RUN_KEY})") from None
            heard, patience = loop.time(), END_SECONDS
        except OSError:
            if loop.time() - heard > patience:
                return None
        await asyncio.sleep(POLL_SECONDS)


def _post(url: str, body: dict, key: str) -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        refused: dict[str, Any] = {}
        with contextlib.suppress(ValueError, KeyError):  # a proxy's own page
            refused = json.loads(error.read())["error"]
        message = refused.get("message", error.reason)
        raise RefusalError(error.code, message, refused.get("code") or "") from None
