"""`python -m jaxrl_llm COMMAND ...`: the commands, each a `main(argv) -> exit code`."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

COMMANDS = {
    "train": ("jaxrl_llm.train", "train a model as a recipe says"),
    "plan": (
        "jaxrl_llm.tools.plan",
        "whether a recipe fits devices that need not be here, and what it takes",
    ),
    "generate": ("jaxrl_llm.tools.generate", "responses of a model to the prompts of a file"),
    "score": ("jaxrl_llm.tools.score", "log-probabilities of given tokens under a model"),
    "export": ("jaxrl_llm.tools.export", "a Hugging Face folder from a run's checkpoint"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; a user's mistake (ValueError) is one message and exit code 2, not a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
        print(f"error: {command}: unknown command. Did you mean {near}?\n\n{usage()}", file=sys.stderr)
        return 2
    runtime = importlib.import_module("jaxrl_llm.runtime")
    runtime.quiet_transformers()
    module = importlib.import_module(COMMANDS[command][0])
    return run(module.main, rest)


def run(command_main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Exit code of `command_main(argv)`: 2, with the message alone, where this package refuses its input.

    A ValueError from inside another library is no such refusal and keeps its traceback.
    """
    try:
        return command_main(argv) or 0
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(__file__).parent not in raised_in.parents:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    lines = ["usage: python -m jaxrl_llm COMMAND ...", ""]
    lines += [f"    {name:<10} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m jaxrl_llm COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
