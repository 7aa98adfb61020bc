"""Entry point of every command: signals, errors, exit codes. Imports no jax."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_llm.errors import RunError, UserError, exit_code
from jaxrl_llm.host.signals import Interrupted, show_cursor, unwinding


def run_command(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Return the exit code of `command(argv)`; print a UserError (2) or a RunError (1) as one message.

    Raises:
        Interrupted: by SIGTERM or SIGINT; it ends the interpreter with code 143 or 130 and no traceback.
    """
    quiet_transformers()
    with unwinding():
        try:
            return command(argv) or 0
        except (UserError, RunError) as error:
            print(f"error: {error}", file=sys.stderr)
            return exit_code(error)
        except Interrupted:  # perhaps while a live panel was being opened
            show_cursor()
            raise


def quiet_transformers() -> None:
    """Hide the warning of transformers that torch, which is not needed, is not installed."""
    hide_records("transformers", "PyTorch was not found")


def hide_records(logger: str, text: str) -> None:
    """Hide the records of a logger whose message, before its arguments, has the text."""
    logging.getLogger(logger).addFilter(_Without(text))


@dataclass(frozen=True)
class _Without:
    """Filter of a logger; equal ones are added once."""

    text: str

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in str(record.msg)
