"""Handlers of SIGTERM and SIGINT (Ctrl-C), from the first line of a command to its last.

The first signal ends the command: immediately during imports and interpreter shutdown, by an exception inside
`unwinding`, after the work in progress inside `deferred`. A second signal exits immediately. The exit code is
128 + the signal's number (130, 143), unless the deferred work has another.

Inside `interruptible`, for runs of a notebook, no SIGINT ends the process, which holds the user's variables:
one that nothing defers, and the second one, raise KeyboardInterrupt.

Python runs signal handlers between two bytecodes of the main thread, which may be inside a compilation for
minutes. Therefore a thread announces signals and handles the second one; the interpreter's C handler wakes it
through a pipe (`signal.set_wakeup_fd`). Imports only the standard library, since commands install the
handlers before they import jax.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

HANDLED = (signal.SIGTERM, signal.SIGINT)
CAUGHT_UP = b"\0"  # no signal has this number
SHOW_CURSOR = b"\x1b[?25h"  # a live panel hides the cursor


class Interrupted(SystemExit):
    """Exception that unwinds a command after a signal; its code is 128 + the signal's number."""


class SignalHandlers:
    """The handlers of this process.

    Args:
        keep_process: SIGINT raises KeyboardInterrupt instead of ending the process.

    Attributes:
        received: number of the first signal; 0 = none yet.
        unwinds: True if the first signal unwinds the main thread, False if it exits immediately.
        deferred: description of the work that is finished first; "" = none.
        interrupt: called in the main thread by each SIGINT, which then ends nothing; None = SIGINT ends.
        main_decides: the thread leaves SIGINT to the main thread: it may read one that `interrupt` handled.
    """

    def __init__(self, keep_process: bool = False):
        self.keep_process = keep_process
        self.received = 0
        self.unwinds = False
        self.deferred = ""
        self.interrupt: Callable[[], None] | None = None
        self.main_decides = False
        self._response: Literal["exit", "unwind", "defer"] = "exit"
        self._action = ""  # announced with the first signal
        self._lock = threading.RLock()  # a handler may interrupt a handler
        self._handled = 0
        self._announced = threading.Event()
        self._caught_up = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {number: signal.signal(number, self._handle) for number in HANDLED}
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._report_unraisable
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()

    def wait_for_announcement(self) -> None:
        """Wait until a received signal is announced, at most a second: the terminal may be blocked."""
        if self.received:
            self._announced.wait(1.0)

    def wait_for_thread(self) -> None:
        """Wait until the thread has read the signals so far, at most 5 seconds: it may be blocked."""
        self._caught_up.clear()
        with contextlib.suppress(BlockingIOError):  # a full pipe
            os.write(self._write, CAUGHT_UP)
            self._caught_up.wait(5.0)

    def remove(self) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(self._previous_fd)
        sys.unraisablehook = self._previous_hook
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join(1.0)

    def forget(self) -> None:
        """Reset the handlers in a forked child, which shares the parent's pipe."""
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)

    def _respond(self, number: int) -> None:
        """Set the response to the first signal by the state in which it arrived."""
        with self._lock:
            if not self.received:
                self.received = number
                self._response = "defer" if self.deferred else "unwind" if self.unwinds else "exit"
                second = "stop" if self._raises(number) else "exit"
                self._action = f"{self.deferred or 'stopping'}; again = {second} at once"
                if self._response == "exit":
                    self._action = second

    def _raises(self, number: int) -> bool:
        """Return whether this signal raises KeyboardInterrupt instead of ending the process."""
        return self.keep_process and number == signal.SIGINT

    def _handle(self, number: int, frame: object) -> None:
        """Handle a signal in the main thread, which runs this when it next executes Python."""
        if number == signal.SIGINT and self.interrupt:
            self.interrupt()
            return
        self._handled += 1
        if self._handled > 1 and not self._raises(number):
            exit_at_once(number)
        self._respond(number)
        if self._raises(number) and (self._handled > 1 or self._response != "defer"):
            raise KeyboardInterrupt
        if self._response == "unwind":
            raise Interrupted(128 + number)
        if self._response == "exit":
            self.wait_for_announcement()  # after which the thread exits, if it can still run
            exit_at_once(number)

    def _report_unraisable(self, unraisable: Any) -> None:
        """Report an exception that Python drops, as in a finalizer, unless a signal raised it.

        `received` stays set: the command ends at its next check, or at a second signal.
        """
        if not isinstance(unraisable.exc_value, Interrupted):
            self._previous_hook(unraisable)

    def _watch(self) -> None:
        """Announce the first signal, exit at the second."""
        count = 0
        while data := os.read(self._read, 64):
            for number in filter(HANDLED.__contains__, data):
                if number == signal.SIGINT and self.main_decides:
                    continue
                count += 1
                if count > 1 and self._raises(number):
                    continue  # the main thread raises it
                if count > 1:
                    exit_at_once(number)
                self._respond(number)
                announce(number, self._action)
                self._announced.set()
                if self._response == "exit" and not self._raises(number):
                    exit_at_once(number)
            if CAUGHT_UP in data:
                self._caught_up.set()
        os.close(self._read)


