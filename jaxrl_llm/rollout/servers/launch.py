"""Servers as child processes: started together, waited for, stopped with the run that started them.

Linux ends them with the run, so that a killed run leaves no server on the accelerator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NoReturn

from jaxrl_llm.bridge.servers import CACHE, WEIGHTS, Json
from jaxrl_llm.bridge.transports.cuda_ipc import VISIBLE
from jaxrl_llm.errors import ConfigError, ServerError
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig, flag_value
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.commands import ROUTES_FLAG, server_command, server_environment, write_plugin
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.rollout.servers.server import Server, print_line
from jaxrl_llm.user_file import kill_group

PORTS = range(20_000, 32_768)  # below the ephemeral ports of Linux
KILL_DELAY = 10.0  # seconds between SIGTERM and SIGKILL
POLL_INTERVAL = 0.5
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know this machine
LOG_TAIL = 2000  # characters of a log that an error shows


class ServerProcesses:
    """The server processes of this run. `urls` are known at once; `wait` returns when they reply.

    Args:
        model: folder with config and tokenizer; its weights, if any, are read later.
        logs: directory for sglang_0.log, sglang_1.log, ... or vllm_0.log, ...
        flags: more of them, which `servers.flags` override.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: ServersConfig,
        model: Path,
        logs: Path,
        *,
        flags: Sequence[str] = (),
    ):
        self.timeout, self.restarts = servers.start_timeout, servers.restarts
        self.kind, self.dtype = KINDS[config.engine], config.dtype
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"{config.engine}_{index}.log" for index in range(config.launch)]
        ports = free_ports(config.launch)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.commands = [server_command(config, servers, model, port, flags=flags) for port in ports]
        # The environment, in which vLLM finds our plugin, and SGLang our loader.
        plugins = write_plugin(logs.absolute() / "server_plugins")
        if config.engine == "vllm":
            print_line("vLLM's routes for weights take no key: its servers listen on 127.0.0.1 alone")
        self.environment = server_environment(config.engine, plugins)
        self.visible = servers.devices or [os.environ.get(VISIBLE, "")] * config.launch
        self.starts = [0] * config.launch
        self._replied = False  # all servers, once
        self._restarting = threading.Lock()
        self.processes = [self._start(index) for index in range(config.launch)]

    def restart(self, url: str) -> str:
        """Start the server of this address again if it has ended. Returns what happened; "" = nothing."""
        index = self.urls.index(url)
        with self._restarting:  # health checks and `wait` are in different threads
            code = self.processes[index].poll()
            if code is None or self.starts[index] > self.restarts:
                return ""
            kill_group(self.processes[index].pid)  # its children may hold the port or the accelerator
            message = f"the {self.kind.name} server at {url} ended with {code} ({self.logs[index]}) and"
            try:
                self.processes[index] = self._start(index)
            except OSError as error:  # no memory, no space for the log
                return f"{message} could not be started again: {error}"
            return f"{message} was started again"

    def _start(self, index: int) -> subprocess.Popen:
        self.starts[index] += 1
        environment = os.environ | self.environment
        if devices := self.visible[index]:
            environment[VISIBLE] = devices
        # Else SGLang rounds the inputs of short convolutions to bfloat16 between tokens, whatever --dtype is.
        environment.setdefault("SGLANG_MAMBA_CONV_DTYPE", self.dtype)
        if "cpu" in self.commands[index]:
            environment.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # else it looks for kernels of a GPU
            # Servers whose threads wait for each other's cores crawl.
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // len(self.urls), 1)))
        with self.logs[index].open("ab") as out:
            return subprocess.Popen(
                self.commands[index],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # its own group: stopped as a whole, not by Ctrl-C
            )

    def wait(self) -> None:
        """Wait until every server replies; in later calls until one replies, since health checks restart the
        others.

        Raises:
            ServerError: at the start a server ended, or later all ended, or no reply came in time; the
                message has the end of a log.
        """
        deadline, enough = time.monotonic() + self.timeout, any if self._replied else all
        while not enough(map(self.is_up, self.urls)):
            for url in self.urls if self._replied else ():
                if message := self.restart(url):
                    print_line(message)
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            if len(ended) == len(self.processes) or (ended and not self._replied):
                self._fail(
                    ended[0], f"the {self.kind.name} server ended with {self.processes[ended[0]].returncode}"
                )
            if time.monotonic() > deadline:
                index = next((i for i, url in enumerate(self.urls) if not self.is_up(url)), 0)
                setting = f"{self.timeout:g} s (--servers.start_timeout)"
                self._fail(index, f"no answer from {self.urls[index]} in {setting}")
            time.sleep(POLL_INTERVAL)
        self._replied = True

    def is_up(self, url: str) -> bool:
        """Return whether the server of this address works."""
        return is_up(url, self.kind.up_route)

    def _fail(self, index: int, problem: str) -> NoReturn:
        log = self.logs[index]
        raise ServerError(f"{problem}; {log} ends:\n{log.read_text(errors='replace')[-LOG_TAIL:]}")

    def close(self) -> None:
        """End all servers, with their children."""
        for process in self.processes:
            process.terminate()  # it alone: SGLang takes a child that ends by itself for a crash
        deadline = time.monotonic() + KILL_DELAY
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            kill_group(process.pid)
            process.wait()


