"""`python -m jaxrl_llm generate --model DIR --prompts p.jsonl --out o.jsonl`: responses to prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.ranges import Count
from jaxrl_llm.tools.arguments import check_output_path, parse_arguments
from jaxrl_llm.tools.config import GenerateConfig, ModelChoice, SelectConfig, check_selection, gives_rewards


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ModelChoice, GenerateConfig, SelectConfig):
    """Generate responses to the prompts of a file, and reward and select them.

    Rewards have the flags of training: --reward.name math (or my_rewards.py:f, or a URL),
    --reward.models.0.path FOLDER, --reward.models.0.weight 0.5 and so on.
    """

    model: str
    """Hugging Face folder, GGUF file, hub name, or directory of a run (its newest checkpoint)."""
    prompts: Path
    """JSONL (or JSON, CSV, Parquet, Arrow) with "prompt" (text) or "messages" (a chat, to be rendered with
    the chat template), such as samples.jsonl of a run."""
    out: Path
    """JSONL to write: {"prompt", "responses": [{"text", "tokens", "logprobs", "finish"}]}, each response with
    "reward" where there is one, and the columns of the prompt's row. Other rows: --select."""
    resume: bool = True
    """Continue the file of a command that was killed, and refuse one that this command did not write; False =
    write it anew."""
    batch_tokens: Count = 8192
    """Tokens of one forward pass of a reward model, including padding."""


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
