"""Profile of some steps: a trace of jax.profiler, which xprof and Perfetto open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

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