def routes_problem(info: Json) -> str:
    """Return why a server does not report routes, with the flag to add; "" = it does.

    Args:
        info: its reply to /server_info.
    """
    if info.get("enable_return_routed_experts"):
        return ""
    return f"does not report the experts that tokens chose (--routing.replay). Start it with {ROUTES_FLAG}"


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on; a server may need minutes until it does."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ServerError(f"{len(ports)} ports of {PORTS.start} to {PORTS.stop - 1} are free, {count} are needed")


def is_up(url: str, route: str) -> bool:
    """Return whether a server replies at this address."""
    try:
        request = urllib.request.Request(f"{url}{route}", headers=auth.request_headers(route))
        with DIRECT.open(request, timeout=5) as reply:
            return reply.status == 200
    except (OSError, HTTPException):  # the second: a program with another protocol
        return False


IDLE_TIMEOUT = 30.0  # seconds until a server has no request left
MAX_FRACTION = 0.92  # of a GPU's memory for both: the rest is for CUDA contexts, graphs and communication
MEM_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Names, now and earlier, of the share of a GPU's memory that XLA preallocates."""
GPU_MEM_FRACTION = 0.75
"""XLA's default."""


async def release_memory(pool: ServerPool) -> None:
    """Have every server release its memory until new weights are sent; one that does not is left out."""
    pool.memory_released = True

    async def release(server: Server) -> None:
        try:
            # Its responses are not needed any more, and a server that is not idle would crash.
            await pool.request_bytes(server, "/abort_request", {"abort_all": True})
            await pool.request_bytes(server, f"/flush_cache?timeout={IDLE_TIMEOUT:g}", {})
            await pool.request(server, "/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})
            server.released = {CACHE, WEIGHTS}
        except ServerError as error:
            server.leave_out(error)

    await asyncio.gather(*(release(server) for server in pool.usable if not server.released))


def colocated_problems(servers: ServersConfig, launch: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield why trainer and servers cannot share these GPUs; `servers` itself is valid.

    Args:
        launch: number of servers started here.
        environment: of the process, with jax's variables.
    """
    if not launch:
        yield "--servers.colocated needs servers that are started here: set --rollout.launch N."
    words = shlex.split(servers.flags)
    if flag_value(words, "--device") == "cpu":
        return
    given = flag_value(words, "--mem-fraction-static")
    if given is None:
        yield (
            "--servers.colocated needs the servers' share of memory: for example "
            "--servers.flags='--mem-fraction-static 0.4' with XLA_CLIENT_MEM_FRACTION=0.5 in the environment."
        )
        return
    # Both shares of a GPU's memory.
    server, trainer = _fraction(given), None
    if server in (None, 1.0):
        yield f"--servers.flags: --mem-fraction-static is {given!r}: it must be above 0 and below 1."
        server = None
    try:
        trainer = gpu_mem_fraction(environment)
    except ConfigError as error:
        yield str(error)
    if server is None or trainer is None or environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return  # with "platform" jax gives memory back as soon as an array is deleted
    if server + trainer > MAX_FRACTION:
        yield (
            f"--servers.colocated: the servers' --mem-fraction-static {server:g} and jax's {trainer:g} "
            f"(XLA_CLIENT_MEM_FRACTION) are more than {MAX_FRACTION:g} of a GPU together, and jax never "
            "gives its share back. Lower one of them, or set XLA_PYTHON_CLIENT_ALLOCATOR=platform."
        )


def gpu_mem_fraction(environment: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that XLA preallocates.

    Raises:
        ConfigError: a variable is not a number above 0 and at most 1.
    """
    for name in MEM_FRACTION_VARIABLES:
        if text := environment.get(name):
            if (fraction := _fraction(text)) is None:
                raise ConfigError(
                    f"{name} is {text!r} in the environment: it must be a number above 0 and at most 1."
                )
            return fraction
    return GPU_MEM_FRACTION


def _fraction(text: str) -> float | None:
    """Return a number above 0 and at most 1, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
