"""The parent's end of one worker process: start, send, receive, kill. Never blocks.

Workers are started with subprocess, not multiprocessing: fork is unsafe beside JAX's threads, and spawn
would import the training script (and so jax) again in every worker.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.sample import RewardConfig

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrl_llm.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
SECRET_NAME = re.compile(
    r"(^|_)(KEYS?|TOKENS?|PAT|AUTH|CREDENTIALS?)(_|$)|APIKEY|PASSW(OR)?D|PASSPHRASE|SECRET",
    re.I,
)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")  # a URL with a password in it
MAX_LINE = 1 << 24  # bytes of an answer; more is a worker gone wild
TAIL = 2000  # bytes of output kept for error messages


class Worker:
    """One process. `assigned` and `deadline` belong to the pool."""

    def __init__(self, config: RewardConfig, on_output: Callable[[bytes], None]):
        ours, theirs = socket.socketpair()
        self.output, write_end = os.pipe()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        command = [sys.executable, "-P", "-c", BOOT, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                env=worker_environment(dict(os.environ), config.keep_env),
                start_new_session=True,  # a group of its own: killed whole, and Ctrl-C does not reach it
            )
        os.close(write_end)
        os.set_blocking(self.output, False)
        ours.setblocking(False)
        self.socket = ours
        self.on_output = on_output
        self.tail = b""
        self.scored = 0
        self.assigned: Any = None
        self.deadline = float("inf")
        self.kill_at = float("inf")
        self._outgoing = b""
        self._incoming = b""
        self.send(config)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        """Queues a message; `flush` writes what the socket takes."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing += struct.pack("!I", len(body)) + body
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            return
        except OSError:  # it died; `receive` will see the end
            self._outgoing = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """(answers that have arrived, whether the line is dead or speaks nonsense)."""
        ended = False
        try:
            while part := self.socket.recv(1 << 16):
                self._incoming += part
                if len(self._incoming) > MAX_LINE:
                    return [], True
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self._incoming = self._incoming.split(b"\n")
        try:
            return [json.loads(line) for line in lines], ended
        except ValueError:
            return [], True

    def drain(self) -> bool:
        """Reads what the worker printed; False when it has closed its output."""
        try:
            while part := os.read(self.output, 1 << 16):
                self.tail = (self.tail + part)[-TAIL:]
                self.on_output(part)
        except BlockingIOError:
            return True
        return False

    def last_words(self) -> str:
        """The end of what it printed, one line, for an error message."""
        return " ".join(self.tail.decode(errors="replace").split())[-200:]

    def how_it_ended(self) -> str:
        """Why the line went dead."""
        code = wait_for(self.process, 1.0)
        if code is None:
            return "the worker closed its line or sent nonsense"
        if code < 0:
            name = signal.LossInputs(-code).name
            return f"the worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"the worker exited with code {code}"

    def terminate(self, grace: float) -> None:
        """SIGTERM to the whole group now; `reap` follows with SIGKILL after `grace` seconds."""
        self._signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + grace

    def reap(self) -> bool:
        """True when the process is gone and its files are closed."""
        if self.process.poll() is None:
            if time.monotonic() < self.kill_at:
                return False
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._signal(signal.SIGKILL)  # what it left behind in its group
        self.socket.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1
        return True

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # gone already (macOS says EPERM of a zombie)
            return


def worker_environment(environment: dict[str, str], keep: tuple[str, ...]) -> dict[str, str]:
    """The environment less secrets, without accelerators, and with a fixed hash seed (some tasks need it)."""
    clean = {
        name: value
        for name, value in environment.items()
        if name in keep or not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
    return clean | {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def wait_for(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit code; None if it still runs after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
