"""Child processes that answer on their pipes, and messages of a known length. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

HEADER = struct.Struct("!Q")  # bytes of the message that follows


class Child(subprocess.Popen):
    """A process with pipes for input and output; its standard error goes to a file, as a pipe would fill."""

    def __init__(self, command: Sequence[str], **settings: Any):
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115, closed by close
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
            start_new_session=True,  # the terminal's signals do not reach it
            **settings,
        )

    def last_errors(self, count: int) -> str:
        """Return the last `count` bytes that it wrote to its standard error."""
        self._stderr_file.seek(0)
        return self._stderr_file.read()[-count:].decode(errors="replace").strip()

    def close(self) -> None:
        """Kill the process, wait for its end and close its files."""
        self.kill()
        self.wait()
        for file in (self.stdin, self.stdout, self._stderr_file):
            with contextlib.suppress(OSError, ValueError):  # a pipe that has broken
                file.close()


def pack_message(body: bytes) -> bytes:
    """Return a message as `read_message` reads it."""
    return HEADER.pack(len(body)) + body


def read_message(file: BinaryIO) -> bytes | None:
    """Return the next message; None at the end of the file."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = file.read(size)
    return body if len(body) == size else None
