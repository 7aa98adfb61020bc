"""Table of the algorithms by name, and the loader of a user's own file (`--algo path/to/my_algo.py`).

Imports no jax: the command line reads names and first lines; an algorithm is imported when it is used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Algorithm, Requirements, renamed
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import import_user_file


class Algorithms(Mapping[str, Algorithm]):
    """Algorithms by name. Looking one up imports its module, and with it jax.

    Args:
        modules: module of jaxrl_llm.algos -> the algorithms that it defines, with spaces between.
    """

    def __init__(self, modules: dict[str, str]):
        self._modules = {name: module for module, names in modules.items() for name in names.split()}

    def __getitem__(self, name: str) -> Algorithm:
        return getattr(importlib.import_module(f"{__name__}.{self._modules[name]}"), name)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def first_line(self, name: str) -> str:
        """Return the first line of an algorithm's doc, its second argument, from the source of its module."""
        source = Path(__file__).with_name(f"{self._modules[name]}.py").read_text()
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                return inspect.cleandoc(ast.literal_eval(statement.value.args[1])).partition("\n")[0]
        raise AssertionError(f"{self._modules[name]}.py defines no {name}")


ALGOS = Algorithms(
    {
        "clipped": "dapo dr_grpo grpo ppo reinforce_pp rloo",
        "baselines": "gdpo gigpo mt_grpo opo otb passk remax",
        "selection": "clip_cov kl_cov pf_ppo",
        "distillation": "distill gkd",
        "imitation": "raft sft",
        "preference": "cpo dpo kto online_dpo orpo simpo",
        "reward_models": "prm reward_model",
        "surrogates": "a_star_po cispo dppo dro gmpo gpg gspo luspo reinforce sapo vespo",
    }
)
"""The algorithms of `--algo`."""
_LOADED: dict[str, Algorithm] = {}  # path of a user's file -> its algorithm
_CRITIC = Algorithms({"policy_gradient": "value"})
_KNOWN = ChainMap(_LOADED, ALGOS, _CRITIC)

__all__ = [
    "ALGOS",
    "AlgoConfig",
    "learns_from_rewards",
    "load_algorithm",
    "of",
    "requirements",
    "value",
    *ALGOS,
]


def __getattr__(name: str) -> Algorithm:
    if name in _KNOWN:
        return _KNOWN[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def of(config: AlgoConfig) -> Algorithm:
    """Return the algorithm whose settings these are."""
    assert is_known(config), f"{config}: of no algorithm; make it with NAME.Config(...)"
    return _KNOWN[config.algorithm]


def is_known(config: AlgoConfig) -> bool:
    """Return whether an algorithm's NAME.Config(...) made these settings."""
    return config.algorithm in _KNOWN


def first_line(config: AlgoConfig) -> str:
    """Return the first line of the doc of the algorithm whose settings these are."""
    for table in (ALGOS, _CRITIC):
        if config.algorithm in table:
            return table.first_line(config.algorithm)
    return of(config).doc.partition("\n")[0]


def requirements(config: AlgoConfig) -> Requirements:
    """Return the arrays and models that the algorithm reads under these settings."""
    return of(config).requires(config)


def updates_policy(config: AlgoConfig) -> bool:
    """Return whether a model with these settings is the policy of rollouts, unlike a critic or a model that
    learns from a dataset."""
    return of(config).on_rollouts and requirements(config).logprobs


def learns_from_rewards(config: AlgoConfig) -> bool:
    """Return whether rewards of the model's own responses reach the loss."""
    return of(config).on_rollouts and requirements(config).rewards


def load_algorithm(name: str) -> Algorithm:
    """Return an algorithm by its name in ALGOS or by the path of a Python file.

    The file defines `algorithm = Algorithm(...)` (docs/algorithms.md, "Your own").

    Raises:
        UserError: the name is neither known nor a file, or the file raises or lacks a part.
    """
    if name in ALGOS:
        return ALGOS[name]
    path = Path(name)
    if path.suffix != ".py":
        raise UserError(
            f"--algo {name}: not one of {', '.join(sorted(ALGOS))}, and not the path of a .py file"
        )
    try:
        module = import_user_file(path, "algo")
    except UserError as error:
        raise UserError(f"{error}{renamed(error)}") from error
    own = getattr(module, "algorithm", None)
    if not isinstance(own, Algorithm):
        kind = getattr(module, "INPUT", "rollouts")  # earlier releases read this, and needs_* of the Config
        raise UserError(
            f'--algo {name}: the file lacks `algorithm = Algorithm("{path.stem}", __doc__, "{kind}", '
            "Config(), loss)`, with advantages=advantages for rollouts, and with "
            "requires=lambda config: Requirements(...) in place of needs_* in the Config"
        )
    key = os.path.abspath(path)
    _LOADED[key] = replace(own, name=key)
    return _LOADED[key]
