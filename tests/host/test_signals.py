"""Signals from the first import to the last cleanup: the exit code, the message, no traceback."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from distributed import Running

from jaxrl_llm.host import signals
from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.signals import Interrupted, deferred, interruptible, received_signal, unwinding

SLOW_MODULE = """
import time
print("importing", flush=True)
time.sleep(60)
"""


TRAIN = ["train", "--config", "grpo_tiny.py"]
GENERATE = ["generate", "--model", "m", "--prompts", "p.jsonl", "--out", "o.jsonl"]
UNWINDS = "stopping; again = exit at once"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("module", "command", "message"),
    [
        ("jax", ["jaxrl_llm.train", *TRAIN[1:]], UNWINDS),  # a recipe imports jax
        ("jax", ["jaxrl_llm", *TRAIN], UNWINDS),
        ("jax", ["jaxrl_llm", *GENERATE], UNWINDS),
        ("shlex", ["jaxrl_llm", *GENERATE], "exit"),  # the command's flags are not read yet
    ],
    ids=["module", "train", "generate", "before the command"],
)
def test_a_signal_while_a_module_is_imported_ends_the_command(tmp_path, number, module, command, *, message):
    (tmp_path / f"{module}.py").write_text(SLOW_MODULE)
    running = Running(["-m", *command], {**os.environ, "PYTHONPATH": str(tmp_path)})
    running.wait_for("importing\n")
    running.process.send_signal(number)
    name = next(word for word in ("train", "generate") if word in f"{command}")
    first = f"jaxrl_llm {name}: starting\n"
    assert running.end(20) == (128 + number, "importing\n", f"{first}{number.name}: {message}\n")


COMMAND = """
import ctypes, os, signal, sys, time
from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.signals import HANDLED, deferred, received_signal
def compile():  # holds the main thread outside of Python, as XLA does, until the other end writes
    wakes = os.open(sys.argv[2], os.O_RDWR)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # other threads get them: none ends the read
    print("ready", flush=True)
    ctypes.CDLL(None).read(wakes, ctypes.create_string_buffer(1), 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
def command(argv):
    try:
        if sys.argv[1] == "start-up":
            print("ready", flush=True)
            time.sleep(60)  # an exception ends it
        elif sys.argv[1] == "compile":
            compile()
        else:
            with deferred("saving after this step, then stopping"):
                compile()
            print("received", received_signal(), flush=True)
            return 75
    finally:
        print("closed", flush=True)
sys.exit(run_command(command, []))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_start_up_closes_what_is_open(number):
    running = Running(["-c", COMMAND, "start-up"])
    running.wait_for("ready\n")
    running.process.send_signal(number)
    assert running.end(20) == (
        128 + number,
        "ready\nclosed\n",
        f"{number.name}: stopping; again = exit at once\n",
    )


@pytest.fixture
def compiling(tmp_path):
    """`compiling(where)`: a command in a compilation, and a function that ends it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def start(where):
        running = Running(["-c", COMMAND, where, str(fifo)])
        running.wait_for("ready\n")
        return running, lambda: fifo.write_bytes(b".")

    return start


def test_a_signal_in_a_compilation_is_announced_at_once_and_obeyed_afterwards(compiling):
    running, end = compiling("compile")
    running.process.send_signal(signal.SIGINT)
    running.wait_for("SIGINT: stopping; again = exit at once", "stderr")
    assert "closed" not in running.peek("stdout")
    end()
    assert running.end(20)[:2] == (130, "ready\nclosed\n")


@pytest.mark.parametrize("where", ["compile", "step"])
def test_a_second_signal_in_a_compilation_exits_at_once(compiling, where):
    running, _ = compiling(where)
    running.process.send_signal(signal.SIGINT)
    running.wait_for("again = exit at once", "stderr")
    running.process.send_signal(signal.SIGTERM)
    code, out, err = running.end(20)
    assert (code, out) == (128 + signal.SIGTERM, "ready\n") and err.count("\n") == 1


def test_a_deferred_signal_lets_the_work_finish(compiling):
    running, end = compiling("step")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("again = exit at once\n", "stderr")
    end()
    message = "SIGTERM: saving after this step, then stopping; again = exit at once\n"
    assert running.end(20) == (75, "ready\nreceived 15\nclosed\n", message)


PANEL = """
import os, signal
from jaxrl_llm.host.signals import deferred, handled_signals, unwinding
from jaxrl_llm.report.progress import Progress
with unwinding(), deferred("saving after this step, then stopping"):
    panel = Progress("rich", 50, 10)
    panel.live.refresh()
    os.kill(os.getpid(), signal.SIGINT)
    with handled_signals():  # its end waits for the announcement
        pass
    panel.close()
"""


def test_the_announcement_stands_above_the_live_panel():
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", PANEL], stdout=child, stderr=child, env=env)
    os.close(child)
    data = b""
    try:
        while more := os.read(parent, 1 << 16):
            data += more
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0, data
    text = data.decode()
    message = "SIGINT: saving after this step, then stopping; again = exit at once"
    assert text.count(message) == 1
    assert "step 10/50" in text[: text.index(message)] and "step 10/50" in text[text.index(message) :]


def test_an_interrupted_command_shows_the_cursor_again(monkeypatch):
    """Also where the signal arrives before there is anything to close the live panel."""
    written = []
    monkeypatch.setattr(signals.os, "isatty", lambda fd: True)
    monkeypatch.setattr(signals.os, "write", lambda fd, data: written.append((fd, data)))

    def command(argv):
        raise Interrupted(130)

    with pytest.raises(Interrupted):
        run_command(command, [])
    assert written == [(1, b"\x1b[?25h")]


def test_a_signal_inside_a_finalizer_has_no_traceback(monkeypatch):
    class Closed:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    other = ValueError("of another kind")
    with unwinding():
        Closed(Interrupted(143))
        Closed(other)
    assert reported == [other]


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in signals.HANDLED]
    with unwinding(), deferred("later"):
        assert [signal.getsignal(number) for number in signals.HANDLED] != before
    assert [signal.getsignal(number) for number in signals.HANDLED] == before
    assert received_signal() == 0


def test_interrupted_in_process_is_an_exit():
    with pytest.raises(SystemExit) as error, unwinding():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert isinstance(error.value, Interrupted) and error.value.code == 143


def test_in_a_notebook_no_interrupt_ends_the_process(capsys):
    """The process holds the user's variables; here it is pytest's own."""
    send = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        send()
        time.sleep(5)
    with pytest.raises(KeyboardInterrupt), interruptible(), unwinding(), deferred("saving after this step"):
        send()
        time.sleep(0.1)
        assert received_signal() == signal.SIGINT
        send()
        time.sleep(5)
    assert "SIGINT: saving after this step; again = stop at once\n" in capsys.readouterr().err
    assert received_signal() == 0


def test_another_thread_than_the_main_one_changes_no_handler():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with unwinding(), deferred("later"):
            seen.append((signal.getsignal(signal.SIGINT), received_signal()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, 0)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_signals_of_a_forked_child_are_its_own():
    with unwinding(), deferred("later"):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b".")
            time.sleep(60)
            os._exit(0)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        time.sleep(0.1)
        assert received_signal() == 0


SLOW_THREAD = """
import os, signal, threading, time
from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.signals import install_handlers, interrupts_call
read = os.read
def late(fd, count):  # as on a machine that has no core for the thread
    data = read(fd, count)
    time.sleep(0.5)
    return data
os.read = late
send = lambda: os.kill(os.getpid(), signal.SIGINT)
install_handlers()
"""
CHAT = """
def command(argv):
    with interrupts_call(lambda: print("stopped", flush=True)):
        send()
        {more}
    print("goes on", flush=True)
    time.sleep({rest})  # the thread of a signal is late by half a second
run_command(command, [])
"""


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (CHAT.format(more="", rest=0.7), (0, "stopped\ngoes on\n")),
        (CHAT.format(more="threading.Timer(0.2, send).start()", rest=20), (130, "stopped\n")),
        ("send()\nprint('goes on')", (130, "")),
    ],
    ids=["handled by an action", "just after an action", "imports"],
)
def test_the_main_thread_obeys_a_signal_however_late_the_thread_reads_it(script, end):
    assert Running(["-c", SLOW_THREAD + script]).end(60)[:2] == end
