"""Scores responses in worker processes that can be killed.

A sample that raises, hangs, exits or returns nonsense is tried again and then counts as failed; no other
sample is touched. One thread, one selector loop, no locks held while a reward runs.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards import load
from jaxrl_llm.rewards.process import Worker
from jaxrl_llm.rewards.sample import Result, RewardConfig, RewardLoadError, Sample
from jaxrl_llm.rewards.summary import check_failures, summarize

GRACE = 0.5  # seconds between SIGTERM and SIGKILL
MAX_CHUNK = 64  # samples of one message
MAX_STARTS = 3  # workers in a row that may die before they have loaded the reward
LOG_BYTES = 1 << 20  # of the workers' output kept in the log file


@dataclass
class Chunk:
    """Samples that go to a worker in one message; answered ones leave from the front."""

    name: str
    indices: list[int]
    ready: bool = False  # the reward is loaded
    batched: bool = False  # the reward takes them as one list


@dataclass
class Round:
    """One call of `score`."""

    samples: Sequence[Sample]
    queue: deque[Chunk]
    results: list[Result | None]
    attempts: list[int]
    counts: Counter = field(default_factory=Counter)

    @property
    def finished(self) -> bool:
        return all(result is not None for result in self.results)


class RewardPool:
    """Worker processes started when first needed. A context manager; `close` leaves no process behind.

    Workers die with the thread that started them (Linux), so score from threads that live on.
    """

    def __init__(self, config: RewardConfig, log: Path | None = None):
        """`log`: file that receives what rewards print, up to 1 MiB. Raises RewardLoadError on a bad name."""
        for name in (config.name, *(name for name, _ in config.shaping)):
            load.check(name)
        self.config = config
        self.metrics: dict[str, float] = {}
        self._log = log
        self._logged = 0
        self._workers: list[Worker] = []
        self._dying: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._failed_starts = 0

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: Sequence[Sample]) -> list[Result]:
        """Results in the order of the samples; `metrics` then speaks of this call.

        Raises RewardLoadError if the reward cannot be found or imported, RewardFailureError if more than
        `max_failed_fraction` of the samples failed.
        """
        with self._lock:
            started = time.monotonic()
            round_ = self._plan(samples)
            try:
                while not round_.finished:
                    self._dispatch(round_)
                    self._wait(round_)
            finally:
                for worker in [w for w in self._workers if w.assigned is not None]:
                    self._dismiss(worker)  # interrupted: its answers would belong to nobody
            results = [result for result in round_.results if result is not None]
            self.metrics = summarize(results) | {
                "reward/retries": float(round_.counts["retry"]),
                "reward/timeouts": float(round_.counts["timeout"]),
                "reward/wall_seconds": time.monotonic() - started,
            }
        check_failures(results, self.config.max_failed_fraction)
        return results

    def close(self) -> None:
        """Ends all workers and waits until they are gone."""
        with self._lock:
            for worker in list(self._workers):
                self._dismiss(worker)
            while self._dying:
                self._reap()
                time.sleep(0.002)

    def _plan(self, samples: Sequence[Sample]) -> Round:
        """Chunks of neighbours that share a reward, small enough to keep every worker busy."""
        size = min(max(math.ceil(len(samples) / self.config.workers), 1), MAX_CHUNK)
        chunks: list[Chunk] = []
        for index, sample in enumerate(samples):
            name = load.resolve(self.config.name, sample.source, sample.columns)
            if not chunks or chunks[-1].name != name or len(chunks[-1].indices) == size:
                chunks.append(Chunk(name, []))
            chunks[-1].indices.append(index)
        return Round(samples, deque(chunks), [None] * len(samples), [0] * len(samples))

    def _dispatch(self, round_: Round) -> None:
        """A chunk to every idle worker; dead and worn-out workers are replaced first."""
        for worker in [w for w in self._workers if w.assigned is None]:
            if worker.process.poll() is not None or worker.scored >= self.config.recycle:
                self._dismiss(worker)
        while round_.queue:
            worker = next((w for w in self._workers if w.assigned is None), None)
            if worker is None and len(self._workers) == self.config.workers:
                return
            worker = worker or self._start()
            chunk = round_.queue.popleft()
            worker.assigned = chunk
            worker.deadline = time.monotonic() + self.config.start_timeout
            worker.send((chunk.name, [round_.samples[index] for index in chunk.indices]))
            if worker.wants_to_write:
                self._selector.modify(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _wait(self, round_: Round) -> None:
        """Until something arrives or a deadline passes; then deals with it."""
        until = min(w.deadline for w in self._workers)
        if self._dying:
            until = min(until, time.monotonic() + 0.05)
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
        if events & selectors.EVENT_WRITE:
            worker.flush()
            if not worker.wants_to_write:
                self._selector.modify(worker.socket, selectors.EVENT_READ, worker)
        if not events & selectors.EVENT_READ:
            return
        answers, ended = worker.receive()
        for answer in answers:
            if worker.assigned is None:  # it speaks unasked
                ended = True
                break
            self._take(round_, worker, answer)
        if ended:
            worker.drain()
            words = worker.last_words()
            self._lose(round_, worker, worker.how_it_ended() + (f": {words}" if words else ""))

    def _take(self, round_: Round, worker: Worker, answer: dict[str, Any]) -> None:
        """One line from a worker: the reward is loaded, cannot be loaded, failed, or has scored."""
        chunk = worker.assigned
        if "broken" in answer:
            raise RewardLoadError(f"the reward {chunk.name} cannot be loaded: {answer['broken']}")
        if "ready" in answer:
            self._failed_starts = 0
            chunk.ready, chunk.batched = True, bool(answer["ready"])
        elif "error" in answer:
            self._fail(round_, chunk, answer["error"])
        else:
            for score, outcome, reason, components in answer["results"]:
                found = Result(_nan(score), Outcome(outcome), reason, answer["seconds"], tuple(components))
                self._settle(round_, chunk, found)
                worker.scored += 1
        extra = (len(chunk.indices) - 1) / 10 if chunk.batched else 0.0
        worker.deadline = time.monotonic() + self.config.timeout * (1 + extra)
        if not chunk.indices:
            worker.assigned, worker.deadline = None, math.inf

    def _settle(self, round_: Round, chunk: Chunk, result: Result) -> None:
        """The first sample of the chunk has its result, or is tried again."""
        index = chunk.indices.pop(0)
        if result.outcome is Outcome.FAILED and not result.abstained:
            round_.attempts[index] += 1
            if round_.attempts[index] <= self.config.retries:
                round_.counts["retry"] += 1
                round_.queue.append(Chunk(chunk.name, [index]))
                return
            if self.config.failed == "zero":
                result = Result(0.0, Outcome.FAILED, result.reason, result.seconds)
        round_.results[index] = result

    def _fail(self, round_: Round, chunk: Chunk, reason: str) -> None:
        """The sample at work failed. A list that failed is taken apart first: it hides the culprit."""
        if chunk.batched and len(chunk.indices) > 1:
            round_.queue.extend(Chunk(chunk.name, [index]) for index in chunk.indices)
            chunk.indices.clear()
        else:
            self._settle(round_, chunk, Result(math.nan, Outcome.FAILED, reason))

    def _lose(self, round_: Round, worker: Worker, reason: str) -> None:
        """A worker died: blames the sample at work, gives the others to another worker."""
        chunk = worker.assigned
        self._dismiss(worker)
        if chunk is None:
            return
        if chunk.ready:
            self._fail(round_, chunk, reason)
        else:
            self._failed_starts += 1
            if self._failed_starts >= MAX_STARTS:
                raise RewardLoadError(f"the reward {chunk.name} cannot be loaded: {reason}")
        if chunk.indices:
            round_.queue.appendleft(Chunk(chunk.name, chunk.indices))

    def _time_out(self, round_: Round, worker: Worker) -> None:
        if worker.assigned.ready:
            round_.counts["timeout"] += 1
            self._lose(round_, worker, f"took longer than {self.config.timeout:g} s")
        else:
            seconds = self.config.start_timeout
            self._lose(round_, worker, f"loading it took longer than {seconds:g} s (reward.start_timeout)")

    def _start(self) -> Worker:
        worker = Worker(self.config, self._write_log)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        return worker

    def _dismiss(self, worker: Worker) -> None:
        """Out of service now; `_reap` sees it off."""
        self._workers.remove(worker)
        for file in (worker.socket, worker.output):
            with contextlib.suppress(KeyError):  # the output unregisters itself at its end
                self._selector.unregister(file)
        worker.assigned, worker.deadline = None, math.inf
        worker.terminate(GRACE)
        self._dying.append(worker)

    def _reap(self) -> None:
        self._dying = [worker for worker in self._dying if not worker.reap()]

    def _write_log(self, text: bytes) -> None:
        if self._log is not None and self._logged < LOG_BYTES:
            with self._log.open("ab") as file:
                file.write(text[: LOG_BYTES - self._logged])
            self._logged += len(text)


def _nan(score: float | None) -> float:
    return math.nan if score is None else float(score)
