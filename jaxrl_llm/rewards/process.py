"""The trainer's end of one worker process: start, send, receive, kill. Never blocks.

Workers are started with subprocess, not multiprocessing: fork is unsafe beside JAX's threads, and spawn
would import the training script (and so jax) again in every worker.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.child import pack_message
from jaxrl_llm.rewards.environment import worker_environment
from jaxrl_llm.rewards.messages import MAX_LINE
from jaxrl_llm.user_file import kill_group, python_command

READ_BYTES = 1 << 16
MAX_READS = 16  # in a row, of one file: a flood must not keep the trainer from everything else
TAIL = 2000  # bytes of output kept for error messages
LAST_RESORT = 5.0  # seconds after SIGTERM in which a supervisor must have killed all its processes


class Worker:
    """One process. `assigned`, `deadline`, `loaded` and `scored` belong to the pool."""

    def __init__(self, keep_env: tuple[str, ...], on_output: Callable[[bytes], None]):
        # The process: a socket for messages and a pipe for output, without secrets in its environment.
        ours, theirs = socket.socketpair()
        self.output, write_end = os.pipe()
        command = python_command("jaxrl_llm.rewards.worker", "main", theirs.fileno(), os.getpid())
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                env=worker_environment(dict(os.environ), keep_env),
                start_new_session=True,  # a separate process group: Ctrl-C does not reach it
            )
        # Our ends of both do not block.
        os.close(write_end)
        os.set_blocking(self.output, False)
        ours.setblocking(False)
        self.socket = ours
        self.on_output = on_output
        self.tail = b""
        self.loaded = False  # it has loaded a reward
        self.scored = 0
        self.assigned: Any = None
        self.deadline = float("inf")
        self.kill_at = float("inf")
        self._outgoing = memoryview(b"")
        self._incoming = b""

    @property
    def has_outgoing(self) -> bool:
        """True if `flush` has something left to write."""
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        """Queue a message and write as much as the socket accepts; `flush` writes the rest."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing = memoryview(b"".join([self._outgoing, pack_message(body)]))
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket accepts now."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            return
        except OSError:  # it died; `receive` will see the end
            self._outgoing = memoryview(b"")

    def receive(self) -> tuple[list[bytes], bool]:
        """Return (lines that have arrived, whether the connection is closed).

        Of a line that grows beyond what any reply takes, the beginning is returned as a line.
        """
        data, closed = _read_available(self.socket.fileno())
        *lines, rest = (self._incoming + data).split(b"\n")
        if len(rest) > MAX_LINE:
            lines, rest = [*lines, rest], b""
        self._incoming = rest
        return lines, closed

    def drain(self) -> bool:
        """Read the worker's output; return False after it has closed its output."""
        data, closed = _read_available(self.output)
        if data:
            self.tail = (self.tail + data)[-TAIL:]
            self.on_output(data)
        return not closed

    def last_output(self) -> str:
        """Return the end of the worker's output, one line, for an error message."""
        return " ".join(self.tail.decode(errors="replace").split())[-200:]

    def exit_reason(self) -> str:
        """Return why the connection is closed."""
        try:
            code = self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its connection"
        if code < 0:
            known = -code in list(signal.Signals)
            name = signal.Signals(-code).name if known else f"signal {-code}"
            return f"the worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"the worker exited with code {code}"

    def terminate(self) -> None:
        """Signal the supervisor to end all its processes; `reap` waits for it."""
        self.process.terminate()
        self.kill_at = time.monotonic() + LAST_RESORT

    def reap(self) -> bool:
        """Return True when the process is gone and its files are closed."""
        if self.process.poll() is None:
            if time.monotonic() < self.kill_at:
                return False
            kill_group(self.process.pid)
            self.process.wait()
        kill_group(self.process.pid)  # on systems without a supervisor
        self.socket.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1
        return True


def _read_available(fd: int) -> tuple[bytes, bool]:
    """Return (bytes that have arrived, at most MAX_READS reads; whether the other end is closed)."""
    parts: list[bytes] = []
    closed = False
    try:
        while len(parts) < MAX_READS and not closed:
            parts.append(os.read(fd, READ_BYTES))
            closed = not parts[-1]
    except BlockingIOError:
        pass
    except OSError:  # the connection was reset
        closed = True
    return b"".join(parts), closed
