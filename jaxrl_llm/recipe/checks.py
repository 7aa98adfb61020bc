"""Checks of a recipe in three phases, each with a list of rules, before expensive work.

Each phase is checked as soon as its inputs are known: the recipe; recipe and architectures; recipe and
devices. `doctor` lists the same rules as `train`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig, TransformerConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.resolve import other_folder
from jaxrl_llm.models.attention import with_yarn
from jaxrl_llm.recipe.fields import refuse
from jaxrl_llm.recipe.keys import shorten
from jaxrl_llm.recipe.rule import Rule, apply_rules
from jaxrl_llm.recipe.rules_devices import DEVICES, with_sizes
from jaxrl_llm.recipe.rules_model import MODEL, Models
from jaxrl_llm.recipe.rules_recipe import RECIPE
from jaxrl_llm.sharding.config import CRITIC, POLICY, REFERENCE, teacher_role
from jaxrl_llm.sharding.placement import Device
from jaxrl_llm.user_file import expand_home

SIZED = tuple(rule for rule in RECIPE if rule.sized)


def check_config(config: TrainConfig, writes: bool = True) -> None:
    """Refuse a recipe that cannot work, also with architectures that are at hand; starts no jax backend.

    Args:
        writes: whether a run directory is going to be needed; then it is made.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    _check(RECIPE, config)
    check_models(config, architectures(config, read_local))
    if writes:
        refuse(_run_dir_problems(config.run_dir))


def check_models(config: TrainConfig, models: Models) -> None:
    """Refuse a recipe that does not fit its models.

    Args:
        models: `architectures`; without the policy's nothing is checked.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    if POLICY in models:
        _check(MODEL, config, models)


def check_on_devices(config: TrainConfig, devices: Sequence[Device]) -> TrainConfig:
    """Refuse a recipe that does not fit the devices; return it with all sizes, for `check_models`.

    Args:
        devices: of all processes.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    _check(DEVICES, config, devices)
    config = with_sizes(config, devices)
    _check(SIZED, config)
    return config


def apply_all_rules(
    config: TrainConfig, read: Callable[[str], TransformerConfig | None], devices: Sequence[Device]
) -> Iterator[tuple[Rule, list[str]]]:
    """Yield the rules with their messages as a run asks them, up to the end of the first phase that refuses.

    Args:
        read: as of `architectures`; rules on a policy that it does not know are left out.
        devices: of all processes; () = not known: rules on devices are left out.
    """
    asked = list(apply_rules(RECIPE, config))
    yield from asked
    if not any(lines for _, lines in asked) and devices:
        asked = list(apply_rules(DEVICES, config, devices))
        if not any(lines for _, lines in asked):
            config = with_sizes(config, devices)
            asked += [(rule, lines) for rule, lines in apply_rules(SIZED, config) if lines]
        yield from asked
    if not any(lines for _, lines in asked) and POLICY in (models := architectures(config, read)):
        yield from apply_rules(MODEL, config, models)


def architectures(
    config: TrainConfig, read: Callable[[str], TransformerConfig | None]
) -> dict[str, TransformerConfig]:
    """Return role -> architecture of the policy, and of critic, reference, teachers and reward models that
    have separate files; models that are not known are left out.

    Args:
        read: path of a model -> its architecture; None = not known.
    """
    paths, requires = {POLICY: config.model.path}, algos.requirements(config.algo)
    if requires.critic:
        paths[CRITIC] = config.critic.path
    if requires.ref_logprobs:
        paths[REFERENCE] = config.reference.path
    paths |= {teacher_role(i): path for i, path in enumerate(requires.teachers)}
    paths |= {role: reward.path for role, reward in config.reward_models.items()}
    models = {role: read(path) for role, path in paths.items() if path}
    if not config.model.path:
        models[POLICY] = config.model.architecture
    known, policy = {role: model for role, model in models.items() if model is not None}, config.model
    for role in known:
        if paths[role] == policy.path:
            known[role] = with_yarn(known[role], policy.yarn_factor, policy.yarn_original)
    return known


def read_local(path: str) -> TransformerConfig | None:
    """Return the architecture of a Hugging Face folder on this machine; None for any other path.

    Raises:
        UserError: it is the directory of a run; its config.json cannot be used.
    """
    folder = expand_home(path)
    if not path or not os.path.isfile(folder / "config.json"):
        return None
    if other := other_folder(folder):
        raise UserError(f"{folder}: {other}")
    return read_config(folder)


def _check(rules: Sequence[Rule], *facts: Any) -> None:
    refuse([line for _, lines in apply_rules(rules, *facts) for line in lines])


def _run_dir_problems(run_dir: str) -> list[str]:
    """Make the folder and a probe file in it: permissions alone do not suffice (root, read-only disks)."""
    fix = "Set --run_dir to a folder that can be written."
    if not run_dir:
        return [f"--run_dir is empty. {fix}"]
    try:
        probe = expand_home(run_dir) / f".probe-{os.getpid()}"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:  # the last one: a NUL character
        reason = getattr(error, "strerror", None) or error
        return [f"--run_dir {shorten(run_dir)}: cannot be written ({reason}). {fix}"]
    return []
