"""The algorithms, by name. A user's own file is one too (`--algo path/to/my_algo.py`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from jaxrl_llm.algos import (
    cpo,
    distill,
    dpo,
    gkd,
    grpo,
    kto,
    online_dpo,
    orpo,
    ppo,
    prm,
    reward_model,
    sft,
    simpo,
)
from jaxrl_llm.algos.contract import AlgoConfig

ALGOS: dict[str, ModuleType] = {
    "cpo": cpo,
    "distill": distill,
    "dpo": dpo,
    "gkd": gkd,
    "grpo": grpo,
    "kto": kto,
    "online_dpo": online_dpo,
    "orpo": orpo,
    "ppo": ppo,
    "prm": prm,
    "reward_model": reward_model,
    "sft": sft,
    "simpo": simpo,
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
