"""Work of one process for all, and runs that lose one of their processes."""

import logging
import re
import time

import pytest
from distributed import start_processes
from orbax.checkpoint._src.futures.future import _SignalingThread

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import on_first, show_warnings
from jaxrl_llm.host.watch import hide_raised_errors


def test_warnings_are_lines_of_this_program(capsys):
    """Orbax and absl install handlers of their own, which would add level and module."""
    show_warnings()
    show_warnings()
    logging.getLogger("jaxrl_llm.data.loader").warning("%d rows skipped", 2)
    assert capsys.readouterr().err == "warning: 2 rows skipped\n"


def test_an_error_of_a_saving_thread_is_raised_once(caplog):
    """Orbax logs its traceback beside raising it, which a run that lost a process showed now and then."""
    absl = logging.getLogger("absl")
    filters = list(absl.filters)

    def save():
        raise OSError("disk full")

    try:
        hide_raised_errors()
        thread = _SignalingThread(send_signals=[], receive_signals=[], operation_id="0", target=save)
        thread.start()
        with pytest.raises(OSError, match="disk full"):
            thread.result()
        absl.error("another error")
    finally:
        absl.filters[:] = filters
    assert [record.getMessage() for record in caplog.records] == ["another error"]


FIRST = """
import json, socket, sys, time
import jax
from jax._src import distributed
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.processes import agree, on_first, share
from jaxrl_llm.host.start import start_host
from jaxrl_llm.host.watch import ADDRESS_KEY, _Watch, watched_processes

LATE = ("connected", "_receive", "introduce")  # its thread has no core
if sys.argv[-1] in LATE and os.environ["JAX_PROCESS_ID"] == "0":
    def late(self, *args, original=getattr(_Watch, sys.argv[2])):
        time.sleep(1.0 if sys.argv[1] == "late" else 60.0)
        return original(self, *args)
    setattr(_Watch, sys.argv[2], late)

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def raising(error):
    def work():
        calls.append(1)
        raise error
    return work

def command(argv):
    start_host()
    with watched_processes():
        if sys.argv[1] == "late":
            time.sleep(3.0 * jax.process_index())
            return
        assert share({"from": jax.process_index()}) == {"from": 0} and agree(jax.process_index()) == 1
        assert on_first(lambda: calls.append(1) or "result") == "result"
        for error in (UserError("bad"), OSError(28, "full"), RunError("over"), Odd("odd", 2)):
            try:
                on_first(raising(error))
            except Exception as raised:
                print(type(raised).__name__, raised)
        print(len(calls), flush=True)
        if sys.argv[1] == "finish" and jax.process_index() == 1:
            place = json.loads(distributed.global_state.client.blocking_key_value_get(ADDRESS_KEY, 1000))
            strangers = [socket.create_connection(("localhost", place["port"])) for _ in range(3)]
            strangers[0].sendall(b'{"token": "guess", "process": 0, "host": "x"}\\n{"lost": [1, "x", ""]}\\n')
            strangers[1].sendall(b"x" * 10_000)
            for stranger in strangers[:2]:
                try:
                    print(stranger.recv(100))
                except ConnectionResetError:
                    print(b"")
        if sys.argv[1] == "finish":
            agree(0)  # process 0 announces its end to all that are connected then
        if sys.argv[1] in ("raise", "raise late") and jax.process_index() == int(sys.argv[2]):
            time.sleep(1.0)
            raise UserError("mine alone")
        while sys.argv[1] in ("kill", "raise"):
            agree(0)  # collectives, until one is lost

calls = []
sys.exit(run_command(command, []))
"""


def test_alone_the_first_process_is_this_one():
    assert on_first(lambda: 3) == 3
    with pytest.raises(UserError, match="bad"):
        on_first(lambda: (_ for _ in ()).throw(UserError("bad")))


@pytest.mark.parametrize(
    ("victim", "late"), [(0, ""), (1, ""), pytest.param(0, "introduce", marks=pytest.mark.slow)]
)
def test_process_0_works_for_all_and_a_lost_process_is_named(victim, late):
    """Two processes; `work` runs in the first alone, its errors are raised in both, then one is killed.

    Late: process 0 is killed before its thread, which has no core, has introduced it to process 1.
    """
    running = start_processes(FIRST, 2, ["kill", late], devices=1, initialize=False)
    for process in running:
        process.wait_for("\n5\n" if process is running[0] else "\n0\n")
    start = time.monotonic()
    running[victim].process.kill()
    ends = [process.end(60) for process in running]
    assert time.monotonic() - start < 30
    odd = ("Odd odd", "RunError process 0 failed: Odd: odd")
    for i, end in enumerate(ends):
        assert end.stdout.splitlines()[:4] == [
            *("UserError bad", "OSError [Errno 28] full", "RunError over", odd[i])
        ]
    survivor = ends[1 - victim]
    assert survivor.code == 1
    expected = (  # gRPC may log, in a thread of its own, on the same line or after it
        f"error: process {victim} on .* is lost: killed, or its machine is lost. "
        f"Process {1 - victim} cannot continue without it and ends; "
        "its checkpoints are kept: start all processes again with the same command.\n"
    )
    assert re.search(expected, survivor.stderr)
    assert "Traceback" not in survivor.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "victim"), [("raise", 0), ("raise", 1), ("raise late", 0), ("raise late", 1)]
)
def test_an_error_of_one_process_ends_the_other(when, victim):
    """Late: when the other has finished and waits."""
    running = start_processes(FIRST, 2, [when, str(victim)], devices=1, initialize=False)
    ends = [process.end(60) for process in running]
    assert (ends[victim].code, ends[victim].stderr.splitlines()[-1]) == (2, "error: mine alone")
    other = ends[1 - victim]
    assert other.code == 1
    assert " has ended (UserError: mine alone). Process " in other.stderr.splitlines()[-1]
    assert "Traceback" not in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("late", ["connected", "_receive", "introduce"])
def test_processes_that_finish_before_they_know_each_other_end_too(late):
    """A run that is over at once, where the thread of process 0 has no core."""
    running = start_processes(FIRST, 2, ["late", late], devices=1, initialize=False)
    ends = [process.end(60) for process in running]
    assert [(end.code, end.stderr) for end in ends] == [(0, ""), (0, "")]


def test_processes_that_finish_end_together_whoever_else_connects():
    running = start_processes(FIRST, 2, ["finish"], devices=1, initialize=False)
    ends = [process.end(60) for process in running]
    assert [(end.code, end.stderr) for end in ends] == [(0, ""), (0, "")]
    assert ends[1].stdout.splitlines()[-2:] == ["b''", "b''"]  # closed, without a message
