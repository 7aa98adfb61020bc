"""Lines that a run prints at its start, and prompts to try its model on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl_llm import algos
from jaxrl_llm.algos.contract import ignores_staleness
from jaxrl_llm.builders.evaluation import evaluation_line
from jaxrl_llm.builders.run import Run
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.chat import prompt_messages, prompt_row
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import named_leaves
from jaxrl_llm.models.kernels import describe_kernels, turing_warning
from jaxrl_llm.models.lora import rank_of_experts, trained_state
from jaxrl_llm.models.quantize import SCALE
from jaxrl_llm.sharding.placement import format_placement, placement_of

MIN_LORA_RATE = 5e-6
SHOWN_CHARACTERS = 100
"""Of each end of a prompt."""


def start_lines(run: Run, start: int) -> Iterator[str]:
    """Yield lines on model, devices, kernels, sizes, stale tokens and data of a run.

    Args:
        start: steps that a checkpoint has; 0 = a new run.
    """
    policy, config = run.stages[0].policy, run.config
    leaves = named_leaves(policy.abstract_state().params)
    weights = sum(math.prod(w.shape) for name, w in leaves if not name.endswith(SCALE))
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    yield f"{weights / 1e6:,.1f}M weights on {run.mesh.size} {jax.devices()[0].device_kind} device(s): {mesh}"
    for role, own in run.meshes.items():
        if own != run.mesh:
            yield f"{role.rstrip('.')}: {format_placement(placement_of(own, jax.devices()))}"
    yield describe_kernels(policy.model, config.model.dtype, run.mesh, config.strict)
    if warning := turing_warning(config.dtypes, run.mesh):
        yield warning
    yield ", ".join(f"{k} {v:,}" for k, v in derived(config, run.mesh.size).items())
    if line := staleness_line(config):
        yield line
    if line := filter_line(config):
        yield line
    yield from lora_lines(run)
    if config.epochs:
        yield epochs_line(config, run.loaders["train"])
    for name, loader in run.loaders.items():
        counts = ", ".join(f"{what} {count:,}" for what, count in loader.stats().items())
        yield f"data for {name}: {counts}"
    if run.env and run.env.line:
        yield run.env.line
    if date := config.data.chat.date:
        yield f"chat templates that write the date write {date} for the whole run (--data.chat.date)"
    yield from first_prompt_line(run)
    yield evaluation_line(config, run.evaluators)
    if 0 < start < run.total:
        yield f"continuing {config.run_dir} after step {start}"
    if start >= run.total:  # more where --steps is less than before
        length = "epochs" if config.epochs else "steps"
        yield (
            f"nothing to do: step {start} of {run.total} is done in {config.run_dir}. Raise --{length} to "
            "train on, or set another --run_dir to train anew with these settings."
        )


def first_prompt_line(run: Run) -> Iterator[str]:
    """Yield how the first prompt is rendered, and its beginning and end as the model reads them."""
    loader, chat, ends = run.loaders["train"], run.config.data.chat, SHOWN_CHARACTERS
    try:
        (prompt,) = loader.batch(0, 1)
    except UserError:  # rows for supervised training may have no prompt, or one that is too long for it
        return
    form = "plain text" if prompt_messages(prompt.example, chat) is None else "chat template"
    text = run.tokenizer.decode(prompt.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    shown = repr(text) if len(text) <= 2 * ends else f"{text[:ends]!r} ... {text[-ends:]!r}"
    yield (
        f"first prompt ({prompt.example.where}): {form} (--data.chat.render {chat.render}), "
        f"{len(prompt.ids)} tokens: {shown}"
    )


def epochs_line(config: TrainConfig, loader: Loader) -> str:
    """Return the steps of the run's epochs; of several sources how often each is read."""
    line = f"--epochs {config.epochs:g}: {config.steps:,} steps of {config.prompts_per_step} rows"
    passes = loader.passes(config.steps * config.prompts_per_step)
    if len(passes) == 1:
        return line
    each = ", ".join(f"{path} {count:.2f} times" for path, count in passes.items())
    return f"{line}; by their weights {each}"


def lora_lines(run: Run) -> Iterator[str]:
    """Yield the trained weights of a run with adapters, and a warning of a rate for full training."""
    lora, rate = run.config.lora, run.config.optim.learning_rate
    if not lora.rank:
        return
    state = trained_state(run.stages[-1].abstract_state())
    trained = sum(math.prod(w.shape) for w in jax.tree.leaves(state.params))
    base = "" if lora.quantize == "none" else f", linear layers frozen in {lora.quantize}"
    experts = rank_of_experts(run.model)
    ranks = f"rank {lora.rank}" + (f", of experts {experts}" if experts else "")
    yield f"LoRA: {ranks}, scale {lora.scale:g}, {trained / 1e6:,.2f}M trained weights{base}"
    if rate < MIN_LORA_RATE:
        yield (
            f"warning: --optim.learning_rate {rate:g} is small for LoRA, which learns at about ten times the "
            "rate of full training: 1e-5 to 1e-4 are usual"
        )


def staleness_line(config: TrainConfig) -> str:
    """Return what a run does about tokens of weights other than the policy's; "" where there are none."""
    algorithm, requires = algos.of(config.algo), algos.requirements(config.algo)
    if config.is_on_policy or not algorithm.on_rollouts:
        return ""
    tokens = f"responses are up to {config.rollout.max_staleness} steps old"
    if config.rollout.weight_noise:
        tokens = "responses are of noised weights"
    if ignores_staleness(algorithm, requires):
        return (
            f"warning: {tokens}, and --algo.old {config.algo.old} without --algo.correction treats them as "
            "on-policy: ratio 1, no clip"
        )
    return f"{tokens}: " + (
        "--algo.correction weighs their tokens"
        if requires.corrected
        else "old log-probs are those of the rollout (--algo.old)"
    )


def filter_line(config: TrainConfig) -> str:
    """Return what filters of sampling do to importance weights; "" where none acts."""
    sampling = config.rollout.sampling
    filters = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    acting = [
        f"--rollout.sampling.{name} {getattr(sampling, name):g}" for name, acts in filters.items() if acts
    ]
    if (
        not acting
        or sampling.kept_sets
        or not algos.of(config.algo).on_rollouts
        or not algos.requirements(config.algo).logprobs
    ):
        return ""
    return (
        f"warning: {', '.join(acting)}: tokens are drawn from what the filters keep, and log-probs are of "
        "the full softmax: importance weights are biased, and the metrics mismatch/ do not show it; "
        "--rollout.sampling.kept_sets True, with a top_k, takes log-probs over what is kept"
    )


def prompts_to_try(run: Run, count: int = 64) -> list[dict[str, Any]]:
    """Return rows of prompts.jsonl: held-out prompts, or training prompts of a run without evaluation.

    Returns: `data.chat.prompt_row` and, where the row has one, "answer". [] for a dataset without prompts.
    """
    config, loader = run.config, run.loaders.get("eval", run.loaders["train"])
    try:
        count = min(count, config.eval.prompts, loader.stats()["rows"]) if config.eval.every else count
        prompts = loader.eval_set(count) if config.eval.every else loader.batch(0, count)
    except UserError:  # rows for supervised training may be too long for a prompt
        return []
    answers = [{"answer": p.example.answer} if p.example.answer is not None else {} for p in prompts]
    rows = [prompt_row(prompt.example, config.data.chat) for prompt in prompts]
    return [{**row, **answer} for row, answer in zip(rows, answers, strict=True)]
