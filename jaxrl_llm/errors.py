"""The program's own errors: one family for mistakes in the input, one for runs that cannot go on.

`host.command.run_command` prints a UserError (exit code 2) or a RunError (exit code 1) as one message. Every
other exception is a defect and keeps its traceback. Imports nothing, so that reward workers start quickly.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave; the message names the file, line or key and the fix."""


class ConfigError(UserError):
    """A mistake in a recipe or on the command line."""


class RunError(RuntimeError):
    """A run that cannot go on; its checkpoints stand."""


class ServerError(RunError):
    """A server, or all of them, cannot be used."""


class RefusedError(ServerError):
    """The server is healthy and does not take the request."""


class UnreachableError(ServerError):
    """No answer, or an answer that says the server failed; it may recover."""


class NoRouteError(UnreachableError):
    """The server does not know the route."""


class BusyError(ServerError):
    """The server is healthy and overloaded."""


class InvalidReplyError(ServerError):
    """The server replied what cannot be true."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends by `error`: 2 bad input, 1 a failed run or a defect."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, UserError) else 1
