"""The tool `python`: untrusted programs under bubblewrap's namespaces, a seccomp filter and resource limits.

The program sees the system's folders and this Python's standard library, read-only, and a /tmp of its own.
It has no network, no /proc, no home, no environment, no other process; docs/agents_tools.md lists the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.envs.tools.syscalls import refuse_filter
from jaxrl_llm.errors import UserError

BOOT = """
import ctypes, json, os, resource, sys
limits, tmpfs = json.loads(sys.argv[1])
if tmpfs:  # takes CAP_SYS_ADMIN of the sandbox's own user namespace, which is given up at once
    libc, remount_nosuid_nodev = ctypes.CDLL(None, use_errno=True), 32 | 2 | 4
    failed = libc.mount(b"tmpfs", b"/tmp", b"tmpfs", remount_nosuid_nodev, tmpfs.encode())
    no_capabilities, version_3 = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 2)(0x20080522, 0)
    if failed or libc.capset(version_3, no_capabilities):
        sys.exit("the number of files in /tmp cannot be limited: " + os.strerror(ctypes.get_errno()))
for name, limit in limits.items():
    which = getattr(resource, name)
    resource.setrlimit(which, tuple(
        old if old != resource.RLIM_INFINITY and old < new else new
        for old, new in zip(resource.getrlimit(which), limit)))
with open("main.py", "wb") as file:
    file.write(sys.stdin.buffer.read())
os.execv(sys.executable, [sys.executable, "-I", "-u", "main.py"])
"""  # limits that are set here, before the program is there, cannot be raised by it
NOBODY = "65534"
START_SECONDS = 60.0
MAX_PRINTED = 16 << 20  # bytes; a flood of output would keep the event loop from everything else
FIX = (
    "Install bubblewrap 0.7 or newer (apt-get install bubblewrap) and allow user namespaces; or, on a "
    "machine with nothing to lose, set --env.toolbox.python.allow_unsandboxed to run without a sandbox."
)


class SandboxError(UserError):
    """No sandbox can be made on this machine; the message gives the reason and the fix."""


class Python:
    """The tool `python`. Each call is a program of its own: nothing is kept from one to the next.

    Raises:
        SandboxError: no sandbox can be made here.
    """

    schema: ClassVar[dict[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. It has the standard library, no "
        "network and no subprocesses; every call starts afresh.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; print() what to see."}},
            "required": ["code"],
        },
    }

    def __init__(self, config: ToolsConfig):
        self._sandbox = Sandbox(config.python)
        self.turn = asyncio.Semaphore(config.python.concurrent or os.cpu_count() or 1)

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return what the program prints."""
        return await self._sandbox.run(arguments["code"])


class Sandbox:
    """Runs programs, any number at once.

    Raises:
        SandboxError: bubblewrap is missing or may not work here, and `allow_unsandboxed` is not set.
    """

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._wrapped, self._filter, self.limits_files = [], b"", False
        try:
            self._wrap()
        except SandboxError:
            if not config.allow_unsandboxed:
                raise
            self._wrapped, self.limits_files = [], False

    @property
    def contained(self) -> bool:
        """True if programs are sandboxed; False only with `allow_unsandboxed`."""
        return bool(self._wrapped)

    def _wrap(self) -> None:
        """Find a command that contains programs, with a limit on files where the kernel allows one."""
        self._filter = _filter()
        for self.limits_files in (True, False):
            self._wrapped = _bubblewrap(self._config, self.limits_files)
            problem = self._probe()
            if not problem:
                break
        else:
            raise SandboxError(f"the sandbox does not start: {problem}. {FIX}")
        if not self.limits_files:
            print("python tool: the number of files in /tmp is not limited here", file=sys.stderr, flush=True)

    async def run(self, code: str) -> str:
        """Return what the program printed, its standard output and error together.

        Raises:
            ToolError: it failed or broke a limit; the text has what it printed, and why it ended.
        """
        limits = self._config
        if len(code) > limits.code_chars:
            raise ToolError(f"the program is longer than {limits.code_chars} characters")
        with contextlib.ExitStack() as stack:
            folder = "/"
            if not self.contained:
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            program = await self._start(folder)
            return await program.finish(code.encode(errors="replace"))

    async def _start(self, folder: str) -> _Program:
        """Start a program that waits for its text; it is killed whole when this process ends."""
        with _readable(self._filter) as seccomp:
            _, program = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Program(self._config),
                *self._command(seccomp),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment("/tmp" if self.contained else folder),
                pass_fds=(seccomp,) if self.contained else (),
                start_new_session=True,
            )
        return program

    def _command(self, seccomp: int) -> list[str]:
        config = self._config
        tmpfs = f"size={config.disk_mb << 20},nr_inodes={config.max_files + 2}"  # /tmp itself, main.py
        limits = json.dumps(
            [
                _limits(config) if sys.platform == "linux" else {},
                tmpfs if self.contained and self.limits_files else "",
            ]
        )
        wrapped = [*self._wrapped, "--seccomp", str(seccomp), "--"] if self.contained else []
        return [*wrapped, _interpreter(), "-I", "-S", "-c", BOOT, limits]

    def _probe(self) -> str:
        """Run one program now, before a model is loaded; return why it did not work, "" = it did."""
        with _readable(self._filter) as seccomp:
            try:
                done = subprocess.run(
                    self._command(seccomp),
                    input=b"print(6 * 7)",
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    env=_environment("/tmp"),
                    pass_fds=(seccomp,),
                    timeout=START_SECONDS,
                )
            except (OSError, subprocess.SubprocessError) as error:
                return str(error)
        output = done.stdout.decode(errors="replace").strip()
        return "" if output == "42" else output or f"exit code {done.returncode}"


