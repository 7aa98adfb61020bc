"""The algorithms, by name. A user's own file is one too (`--algo path/to/my_algo.py`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from jaxrl_llm.algos import (
    cispo,
    clip_cov,
    cpo,
    dapo,
    distill,
    dpo,
    dppo,
    dr_grpo,
    dro,
    gdpo,
    gkd,
    gmpo,
    gpg,
    grpo,
    gspo,
    kl_cov,
    kto,
    online_dpo,
    opo,
    orpo,
    otb,
    passk,
    pf_ppo,
    ppo,
    prm,
    raft,
    reinforce,
    reinforce_pp,
    remax,
    reward_model,
    rloo,
    sapo,
    sft,
    simpo,
    vespo,
)
from jaxrl_llm.algos.contract import AlgoConfig

ALGOS: dict[str, ModuleType] = {
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

__all__ = ["ALGOS", "AlgoConfig", "load", "module_of"]


def module_of(config: AlgoConfig) -> ModuleType:
    """The module whose Config this is."""
    return sys.modules[type(config).__module__]


def unit(config: AlgoConfig) -> int:
    """Sequences that its loss wants side by side in a row."""
    return getattr(module_of(config), "UNIT", 1)


def data(config: AlgoConfig) -> str:
    """What it reads of a dataset: its INPUT, or the DATA that says it more closely ("steps", "teachers")."""
    module = module_of(config)
    return getattr(module, "DATA", module.INPUT)


def load(name: str) -> ModuleType:
    """An algorithm by its name in ALGOS or by the path of a Python file that keeps the contract.

    Raises:
        ValueError: neither a known name nor a file, or the file lacks a part of the contract.
    """
    if name in ALGOS:
        return ALGOS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--algo {name}: not one of {sorted(ALGOS)} and not a Python file")
    module_name = f"jaxrl_llm_user_algo_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted = ["INPUT", "Config", "loss"]
    if getattr(module, "INPUT", None) == "rollouts":
        wanted.append("advantages")
    missing = [part for part in wanted if not hasattr(module, part)]
    if missing:
        raise ValueError(
            f"--algo {name}: the file lacks {', '.join(missing)}; see jaxrl_llm/algos/contract.py"
        )
    return module
