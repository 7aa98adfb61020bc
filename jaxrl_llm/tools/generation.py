"""Responses of a model to prompts, with rewards, as `generate` writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.data.chat import encode_prompt, plain_text_warning, prompt_messages
from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.command import working
from jaxrl_llm.host.processes import show_warnings
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT
from jaxrl_llm.structs import Trajectory
from jaxrl_llm.tools.config import GenerateArguments, GenerateConfig, ModelChoice, gives_rewards
from jaxrl_llm.tools.models import open_model, pick_dtype
from jaxrl_llm.tools.output import (
    ProgressBar,
    ResumableOutput,
    json_line,
    print_progress,
    settings_of,
    with_date,
)
from jaxrl_llm.tools.response_rewards import ResponseRewarder
from jaxrl_llm.tools.selection import (
    RewardedResponse,
    RewardSummary,
    base_row,
    reward_columns,
    selected_rows,
    thought_column,
)


def write_responses(args: GenerateArguments) -> None:
    """Write the responses to all prompts, or continue the file of a command that was killed.

    Raises:
        UserError: a model, file or row that cannot be used, with the fix.
    """
    show_warnings()
    examples, asked = read_examples(args.prompts), args
    args = with_date(args)
    with contextlib.ExitStack() as closing:
        generator = Generator(args.model, examples, args, args)
        rewarder = open_rewarder(args, generator, examples, closing)
        settings = settings_of(replace(asked, step=generator.model.step), args.prompts)
        output = ResumableOutput(args.out, settings, args.resume, args.chat.date)
        closing.enter_context(output)
        bar, summary = ProgressBar(len(examples), "prompts", output.rows_done), RewardSummary()
        for part, groups, speed in generator.windows(output.rows_done):
            rewarded = reward_groups(rewarder, part, groups)
            rows = (row for x in zip(part, groups, rewarded, strict=True) for row in output_rows(*x, args))
            output.append([json_line(row, args.model) for row in rows], output.rows_done + len(part))
            note = summary.add(rewarded) if rewarder else ""
            bar.update(output.rows_done, f"{speed:,.0f} tokens/s{note}")
        output.finish()


class Generator:
    """A model and requests for responses to all prompts.

    Raises:
        UserError: a model or prompt that cannot be used, with the fix.
    """

    def __init__(
        self,
        model: str,
        examples: Sequence[Example],
        config: GenerateConfig,
        choice: ModelChoice = ModelChoice(),  # noqa: B008  frozen
    ):
        check_kernels_setting()
        self.examples, self.config, self.mesh = examples, config, make_mesh(config.mesh)
        self.model = open_model(model, choice)
        self.tokenizer = self.model.read_tokenizer()
        self.dtype = pick_dtype(config.dtype)
        if warning := plain_text_warning(self.tokenizer, examples, config.chat, "--chat.render"):
            print_progress(f"warning: {warning}")
        positions = self.model.config.max_position
        self.requests = [
            make_request(config, positions, self.tokenizer, i, example=example)
            for i, example in enumerate(examples)
        ]
        longest = (len(request.prompt_ids) + request.max_tokens for request in self.requests)
        self.model = self.model.for_length(max(longest, default=1))

    def windows(self, start: int = 0) -> Iterator[tuple[Sequence[Example], list[list[Trajectory]], float]]:
        """Load the model; yield (examples, their responses, tokens per second) for several prompts at a time.

        Args:
            start: prompts that are left out; responses to the others do not depend on them.
        """
        config, rollout = self.config, RolloutConfig(slots=self.config.slots, dtype=self.dtype)
        if start >= len(self.requests):
            return
        engine = NativeEngine(
            rollout, self.model.config, self.mesh, self.tokenizer, eos_ids=self.model.end_ids
        )
        with working("loading the model"):
            engine.publish(self.model.load(self.mesh, ROLLOUT, self.dtype), version=0)
        window = max(1, 8 * config.slots // config.n)  # prompts between two results
        for first in range(start, len(self.requests), window):
            part = self.requests[first : first + window]
            with working(f"generating responses to {len(part)} prompts"):
                trajectories = engine.generate(part, config, jax.random.key(config.seed))
            responses = [trajectories[i * config.n : (i + 1) * config.n] for i in range(len(part))]
            speed = engine.metrics["rollout/tokens_per_second"]
            yield self.examples[first : first + window], responses, speed


def open_rewarder(
    args: GenerateArguments, generator: Generator, examples: Sequence[Example], closing: contextlib.ExitStack
) -> ResponseRewarder | None:
    """Return the rewards of a command, tried on the first rows, or None."""
    if not gives_rewards(args.reward):
        return None
    rewarder = ResponseRewarder(
        args.reward,
        args.mesh,
        generator.dtype,
        args.batch_tokens,
        chat=args.chat,
        closing=closing,
        policy_tokenizer=generator.tokenizer,
    )
    rewarder.open(examples)
    return rewarder


def reward_groups(
    rewarder: ResponseRewarder | None, examples: Sequence[Example], groups: Sequence[Sequence[Trajectory]]
) -> list[list[RewardedResponse]]:
    """Return the responses of each prompt with their rewards; without a rewarder they have none."""
    if rewarder is None:
        return [[RewardedResponse(t.text, opens_thought=t.opens_thought) for t in group] for group in groups]
    each = [example for example, group in zip(examples, groups, strict=True) for _ in group]
    rewarded = iter(rewarder.score(each, [t for group in groups for t in group]))
    return [[next(rewarded) for _ in group] for group in groups]


def output_rows(
    example: Example,
    group: Sequence[Trajectory],
    rewarded: Sequence[RewardedResponse],
    args: GenerateArguments,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a prompt."""
    if args.select != "all":
        yield from selected_rows(example, rewarded, args, args.chat)
        return
    messages = prompt_messages(example, args.chat)
    base = base_row(example, args.chat)
    prompt = base.pop("prompt") if messages is None else base.pop("messages")
    responses = [
        {
            "text": t.text,
            "tokens": t.response_ids.tolist(),
            "logprobs": t.logprobs.tolist(),
            "finish": t.finish,
            **reward_columns(response),
        }
        for t, response in zip(group, rewarded, strict=True)
    ]
    yield {**base, "prompt": prompt, **thought_column(rewarded[0]), "responses": responses}


def make_request(
    config: GenerateConfig, max_position: int, tokenizer: Any, i: int, *, example: Example
) -> Request:
    """Return prompt i as a request for `max_tokens`, or as many as the model has positions for.

    Raises:
        UserError: the prompt leaves no position for a response; names file and line.
    """
    ids = encode_prompt(tokenizer, example, config.chat)
    if len(ids) >= max_position:
        raise UserError(
            f"{example.where}: a prompt of {len(ids)} tokens leaves no position for a response, of the "
            f"model's {max_position}; shorten the prompt"
        )
    return Request(ids, i, config.n, min(config.max_tokens, max_position - len(ids)))


def read_examples(path: Path) -> list[Example]:
    """Return all prompts of a file.

    Raises:
        UserError: a bad row; names file and line.
    """
    source = open_source(SourceConfig(path=str(path)), seed=0, bad_rows="fail")
    return [source[i] for i in range(len(source))]
