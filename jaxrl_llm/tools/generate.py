"""`python -m jaxrl_llm generate --model DIR --prompts p.jsonl --out o.jsonl`: responses to prompts."""

from __future__ import annotations

from jaxrl_llm.tools.arguments import check_output_path, parse_arguments
from jaxrl_llm.tools.config import GenerateArguments, check_selection, gives_rewards


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model, file, row or setting that cannot be used, with the fix.
    """
    args = parse_arguments(GenerateArguments, argv, "generate")
    check_selection(args, gives_rewards(args.reward))
    check_output_path(args.out, args.prompts)
    from jaxrl_llm.tools.generation import write_responses  # imports jax: --help and bad flags end before

    write_responses(args)
    return 0
