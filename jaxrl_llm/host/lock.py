"""One run at a time in a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import agree

NAME = ".lock"


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Have the run directory, which is made, to ourselves while inside. Every process of a run calls this.

    The first process holds run_dir/.lock. The operating system frees it when that process ends, whatever
    it ends by, so there is never a stale one. A file system that knows no locks is only warned about.

    Raises:
        ValueError: another run holds it (says which), or the folder cannot be written to.
    """
    with contextlib.ExitStack() as closing:
        problem = None
        if jax.process_index() == 0:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                file = closing.enter_context((run_dir / NAME).open("a+"))
                problem = _why_not(run_dir, file)
            except OSError as error:
                problem = (
                    f"{run_dir} cannot be written to: {error.strerror}. "
                    "Set --run_dir to a folder that you may write to."
                )
        if agree(problem is not None):
            raise UserError(problem or f"{run_dir}: the first process cannot use it; its message says why")
        yield


def _why_not(run_dir: Path, file: TextIO) -> str | None:
    """Take the lock, which lasts until `file` is closed, or say who has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        return (
            f"{run_dir} is in use by {holder}: two runs would overwrite each other's files. "
            "Wait for that one, end it, or set another --run_dir."
        )
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        print(
            f"{run_dir} is on a file system without locks: see to it yourself that no other run uses it",
            file=sys.stderr,
            flush=True,
        )
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return None
