"""Run one script in several processes that are one JAX program, on CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxrl_llm.rollout.servers.launch import free_ports

DEVICE_COUNT = re.compile(r"(--xla_force_host_platform_device_count=)\d+")
# C++ (Gloo) writes to descriptor 1 from several threads, its lines torn apart: stdout is Python's alone.
OWN_STDOUT = """\
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
"""
PREAMBLE = """\
import jax
n, i = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
from jaxrl_llm.host.start import write_programs_by_rename
write_programs_by_rename()
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], n, i)
"""


def with_devices(count: int) -> dict[str, str]:
    """Return this process's environment with `count` virtual CPU devices.

    The compiler's flags stay as in conftest.py: a short run takes 14 seconds of processor time with them, 40
    where its programs are fully optimized. Small programs are cached, too: other children run them again.
    """
    flags = DEVICE_COUNT.sub(rf"\g<1>{count}", os.environ["XLA_FLAGS"])
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


class End(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Running:
    """`python argv...`, its output in files, so that no full pipe blocks the process."""

    def __init__(self, argv: Sequence[str], env: dict[str, str] | None = None):
        self.stdout = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *argv], stdout=self.stdout, stderr=self.stderr, env=env
        )

    def peek(self, stream: Literal["stdout", "stderr"]) -> str:
        """Return its output so far."""
        return os.pread(getattr(self, stream).fileno(), 1 << 20, 0).decode()

    def wait_for(self, text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
        """Wait until it has written `text`; fail if it ends before."""
        while text not in self.peek(stream):
            assert self.process.poll() is None or text in self.peek(stream), self.end()
            time.sleep(0.02)

    def end(self, timeout: float = 240) -> End:
        """Wait for it, or kill it after `timeout` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self.stdout, self.stderr:
            self.stdout.seek(0)
            self.stderr.seek(0)
            return End(self.process.returncode, self.stdout.read(), self.stderr.read())


def run_processes(
    script: str,
    n: int,
    args: Sequence[str] = (),
    *,
    devices: int = 4,
    initialize: bool = True,
    timeout: float = 240,
) -> list[str]:
    """Return the stdout of each of `n` processes, in the order of their ids.

    Args:
        script: Python source.
        args: its sys.argv[1:].
        devices: virtual CPU devices a process.
        initialize: join the processes before the script starts; otherwise it must do so from
            JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    """
    running = start_processes(script, n, args, devices=devices, initialize=initialize)
    ends = [process.end(timeout) for process in running]
    for i, end in enumerate(ends):
        assert end.code == 0, f"process {i} exited {end.code}:\n{end.stdout}\n{end.stderr}"
    return [end.stdout for end in ends]


def start_processes(
    script: str, n: int, args: Sequence[str] = (), *, devices: int = 4, initialize: bool = True
) -> list[Running]:
    """The processes of `run_processes`, still running."""
    source = OWN_STDOUT + (PREAMBLE if initialize else "") + script
    env = {
        **with_devices(devices),
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": str(n),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    return [Running(["-c", source, *args], {**env, "JAX_PROCESS_ID": str(i)}) for i in range(n)]


def free_port() -> int:
    return free_ports(1)[0]
