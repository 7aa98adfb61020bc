"""Locks of folders: one run at a time in a run directory, one conversion in a cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import on_first, print_on_first

LOCK_FILE = ".lock"
UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of `flock` on file systems without locks."""


@contextlib.contextmanager
def run_dir_lock(run_dir: Path) -> Iterator[None]:
    """Make run_dir and hold run_dir/.lock inside the context, which every process of a run enters.

    Process 0 holds the lock. The operating system releases it when that process ends, for any reason, so it
    is never stale. A file system without locks gets a warning.

    Raises:
        UserError: another run holds the lock (names its process), or the folder cannot be written to.
    """
    with contextlib.ExitStack() as closing:
        on_first(lambda: _lock(run_dir, closing))
        yield


@contextlib.contextmanager
def cache_lock(folder: Path) -> Iterator[bool]:
    """Make the folder and hold its lock inside the context; waits for another process that holds it. Yields:
    whether the lock is held; False on a file system without locks.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_on_first(f"{folder} is in use by another process; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRORS:
                raise
            yield False
            return
        yield True


def _lock(run_dir: Path, closing: contextlib.ExitStack) -> None:
    """Acquire the lock; it is released when `closing` closes the file."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = closing.enter_context((run_dir / LOCK_FILE).open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UserError(
            f"{run_dir} is in use by {holder}: two runs would overwrite each other's files. "
            "Wait for that run, end it, or set another --run_dir."
        ) from None
    except OSError as error:
        if error.errno in UNSUPPORTED_ERRORS:
            print_on_first(
                f"{run_dir} is on a file system without locks: make sure that no other run uses it"
            )
            return
        raise UserError(
            f"{run_dir} cannot be written to: {error.strerror}. "
            "Set --run_dir to a folder that you may write to."
        ) from error
