"""The worker process: reads chunks of samples from a socket, answers a line of JSON a sample.

It is started by process.py and trusted with nothing: only plain JSON goes back, and whatever a reward
does (raise, hang, print, exit) costs one sample at most.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.load import load
from jaxrl_llm.rewards.sample import ABSTAINED, RewardConfig, RewardLoadError, Sample
from jaxrl_llm.rewards.signatures import Scorer, Verdict, judge

PR_SET_PDEATHSIG = 1
MAX_REASON = 300  # characters


def main(fd: int, parent: int) -> None:
    """Serves chunks until the parent closes the socket or dies."""
    _die_with(parent)
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # what a reward starts must not keep the line open
    me = os.getpid()
    config: RewardConfig = _receive(connection)
    _limit_memory(config.memory_gb)
    scorers: dict[str, Scorer] = {}
    while (message := _receive(connection)) is not None:
        name, samples = message
        try:
            used = [(config.weight, _scorer(name, scorers, config))]
            used += [(weight, _scorer(extra, scorers, config)) for extra, weight in config.shaping]
        except BaseException as error:
            text = str(error) if isinstance(error, RewardLoadError) else traceback.format_exc(limit=-3)
            _send(connection, {"broken": f"{text}"[-2000:]})
            continue
        batched = any(scorer.batched for _, scorer in used)
        _send(connection, {"ready": batched})
        groups = [samples] if batched else [[sample] for sample in samples]
        for group in groups:
            answer = _score(group, used, config.correct_at)
            if os.getpid() != me:  # a reward forked, and its child came back here
                os._exit(0)
            _send(connection, answer)
        sys.stdout.flush()


def _score(group: list[Sample], used: list[tuple[float, Scorer]], correct_at: float) -> dict[str, Any]:
    """{"results": [[score, outcome, reason, components], ...], "seconds"}, or {"error"} of a failed call."""
    started = time.perf_counter()
    try:
        columns = [(weight, scorer, scorer.call(group)) for weight, scorer in used]
        for _, _, raws in columns:
            if len(raws) != len(group):
                raise UserError(f"returned {len(raws)} scores for {len(group)} samples")
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: they are the reward's, not ours
        return {"error": _describe(error)}
    rows = [[(weight, scorer, raws[i]) for weight, scorer, raws in columns] for i in range(len(group))]
    results = [_combine(row, correct_at) for row in rows]
    return {"results": results, "seconds": (time.perf_counter() - started) / len(group)}


def _combine(row: list[tuple[float, Scorer, Any]], correct_at: float) -> list[Any]:
    """Weighted sum; the first reward says correct or wrong; a shaping reward that abstains adds nothing."""
    try:
        verdicts: list[tuple[float, Verdict]] = [
            (w, judge(raw, scorer, correct_at)) for w, scorer, raw in row
        ]
    except Exception as error:  # the value came from foreign code and may be any object
        return [None, Outcome.FAILED, _describe(error), []]
    first, outcome = verdicts[0][1]
    if first is None:
        return [None, Outcome.FAILED, ABSTAINED, []]
    scores = [0.0 if score is None else score for _, (score, _) in verdicts]
    return [sum(w * score for (w, _), score in zip(verdicts, scores, strict=True)), outcome, "", scores]


def _scorer(name: str, scorers: dict[str, Scorer], config: RewardConfig) -> Scorer:
    if name not in scorers:
        scorers[name] = load(name, config)
    return scorers[name]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


def _die_with(parent: int) -> None:
    """SIGKILL for us when the parent's thread that started us ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _limit_memory(gigabytes: float) -> None:
    if sys.platform == "linux":
        import resource

        limit = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(connection: socket.socket) -> Any:
    """The next pickled message; None when the parent has closed."""
    header = _exactly(connection, 4)
    return pickle.loads(_exactly(connection, struct.unpack("!I", header)[0])) if header else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
