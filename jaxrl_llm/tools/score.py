"""`python -m jaxrl_llm score --data t.jsonl --out o.jsonl`: log-probs or rewards of given responses."""

from __future__ import annotations

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.arguments import check_output_path, parse_arguments
from jaxrl_llm.tools.config import ScoreArguments, check_selection, gives_rewards


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model, file, row or setting that cannot be used, with the fix.
    """
    args = parse_arguments(ScoreArguments, argv, "score")
    rewards = gives_rewards(args.reward)
    check_selection(args, rewards)
    if rewards == bool(args.model):
        problem = "both are given" if rewards else "neither is given"
        raise UserError(
            f"score writes log-probs of a model (--model FOLDER) or rewards (--reward.name NAME, "
            f"--reward.models.0.path FOLDER); {problem}. Give one of them."
        )
    if not args.model and (args.adapter or args.step is not None):
        flag = f"--adapter {args.adapter}" if args.adapter else f"--step {args.step}"
        raise UserError(f"{flag} is of the model whose log-probs are written, and --model is not given")
    check_output_path(args.out, args.data)
    from jaxrl_llm.tools.scoring import write_scores  # imports jax: --help and bad flags end before

    write_scores(args)
    return 0
