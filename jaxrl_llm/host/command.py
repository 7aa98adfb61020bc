"""A command: its entry point (signals, errors, exit codes), and lines about its work. Imports no jax."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxrl_llm.addresses import mask_text
from jaxrl_llm.errors import RunError, UserError, exit_code
from jaxrl_llm.host.signals import Interrupted, show_cursor, unwinding

FIRST = 3.0  # seconds of work before its first line
AGAIN = 10.0  # seconds between two lines

WITHOUT_DATA = ("chat", "generate", "score")
"""Commands that read rows or chats, but have no `--data` flags."""
THEIR_WORDS = (
    (r"(?:,|;)? or name [^()]*\(--data\.train\.0\.[^)]*\)", ""),
    (r"\(--data\.train\.0\.answer_key [^)]*\)", "(it has to be the column answer)"),
    (r"; --data\.train\.0\.prompt_key (?:.* in training)?", ""),
    (r" ?\(--data\.train\.0\.\w+_key[^)]*\)", ""),
    (r"; --data\.bad_rows skip trains if only a few rows are like this", ""),
    (r"--data\.chat\.", "--chat."),
)
"""Pattern in advice of `train` -> its replacement in messages of the commands WITHOUT_DATA."""

_under_way: list[str] = []  # the innermost last
_name = ""  # of the command that runs


def own_flags(text: str) -> str:
    """Return a message with the flags of the command that runs in place of training's."""
    for advice, words in THEIR_WORDS if _name in WITHOUT_DATA else ():
        text = re.sub(advice, words, text)
    return text


@contextlib.contextmanager
def working(what: str, quiet: bool = False, first: float | None = None) -> Iterator[None]:
    """Print the name and duration of some work to stderr, if it takes more than `first` seconds.

    Args:
        quiet: print nothing, as in processes other than the first.
        first: seconds of work before the first line; None = FIRST.
    """
    began, said = time.perf_counter(), []

    def say() -> None:
        if _under_way[-1] == what:  # an inner piece has its own lines
            said.append(what)
            print(f"{what}: {time.perf_counter() - began:.0f} s so far", file=sys.stderr, flush=True)

    _under_way.append(what)
    try:
        with contextlib.nullcontext() if quiet else repeated(say, FIRST if first is None else first, AGAIN):
            yield
    finally:
        _under_way.pop()
    if said:
        print(f"{what}: took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def repeated(action: Callable[[], None], first: float, again: float) -> Iterator[None]:
    """Call an action from a thread while the body runs: after `first` seconds, then after every `again`."""
    ended = threading.Event()

    def repeat() -> None:
        wait = first
        while not ended.wait(wait):
            action()
            wait = again

    thread = threading.Thread(target=repeat, name="repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_command(command: Callable[[list[str]], int | None], argv: list[str], name: str = "train") -> int:
    """Return the exit code of `command(argv)`; print a UserError (2) or a RunError (1) as one message.

    A file name that no system takes is a mistake of the user, wherever it is met.

    Args:
        name: of the command, whose flags the messages name.

    Raises:
        Interrupted: by SIGTERM or SIGINT; it ends the interpreter with code 143 or 130 and no traceback.
    """
    global _name
    _name = name
    quiet_transformers()
    with unwinding():
        try:
            return command(argv) or 0
        except (UserError, RunError) as error:
            print(f"error: {own_flags(str(error))}", file=sys.stderr)
            return exit_code(error)
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
                raise
            name = mask_text(str(error.filename))
            shown = name if len(name) <= 80 else f"{name[:40]}...{name[-20:]}"
            print(f"error: {shown}: {error.strerror}. Give another name.", file=sys.stderr)
            return 2
        except Interrupted:  # perhaps while a live panel was being opened
            show_cursor()
            raise


def quiet_transformers() -> None:
    """Hide the warning of transformers that torch, which is not needed, is not installed."""
    hide_records("transformers", "PyTorch was not found")


@functools.cache  # a filter is added once
def hide_records(logger: str, text: str) -> None:
    """Hide the records of a logger whose message, before its arguments, has the text."""
    logging.getLogger(logger).addFilter(lambda record: text not in str(record.msg))
