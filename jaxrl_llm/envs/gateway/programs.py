"""The programs of trajectories: started with limits, and killed with their children at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from typing import Any, NamedTuple

from jaxrl_llm.addresses import withheld_names
from jaxrl_llm.user_file import kill_group

MAX_SHOWN = 2000  # characters of a program's output that a failure shows
POLL_SECONDS = 0.05
KILL_SECONDS = 5.0  # that the system may take to end a killed program
LIMITED = """
now=$(ulimit -v)
if [ "$now" = unlimited ] || [ "$now" -gt "$1" ]; then ulimit -v "$1" || exit; fi
shift && exec "$@"
"""
"""Limits the program's memory to its first argument in KiB; a lower limit stays."""
WATCHDOG = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads "+GROUP" and "-GROUP", and kills the groups that are left when the run ends, kill -9 included."""


class Finished(NamedTuple):
    """The end of a program."""

    code: int  # negative = a signal
    output: str  # the end of what it printed


class ProgramRunner:
    """Starts one program after another; a context manager.

    Args:
        command: as for a shell.
        memory_mb: address space of each process; 0 = no limit.
    """

    def __init__(self, command: str, memory_mb: int):
        words = shlex.split(command)
        limit = ["/bin/sh", "-c", LIMITED, "sh", str(memory_mb * 1024)] if memory_mb else []
        self.words = [*limit, *words]
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHDOG],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no signal of the terminal reaches it
        )

    async def run(self, row: dict[str, Any], variables: dict[str, str]) -> Finished:
        """Run the program and wait for its end; a cancelled one is killed.

        Args:
            row: JSON on its standard input.
            variables: of its environment, besides those of this process that hold no secret.
        """
        # Start it, as the leader of a group of processes.
        withheld = withheld_names(os.environ)
        kept = {name: value for name, value in os.environ.items() if name not in withheld}
        process = await asyncio.create_subprocess_exec(
            *self.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=kept | variables,
            start_new_session=True,
        )
        self._tell(f"+{process.pid}")
        # Give it the row, and meanwhile read its output: it may print before it reads.
        tail = bytearray()
        writing = asyncio.create_task(_write(process.stdin, json.dumps(row, default=str).encode()))
        reading = asyncio.create_task(_read_tail(process.stdout, tail))
        try:
            # The program's end counts: children may hold its output open.
            while process.returncode is None and not reading.done():
                await asyncio.wait({reading}, timeout=POLL_SECONDS)
            code = await process.wait()
            kill_group(process.pid)
            await asyncio.wait({reading}, timeout=1.0)
            return Finished(code, tail.decode(errors="replace").strip())
        finally:
            writing.cancel()
            reading.cancel()
            kill_group(process.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await process.wait()
            self._tell(f"-{process.pid}")

    def close(self) -> None:
        """Kill the programs that still run."""
        with contextlib.suppress(OSError):
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: it has killed all
            print(line, file=self._watchdog.stdin, flush=True)


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read to the end, and keep the last bytes in `tail`."""
    while chunk := await stream.read(1 << 16):
        tail += chunk
        del tail[:-MAX_SHOWN]
