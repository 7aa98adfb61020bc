"""Chat templates rendered in a child process, under the kernel's limits of time and memory.

A template comes with a model folder, so it is untrusted code. The sandbox of jinja2 isolates it but does not
bound it: loops nest, strings double, and a single large power never returns to the interpreter, so neither a
counter nor an exception can stop it. The limits of a process bound all of these. Every chat is rendered in
the process, not only the first one as a trial, because a template can depend on the chat, on chance and on
the time.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.child import Child, pack_message, read_message
from jaxrl_llm.data.rows import MAX_CHARACTERS, RowError
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.user_file import limit_memory, python_command

CPU_SECONDS = 3.0  # of the processor, for one chat; a millisecond is usual
MAX_MEMORY = 2 << 30  # bytes of address space in addition to the idle process
MAX_RENDERED = 2 * MAX_CHARACTERS  # of one chat
MAX_ERROR_CHARACTERS = 500  # characters of a template's own error message
KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ")
Rendered = tuple[str, list[tuple[int, int]]]
"""Text, and the character spans inside {% generation %}."""


class TemplateLimitError(UserError):
    """A chat template exceeds its limit of time, memory or output.

    Not a RowError: a skipped row must be skipped in every process and run, but time varies.
    """


class TemplateProcess:
    """The child process: started by the first chat, and restarted after a chat that killed it.

    Args:
        seconds: of the processor, for one chat.
    """

    def __init__(self, seconds: float = CPU_SECONDS):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: Child | None = None

    def render(
        self, template: str, calls: Sequence[dict[str, Any]], name: str, where: str, *, date: str = ""
    ) -> list[Rendered]:
        """Render the template with the arguments of each call.

        Args:
            template: Jinja text.
            calls: keyword arguments of `transformers.utils.chat_template_utils.render_jinja_template`.
            name: of the template, for messages: "the chat template t.jinja".
            where: the row, for messages.
            date: date for `strftime_now`, as "2026-11-27"; "" = today.

        Raises:
            RowError: the template refuses this chat.
            UserError: the template is not valid Jinja, or exceeds a limit (TemplateLimitError).
            RunError: the process cannot be started.
        """
        request = _request([template, list(calls), date], where)
        with self._lock:
            idle = self._process is not None
            reply = self._exchange(request)
            if idle and reply.get("signal") == signal.SIGKILL:  # perhaps before it had the request
                reply = self._exchange(request)
        if "rendered" in reply:
            return [(text, [tuple(span) for span in spans]) for text, spans in reply["rendered"]]
        if "syntax" in reply:
            raise UserError(f"{name} is not a valid Jinja template: {reply['syntax']}")
        if "limit" in reply:
            raise TemplateLimitError(f"{where}: {name} {reply['limit']} for this chat")
        raise RowError(f"{where}: {name} cannot render this chat: {reply['error']}")

    def close(self) -> None:
        """End the process; the next chat starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._process and self._process.poll() is not None:  # it was killed while idle
            self.close()
        if self._process is None:
            self._start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died, and there will be no reply
                self._process.stdin.write(pack_message(request))
                self._process.stdin.flush()
            reply = read_message(self._process.stdout)
            return self._reason_of_death() if reply is None else json.loads(reply)
        except BaseException:  # Ctrl-C between request and reply: the next reply would be the wrong one
            self.close()
            raise

    def _start(self) -> None:
        kept = {key: os.environ[key] for key in KEPT_ENVIRONMENT if key in os.environ}
        # One thread, as the buffers of many count as memory. No secrets, no accelerators.
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = python_command("jaxrl_llm.data.rendering", "serve_renderer", self._seconds)
        self._process = Child(command, env=kept | settings)
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _reason_of_death(self) -> dict[str, Any]:
        """Wait for the process, which has closed its output; return the limit and signal that ended it."""
        code, errors = self._process.wait(), self._process.last_errors(2000)
        self.close()
        if code == -signal.SIGPROF:
            return {"limit": f"takes more than {self._seconds:g} s of processor time"}
        if code < 0:
            name = signal.Signals(-code).name
            return {"limit": f"ends the process that renders it ({name})", "signal": -code}
        raise RunError(f"the process that renders chat templates ended with code {code}: {errors}")


def serve_renderer(seconds: float) -> None:
    """Render the requests of standard input until it closes; the body of the child process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with its standard input
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    from transformers.utils.chat_template_utils import render_jinja_template  # before the limits

    _limit_memory()
    while (request := read_message(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, inside C code too
        reply = json.dumps(_render(render_jinja_template, request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(pack_message(reply))
        replies.flush()


def _limit_memory() -> None:
    """Limit the address space to MAX_MEMORY more than now; macOS has neither the file nor the limit."""
    import resource  # Unix has it

    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
        limit_memory(int(file.read().split()[0]) * resource.getpagesize() + MAX_MEMORY)


def _render(render: Callable, request: bytes) -> dict[str, Any]:
    import jinja2

    rendered = []
    try:
        template, calls, date = json.loads(request)
        _set_date(date)
        for arguments in calls:
            (text,), spans = render(chat_template=template, **arguments)
            if len(text) > MAX_RENDERED:
                return {"limit": f"writes more than {MAX_RENDERED:,} characters"}
            rendered.append((text, spans[0] if spans else []))
    except MemoryError:
        return {"limit": f"needs more than {MAX_MEMORY >> 30} GiB"}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"{error.message:.{MAX_ERROR_CHARACTERS}} (line {error.lineno})"}
    except jinja2.TemplateError as error:  # the template's own raise_exception, undefined values
        return {"error": f"{error.message or type(error).__name__:.{MAX_ERROR_CHARACTERS}}"}
    except Exception as error:  # any other that its expressions raise
        return {"error": f"{type(error).__name__}: {error!s:.{MAX_ERROR_CHARACTERS}}"}
    return {"rendered": rendered}


def _set_date(date: str) -> None:
    """Make the clock of templates return this date; "" = today. transformers has no argument for it."""
    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.fromisoformat(date)

    chat_template_utils.datetime = Day if date else datetime.datetime


def _request(parts: list[Any], where: str) -> bytes:
    try:
        return json.dumps(parts).encode()
    except (TypeError, ValueError, RecursionError) as error:  # messages of an environment hold anything
        raise RowError(f"{where}: the chat holds what JSON cannot: {error}") from error
