"""The processes of one reward worker: a supervisor, and its child, which runs the reward.

The child is untrusted: it sends only plain JSON, and a reward that raises, hangs, prints or exits costs at
most one sample. The supervisor adopts every process that descends from the child, also one that left its
session, and kills them all when the child or the trainer ends (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import inspect
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jaxrl_llm.child import read_message
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.load import load_reward
from jaxrl_llm.rewards.messages import (
    Broken,
    Failed,
    Loaded,
    Reply,
    Scored,
    ScoreRequest,
    Setup,
    encode_reply,
)
from jaxrl_llm.rewards.sample import ABSTAINED, RewardLoadError, RewardResult, RewardSample
from jaxrl_llm.rewards.signatures import AdaptedReward, InvalidScoreError, parse_score
from jaxrl_llm.user_file import describe_error, end_with_parent, explain, limit_memory

GRACE = 0.5  # seconds between SIGTERM and SIGKILL of the child
SWEEP_SECONDS = 3.0  # for killing the remaining descendants of the child
PR_SET_CHILD_SUBREAPER = 36
WATCHED = {signal.SIGTERM, signal.SIGCHLD}


def main(fd: int, parent: int) -> None:
    """Serve score requests on a socket until `parent` closes it or ends; end all processes."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # processes that a reward starts must not keep the connection open
    if sys.platform != "linux":
        serve_requests(connection)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent(parent, signal.SIGTERM)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        connection.close()
        _exit_as(supervise(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    end_with_parent(supervisor, signal.SIGKILL)
    serve_requests(connection)


def supervise(child: int) -> int:
    """Wait until the child ends (SIGTERM ends it), kill its descendants, and return its wait status."""
    kill_at = float("inf")
    while (status := _reap()[0].get(child)) is None:
        wait = min(max(kill_at - time.monotonic(), 0.05), 60.0)
        received = signal.sigtimedwait(WATCHED, wait)
        if received is not None and received.si_signo == signal.SIGTERM and kill_at == float("inf"):
            kill_at = time.monotonic() + GRACE
            os.kill(child, signal.SIGTERM)
        if time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
    give_up = time.monotonic() + SWEEP_SECONDS
    while _reap()[1] and time.monotonic() < give_up:
        for pid in _children():  # their children become ours
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return status


def _reap() -> tuple[dict[int, int], bool]:
    """Return (process -> wait status of the children that have ended, whether any others run)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if not pid:
            return ended, True
        ended[pid] = status


def _children() -> list[int]:
    """Return the processes whose parent is this one."""
    me, pids = str(os.getpid()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text(errors="replace").rpartition(") ")[2].split()
            if fields[1] == me:
                pids.append(int(stat.parent.name))
    return pids


def _exit_as(status: int) -> NoReturn:
    """End as the child did, so that the trainer sees its exit code or signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _no_core_files()
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def serve_requests(connection: socket.socket) -> None:
    """Answer requests until the connection is closed."""
    requests = connection.makefile("rb")
    setup: Setup = _receive(requests)
    limit_memory(int(setup.config.memory_gb * 2**30))
    _no_core_files()
    with contextlib.closing(asyncio.Runner()) as runner, contextlib.suppress(asyncio.CancelledError):
        server = RewardServer(connection, setup, runner)
        while (request := _receive(requests)) is not None:
            server.answer(request)


class RewardServer:
    """Answers requests; all async calls run in one event loop, which clients of the reward may keep."""

    def __init__(self, connection: socket.socket, setup: Setup, runner: asyncio.Runner):
        self.connection, self.runner, self.pid = connection, runner, os.getpid()
        self.config, self.function = setup.config, setup.function
        self.rewards: dict[str, AdaptedReward] = {}

    def answer(self, request: ScoreRequest) -> None:
        """Load the rewards of a request and score its samples.

        Raises:
            CancelledError: by SIGTERM, after the calls in flight were cancelled.
        """
        try:
            used = [self._loaded(name) for name in (request.name, *self.config.used[1:])]
        except BaseException as error:  # also SystemExit: it is the user's
            known = isinstance(error, RewardLoadError)
            text = str(error) if known else f"the reward {request.name} cannot be loaded: {explain(error)}"
            self._send(request, Broken(text))
            return
        batched = any(reward.batched for reward in used)
        at_once = self.config.concurrency if not batched and any(reward.is_async for reward in used) else 1
        self._send(request, Loaded(batched, at_once))
        if at_once > 1:
            self.runner.run(self._score_at_once(request, used))
        else:
            groups = [request.samples] if batched else [[sample] for sample in request.samples]
            for group in filter(None, groups):
                self._send(request, self._score(group, used))
        sys.stdout.flush()

    def _loaded(self, name: str) -> AdaptedReward:
        if name not in self.rewards:
            self.rewards[name] = replace(load_reward(name, self.config, self.function), name=name)
        return self.rewards[name]

    def _send(self, request: ScoreRequest, reply: Reply) -> None:
        if os.getpid() != self.pid:  # a reward forked, and its child came back here
            os._exit(0)
        self.connection.sendall(encode_reply(request.id, reply))

    def _score(self, group: Sequence[RewardSample], used: list[AdaptedReward]) -> Reply:
        """Return the results of a group, or the failure of a call."""
        started = time.perf_counter()
        try:
            columns = [reward.call(_own_copies(group)) for reward in used]
            if any(map(inspect.isawaitable, columns)):
                columns = self.runner.run(_awaited(columns))
            return self._results(columns, group, used, started=started)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, of the reward
            return Failed(type(error).__name__, describe_error(error))

    async def _score_at_once(self, request: ScoreRequest, used: list[AdaptedReward]) -> None:
        """Score the samples of a request concurrently, and send each reply immediately.

        SIGTERM cancels the calls, so that they can release their resources.
        """
        slots, waiting = asyncio.Semaphore(self.config.concurrency), [*request.samples]

        async def one(sample: RewardSample) -> None:
            async with slots:
                reply = await self._score_async(sample, used)
            offset = next(i for i, other in enumerate(waiting) if other is sample)
            del waiting[offset]
            self._send(request, replace(reply, offset=offset))

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if sys.platform == "linux":  # here a supervisor kills calls that do not end
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await asyncio.gather(*map(one, request.samples))
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def _score_async(self, sample: RewardSample, used: list[AdaptedReward]) -> Reply:
        """Return the result of a sample, or the failure of a call, within the time limit of a sample."""
        started, seconds = time.perf_counter(), self.config.timeout
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                columns = await _awaited([reward.call(_own_copies([sample])) for reward in used])
            return self._results(columns, [sample], used, started=started)
        except BaseException as error:  # as in `_score`
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # SIGTERM
            if limit.expired():
                return Failed("", f"took longer than {seconds:g} s (reward.timeout)")
            return Failed(type(error).__name__, describe_error(error))

    def _results(
        self, columns: list[Any], group: Sequence[RewardSample], used: list[AdaptedReward], *, started: float
    ) -> Scored:
        """Return the results of a group from the raw scores of each reward."""
        for reward, raws in zip(used, columns, strict=True):
            if len(raws) != len(group):
                raise InvalidScoreError(f"{reward.name} returned {len(raws)} scores for {len(group)} samples")
        seconds = (time.perf_counter() - started) / len(group)
        return Scored(tuple(self._combine(raws, used, seconds) for raws in zip(*columns, strict=True)))

    def _combine(self, raws: tuple[Any, ...], used: list[AdaptedReward], seconds: float) -> RewardResult:
        """Return the weighted sum; the first reward decides the outcome, abstaining shaping adds nothing."""
        config = self.config
        try:
            scores = [parse_score(raw, s, config.correct_at) for raw, s in zip(raws, used, strict=True)]
        except Exception as error:  # the value came from foreign code and may be any object
            reason = f"{type(error).__name__}: {error}"
            return RewardResult(float("nan"), Outcome.FAILED, reason, seconds, error=type(error).__name__)
        if scores[0].value is None:
            return RewardResult(float("nan"), Outcome.FAILED, ABSTAINED, seconds)
        values = tuple(0.0 if score.value is None else score.value for score in scores)
        total = sum(weight * value for weight, value in zip(config.weights, values, strict=True))
        return RewardResult(total, scores[0].outcome, "", seconds, components=values)


def _own_copies(group: Sequence[RewardSample]) -> list[RewardSample]:
    """Copy the rows of samples, so that a reward may change them: responses to one prompt share a row."""
    row = lambda s: {"answer": s.answer, "messages": s.messages, "columns": s.columns}
    return [replace(sample, **copy.deepcopy(row(sample))) for sample in group]


async def _awaited(columns: list[Any]) -> list[list[Any]]:
    """Return the scores of each reward."""
    return [await raws if inspect.isawaitable(raws) else raws for raws in columns]


def _no_core_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(requests: BinaryIO) -> Any:
    """Return the trainer's next message; None when it has closed."""
    message = read_message(requests)
    return None if message is None else pickle.loads(message)
