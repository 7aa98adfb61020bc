"""`python -m jaxrl_llm COMMAND ...`: the commands, each a `main(argv) -> exit code`."""

from __future__ import annotations

import difflib
import importlib
import platform
import sys

from jaxrl_llm.extensions import load_extensions, package_version
from jaxrl_llm.host import huge_pages
from jaxrl_llm.host.command import AGAIN, run_command, working
from jaxrl_llm.host.signals import handled_signals, install_handlers

COMMANDS = {
    "train": ("jaxrl_llm.tools.train", "Train a model by a recipe."),
    "plan": ("jaxrl_llm.tools.plan", "Compile a recipe for devices that need not be here: does it fit?"),
    "doctor": ("jaxrl_llm.tools.doctor", "Check this machine for a run; name the fixes."),
    "chat": ("jaxrl_llm.tools.chat", "Talk to a model in the terminal."),
    "generate": ("jaxrl_llm.tools.generate", "Generate responses to the prompts of a file; best of n."),
    "score": ("jaxrl_llm.tools.score", "Compute log-probabilities, or rewards, of given responses."),
    "view": ("jaxrl_llm.tools.view", "Write runs as one HTML page: curves, evaluation, samples, configs."),
    "export": ("jaxrl_llm.tools.export", "Write a checkpoint's model as a Hugging Face folder or GGUF file."),
}
COMPUTING = {"train", "chat", "generate", "score"}
SLOW_TO_START = COMPUTING | {"plan", "doctor", "export"}
"""Commands that import jax, which takes seconds."""

ENDS_AT_ONCE = {"--help", "-h", "--list", "--version"}


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user is one message and exit code 2, not a traceback.

    Args:
        argv: None = the words of this process, which may restart for huge pages (`host.huge_pages`).
    """
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv is None:
        start_process(command, rest)
    if command in ("-h", "--help", "help"):
        print(command_table())
        return 0
    if command in ("-V", "--version", "version") or "--version" in rest:
        print(version_line())
        return 0
    if command == "--list":
        command, rest = "train", ["--list", *rest]
    # The command, or the nearest one.
    known = COMMANDS if command in COMMANDS else all_commands()
    if command not in known:
        near = difflib.get_close_matches(command, known, n=1, cutoff=0.0)[0]
        if command.startswith("-"):  # flags of training without its name
            near = f"train {command}"
        print(
            f"error: {command}: unknown command. Did you mean {near}?\n\n{command_table()}", file=sys.stderr
        )
        return 2
    # Its module, whose import may be slow.
    with handled_signals():  # before jax, whose import takes seconds
        with working(f"importing {command}", first=AGAIN):
            module = importlib.import_module(known[command][0])
        return run_command(module.main, rest, command)


def all_commands() -> dict[str, tuple[str, str]]:
    """Return the commands of this package and of installed packages that extend it."""
    return COMMANDS | {name: row for table in load_extensions("commands") for name, row in table.items()}


def start_process(command: str, rest: list[str]) -> None:
    """Restart this process for huge pages if the command computes; say at once that a slow command starts."""
    if not rest or ENDS_AT_ONCE.intersection(rest):
        return
    if command in COMPUTING:
        huge_pages.restart_with_them()
    if command in SLOW_TO_START:
        print(f"jaxrl_llm {command}: starting", file=sys.stderr, flush=True)


def version_line() -> str:
    """Return the versions of the package, of Python and of jax."""
    ours, jax = (package_version(name) for name in ("jaxrl-llm", "jax"))
    return f"jaxrl_llm {ours}, Python {platform.python_version()}, jax {jax}"


def command_table() -> str:
    """Return the usage line and the commands, each with a sentence."""
    lines = ["usage: python -m jaxrl_llm COMMAND [--key value ...]", ""]
    lines += [f"    {name:<13} {sentence}" for name, (_, sentence) in all_commands().items()]
    lines += [
        "",
        "python -m jaxrl_llm --list: recipes and algorithms; COMMAND --help: its options; --version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    install_handlers()  # to the end of the interpreter
    sys.exit(main())
