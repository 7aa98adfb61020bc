"""Lines and records of a run for its reader: at the start, samples of a step, the next command."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.algos.contract import ignores_staleness
from jaxrl_llm.builders.evaluation import evaluation_line
from jaxrl_llm.builders.run import Run
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.chat import prompt_messages, prompt_row
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.models import TransformerConfig, named_leaves
from jaxrl_llm.models.attention import original_length
from jaxrl_llm.models.kernels import describe_kernels, turing_warning
from jaxrl_llm.models.lora import rank_of_experts, trained_state
from jaxrl_llm.models.quantize import SCALE
from jaxrl_llm.report.log import PROMPTS
from jaxrl_llm.report.samples import sample_rows
from jaxrl_llm.rollout.engine import raw_text
from jaxrl_llm.sharding.placement import format_placement, number_of_slices, placement_of
from jaxrl_llm.structs import Trajectory

MIN_LORA_RATE = 5e-6
SHOWN_CHARACTERS = 100
"""Of each end of a prompt."""


def start_lines(run: Run, start: int) -> Iterator[str]:
    """Yield lines on model, devices, kernels, sizes, stale tokens and data of a run.

    Args:
        start: steps that a checkpoint has; 0 = a new run.
    """
    policy, config = run.stages[0].policy, run.config
    # Model, devices and kernels.
    leaves = named_leaves(policy.abstract_state().params)
    weights = sum(math.prod(w.shape) for name, w in leaves if not name.endswith(SCALE))
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    yield f"{weights / 1e6:,.1f}M weights on {run.mesh.size} {jax.devices()[0].device_kind} device(s): {mesh}"
    if (found := number_of_slices(jax.devices())) > config.mesh.slices:
        yield (
            f"the devices are in {found} slices with slow links between them: with --mesh.data and "
            f"--mesh.slices {found} gradients cross these once an update (docs/placement.md)"
        )
    for role, own in run.meshes.items():
        if own != run.mesh:
            yield f"{role.rstrip('.')}: {format_placement(placement_of(own, jax.devices()))}"
    if line := frequencies_line(policy.model, config.max_tokens):
        yield line
    if policy.model.index:
        yield indexer_line(policy.model, config.max_tokens)
    yield describe_kernels(policy.model, config.model.dtype, run.mesh, config.strict)
    if warning := turing_warning(config.dtypes, run.mesh):
        yield warning
    # Sizes, data and evaluation.
    yield ", ".join(f"{k} {v:,}" for k, v in derived(config, run.mesh.size).items())
    if line := staleness_line(config):
        yield line
    if line := filter_line(config):
        yield line
    yield from lora_lines(run)
    if (alone := run.stages[-1].critic_warmup) >= config.steps > 0:
        yield f"warning: --critic.warmup_steps {alone} is all {config.steps} steps: the policy is not trained"
    if config.epochs:
        yield epochs_line(config, run.loaders["train"])
    for name, loader in run.loaders.items():
        counts = ", ".join(f"{what} {count:,}" for what, count in loader.stats().items())
        yield f"data for {name}: {counts}"
    if run.env and run.env.line:
        yield run.env.line
    if run.exporter:
        yield run.exporter.line
    if date := config.data.chat.date:
        yield f"chat templates that write the date write {date} for the whole run (--data.chat.date)"
    yield from first_prompt_line(run)
    yield evaluation_line(config, run.evaluators)
    # Where the run continues.
    if 0 < start < run.total:
        yield f"continuing {config.run_dir} after step {start}"
    if start >= run.total:  # more where --steps is less than before
        length = "epochs" if config.epochs else "steps"
        yield (
            f"nothing to do: step {start} of {run.total} is done in {config.run_dir}. Raise --{length} to "
            "train on, or set another --run_dir for a new run with these settings."
        )


def frequencies_line(model: TransformerConfig, longest: int) -> str:
    """Return how a model's RoPE is stretched (yarn), or which of two sets of frequencies (longrope) a run
    uses; "" for others."""
    rope = model.rope
    if rope.scaling == "yarn":
        return (
            f"yarn: factor {rope.factor:g} over {original_length(model):,} positions, {model.max_position:,} "
            "in all"
        )
    if rope.scaling != "longrope":
        return ""
    name, relation = ("long_factor", "above") if model.rope.is_long else ("short_factor", "up to")
    return (
        f"longrope: {name} for the whole run, whose sequences of at most {longest:,} tokens are {relation} "
        f"the model's original length, {original_length(model):,}"
    )


def indexer_line(model: TransformerConfig, longest: int) -> str:
    """Return whether a run uses the model's sparse indexer, which it never trains."""
    if longest <= (topk := model.index.topk):
        return f"sparse indexer: not used, since sequences have {longest:,} of {topk:,} tokens (index_topk)"
    return (
        f"sparse indexer: frozen. It chooses {topk:,} of up to {longest:,} tokens as it did at the start; "
        "the loss that DeepSeek trains it with is not here (docs/experts.md)"
    )


