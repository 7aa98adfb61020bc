"""Recipe files: found, loaded, changed by the command line, checked.

A recipe is a Python file whose docstring says command, hardware, time and expected result, and whose
`get_config()` returns a TrainConfig.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import sys
import traceback
import typing
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.recipe.checks import check
from jaxrl_llm.recipe.overrides import closest, nearest, override, print_help, split

USAGE = """\
usage: python -m jaxrl_llm.train --config RECIPE.py [--KEY VALUE ...]

    --config RECIPE.py   a path, or one of the recipes below
    --algo NAME|FILE.py  another algorithm, with its defaults
    --KEY VALUE          any field, such as --steps 100 --mesh.fsdp 8; a part in the middle may be left out:
                         --rollout.temperature 0.7 is --rollout.sampling.temperature
    --help               every field with its doc and its value (in RECIPE.py, with --config)
    --list               the recipes
"""


class Launch(NamedTuple):
    """What a command line asks for."""

    config: TrainConfig
    recipe: str  # path of the recipe file


def from_command_line(
    argv: list[str], prog: str = "python -m jaxrl_llm.train", writes: bool = True
) -> Launch:
    """The checked config of `--config RECIPE [--algo A] [--a.b value ...]`. Starts no jax backend.

    Args:
        writes: whether the run directory is going to be needed.

    `--help` and `--list` print and raise SystemExit(0).

    Raises:
        ConfigError: anything wrong with the recipe, a key, a value or their combination.
    """
    if "--list" in argv:
        print(list_text())
        raise SystemExit(0)
    wants_help = "--help" in argv or "-h" in argv
    pairs = split([word for word in argv if word not in ("--help", "-h")])
    recipe = _last(pairs, "config")
    if recipe is None and not wants_help:
        raise ConfigError(f"--config RECIPE.py is missing.\n\n{USAGE}\n{list_text()}")
    path = find(recipe) if recipe else None
    config = load(path) if path else TrainConfig()
    config = with_algo(config, _last(pairs, "algo"))
    config = override(config, [(key, words) for key, words in pairs if key not in ("config", "algo")])
    given = {key for key, _ in pairs}
    if config.model.path and "model.path" in given and "model.tokenizer" not in given:
        # another model than the recipe's brings its own tokenizer
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tokenizer=""))
    if wants_help:
        print(USAGE, list_text(), sep="\n")
        print_help(config, prog)
        raise SystemExit(0)
    check(config, writes)
    return Launch(config, str(path))


def _last(pairs: list[tuple[str, list[str]]], key: str) -> str | None:
    given = [words for name, words in pairs if name == key]
    if given and len(given[-1]) != 1:
        raise ConfigError(f"--{key} takes one value, got {' '.join(given[-1]) or 'nothing'!r}.")
    return given[-1][0] if given else None


def with_algo(config: TrainConfig, name: str | None) -> TrainConfig:
    """The config with another algorithm's defaults; naming the one it has changes nothing."""
    if name is None:
        return config
    if not name.endswith(".py") and name not in algos.ALGOS:
        known = ", ".join(sorted(algos.ALGOS))
        raise ConfigError(
            f"--algo {name}: unknown algorithm. Did you mean --algo {closest(name, algos.ALGOS)}? "
            f"There are {known}; your own is the path of a .py file."
        )
    try:
        module = algos.load(name)
    except Exception as error:  # the file is the user's code
        raise ConfigError(_blame(Path(name), error)) from error
    return (
        config
        if isinstance(config.algo, module.Config)
        else dataclasses.replace(config, algo=module.Config())
    )


def packaged_dir() -> Path:
    """Where the recipes that come with jaxrl_llm lie: beside it when installed, above it in a checkout."""
    spec = importlib.util.find_spec("jaxrl_llm.configs")
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).parent.parent / "configs"


def packaged() -> list[Path]:
    return sorted(path for path in packaged_dir().glob("*.py") if path.stem != "__init__")


def find(name: str) -> Path:
    """The recipe file: `name` as a path, then among the packaged ones; ".py" may be left out.

    Raises:
        ConfigError: there is none.
    """
    for base in (Path(name).expanduser(), packaged_dir() / name, packaged_dir() / Path(name).name):
        for path in (base, base.with_name(base.name + ".py")):
            if path.is_file():
                return path.resolve()
    known = [path.name for path in packaged()]
    raise ConfigError(
        f"--config {name}: no such file, and no packaged recipe of that name. "
        f"Did you mean --config {closest(Path(name).name, known)}? The packaged ones: {', '.join(known)}."
    )


def load(path: Path) -> TrainConfig:
    """What the recipe's `get_config()` returns.

    Raises:
        ConfigError: the file raises, lacks get_config, or returns something else.
    """
    name = f"jaxrl_llm_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config() if hasattr(module, "get_config") else None
    except Exception as error:  # the recipe is the user's code
        raise ConfigError(_blame(path, error)) from error
    if not isinstance(config, TrainConfig):
        what = "no get_config()" if not hasattr(module, "get_config") else f"get_config() returns {config!r}"
        raise ConfigError(f"{path}: {what}; a recipe defines get_config() and returns a TrainConfig.")
    return config


def list_text() -> str:
    """The packaged recipes, each with the first line of its docstring."""
    lines = ["recipes:"]
    for path in packaged():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"    {path.name:<22} {doc.splitlines()[0] if doc else ''}")
    return "\n".join(lines)


def _blame(path: Path, error: Exception) -> str:
    """What the user's file did wrong, with its line, and the nearest field where a name is misspelt."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
    return f"{path}{f':{line}' if line else ''}: {what}{_did_you_mean(error)}"


def _did_you_mean(error: Exception) -> str:
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if not found or "Did you mean" in str(error):  # Python 3.13 says it by itself
        return ""
    classes = [cls for cls in _config_classes() if cls.__name__ == found[1]]
    names = [field.name for cls in classes for field in dataclasses.fields(cls)]
    return f". Did you mean '{nearest(found[2], names)}'?" if names else ""


def _config_classes() -> set[type]:
    """TrainConfig, the dataclasses its fields are declared with, and the algorithms'."""
    seen: set[type] = set()
    queue = [TrainConfig, *(module.Config for module in algos.ALGOS.values())]
    while queue:
        hint = queue.pop()
        if dataclasses.is_dataclass(hint) and hint not in seen:
            seen.add(hint)
            queue.extend(typing.get_type_hints(hint).values())
        queue.extend(typing.get_args(hint))
    return seen
