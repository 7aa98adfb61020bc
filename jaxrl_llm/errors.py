"""Errors of the program itself: one family for mistakes in the input, one for runs that cannot continue.

`host.command.run_command` prints a UserError (exit code 2) or a RunError (exit code 1) as one message. Every
other exception is a defect and keeps its traceback. Messages show no keys.
"""

from __future__ import annotations

from jaxrl_llm.addresses import mask_text


class UserError(ValueError):
    """A mistake in the user's input; the message names the file, line or key and the fix."""

    def __str__(self) -> str:
        return mask_text(super().__str__())


class ConfigError(UserError):
    """A mistake in a recipe or on the command line."""


class RunError(RuntimeError):
    """A run that cannot continue; its checkpoints are kept."""

    def __str__(self) -> str:
        return mask_text(super().__str__())


class ServerError(RunError):
    """One server, or every server, cannot be used."""


class RefusedError(ServerError):
    """A request that a healthy server refuses."""


class UnreachableError(ServerError):
    """No reply, or a reply that reports a failure of the server; it may recover."""


class LostError(UnreachableError):
    """The connection to a server failed, or it was left out for another reason: no fault of the request."""


class NoRouteError(UnreachableError):
    """A route that the server does not have."""


class BusyError(ServerError):
    """A healthy server that is overloaded."""


class InvalidReplyError(ServerError):
    """A reply of a server with the wrong form or impossible values."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends by `error`: 2 bad input, 1 a failed run or a defect."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, UserError) else 1
