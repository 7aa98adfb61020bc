"""From a reward's name to the function: a built-in, or "path/to/file.py:function"."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards import REWARDS, service
from jaxrl_llm.rewards.sample import RewardConfig, RewardLoadError
from jaxrl_llm.rewards.signatures import Scorer, adapt

LIBRARIES = {
    "math": "math_verify",
    "gym": "reasoning_gym",
}  # slow: imported before any deadline
URL = ("http://", "https://")
USUAL_NAMES = ("reward", "compute_score", "reward_func", "reward_fn", "env_step")
SOURCES = {  # for "auto": the first key that the name of the data source contains
    "judgement": "verdict",
    "gym": "gym",
    "gsm8k": "gsm8k",
    "countdown": "countdown",
    "arithmetic": "arithmetic",
    "task:guess": "exact",
    "task:calculate": "exact",
    "task:maximum": "exact",
    "task:reverse": "exact",
    "task:preference": "arithmetic",
    "task:steps": "arithmetic",
    "math": "math",
    "aime": "math",
    "amc": "math",
    "deepscaler": "math",
}


def check(name: str) -> None:
    """Raises RewardLoadError if `name` is not "auto", a built-in or an existing file. Imports nothing."""
    if name in ("auto", "none") or name in REWARDS or name.startswith(URL):
        return
    path, _ = split(name)
    if path.suffix != ".py":
        near = difflib.get_close_matches(name, [*REWARDS, "auto"], 1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise RewardLoadError(
            f'reward.name "{name}" is unknown.{hint} Built in are {", ".join(REWARDS)}; '
            'a function of yours is "path/to/file.py:function".'
        )
    if not path.is_file():
        raise RewardLoadError(f"reward.name: there is no file {path.resolve()}")


def resolve(name: str, source: str, columns: dict[str, Any]) -> str:
    """The reward of a row: `name`, or where that is "auto" the one that fits the row's data source."""
    if name != "auto":
        return name
    if isinstance(columns.get("metadata"), dict) and "source_dataset" in columns["metadata"]:
        return "gym"
    for key, reward in SOURCES.items():
        if key in source.lower():
            return reward
    raise RewardLoadError(
        f'reward.name "auto" knows no reward for the data source "{source}" (it knows {", ".join(SOURCES)}). '
        f"Set reward.name to one of {', '.join(REWARDS)} or to your own file.py:function."
    )


def load(name: str, config: RewardConfig) -> Scorer:
    """The Scorer of a built-in or of a user's file. Raises RewardLoadError naming the fix."""
    if name.startswith(URL):
        return service.scorer(name, config.timeout)
    if name not in REWARDS:
        path, function = split(name)
        return adapt(_user_function(path, function), name, config)
    library = LIBRARIES.get(name)
    if library and importlib.util.find_spec(library) is None:
        package = library.replace("_", "-")
        raise RewardLoadError(f'reward "{name}" needs {package}: pip install "jaxrl-llm[tasks]"')
    if library:
        importlib.import_module(library)
    return adapt(REWARDS[name], name, config)


def split(name: str) -> tuple[Path, str]:
    """("dir/file.py", "function" or "") of "dir/file.py:function"."""
    path, colon, function = name.rpartition(":")
    return (Path(path), function) if colon and path.endswith(".py") else (Path(name), "")


def _user_function(path: Path, name: str) -> Callable[..., Any]:
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location(f"user_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = [name] if name else [usual for usual in USUAL_NAMES if hasattr(module, usual)]
    if not found or not callable(getattr(module, found[0], None)):
        functions = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        wanted = f'function "{name}"' if name else f"function named {', '.join(USUAL_NAMES)}"
        raise RewardLoadError(f"{path} has no {wanted}; it has {', '.join(functions) or 'none'}")
    return getattr(module, found[0])
