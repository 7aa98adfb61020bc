"""Data of a run: loaders of its splits, the record of the held-out rows, and steps from epochs."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.holdout import HeldOutSplit, shared_prompts, split_sources
from jaxrl_llm.data.loader import Loader, RowKind
from jaxrl_llm.data.rows import Example, column_names
from jaxrl_llm.data.sources import OpenSource, open_sources
from jaxrl_llm.envs.python_file import check_env
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.host.files import load_json, replace_text
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.recipe.fields import refuse
from jaxrl_llm.rewards.sample import RewardSample

ANSWER_FIX = (
    "--data.train.0.answer_key COLUMN names the one with the answer; rows that lack it are then refused, or "
    "left out with --data.bad_rows skip"
)
NO_HELD_OUT = (
    "--eval.every is {every}: no held-out data to evaluate on. Hold out a part of the training rows "
    "(--data.holdout 0.1), give some (--data.eval_path FILE), or set --eval.every 0, for no evaluation."
)
log = logging.getLogger(__name__)


def open_loaders(config: TrainConfig, tokenizer: Any, columns: dict[str, Any]) -> dict[str, Loader]:
    """Open the data: "train", and "warm_start" and "eval" of runs that have them.

    Args:
        columns: columns that every row gets, such as the tools that the chat template shows.
    """
    data, warm = config.data, config.warm_start
    holdout = open_split(config) if data.holdout else None

    def loader(data=data, split: Literal["train", "eval"] = "train", opened: list[OpenSource] | None = None):
        return Loader(
            data,
            tokenizer,
            config.seed,
            config.max_prompt_tokens,
            split=split,
            max_tokens=config.max_tokens,
            columns=columns,
            opened=opened,
        )

    # The loader of each part of the run.
    loaders = {"train": loader(opened=holdout and holdout.train)}
    if warm.steps and warm.sources:
        warm_data = replace(data, train=warm.sources, path="", holdout=0.0)
        opened = holdout and holdout.without_held_out(open_sources(warm_data, "train", config.seed))
        loaders["warm_start"] = loader(warm_data, opened=opened)
    elif warm.steps:
        loaders["warm_start"] = loader(opened=holdout and holdout.train)
    if config.eval.every:
        loaders["eval"] = loader(split="eval", opened=holdout and holdout.eval)
        if not loaders["eval"].stats()["rows"]:
            raise UserError(NO_HELD_OUT.format(every=config.eval.every))
        if not data.holdout:
            warn_of_shared_prompts(loaders)
    return loaders


def warn_of_shared_prompts(loaders: dict[str, Loader]) -> None:
    """Warn of held-out files that share prompts with training files: they do not measure generalization."""
    if shared := shared_prompts(loaders["train"].opened, loaders["eval"].opened):
        log.warning(
            "%s have a prompt that is trained on, too, so the evaluation is better than on new prompts. "
            "Give another --data.eval_path, or hold out rows of the training files (--data.holdout 0.1)",
            shared,
        )


def open_split(config: TrainConfig) -> HeldOutSplit:
    """Return the training data, split; a run that continues holds out the prompts that it began with.

    They are recorded in the run directory, by seed, number and sources: files may have grown since. A
    collective.

    Raises:
        UserError: the record is damaged.
    """
    data = config.data
    paths = [source.path for source in data.sources("train")]
    name = hashlib.sha256(json.dumps([config.seed, data.holdout, paths]).encode()).hexdigest()[:12]
    path = Path(config.run_dir) / "eval" / f"holdout_{name}.json"
    recorded = on_first(lambda: _recorded_prompts(path))
    split = split_sources(data, config.seed, recorded)
    if recorded is None:
        prompts = [f"{prompt:016x}" for prompt in split.prompts.tolist()]
        record = json.dumps({"holdout": data.holdout, "sources": paths, "prompts": prompts}, indent=2)
        on_first(lambda: replace_text(path, f"{record}\n"))
    return split


def _recorded_prompts(path: Path) -> list[int] | None:
    """Return the hashes in the record of held-out prompts, or None without a record."""
    if not path.exists():
        return None
    try:
        return [int(prompt, 16) for prompt in load_json(path.read_text())["prompts"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}, the record of the held-out prompts of this run, cannot be used ({error}). Put a good "
            "copy there; without the file, rows are chosen again from the present data, and some of them may "
            "have been trained on."
        ) from error


def with_steps(config: TrainConfig, loader: Loader) -> TrainConfig:
    """Return the config with the steps that its epochs over the rows of a loader take, if it has epochs.

    Raises:
        ConfigError: --profile names a step beyond them.
    """
    if not config.epochs:
        return config
    rows = loader.stats()["rows"]
    steps = steps_of_epochs(config.epochs, rows, config.prompts_per_step)
    refuse([f"--{key} {problem}" for key, problem in replace(config, steps=steps, epochs=0.0).problems()])
    return replace(config, steps=steps)


def steps_of_epochs(epochs: float, rows: int, rows_per_step: int) -> int:
    """Return how many steps read every row `epochs` times, rounded up.

    The last step is filled with the first rows of the next epoch, so that no row is left out.
    """
    return math.ceil(Fraction(str(epochs)) * rows / rows_per_step)  # exact: 1.1 * 100 / 10 is 11


def try_first_rows(config: TrainConfig, loaders: dict[str, Loader]) -> list[Example]:
    """Return a row of each training source, after rendering, tokenizing and resetting the environment for it.

    Raises:
        UserError: no row of a source can be used, or an environment or tool fails; with the fix.
    """
    algorithm = algos.of(config.algo)
    kind = "prompts" if algorithm.on_rollouts else algorithm.data
    rows = {"train": loaders["train"].check_first_rows(kind)}
    if warm := loaders.get("warm_start"):
        try:
            rows["warm_start"] = warm.check_first_rows("tokens")
        except UserError as error:
            raise UserError(
                f"{error}. The supervised warm-up reads it: --warm_start.steps 0 goes without"
            ) from error
    held_out = check_held_out_rows(loaders["eval"], kind) if "eval" in loaders else []
    loaders["train"].warn_of_plain_text([row for of in (*rows.values(), held_out) for row in of])
    on_first(lambda: check_env(config.env, rows["train"]))
    return rows["train"]


def check_answers(
    unanswered: Sequence[tuple[Example, int]], total: int, can_score: Callable[[RewardSample], bool], fix: str
) -> None:
    """Warn of rows without the answer that their reward compares with.

    Args:
        unanswered: of each source with such rows the first one, and their number.
        total: rows of all sources.
        fix: ends the message.

    Raises:
        UserError: no row has one.
    """
    lacking = [(row, count) for row, count in unanswered if not can_score(reward_sample(row))]
    if not lacking:
        return
    first, count = lacking[0][0], sum(count for _, count in lacking)
    problem = (
        f"{first.where}: no answer for the reward to compare with, as in {count:,} of {total:,} rows; the "
        f"columns beside the prompt are {column_names(first.columns) or 'none'}. {fix}"
    )
    if count == total:
        raise UserError(problem)
    log.warning("%s", problem)


def check_held_out_rows(held_out: Loader, kind: RowKind) -> list[Example]:
    """Return a row of each held-out source: one that the algorithm learns from, or else a prompt to answer.

    Raises:
        UserError: no row of a source is either, with the reason for the first.
    """
    rows = []
    for i in range(held_out.num_sources):
        source = held_out.of_sources([i])
        try:
            rows += source.check_first_rows(kind)
        except UserError as error:
            try:
                rows += source.check_first_rows("prompts")
            except UserError:
                raise error from None
    return rows
