"""Table of the algorithms by name, and the loader of a user's own file (`--algo path/to/my_algo.py`)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from jaxrl_llm.algos import policy_gradient
from jaxrl_llm.algos.clipped import (
    dapo,
    dr_grpo,
    gdpo,
    grpo,
    opo,
    otb,
    passk,
    ppo,
    reinforce_pp,
    remax,
    rloo,
)
from jaxrl_llm.algos.contract import AlgoConfig, Algorithm, Divergence, Requirements
from jaxrl_llm.algos.covariance import clip_cov, kl_cov
from jaxrl_llm.algos.critic import value
from jaxrl_llm.algos.distillation import distill, gkd
from jaxrl_llm.algos.imitation import raft, sft
from jaxrl_llm.algos.policy_gradient import PolicyConfig
from jaxrl_llm.algos.preference import cpo, dpo, kto, online_dpo, orpo, simpo
from jaxrl_llm.algos.resampled import pf_ppo
from jaxrl_llm.algos.reward_models import prm, reward_model
from jaxrl_llm.algos.surrogates import (
    a_star_po,
    cispo,
    dppo,
    dro,
    gmpo,
    gpg,
    gspo,
    luspo,
    reinforce,
    sapo,
    vespo,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import explain, import_user_file

ALGOS: dict[str, Algorithm] = {
    "a_star_po": a_star_po,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "cpo": cpo,
    "dapo": dapo,
    "distill": distill,
    "dpo": dpo,
    "dppo": dppo,
    "dr_grpo": dr_grpo,
    "dro": dro,
    "gdpo": gdpo,
    "gkd": gkd,
    "gmpo": gmpo,
    "gpg": gpg,
    "grpo": grpo,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "kto": kto,
    "luspo": luspo,
    "online_dpo": online_dpo,
    "opo": opo,
    "orpo": orpo,
    "otb": otb,
    "passk": passk,
    "pf_ppo": pf_ppo,
    "ppo": ppo,
    "prm": prm,
    "raft": raft,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "remax": remax,
    "reward_model": reward_model,
    "rloo": rloo,
    "sapo": sapo,
    "sft": sft,
    "simpo": simpo,
    "vespo": vespo,
}
_LOADED: dict[str, Algorithm] = {}  # path of a user's file -> its algorithm

__all__ = ["ALGOS", "AlgoConfig", "load_algorithm", "of", "requirements", "value", *ALGOS]


def of(config: AlgoConfig) -> Algorithm:
    """Return the algorithm whose settings these are."""
    assert is_known(config), f"{config}: of no algorithm; make it with NAME.Config(...)"
    return {**ALGOS, value.name: value, **_LOADED}[config.algorithm]


def is_known(config: AlgoConfig) -> bool:
    """Return whether these are settings of an algorithm, as NAME.Config(...) makes them."""
    return config.algorithm in {**ALGOS, value.name: value, **_LOADED}


def requirements(config: AlgoConfig) -> Requirements:
    """Return the arrays and models that the algorithm reads under these settings."""
    return of(config).requires(config)


def load_algorithm(name: str) -> Algorithm:
    """Return an algorithm by its name in ALGOS or by the path of a Python file.

    The file defines `algorithm = Algorithm(...)`. Or it defines INPUT, a class Config, loss and where there
    are any advantages, returns, select, baseline, DATA and UNIT; Config states requirements in properties.

    Raises:
        UserError: neither a known name nor a file, or the file raises or lacks a part.
    """
    if name in ALGOS:
        return ALGOS[name]
    path = Path(name)
    if path.suffix != ".py":
        raise UserError(
            f"--algo {name}: not one of {', '.join(sorted(ALGOS))}, and not the path of a .py file"
        )
    module, key = import_user_file(path, "algo"), os.path.abspath(path)
    try:
        _LOADED[key] = _algorithm(name, key, module)
    except UserError:
        raise
    except Exception as error:  # its Config and Algorithm are the user's code
        raise UserError(f"--algo {name}: {explain(error, path)}") from error
    return _LOADED[key]


def _algorithm(typed: str, key: str, module: ModuleType) -> Algorithm:
    if isinstance(getattr(module, "algorithm", None), Algorithm):
        return replace(module.algorithm, name=key)
    required = ["INPUT", "Config", "loss"]
    if getattr(module, "INPUT", None) == "rollouts":
        required.append("advantages")
    if missing := [part for part in required if not hasattr(module, part)]:
        raise UserError(
            f"--algo {typed}: the file lacks {', '.join(missing)}; see jaxrl_llm/algos/contract.py"
        )
    optional = ("advantages", "returns", "select", "baseline")
    return Algorithm(
        key,
        module.__doc__ or "",
        module.INPUT,
        module.Config(),
        module.loss,
        requires=_properties,
        data=getattr(module, "DATA", ""),
        group_size=getattr(module, "UNIT", 1),
        **{name: getattr(module, name) for name in optional if hasattr(module, name)},
    )


_PROPERTIES = {
    "needs_policy": "policy",
    "needs_entropy": "entropy",
    "needs_old": "old",
    "needs_reference": "reference",
    "needs_values": "values",
    "needs_critic": "critic",
    "needs_square": "sum_pi_squared",
    "needs_greedy": "greedy",
    "draws": "draws",
    "teachers": "teachers",
}


def _properties(config: AlgoConfig) -> Requirements:
    """Return the requirements that a Config states in properties."""
    base = policy_gradient.requires(config) if isinstance(config, PolicyConfig) else Requirements()
    stated = {field: getattr(config, name) for name, field in _PROPERTIES.items() if hasattr(config, name)}
    if getattr(config, "bypass_old", False):
        stated["old_source"] = "rollout"
    if divergence := getattr(config, "divergence", None):
        stated["divergence"] = Divergence(**divergence)
    return replace(base, **stated)
