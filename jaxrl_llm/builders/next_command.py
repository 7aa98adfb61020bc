"""The command to try after a run: generate from its model, or RL against its reward model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.report.log import PROMPTS

OF_PROMPTS = ("options", "subset", "split", "prompt_key", "input_template")
"""Fields of a source of pairs that say what its prompts are."""


def next_command(run_dir: Path, config: TrainConfig, has_prompts: bool = True) -> str:
    """Return the command to try next, which works as it stands.

    Args:
        has_prompts: there are rows in prompts.jsonl.
    """
    if not algos.requirements(config.algo).logprobs:
        words = ["python -m jaxrl_llm.train", *_against_reward_model(run_dir, config)]
    elif not has_prompts:
        words = ["python -m jaxrl_llm chat --model", _quoted(run_dir / "hf")]
    else:
        words = ["python -m jaxrl_llm generate --model", _quoted(run_dir / "hf")]
        words += ["--prompts", _quoted(run_dir / PROMPTS), "--out", _quoted(run_dir / "responses.jsonl")]
        words += ["--temperature 0 --max_tokens", str(config.max_response_tokens)]
        if config.rollout.sampling.stop:
            words += ["--stop", *map(_quoted, config.rollout.sampling.stop)]
        if config.data.chat.parse_control_tokens:
            words += ["--chat.parse_control_tokens True"]
        if config.data.chat.date:
            words += ["--chat.date", config.data.chat.date]
    return " ".join(words)


def _against_reward_model(run_dir: Path, config: TrainConfig) -> Iterator[str]:
    """Yield the flags of RL on the prompts of a reward model's pairs, with the sizes of its own run."""
    own_data = not config.data.sources("train")[0].is_generated
    if not config.model.path:
        yield "--config ppo_reward_tiny.py"
    else:
        yield f"--config grpo_qwen.py --reward.name none --run_dir {_quoted(f'{run_dir}_rl')}"
        for key in ("path", "tokenizer", "dtype"):
            if value := getattr(config.model, key):
                yield f"--model.{key} {_quoted(value)}"
        for key in ("max_prompt_tokens", "max_response_tokens", "tokens_per_device"):
            yield f"--{key} {getattr(config, key)}"
        for key in ("render", "system_prompt", "template_options", "chat_template"):
            if key != "chat_template" or config.data.chat.chat_template:
                yield f"--data.chat.{key}={_quoted(getattr(config.data.chat, key))}"
    if config.model.path or own_data:
        yield from _data(config)
    yield f"--reward.models.0.path {_quoted(run_dir / 'hf')}"
    if config.algo.algorithm == "prm":
        yield "--reward.models.0.kind process"


def _data(config: TrainConfig) -> Iterator[str]:
    """Yield the flags of the first training source, and of what is held out for evaluation."""
    source, held_out = config.data.sources("train")[0], config.data.sources("eval")
    yield f"--data.path {_quoted(source.path)}"
    for name in OF_PROMPTS:
        if (value := getattr(source, name)) != getattr(type(source), name):
            yield f"--data.train.0.{name} {_quoted(value)}"
    if config.data.holdout:
        yield f"--data.holdout {config.data.holdout:g}"
    elif held_out and not held_out[0].is_generated and config.eval.every:
        yield f"--data.eval_path {_quoted(held_out[0].path)}"
    else:
        yield "--eval.every 0"


def _quoted(value: object) -> str:
    return shlex.quote(str(value))
