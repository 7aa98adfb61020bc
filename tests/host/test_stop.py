"""Stopping a run: signals and the wall-clock budget, agreed on by all processes."""

import os
import signal
import time

import pytest
from distributed import start_processes
from slow_cases import with_slow

from jaxrl_llm.host.stop import EXIT_STOPPED, Stop


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def stop():
    made = []

    def make(seconds: float = 0.0) -> Stop:
        made.append(Stop(seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_once(stop, capfd, number):
    asked = stop()
    assert asked.requested(0) == asked.signalled() == ""
    os.kill(os.getpid(), number)
    assert asked.requested(1) == asked.signalled() == number.name
    assert asked.requested(2) == number.name
    asked.close()  # what is announced is announced by then
    assert (
        capfd.readouterr().err
        == f"{number.name}: saving after this step, then stopping; again = exit at once\n"
    )


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    Stop().close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_budget_leaves_room_for_the_longest_step_and_the_save(stop, clock):
    asked = stop(100.0)
    clock[0] += 20  # building the model counts, but it is no step
    assert asked.requested(0) == ""
    clock[0] += 30
    assert asked.requested(1) == ""  # 50 gone + 30 for a step
    clock[0] += 10
    assert asked.requested(2, reserve=9.5) == ""  # 60 + 30 + 9.5
    assert asked.requested(2, reserve=10.0) == "wall clock 100 s"
    assert asked.signalled() == ""
    clock[0] += 10
    assert asked.requested(3) == "wall clock 100 s"  # 70 + 30


def test_no_budget_never_ends(stop, clock):
    asked = stop()
    clock[0] += 1e9
    assert asked.requested(0, reserve=1e9) == ""


LOOP = """
import signal, sys, time
from jaxrl_llm.host.stop import EXIT_STOPPED, Stop
stop = Stop(float(sys.argv[1]))
stop._start -= 0.4 * jax.process_index()  # as if this process had started earlier
print("ready", flush=True)
for step in range(100_000):
    if reason := stop.requested(step):
        print(step, reason, flush=True)
        sys.exit(EXIT_STOPPED)
    time.sleep(0.01 * (1 + jax.process_index()))
"""


@pytest.mark.parametrize("cause", with_slow(["SIGTERM", "wall clock"], {"wall clock"}))
def test_processes_stop_at_the_same_step(cause):
    """One of two gets the signal, or runs out of time first: both say the same, at the same step."""
    running = start_processes(LOOP, 2, ["0" if cause == "SIGTERM" else "1.5"], devices=1)
    if cause == "SIGTERM":
        for each in running:
            each.wait_for("ready")
        running[0].process.send_signal(signal.SIGTERM)
    ends = [each.end(60) for each in running]
    assert [end.code for end in ends] == [EXIT_STOPPED] * 2, ends
    first, second = (end.stdout.splitlines()[1:] for end in ends)
    assert first == second
    assert len(first) == 1 and cause in first[0]
