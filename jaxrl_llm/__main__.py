"""`python -m jaxrl_llm COMMAND ...`: the commands, each a `main(argv) -> exit code`."""

from __future__ import annotations

import difflib
import importlib
import sys

from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.signals import handled_signals, install_handlers

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
    """Run the command; a mistake of the user is one message and exit code 2, not a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
        print(f"error: {command}: unknown command. Did you mean {near}?\n\n{usage()}", file=sys.stderr)
        return 2
    with handled_signals():  # before jax, whose import takes seconds
        importlib.import_module("jaxrl_llm.host.start").quiet_transformers()
        return run_command(importlib.import_module(COMMANDS[command][0]).main, rest)


def usage() -> str:
    lines = ["usage: python -m jaxrl_llm COMMAND ...", ""]
    lines += [f"    {name:<10} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m jaxrl_llm COMMAND --help says more."])


if __name__ == "__main__":
    install_handlers()  # to the end of the interpreter
    sys.exit(main())
