"""Wall time of a run by phase, over all its starts: the metrics time/PHASE and goodput/PHASE."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.profiler

from jaxrl_llm.host.files import replace_text

PHASES = ("rollout", "reward", "update", "checkpoint")  # whose times are in every line
STARTUP = ("import", "build", "restore", "loggers", "weights")
"""Parts of the phase "start"."""
PRODUCTIVE = ("data", "publish", "rollout", "reward", "score", "update")
"""Phases that make experience and learn from it. The others: evaluate, checkpoint, compile, profile, start
(before the first step), other, lost (since the last checkpoint before a crash)."""
FILE = "goodput.json"
WRITE_INTERVAL = 10.0  # seconds; a crash loses at most as much of the wall time, or a phase that is longer
COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, XLA or its cache


class PhaseClock:
    """Seconds by phase. All time counts once: for the innermost phase, for "compile", or for `outside`.

    The time in which the thread that made the clock traces and compiles counts as "compile"; programs that
    other threads compile meanwhile do not.

    Args:
        outside: phase of the time outside of all phases, until `begin`.
        began: time.perf_counter() from which on time counts; None = now.
    """

    def __init__(self, outside: str = "other", began: float | None = None):
        self.outside = outside
        self._seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = time.perf_counter() if began is None else began
        self._thread, self._compiling = threading.get_ident(), []
        jax.monitoring.register_event_time_span_listener(self._on_span)

    def begin(self, name: str) -> None:
        """Count the time outside of all phases for this one from now on."""
        self.charge()
        self.outside = name

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for a phase, and name it in profiles."""
        self.charge()
        self._open.append(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.charge()
            self._open.pop()

    def charge(self) -> None:
        """Count the time since the last call."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        compiling = min(sum(end - start for start, end in self._compiling), elapsed)
        self._compiling = []
        self._seconds["compile"] += compiling
        self._seconds[self._open[-1] if self._open else self.outside] += elapsed - compiling

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by phase."""
        self.charge()
        taken = {name: x for name, x in self._seconds.items() if x}
        self._seconds.clear()
        return taken

    def close(self) -> None:
        """Stop listening to JAX; a second call does nothing."""
        with contextlib.suppress(AssertionError):
            jax.monitoring.unregister_event_time_span_listener(self._on_span)

    def _on_span(self, event: str, start: float, end: float, **_: Any) -> None:
        """Collect a span of compilation; it replaces shorter spans inside it."""
        if event.startswith(COMPILE_EVENTS) and threading.get_ident() == self._thread:
            while self._compiling and self._compiling[-1][0] >= start:
                self._compiling.pop()
            self._compiling.append((start, end))


class Goodput:
    """Shares of a run's wall time, from its first start on; time between two starts is not counted.

    RUN/goodput.json keeps the seconds up to the last step, and the wall time up to the last write. After a
    crash, the time between the restored step and that write is lost.
    """

    def __init__(self, run_dir: Path):
        self.path, self.step = run_dir / FILE, 0
        self.seconds: Counter[str] = Counter()  # up to the end of `step`
        self.unfinished: Counter[str] = Counter()  # since then
        self._written = -WRITE_INTERVAL

    def resume(self, step: int, row: Mapping[str, Any]) -> None:
        """Continue the counts of earlier starts.

        Args:
            step: of the checkpoint that the run continues from; below 1 = a new run.
            row: that step's line of metrics.jsonl, {} = none.
        """
        if step < 1 or not self.path.exists():
            return
        saved = json.loads(self.path.read_text())
        known = saved["seconds"] if saved["step"] == step else _seconds_of(row)
        if known:
            self.step = step
            self.seconds.update(known)
            self.seconds["lost"] += max(saved["wall_seconds"] - sum(known.values()), 0.0)

    def add(self, seconds: Mapping[str, float], step: int | None = None) -> None:
        """Add seconds by phase; `step` is done with them, None = it is not yet."""
        self.unfinished.update(seconds)
        if step is not None:
            self.step = step
            self.seconds.update(self.unfinished)
            self.unfinished.clear()

    def metrics(self) -> dict[str, float]:
        """Return goodput/PHASE (fractions that add up to 1), goodput/productive and goodput/wall_seconds."""
        total = self.seconds + self.unfinished
        wall = sum(total.values())
        shares = {name: x / wall for name, x in sorted(total.items()) if x} if wall else {}
        productive = sum(share for name, share in shares.items() if name in PRODUCTIVE)
        metrics = {f"goodput/{name}": share for name, share in shares.items()}
        return metrics | {"goodput/productive": productive, "goodput/wall_seconds": wall}

    def write(self, now: bool = False) -> None:
        """Write the file, unless it was written less than WRITE_INTERVAL ago."""
        if now or time.perf_counter() - self._written >= WRITE_INTERVAL:
            wall = sum(self.seconds.values()) + sum(self.unfinished.values())
            saved = {"step": self.step, "wall_seconds": wall, "seconds": dict(self.seconds)}
            replace_text(self.path, json.dumps(saved), sync=False)
            self._written = time.perf_counter()


def with_start(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by phase, the parts of "start" together."""
    summed: Counter[str] = Counter()
    for name, x in seconds.items():
        summed["start" if name in STARTUP else name] += x
    return dict(summed)


def startup_line(seconds: Mapping[str, float]) -> str:
    """Return the seconds from the start of the command to the end of its first step, by phase, in a line."""
    phases = ", ".join(f"{name} {x:.1f}" for name, x in seconds.items() if x >= 0.05)
    return f"first step done {sum(seconds.values()):.1f} s after the start: {phases}"


def _seconds_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds by phase from the metrics of a step, or {}."""
    wall = row.get("goodput/wall_seconds") or 0.0
    shares = {key.removeprefix("goodput/"): x for key, x in row.items() if key.startswith("goodput/")}
    return {name: x * wall for name, x in shares.items() if name not in ("productive", "wall_seconds")}


Timer = Callable[[str], contextlib.AbstractContextManager]


class Profiler:
    """One trace of consecutive steps, written to a folder when the last of them ends.

    A profiler that fails is reported and left alone; training continues.

    Args:
        folder: RUN/profile. With several processes each writes its own, into process_N.
        steps: numbered from 1.
        message: prints a line.
        timer: counts the time that writing the trace takes.
    """

    def __init__(self, folder: Path, steps: range, message: Callable[[str], None], timer: Timer):
        several = jax.process_count() > 1
        self.folder = folder / f"process_{jax.process_index()}" if several else folder
        self.steps, self.message, self.timer, self.running = steps, message, timer, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace a step if it is one of the steps."""
        if number in self.steps and not self.running:
            self._try(self._start)
            self.running = bool(self.steps)
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                yield
        finally:
            if self.running and number == self.steps[-1]:
                self.close()

    def close(self) -> None:
        """Write a trace that is running; a second call does nothing."""
        if self.running:
            self.running = False
            with self.timer("profile"):
                self._try(jax.profiler.stop_trace)
            if self.steps:
                self.message(
                    f"profile of steps {self.steps[0]} to {self.steps[-1]}: {self.folder} (xprof --logdir "
                    f"{self.folder}, or perfetto_trace.json.gz in it at ui.perfetto.dev)"
                )
            self.steps = range(0)

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: a million events in seconds, all that fits
        jax.profiler.start_trace(self.folder, create_perfetto_trace=True, profiler_options=options)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.steps = range(0)
            self.message(
                f"warning: steps cannot be profiled ({type(error).__name__}: {error}); training continues."
            )
