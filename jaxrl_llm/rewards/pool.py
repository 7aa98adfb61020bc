"""Scores responses in worker processes that can be killed.

A sample that raises, hangs, exits or returns nonsense is tried again and then counts as failed; other samples
are not affected. One thread, one selector loop, no locks held while a reward runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.ranges import problems
from jaxrl_llm.rewards.builtin import REWARDS
from jaxrl_llm.rewards.config import MAX_CHUNK, URL, RewardConfig
from jaxrl_llm.rewards.environment import check_trial, explain_failure, mask_kept, rows_to_try, warn_of_keys
from jaxrl_llm.rewards.gold import COMPARING, answered_by_row, has_answer
from jaxrl_llm.rewards.load import pickle_function, pickled_name, resolve_reward
from jaxrl_llm.rewards.messages import (
    Broken,
    Chunk,
    Failed,
    InvalidWorkerReplyError,
    Loaded,
    ScoreRequest,
    Setup,
    parse_reply,
)
from jaxrl_llm.rewards.process import Worker
from jaxrl_llm.rewards.sample import (
    FailureWarning,
    RewardLoadError,
    RewardResult,
    RewardSample,
    check_failures,
    summarize,
)

ASYNC_GRACE = 1.0  # seconds that a worker has to end async calls in time, before it is killed
MAX_STARTS = 3  # consecutive workers that may die before they have loaded the reward
LOG_BYTES = 1 << 20  # of the workers' output kept in the log file


@dataclass
class Round:
    """One call of `score` or `check`."""

    samples: Sequence[RewardSample]
    queue: deque[Chunk]
    results: list[RewardResult | None]
    attempts: list[int]
    retries: int
    counts: Counter = field(default_factory=Counter)


class RewardPool(contextlib.AbstractContextManager):
    """Worker processes, started on first use. A context manager; `close` ends every process.

    Workers die with the thread that started them (Linux), so score from long-lived threads.
    """

    def __init__(
        self, config: RewardConfig, log: Path | None = None, function: Callable[..., Any] | None = None
    ):
        """Check the settings; no process is started yet.

        Args:
            log: file that receives what rewards print, up to 1 MiB.
            function: a reward function that replaces `config.name`, with any signature that is valid in a
                file; it is pickled by value, so a notebook may define it.

        Raises:
            RewardLoadError: a setting is wrong, or the function cannot be pickled.
        """
        if function is not None:
            config = dataclasses.replace(config, name="auto")
        if wrong := [f"--reward.{name} {problem}" for name, problem in problems(config)]:
            raise RewardLoadError("\n".join(wrong))
        self.config = config
        self.metrics: dict[str, float] = {}
        self._setup = Setup(config, b"" if function is None else pickle_function(function))
        self._only_name = config.name if function is None else pickled_name(function)  # "auto": of each row
        self._log = log
        self._logged = 0
        self._workers: list[Worker] = []
        self._dying: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._failed_starts, self._warn = 0, FailureWarning(config.failed == "zero")
        self._ids = itertools.count(1)

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Return results in the order of the samples, and set `metrics` for this call.

        Raises:
            RewardLoadError: the reward cannot be found or imported.
            RewardFailureError: more than `max_failed_fraction` of the samples failed.
        """
        if self._only_name == "none":
            return [RewardResult(0.0, Outcome.FAILED, components=(0.0,)) for _ in samples]
        with self._lock:
            started = time.monotonic()
            round_ = self._plan(samples, self.config.retries)
            results = self._run(round_)
            self.metrics = summarize(results) | {
                "reward/retries": float(round_.counts["retry"]),
                "reward/timeouts": float(round_.counts["timeout"]),
                "reward/invalid_replies": float(round_.counts["invalid"]),
                "reward/wall_seconds": time.monotonic() - started,
            }
        check_failures(results, self.config.max_failed_fraction)
        self._warn(results)
        return results

    def can_score(self, row: RewardSample) -> bool:
        """Return whether responses to a row can be scored: most built-in rewards need the row's answer."""
        if self._only_name == "none" or has_answer(row.answer):
            return self._only_name != "none"
        try:
            return self._name(row) not in COMPARING
        except RewardLoadError:  # "auto" knows none
            return False

    @property
    def is_builtin(self) -> bool:
        """True if only built-in rewards score responses."""
        return self._only_name in (*REWARDS, "auto", "none")

    def check(self, rows: Sequence[RewardSample] = (), skips: bool = False) -> None:
        """Load the reward in a worker and score some rows, to find mistakes before a model is loaded.

        Args:
            rows: the first of each data source before others; an empty response is replaced by the row's
                answer.
            skips: of `check_own_answers`.

        Raises:
            RewardLoadError: the reward cannot be loaded; it fails on each of the first rows for any response
                (a misspelt name, a missing column, a crash, the time limit); or it is built in and does not
                accept a row's answer.
        """
        if self._only_name == "none":
            return
        warn_of_keys(self.config, self._setup.function)
        by_name: dict[str, list[RewardSample]] = {}
        for row in rows:
            name = self._name(row)
            by_name.setdefault(name, []).append(answered_by_row(row, name))
        if not by_name and self._only_name != "auto":
            by_name[self._only_name] = []
        for name, samples in by_name.items():
            samples = rows_to_try(name, samples)
            with self._lock:
                round_ = self._plan(samples, retries=0)
                if not samples:
                    round_.queue.append(Chunk(name, []))
                results = self._run(round_)
            check_trial(name, samples, results, self.config.keep_env, skips=skips)

    def close(self) -> None:
        """End all workers and wait for them."""
        with self._lock:
            for worker in list(self._workers):
                self._dismiss(worker)
            while self._dying:
                self._reap()
                time.sleep(0.002)

    def _name(self, sample: RewardSample) -> str:
        return resolve_reward(self._only_name, sample.source, sample.columns)

    def _plan(self, samples: Sequence[RewardSample], retries: int) -> Round:
        """Split samples into chunks of neighbours with the same reward, small enough to keep every worker
        busy."""
        size = min(max(math.ceil(len(samples) / self.config.workers), 1), MAX_CHUNK)
        one_request = self.config.service_samples if self.config.service_samples > 1 else MAX_CHUNK
        chunks: list[Chunk] = []
        for index, sample in enumerate(samples):
            name = self._name(sample)
            full = min(size, one_request) if name.startswith(URL) else size
            if not chunks or chunks[-1].name != name or len(chunks[-1].indices) == full:
                chunks.append(Chunk(name, []))
            chunks[-1].indices.append(index)
        return Round(samples, deque(chunks), [None] * len(samples), [0] * len(samples), retries=retries)

    def _run(self, round_: Round) -> list[RewardResult]:
        """Process all chunks; after an exception, no worker keeps samples of this round."""
        try:
            while round_.queue or any(worker.assigned is not None for worker in self._workers):
                self._dispatch(round_)
                self._wait(round_)
        finally:
            for worker in [w for w in self._workers if w.assigned is not None]:
                self._dismiss(worker)  # interrupted: its replies would answer no request
        assert all(result is not None for result in round_.results)
        return [result for result in round_.results if result is not None]

    def _dispatch(self, round_: Round) -> None:
        """Send a chunk to every idle worker; dead and worn-out workers are replaced first."""
        for worker in [w for w in self._workers if w.assigned is None]:
            if worker.process.poll() is not None or worker.scored >= self.config.recycle:
                self._dismiss(worker)
        while round_.queue:
            worker = next((w for w in self._workers if w.assigned is None), None)
            if worker is None and len(self._workers) == self.config.workers:
                return
            worker = worker or self._start()
            chunk = worker.assigned = round_.queue.popleft()
            chunk.id = next(self._ids)
            worker.deadline = time.monotonic() + self.config.start_timeout
            samples = [round_.samples[index] for index in chunk.indices]
            worker.send(ScoreRequest(chunk.id, chunk.name, samples))
            if worker.has_outgoing:
                self._selector.modify(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _wait(self, round_: Round) -> None:
        """Wait until something arrives or a deadline passes, and handle it."""
        longest = 0.05 if self._dying else 60.0
        until = min(time.monotonic() + longest, *(w.deadline for w in self._workers))
        for key, events in self._selector.select(max(until - time.monotonic(), 0.0)):
            worker = key.data
            if worker not in self._workers:  # dismissed a moment ago
                continue
            if key.fd != worker.output:
                self._converse(round_, worker, events)
            elif not worker.drain():
                self._selector.unregister(key.fd)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            self._time_out(round_, worker)
        self._reap()

    def _converse(self, round_: Round, worker: Worker, events: int) -> None:
        """Write queued messages to a worker, and read its replies; an invalid reply ends the worker."""
        if events & selectors.EVENT_WRITE:
            worker.flush()
            if not worker.has_outgoing:
                self._selector.modify(worker.socket, selectors.EVENT_READ, worker)
        if not events & selectors.EVENT_READ:
            return
        lines, closed = worker.receive()
        try:
            for line in lines:
                self._take(round_, worker, line)
        except InvalidWorkerReplyError as error:
            round_.counts["invalid"] += 1
            self._lose(round_, worker, f"the worker sent {error}")
            return
        if closed:
            worker.drain()
            output = worker.last_output()
            self._lose(round_, worker, worker.exit_reason() + (f": {output}" if output else ""))

    def _take(self, round_: Round, worker: Worker, line: bytes) -> None:
        """Handle one line from a worker: the reward is loaded, cannot be loaded, failed, or has scored."""
        chunk = worker.assigned
        reply = parse_reply(line, chunk, self.config)
        if isinstance(reply, Broken):
            raise RewardLoadError(explain_failure(reply.text, self.config.keep_env))
        if isinstance(reply, Loaded):
            self._failed_starts, worker.loaded = 0, True
            chunk.loaded, chunk.batched, chunk.concurrency = True, reply.batched, reply.concurrency
        elif isinstance(reply, Failed):
            round_.counts["timeout"] += not reply.error
            self._fail(round_, chunk, reply.reason, reply.error, offset=reply.offset)
        else:
            for result in reply.results:
                self._settle(round_, chunk, result, reply.offset)
                worker.scored += 1
        extra = (len(chunk.indices) - 1) / 10 if chunk.batched else 0.0
        grace = ASYNC_GRACE if chunk.concurrency > 1 else 0.0
        worker.deadline = time.monotonic() + self.config.timeout * (1 + extra) + grace
        if not chunk.indices:
            worker.assigned, worker.deadline = None, math.inf

    def _settle(self, round_: Round, chunk: Chunk, result: RewardResult, offset: int = 0) -> None:
        """Give a sample of the chunk its result, or queue it again."""
        index = chunk.indices.pop(offset)
        if result.failed:
            round_.attempts[index] += 1
            if round_.attempts[index] <= round_.retries:
                self._retry(round_, chunk, index)
                return
            result = dataclasses.replace(result, reason=explain_failure(result.reason, self.config.keep_env))
            if self.config.failed == "zero":
                zeros = (0.0,) * len(self.config.used)
                result = dataclasses.replace(result, score=0.0, components=zeros)
        round_.results[index] = result

    def _retry(self, round_: Round, chunk: Chunk, index: int) -> None:
        """Queue a sample again; samples of an async reward are joined, so that they are scored
        concurrently."""
        round_.counts["retry"] += 1
        last = round_.queue[-1] if round_.queue else None
        joins = chunk.concurrency > 1 and last and last.is_retry and last.name == chunk.name
        if joins and len(last.indices) < MAX_CHUNK:
            last.indices.append(index)
        else:
            round_.queue.append(Chunk(chunk.name, [index], is_retry=True))

    def _fail(self, round_: Round, chunk: Chunk, reason: str, error: str = "", *, offset: int = 0) -> None:
        """Fail the current sample. A list that failed is first split, to find the sample at fault."""
        if chunk.batched and len(chunk.indices) > 1:
            self._warn.of_list(error, reason)
            self._take_apart(round_, chunk, len(chunk.indices))
        else:
            self._settle(round_, chunk, RewardResult(math.nan, Outcome.FAILED, reason, error=error), offset)

    def _take_apart(self, round_: Round, chunk: Chunk, count: int) -> None:
        """Queue the first samples of a chunk one by one."""
        round_.queue.extend(Chunk(chunk.name, [index]) for index in chunk.indices[:count])
        del chunk.indices[:count]

    def _lose(self, round_: Round, worker: Worker, reason: str) -> None:
        """End a worker, fail its current sample (retry several one by one), and keep the others."""
        chunk = worker.assigned
        self._dismiss(worker)
        if chunk is None:
            return
        if chunk.loaded and chunk.concurrency > 1 and len(chunk.indices) > 1:
            self._take_apart(round_, chunk, chunk.concurrency)
        elif chunk.loaded:
            self._fail(round_, chunk, reason)
        elif not worker.loaded:  # else it was idle and died just before the request
            self._failed_starts += 1
            if self._failed_starts >= MAX_STARTS:
                text = f"the reward {chunk.name} cannot be loaded: {reason}"
                raise RewardLoadError(explain_failure(text, self.config.keep_env))
        if chunk.indices or not chunk.loaded:
            round_.queue.appendleft(Chunk(chunk.name, chunk.indices))

    def _time_out(self, round_: Round, worker: Worker) -> None:
        if worker.assigned.loaded:
            round_.counts["timeout"] += 1
            self._lose(round_, worker, f"took longer than {self.config.timeout:g} s (reward.timeout)")
        else:
            seconds = self.config.start_timeout
            self._lose(round_, worker, f"loading it took longer than {seconds:g} s (reward.start_timeout)")

    def _start(self) -> Worker:
        worker = Worker(self.config.keep_env, self._write_log)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        worker.send(self._setup)
        return worker

    def _dismiss(self, worker: Worker) -> None:
        """Stop using a worker; `_reap` waits for its end."""
        self._workers.remove(worker)
        for file in (worker.socket, worker.output):
            with contextlib.suppress(KeyError):  # the output unregisters itself at its end
                self._selector.unregister(file)
        worker.assigned, worker.deadline = None, math.inf
        worker.terminate()
        self._dying.append(worker)

    def _reap(self) -> None:
        self._dying = [worker for worker in self._dying if not worker.reap()]

    def _write_log(self, text: bytes) -> None:
        if self._log is not None and self._logged < LOG_BYTES:
            shown = mask_kept(text.decode(errors="surrogateescape"), os.environ, self.config.keep_env)
            data = shown.encode(errors="surrogateescape")
            with contextlib.suppress(OSError), self._log.open("ab") as file:  # its disk may be full
                file.write(data[: LOG_BYTES - self._logged])
            self._logged += len(data)
