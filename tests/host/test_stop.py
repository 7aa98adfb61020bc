"""Stopping: one signal asks, two insist, the budget leaves room, and all processes agree."""

import os
import signal
import time

import pytest
from distributed import Running, start_processes

from jaxrl_llm.host.stop import EXIT_STOPPED, Stop


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""
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
    assert asked.requested(0) is None
    os.kill(os.getpid(), number)
    assert asked.requested(1) == number.name
    assert asked.requested(2) == number.name
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
    assert asked.requested(0) is None
    clock[0] += 30
    assert asked.requested(1) is None  # 50 gone + 30 for a step
    clock[0] += 10
    assert asked.requested(2, reserve=9.5) is None  # 60 + 30 + 9.5
    assert asked.requested(2, reserve=10.0) == "wall clock 100 s"
    clock[0] += 10
    assert asked.requested(3) == "wall clock 100 s"  # 70 + 30


def test_no_budget_never_ends(stop, clock):
    asked = stop()
    clock[0] += 1e9
    assert asked.requested(0, reserve=1e9) is None


def test_negative_budget_is_refused():
    with pytest.raises(ValueError, match="max_runtime_seconds is -1"):
        Stop(-1)


INSIST = """
import sys, time
from jaxrl_llm.signals import Stop
stop = Stop()
print("ready", flush=True)
time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_exits_at_once(number):
    running = Running(["-c", INSIST])
    wait_for(running, "ready")
    running.process.send_signal(number)
    while "saving after this step" not in running.peek("stderr"):
        time.sleep(0.02)
    running.process.send_signal(number)
    assert running.end(20).code == 128 + number


LOOP = """
import signal, sys, time
from jaxrl_llm.signals import EXIT_STOPPED, Stop
stop = Stop(float(sys.argv[1]))
stop._start -= 0.4 * jax.process_index()  # as if this process had started earlier
print("ready", flush=True)
for step in range(100_000):
    if reason := stop.requested(step):
        print(step, reason, flush=True)
        sys.exit(EXIT_STOPPED)
    time.sleep(0.01 * (1 + jax.process_index()))
"""


@pytest.mark.parametrize("cause", ["SIGTERM", "wall clock"])
def test_processes_stop_at_the_same_step(cause):
    """One of two gets the signal, or runs out of time first: both say the same, at the same step."""
    running = start_processes(LOOP, 2, ["0" if cause == "SIGTERM" else "1.5"], devices=1)
    if cause == "SIGTERM":
        for each in running:
            wait_for(each, "ready")
        running[0].process.send_signal(signal.SIGTERM)
    ends = [each.end(60) for each in running]
    assert [end.code for end in ends] == [EXIT_STOPPED] * 2, ends
    first, second = (end.stdout.splitlines()[1:] for end in ends)
    assert first == second
    assert len(first) == 1 and cause in first[0]


def wait_for(running: Running, text: str) -> None:
    while text not in running.peek("stdout"):
        assert running.process.poll() is None, running.end()
        time.sleep(0.02)
