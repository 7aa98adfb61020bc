"""Make the evaluators of a run, and the line that describes its evaluation or the reason for none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.addresses import mask_text
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.config import GENERATIVE, TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.load import DialogueSource
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.dataset import dataset_items
from jaxrl_llm.experience.evaluate import HeldOutLoss, HeldOutResponses
from jaxrl_llm.experience.rewards import Rewarder, reward_sample
from jaxrl_llm.experience.win_rate import PairwiseJudge, WinRate, judge_sample, model_judge, pool_judge
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.keys import Purpose, run_key

Evaluator = HeldOutResponses | HeldOutLoss
log = logging.getLogger(__name__)
START_FILE = "eval/start.jsonl"  # in the run directory: responses of the start
NUM_JUDGED = 4  # rows that a judge is tried on


def open_judge(
    config: TrainConfig, rows: Sequence[Example], closing: contextlib.ExitStack
) -> RewardPool | None:
    """Return the workers of a judge that is a function or service, after it has compared the first rows.

    Raises:
        UserError: the judge cannot be loaded, fails on every row, or returns no number from 0 to 1.
    """
    name = config.eval.judge
    if not config.eval.every or name in ("", GENERATIVE):
        return None
    settings = dataclasses.replace(config.reward, name=name, models=(), shaping=(), failed="mask")
    settings = dataclasses.replace(settings, weight=1.0, env="replace", max_failed_fraction=1.0)
    pool = closing.enter_context(RewardPool(settings, Path(config.run_dir) / "rewards.log"))
    try:
        on_first(lambda: try_judge(pool, rows))
    except RewardLoadError as error:
        text = str(error).replace("--reward.name: ", "")
        raise UserError(f"--eval.judge {name}: {text}") from error
    return pool


def try_judge(pool: RewardPool, rows: Sequence[Example]) -> None:
    """Compare a response with itself for the first rows.

    Raises:
        RewardLoadError: as `RewardPool.check`, or a preference is not from 0 to 1.
    """
    samples = [judge_sample(row, reward_sample(row).prompt, "a", "b") for row in rows[:NUM_JUDGED]]
    pool.check(samples)
    values = [result.score for result in pool.score(samples) if result.valid]
    if wrong := [value for value in values if not 0 <= value <= 1]:
        raise RewardLoadError(
            f"it returned {wrong[0]:g}: it must be from 0 to 1; 1 = the first response is better."
        )


def make_evaluators(
    config: TrainConfig,
    held_out: Loader | None,
    stage: Stage,
    engine: Engine | None,
    *,
    rewarder: Rewarder | None,
    env: DialogueSource | None,
    judge: RewardPool | None,
) -> list[Evaluator]:
    """Return the evaluators: of responses, if anything can grade them; loss of a dataset algorithm.

    Args:
        held_out: None = nothing is evaluated.
    """
    # Responses to held-out prompts, if anything grades them.
    evaluators: list[Evaluator] = []
    if held_out is None or not config.eval.every:
        return evaluators
    if rewarder is not None:
        prompts = held_out.eval_set(config.eval.prompts)
        known = [config.env.rewards or rewarder.pool.can_score(reward_sample(p.example)) for p in prompts]
        if lacking := len(known) - sum(known):
            problem = "%d of %d held-out prompts have no answer that the reward can compare with"
            log.warning(problem, lacking, len(known))
        if not (rewarder.reward_models or config.eval.judge):  # nothing reads responses without an answer
            prompts, known = [p for p, k in zip(prompts, known, strict=True) if k], [True] * sum(known)
        # Prompts that remain are generated and graded.
        if prompts:
            evaluators.append(
                HeldOutResponses(
                    prompts=prompts,
                    is_verifiable=known,
                    engine=engine,
                    rewarder=rewarder,
                    sampling=config.eval.sampling,
                    samples=config.eval.samples,
                    max_tokens=config.max_response_tokens,
                    key=run_key(config.seed, Purpose.EVALUATION),
                    chat=config.data.chat,
                    env=env,
                    win_rate=make_win_rate(config, stage.start, rewarder, judge),
                    num_logged=config.eval.log_samples,
                )
            )
    # The loss of a dataset algorithm.
    if not algos.of(config.algo).on_rollouts:
        if not evaluators:
            evaluators.append(make_held_out_loss(config, held_out, stage))
        elif indices := sources_with_targets(held_out, config.algo):  # of others, responses are evaluated
            evaluators.append(make_held_out_loss(config, held_out.of_sources(indices), stage))
    return evaluators


def sources_with_targets(held_out: Loader, algo: AlgoConfig) -> list[int]:
    """Return the sources, by index, whose first row is one that a dataset algorithm learns from."""
    indices = []
    for i in range(held_out.num_sources):
        with contextlib.suppress(UserError):
            dataset_items(held_out.of_sources([i]), algo, 0, 2)  # KTO reads two
            indices.append(i)
    return indices


def make_win_rate(
    config: TrainConfig, start: int, rewarder: Rewarder, judge: RewardPool | None
) -> WinRate | None:
    """Return the comparison with the start; None if only a right answer grades responses."""
    compare: PairwiseJudge | None = None
    if judge is not None:
        compare = pool_judge(judge)
    elif config.eval.judge == GENERATIVE:
        compare = model_judge(next(m for m in rewarder.reward_models if m.config.kind == GENERATIVE))
    elif not rewarder.reward_models and rewarder.pool.is_builtin:
        return None
    settings: dict[str, Any] = {
        "seed": config.seed,
        "eval.samples": config.eval.samples,
        "eval.sampling": dataclasses.asdict(config.eval.sampling),
        "max_response_tokens": config.max_response_tokens,
    }
    if compare is None:
        settings["reward"] = score_settings(config.reward)
    return WinRate(Path(config.run_dir) / START_FILE, start, settings, config.data.chat, judge=compare)


def score_settings(reward: RewardConfig) -> list[Any]:
    """Return the settings that determine the compared scores: reward models, or the reward function."""
    fields = ("path", "kind", "weight", "mean")
    # The 1.0 was a divisor of the score; runs of earlier versions saved it and are still compared.
    models = [[*(getattr(model, name) for name in fields), 1.0] for model in reward.models]
    return models or [mask_text(reward.name)]


def make_held_out_loss(config: TrainConfig, held_out: Loader, stage: Stage) -> HeldOutLoss:
    """Return the evaluator of held-out examples; of several sources also of each, by its name."""
    least = 2 if algos.of(config.algo).data == "labels" else 1  # KTO reads the response to another prompt
    sources: dict[str, list[PackItem]] = {}
    for name, loader, rows in held_out.eval_parts(config.eval.prompts):
        sources.setdefault(name, []).extend(dataset_items(loader, config.algo, 0, max(rows, least)))
    items = [item for each in sources.values() for item in each]
    return HeldOutLoss(items, stage, sources if len(sources) > 1 else {})


def evaluation_line(config: TrainConfig, evaluators: Sequence[Evaluator]) -> str:
    """Return the line that describes a run's evaluation, or the reason for none and the fix."""
    if not config.eval.every:
        data, line = config.data, "no evaluation: --eval.every is 0"
        if data.holdout:
            return f"{line}; the rows of --data.holdout {data.holdout:g} are neither trained on nor evaluated"
        held_out = " --data.holdout 200" * (not data.sources("eval"))
        return f"{line}. --eval.every 10{held_out} evaluates on held-out data every 10 steps"
    if not evaluators:
        return (
            "no evaluation: no held-out prompt has an answer that --reward.name could compare with. Add a "
            "reward model (--reward.models.0.path FOLDER --reward.models.0.weight 0), a reward function "
            "(--reward.name my_rewards.py:my_reward) or a judge (--eval.judge my_judge.py:judge)"
        )
    parts = [text for evaluator in evaluators for text in describe_evaluator(evaluator, config)]
    return f"evaluation every {config.eval.every} steps on held-out data: {', '.join(parts)}"


def describe_evaluator(evaluator: Evaluator, config: TrainConfig) -> list[str]:
    """Return descriptions of an evaluator's measures."""
    if isinstance(evaluator, HeldOutLoss):
        return [f"loss of {len(evaluator.items):,} sequences"]
    several = f" x {evaluator.samples} responses" * (evaluator.samples > 1)
    parts = [f"{len(evaluator.prompts):,} prompts{several}"]
    if verifiable := sum(evaluator.is_verifiable):
        some = f" of {verifiable:,}" * (verifiable < len(evaluator.prompts))
        parts.append(f"pass@1{some}")
    if evaluator.rewarder.reward_models:
        parts.append("score of the reward models")
    if evaluator.win_rate is not None:
        judge = mask_text(config.eval.judge) or "the higher score"
        parts.append(f"win rate against the start by {judge}")
    return parts
