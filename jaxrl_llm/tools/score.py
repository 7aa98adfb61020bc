"""`python -m jaxrl_llm score --data t.jsonl --out o.jsonl`: log-probs or rewards of given responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import Count, Range
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.tools.arguments import check_output_path, parse_arguments
from jaxrl_llm.tools.config import Dtype, ModelChoice, SelectConfig, check_selection, gives_rewards


@dataclass(frozen=True, kw_only=True)
class ScoreArguments(ModelChoice, SelectConfig):
    """Write log-probabilities under a model (--model), or rewards (--reward.name, --reward.models.0.path).

    A row of the data gives a row, in order; --select writes rows to train on instead. Rewards have the flags
    of training: --reward.name math (or my_rewards.py:f, or a URL), --reward.models.0.path FOLDER,
    --reward.models.1.path FOLDER, --reward.models.1.weight 0.5 and so on.
    """

    model: str = ""
    """Model whose log-probabilities are written: Hugging Face folder, GGUF file, hub name, or directory of a
    run (its newest checkpoint)."""
    data: Path
    """Rows with a prompt and "responses" (of generate), a response, or chosen and rejected. For log-probs
    also "tokens" (ids), or "messages" alone (a chat, to be rendered with the chat template)."""
    out: Path
    """JSONL to write. Log-probs: {"tokens": [...], "logprobs": [...]}, nats, one for each token after the
    first; of a response also "prompt_tokens", how many are the prompt's; of several {"responses": [...]} or
    {"chosen": ..., "rejected": ...} of these. Rewards: the row, with "reward", "rewards" by name and
    "outcome" added to it or its responses."""
    temperature: Annotated[float, Range(0.01, 100, usual="1 is usual")] = 1.0
    """Temperature of the softmax whose log-probabilities are written."""
    batch_tokens: Count = 8192
    """Tokens of one forward pass, including padding; a longer row is a batch by itself."""
    window: Count = 1024
    """Rows between two writes; a command that is killed continues behind the last of them."""
    resume: bool = True
    """Continue the file of a command that was killed, and refuse one that this command did not write; False =
    write it anew."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, float16 on Turing GPUs, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template that makes tokens of messages."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""


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
