"""SGLang servers as child processes: started together, waited for, stopped with the run that started them.

Linux ends them with the run: one that is killed leaves no server behind on the accelerator.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.servers import ServerError

BECOME = """
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(OSError, AttributeError):  # Linux alone has it: 1 is PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the run that wanted a server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
POLL = 0.5
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine
TAIL = 2000  # characters of a log that an error shows


class Launched:
    """Servers of this run. `urls` are known at once; `wait` returns when all answer.

    Args:
        model: folder with config and tokenizer; its weights, if any, are read later.
        logs: directory for sglang_0.log, sglang_1.log, ...
    """

    def __init__(self, config: RolloutConfig, sglang: SGLangConfig, model: Path, logs: Path):
        self.timeout, self.processes = sglang.start_timeout, []
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"sglang_{index}.log" for index in range(config.launch)]
        ports = free_ports(config.launch)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        visible = sglang.devices or [os.environ.get(VISIBLE, "")] * config.launch
        for port, log, devices in zip(ports, self.logs, visible, strict=True):
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command(config, sglang, model, port),
                    env={**os.environ, VISIBLE: devices} if devices else None,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # a group of its own: stopped whole, and Ctrl-C does not reach it
                )
            self.processes.append(process)

    def wait(self) -> None:
        """Until every server answers.

        Raises:
            ServerError: one ended, or did not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + self.timeout
        for url, process, log in zip(self.urls, self.processes, self.logs, strict=True):
            while not answers(url):
                problem = ""
                if process.poll() is not None:
                    problem = f"the SGLang server ended with {process.returncode}"
                elif time.monotonic() > deadline:
                    problem = f"no answer from {url} in {self.timeout:g} s (--sglang.start_timeout)"
                if problem:
                    raise ServerError(f"{problem}; {log} ends:\n{tail(log)}")
                time.sleep(POLL)

    def close(self) -> None:
        """End them all, with their children."""
        for process in self.processes:
            process.terminate()  # it alone: SGLang takes a child that ends by itself for a crash
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command(config: RolloutConfig, sglang: SGLangConfig, model: Path, port: int) -> list[str]:
    """What starts one server; `sglang.flags` come last and so have the last word."""
    server = [
        *(sglang.python, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype),
        *("--load-format", "dummy", "--max-running-requests", str(config.slots), "--skip-server-warmup"),
        *shlex.split(sglang.flags),
    ]
    return [sys.executable, "-I", "-c", BECOME, str(os.getpid()), *server]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, far enough apart for what SGLang opens beside its own."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def answers(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/model_info", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL:]
