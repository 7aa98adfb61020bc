"""The tool `python`: untrusted programs under bubblewrap's namespaces, a seccomp filter and resource limits.

The program sees the system's folders and this Python's standard library, read-only, and a private /tmp. It
has no network, no /proc, no home, no environment, no other process; docs/agents_tools.md lists the limits.
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
from pathlib import Path
from typing import Any, ClassVar

from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.envs.tools.syscalls import refuse_filter
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import kill_group

BOOT = """
import ctypes, json, os, resource, signal, sys
limits, tmpfs, rules, status = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
if tmpfs:  # takes CAP_SYS_ADMIN of the sandbox's own user namespace, which is given up at once
    remount_nosuid_nodev = 32 | 2 | 4
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
if rules:
    program = os.fork()
    if program:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    else:
        os.close(status)
    class Filter(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_char_p)]
    rules, seccomp, mode_filter, zero = bytes.fromhex(rules), *map(ctypes.c_ulong, (22, 2, 0))
    if libc.prctl(seccomp, mode_filter, ctypes.byref(Filter(len(rules) // 8, rules)), zero, zero):
        sys.exit("no system call can be refused: " + os.strerror(ctypes.get_errno()))
    if program:
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        os.write(status, str(code).encode())
        os._exit(code % 256)
os.execv(sys.executable, [sys.executable, "-I", "-u", "main.py"])
"""
"""Sets the limits, which the untrusted program cannot raise, and becomes this program. In a sandbox a process
with the same limits waits for it, because bubblewrap's exit code 130 may be a signal or the program's own."""
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
    """The tool `python`. Each call is a separate program and keeps nothing for the next.

    Raises:
        SandboxError: no sandbox can be made here.
    """

    schema: ClassVar[dict[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns its output. It has the standard library, no "
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
        """Run the program and return its output."""
        return await self._sandbox.run(arguments["code"])


class Sandbox:
    """Runs programs, any number at once.

    Raises:
        SandboxError: bubblewrap is missing or may not work here, and `allow_unsandboxed` is not set.
    """

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._wrapped, self._rules, self.limits_files = [], "", False
        try:
            self._wrap()
        except SandboxError:
            if not config.allow_unsandboxed:
                raise
            self._wrapped, self._rules, self.limits_files = [], "", False

    @property
    def contained(self) -> bool:
        """True if programs are sandboxed; False only with `allow_unsandboxed`."""
        return bool(self._wrapped)

    def _wrap(self) -> None:
        """Find a command that contains programs, with a limit on files where the kernel allows one."""
        try:
            self._rules = refuse_filter().hex()
        except ValueError as error:
            raise SandboxError(f"{error}. {FIX}") from None
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
        """Run a program and return its standard output and error together.

        Raises:
            ToolError: the program failed or broke a limit; the text has its output and the reason.
        """
        limits = self._config
        if len(code) > limits.code_chars:
            raise ToolError(f"the program is longer than {limits.code_chars} characters")
        with contextlib.ExitStack() as stack:
            folder = "/"
            if not self.contained:
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            program = await self._start(folder, stack)
            return await program.finish(code.encode(errors="replace"))

    async def _start(self, folder: str, stack: contextlib.ExitStack) -> _Program:
        """Start a program that waits for its text; it is killed whole when this process ends."""
        status, writer = os.pipe()
        stack.callback(os.close, status)
        try:
            _, program = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Program(self._config, status if self.contained else -1),
                *self._command(writer),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment("/tmp" if self.contained else folder),
                pass_fds=(writer,) if self.contained else (),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        return program

    def _command(self, status: int) -> list[str]:
        """Return the command of a program whose exit code is written to the file descriptor `status`."""
        config = self._config
        tmpfs = f"size={config.disk_mb << 20},nr_inodes={config.max_files + 2}"  # /tmp itself, main.py
        limits = json.dumps(
            [
                _limits(config) if sys.platform == "linux" else {},
                tmpfs if self.contained and self.limits_files else "",
                *(self._rules, status),
            ]
        )
        return [*self._wrapped, _interpreter(), "-I", "-S", "-c", BOOT, limits]

    def _probe(self) -> str:
        """Run one program now, before a model is loaded; return why it failed, or ""."""
        try:
            done = subprocess.run(
                self._command(status=2),
                input=b"print(6 * 7)",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment("/tmp"),
                timeout=START_SECONDS,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        output = done.stdout.decode(errors="replace").strip()
        return "" if output == "42\n0" else output or f"exit code {done.returncode}"


class _Program(asyncio.SubprocessProtocol):
    """One running program: keeps the two ends of its output, kills it when its time is over."""

    def __init__(self, config: SandboxConfig, status: int):
        self._config, self._status = config, status  # status: file descriptor with the exit code, -1 = none
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
            why = self._why()
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
        kill_group(self._transport.get_pid())

    def _why(self) -> str:
        """Return why the program failed, or ""."""
        code = self._transport.get_returncode()
        if self._status >= 0:  # else it is the program's own
            told = os.read(self._status, 16)
            killed = 128 - code if code > 128 else code  # the whole sandbox
            code = int(told) if told else killed
        if code == -signal.SIGXCPU:
            return f"stopped after {self._config.cpu_seconds} s of processor time"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}" * (code > 0)

    def _output(self) -> str:
        dropped = self._printed - len(self._head) - len(self._tail)
        gap = b"\n[%d bytes left out]\n" % dropped if dropped else b""
        return (self._head + gap + self._tail).decode(errors="replace").rstrip()


def _bubblewrap(config: SandboxConfig, limits_files: bool) -> list[str]:
    """Return the command prefix that sandboxes a program."""
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
        *(word for folder in _packages(system) for word in ("--tmpfs", folder, "--remount-ro", folder)),
        *("--remount-ro", "/", "--chdir", "/tmp"),  # else all of / but the binds is memory without a limit
        "--",
    ]


def _packages(visible: list[str]) -> list[str]:
    """Return the folders of installed packages and wheels in visible folders, each path to them by itself."""
    libs = [Path(top, lib) for top in visible for lib in ("", "lib", "lib64", "local/lib", "local/lib64")]
    names = ("dist-packages", "site-packages", "ensurepip/_bundled")
    found = [folder for lib in libs for name in names for folder in lib.glob(f"py*/{name}")]
    found += [Path("/usr/share/python-wheels")]
    shown = (os.path.realpath(path) if path.is_symlink() else str(path) for path in found if path.is_dir())
    return sorted(set(shown))


def _interpreter() -> str:
    """Return the path of this Python itself: a virtual environment's is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _environment(home: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"}


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
