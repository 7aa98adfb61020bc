"""The verifier of a run: reward workers, tried on rows with their own answers before a model is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.builders.data import ANSWER_FIX, check_answers
from jaxrl_llm.config import RewardConfig, TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.rewards.environment import ANSWERED_ROWS
from jaxrl_llm.rewards.load import choose_reward
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample

log = logging.getLogger(__name__)


def open_rewards(
    config: TrainConfig,
    loaders: Mapping[str, Loader],
    function: Callable | None,
    closing: contextlib.ExitStack,
) -> RewardPool:
    """Return the pool of reward workers, after it has scored some rows with their answers as responses.

    A built-in verifier that can score no row is replaced by none, with a warning, if no loss needs it.

    Args:
        loaders: scores responses to rows of "train" if the run learns from responses, else of "eval".

    Raises:
        RewardLoadError: the reward cannot be found, imported, or called on any of the rows; or is built in
            and does not accept the answer of one.
        UserError: the run learns from responses without any reward, or no row has an answer.
    """
    loader = loaders["train" if algos.of(config.algo).on_rollouts else "eval"]
    rows = [reward_sample(row) for row in loader.spread_rows(ANSWERED_ROWS)]
    settings = config.reward if function else _choose(config, rows)
    log_file = Path(config.run_dir) / "rewards.log"
    pool = closing.enter_context(RewardPool(settings, log_file, function))
    if settings.name == "none":
        return pool
    try:
        _try_rows(config, loader, pool, rows)
    except UserError as error:
        if not pool.is_builtin or not _may_be_left_out(config, isinstance(error, RewardLoadError)):
            raise
        log.warning("no verifier (--reward.name %s) scores the responses: %s", settings.name, error)
        return RewardPool(replace(settings, name="none"), log_file)
    return pool


def _choose(config: TrainConfig, rows: Sequence[RewardSample]) -> RewardConfig:
    """Return the settings of the reward, with "auto" replaced by "none" if nothing needs a verifier."""
    needed, shapes = _is_needed(config), algos.learns_from_rewards(config.algo) and config.reward.shaping
    settings = choose_reward(config.reward, rows, required=needed or bool(shapes))
    if needed and settings.name == "none":
        raise UserError(
            "--reward.name is none and nothing else rewards, so no response would have a reward. Set a "
            "verifier (--reward.name auto), a reward model (--reward.models.0.path FOLDER) or an environment "
            "(--env.name)."
        )
    return settings


def _try_rows(config: TrainConfig, loader: Loader, pool: RewardPool, rows: Sequence[RewardSample]) -> None:
    """Check the answers of the rows that are learnt from, and score rows with their own answers.

    An evaluation passes over held-out rows without an answer, and says so itself.
    """
    scored = [row for row in rows if pool.can_score(row)]
    if algos.of(config.algo).on_rollouts and not (config.env.rewards and scored):
        others = "" if _is_needed(config) else "; --reward.name none leaves the verifier out"
        check_answers(loader.unanswered(), loader.stats()["rows"], pool.can_score, ANSWER_FIX + others)
    on_first(lambda: pool.check(scored, skips=config.data.bad_rows == "skip"))


def _is_needed(config: TrainConfig) -> bool:
    """Return whether rewards reach the loss, and only a verifier can give them."""
    others = config.env.rewards or any(model.weight for model in config.reward.models)
    return algos.learns_from_rewards(config.algo) and not others


def _may_be_left_out(config: TrainConfig, unusual: bool) -> bool:
    """Return whether the run may go on without the built-in verifier: its rewards are optional or replaced.

    Args:
        unusual: rows have answers, which the verifier does not accept; else no row has one.
    """
    reward = config.reward
    counts = algos.learns_from_rewards(config.algo) and bool(reward.weight or reward.shaping)
    replaced = config.env.rewards and reward.env == "replace"
    asked_for = reward.name != "auto"
    if unusual:
        return not counts and not asked_for
    return not _is_needed(config) and not reward.shaping and (not counts or not asked_for or bool(replaced))