def first_prompt_line(run: Run) -> Iterator[str]:
    """Yield how the first prompt is rendered, and its beginning and end as the model reads them."""
    loader, chat, ends = run.loaders["train"], run.config.data.chat, SHOWN_CHARACTERS
    try:
        (prompt,) = loader.batch(0, 1)
    except UserError:  # rows for supervised training may have no prompt, or one that is too long for it
        return
    form = "plain text" if prompt_messages(prompt.example, chat) is None else "chat template"
    text = raw_text(run.tokenizer, prompt.ids)
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
    """Return a line on the treatment of tokens of older weights; "" for on-policy runs."""
    algorithm, requires = algos.of(config.algo), algos.requirements(config.algo)
    if config.is_on_policy or not algorithm.on_rollouts:
        return ""
    tokens = f"responses are up to {config.rollout.max_staleness} steps old"
    if config.rollout.oversample > 1:
        tokens += ", steps take the first complete groups"
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
        else "old log-probs come from the rollout (--algo.old)"
    )


def filter_line(config: TrainConfig) -> str:
    """Return a warning of sampling filters, which bias importance weights; "" without filters."""
    sampling = config.rollout.sampling
    filters = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    acting = [
        f"--rollout.sampling.{name} {getattr(sampling, name):g}" for name, acts in filters.items() if acts
    ]
    if not acting or sampling.kept_sets or not algos.updates_policy(config.algo):
        return ""
    return (
        f"warning: {', '.join(acting)}: tokens are drawn from the filters' kept set, log-probs are of "
        "the full softmax: importance weights are biased, and the metrics mismatch/ do not show it; "
        "--rollout.sampling.kept_sets True, with a top_k, takes log-probs over the kept set"
    )


MAX_PROMPTS = 64  # rows of prompts.jsonl


def prompts_to_try(run: Run) -> list[dict[str, Any]]:
    """Return rows of prompts.jsonl: held-out prompts, or training prompts of a run without evaluation.

    Returns: `data.chat.prompt_row` with "answer" if the row has one. [] for a dataset without prompts.
    """
    config, loader = run.config, run.loaders.get("eval", run.loaders["train"])
    try:
        if config.eval.every:
            prompts = loader.eval_set(min(MAX_PROMPTS, config.eval.prompts, loader.stats()["rows"]))
        else:
            prompts = loader.batch(0, MAX_PROMPTS)
    except UserError:  # rows for supervised training may be too long for a prompt
        return []
    answers = [{"answer": p.example.answer} if p.example.answer is not None else {} for p in prompts]
    rows = [prompt_row(prompt.example, config.data.chat) for prompt in prompts]
    return [{**row, **answer} for row, answer in zip(rows, answers, strict=True)]


OF_PROMPTS = ("options", "subset", "split", "prompt_key", "input_template")
"""Fields of a data source (of pairs) on which its prompts depend."""


def next_command(run_dir: Path, config: TrainConfig, has_prompts: bool = True) -> str:
    """Return a complete command to try next.

    Args:
        has_prompts: prompts.jsonl has rows.
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
    """Yield the flags of RL on the prompts of a reward model's pairs, with the sizes of its run."""
    own_data = not config.data.sources("train")[0].is_generated
    if not config.model.path:
        yield "--config ppo_reward_tiny.py"
    else:
        yield f"--config grpo_qwen.py --reward.name none --run_dir {_quoted(f'{run_dir}_rl')}"
        for key in ("path", "tokenizer", "dtype", "yarn_factor", "yarn_original"):
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
    """Yield the flags of the first training source, and of the held-out data."""
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