class _Program(asyncio.SubprocessProtocol):
    """One running program: keeps the two ends of its output, kills it when its time is over."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._head, self._tail, self._printed = bytearray(), bytearray(), 0
        self._exited = asyncio.get_running_loop().create_future()
        self._closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.SubprocessTransport) -> None:
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        half = -(-self._config.output_bytes // 2)
        self._printed += len(data)
        room = half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[:-half]
        if self._printed > MAX_PRINTED:
            self._stop()

    def process_exited(self) -> None:
        self._exited.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Mark the program as ended: it has exited, and no process holds its output open."""
        self._closed.set_result(None)

    async def finish(self, code: bytes) -> str:
        """Write the program's text, wait for its end, return its output. Raises ToolError like `run`."""
        stdin = self._transport.get_pipe_transport(0)
        stdin.write(code)
        stdin.write_eof()
        try:
            async with asyncio.timeout(self._config.seconds):
                await asyncio.shield(self._closed)
            why = self._why(self._transport.get_returncode())
            if self._printed > MAX_PRINTED:
                why = f"stopped after printing {MAX_PRINTED >> 20} MB"
        except TimeoutError:
            why = f"stopped after {self._config.seconds:g} s"
        finally:
            await self._kill()
        if why:
            raise ToolError(f"{self._output()}\n[{why}]".lstrip())
        return self._output() or "[the program printed nothing]"

    async def _kill(self) -> None:
        if not self._closed.done():
            self._stop()
        await asyncio.shield(self._exited)
        self._transport.close()

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _why(self, code: int) -> str:
        """Return why it failed, "" = it did not.

        Bubblewrap's exit code is 128 + the signal that killed the program, or the program's own.
        """
        ended_by = -code if code < 0 else code - 128
        if ended_by == signal.SIGXCPU:
            return f"stopped after {self._config.cpu_seconds} s of processor time"
        if 0 < ended_by < signal.NSIG:
            return f"killed by signal {ended_by}"
        return f"exit code {code}" if code else ""

    def _output(self) -> str:
        dropped = self._printed - len(self._head) - len(self._tail)
        gap = b"\n[%d bytes left out]\n" % dropped if dropped else b""
        return (self._head + gap + self._tail).decode(errors="replace").rstrip()


def _filter() -> bytes:
    try:
        return refuse_filter()
    except ValueError as error:
        raise SandboxError(f"{error}. {FIX}") from None


def _bubblewrap(config: SandboxConfig, limits_files: bool) -> list[str]:
    """Return the command up to where the file descriptor of the filter is named."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(f"bubblewrap (bwrap) is not on the PATH. {FIX}")
    system = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"]
    python = Path(sys.base_prefix).resolve()
    if not python.is_relative_to("/usr"):  # not all of it: it may be a home folder
        system += [str(python / "lib"), str(python / "lib64"), _interpreter()]
    binds = [["--ro-bind-try", path, path] for path in system]
    binds += [["--dev-bind", path, path] for path in ("/dev/null", "/dev/zero", "/dev/urandom")]
    return [
        *(program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", *(("--cap-add", "CAP_SYS_ADMIN") if limits_files else ())),  # for BOOT alone
        *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
        *("--size", str(config.disk_mb << 20), "--tmpfs", "/tmp"),
        *(word for bind in binds for word in bind),
        *("--remount-ro", "/", "--chdir", "/tmp"),  # else all of / but the binds is memory without a limit
    ]


def _interpreter() -> str:
    """Return the path of this Python itself: a virtual environment's is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # numpy's libraries start threads when they are loaded
        "OPENBLAS_NUM_THREADS": "1",
    }


def _limits(config: SandboxConfig) -> dict[str, tuple[int, int]]:
    """Return resource limits (soft, hard)."""
    memory, disk = config.memory_mb << 20, config.disk_mb << 20
    return {
        "RLIMIT_CPU": (config.cpu_seconds, config.cpu_seconds + 1),
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_FSIZE": (disk, disk),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
    }


@contextlib.contextmanager
def _readable(data: bytes) -> Iterator[int]:
    """Yield a file descriptor to read `data` from, one page at most."""
    reader, writer = os.pipe()
    try:
        os.write(writer, data)
    finally:
        os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)
