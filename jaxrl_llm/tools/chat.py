"""`python -m jaxrl_llm chat --model FOLDER`: a conversation in the terminal; streaming, with commands."""

from __future__ import annotations

from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.config import ChatArguments


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model or setting that cannot be used, with the fix.
    """
    args = parse_arguments(ChatArguments, argv, "chat")
    from jaxrl_llm.tools.chat_session import open_session  # imports jax: --help and bad flags end before

    open_session(args).run()
    return 0