_handlers: SignalHandlers | None = None
_reset_in_forks = False


def install_handlers(keep_process: bool = False) -> bool:
    """Install the handlers, in the main thread only and once. Return whether this call installed them.

    Args:
        keep_process: as of `SignalHandlers`.
    """
    global _handlers, _reset_in_forks
    if _handlers is not None or threading.current_thread() is not threading.main_thread():
        return False
    _handlers = SignalHandlers(keep_process)
    if not _reset_in_forks:
        os.register_at_fork(after_in_child=_forget)
        _reset_in_forks = True
    return True


@contextlib.contextmanager
def handled_signals(keep_process: bool = False) -> Iterator[SignalHandlers | None]:
    """Install the handlers inside the context; yields None outside the main thread.

    Args:
        keep_process: as of `SignalHandlers`, if this context installs them.
    """
    global _handlers
    installed = install_handlers(keep_process)
    handlers = _handlers
    try:
        yield handlers
    finally:
        if handlers is not None:
            handlers.wait_for_announcement()
        if installed:
            handlers.remove()
            _handlers = None


@contextlib.contextmanager
def _handlers_with(name: str, value: Any) -> Iterator[None]:
    """Install the handlers, and set one of their attributes inside the context."""
    with handled_signals() as handlers:
        if handlers is None:
            yield
            return
        before = getattr(handlers, name)
        setattr(handlers, name, value)
        try:
            yield
        finally:
            setattr(handlers, name, before)


def unwinding() -> contextlib.AbstractContextManager:
    """Have the first signal inside raise `Interrupted` in the main thread, so that `with` blocks close."""
    return _handlers_with("unwinds", True)


def interruptible() -> contextlib.AbstractContextManager:
    """Never let SIGINT end the process inside: code that does not defer it gets KeyboardInterrupt."""
    return handled_signals(keep_process=True)


def deferred(action: str) -> contextlib.AbstractContextManager:
    """Have the first signal inside only announce `action`; see `received_signal`."""
    return _handlers_with("deferred", action)


@contextlib.contextmanager
def interrupts_call(action: Callable[[], None]) -> Iterator[None]:
    """Have each SIGINT (Ctrl-C) inside call `action` in the main thread; SIGTERM ends the command."""
    with _handlers_with("main_decides", True):
        try:
            with _handlers_with("interrupt", action):
                yield
        finally:
            if _handlers is not None:
                _handlers.wait_for_thread()


def received_signal() -> int:
    """Return the number of the first signal, 0 = none."""
    return _handlers.received if _handlers is not None else 0


def announce(number: int, action: str) -> None:
    """Print the signal and the action to sys.stderr, so that the line appears above a live panel."""
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed
        print(f"{signal.Signals(number).name}: {action}", file=sys.stderr, flush=True)


def exit_at_once(number: int) -> None:
    """End the process without cleanup, except that the terminal's cursor is shown."""
    show_cursor()
    os._exit(128 + number)


def show_cursor() -> None:
    """Show the terminal's cursor, which a live panel hides, also where the panel was not closed."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)


def _forget() -> None:
    if _handlers is not None:
        _handlers.forget()