PER_TOKEN = "per_token"
SPLIT = "\N{REPLACEMENT CHARACTER}"  # decoded for a part of a character
MAX_PARTS = 4  # tokens of one character of UTF-8, at most


def samples_of(run: Run, step: int, experience: Experience) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl of a step, after its update: `sample_rows` with the numbers of tokens.

    Returns: rows with "per_token" and "token_ids", of the prompt and of the tokens in "per_token"; each turn
        of "tree" has "trained", how many of its tokens are in the loss.
    """
    log, stage = run.config.log, run.stage(step)
    shown = experience.trajectories[: log.samples]
    examples = [experience.prompts[t.prompt_index].example for t in shown]
    rows = sample_rows(shown, [prompt_row(example, run.config.data.chat) for example in examples])
    items = experience.items[: len(shown)] or [None] * len(shown)  # dynamic sampling may have kept none
    trainer = "old_logprobs" if stage.policy.config.old_logprobs_source == "recompute" else "logprobs"
    for row, trajectory, item in zip(rows, shown, items, strict=True):
        for turn in row["tree"]:
            start, end = turn["tokens"]
            has_loss = item is not None and trainer in item.signals
            turn["trained"] = int((item.mask[start:end] > 0).sum()) if has_loss else 0
        if log.sample_tokens:
            row[PER_TOKEN] = per_token(trajectory, item, run.tokenizer, trainer, limit=log.sample_tokens)
            response = trajectory.response_ids[: log.sample_tokens].tolist()
            row["token_ids"] = {"prompt": trajectory.prompt_ids.tolist(), "response": response}
    return rows


def per_token(
    trajectory: Trajectory, item: PackItem | None, tokenizer: Any, trainer: str, *, limit: int
) -> dict[str, Any]:
    """Return arrays over the first `limit` tokens of a response, rounded to 4 digits.

    Args:
        item: the trajectory's, after the update; None = it was not trained on.
        trainer: signal with the log-probs that the metrics mismatch/ compare with the rollout's.

    Returns: "text" (of each token; joined, the response with its special tokens), "trained" (1 = in the loss,
        0 = an observation of the environment, or a masked trajectory), "rollout_logprobs" (nats; null for
        observations) and, for trained tokens, "advantages", "logprobs" (the trainer's) and "mismatch"
        (trainer minus rollout, before rounding). An array of equal numbers is one number.
    """
    generated = trajectory.mask[:limit] > 0
    columns: dict[str, Any] = {
        "text": token_texts(tokenizer, trajectory.response_ids[:limit].tolist()),
        "rollout_logprobs": four_digits(trajectory.logprobs[:limit], generated),
    }
    trained = np.zeros_like(generated)
    if item is not None:
        response = slice(len(trajectory.prompt_ids), len(trajectory.prompt_ids) + limit)
        signals = {name: array[response] for name, array in item.signals.items()}
        trained = (item.mask[response] > 0) & (trainer in signals)
        if trained.any():
            columns["advantages"] = four_digits(signals["advantages"], trained)
            columns["logprobs"] = four_digits(signals[trainer], trained)
            columns["mismatch"] = four_digits(signals[trainer] - signals["rollout_logprobs"], trained)
    constant = {
        name: values[0] if values and values.count(values[0]) == len(values) else values
        for name, values in {"trained": trained.astype(int).tolist(), **columns}.items()
        if name != "text"
    }
    return {"text": columns["text"], **constant}


def four_digits(values: np.ndarray, present: np.ndarray) -> list[float | None]:
    """Return the numbers with 4 significant digits; null where absent, NaN or infinite."""
    present = present & np.isfinite(values)
    return [float(f"{x:.4g}") if p else None for x, p in zip(values.tolist(), present.tolist(), strict=True)]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the decoded ids, special tokens included.

    A character of several tokens is the text of its last token. Tokens are decoded alone if this gives the
    same text, else each with the tokens since the last complete character.
    """
    decode = functools.partial(raw_text, tokenizer)
    texts = [decode([i]) for i in ids]
    if "".join(texts) == decode(ids):
        return texts
    texts, context, start = [], 0, 0  # ids[context:start] precede the first token without a text
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[context:start]), decode(ids[context:end])
        if after.endswith(SPLIT) and end - start < MAX_PARTS and end < len(ids):
            texts.append("")
            continue
        texts.append(after[len(before) :])
        context, start = start, end
    return texts
