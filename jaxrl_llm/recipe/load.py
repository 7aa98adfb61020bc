"""Recipe files and the command line: find, load, change and check a recipe.

A recipe is a Python file whose docstring has command, hardware, time and expected result, and whose
`get_config()` returns a TrainConfig.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.extensions import load_extensions
from jaxrl_llm.recipe.help import overview, print_and_exit, split_help, topics_text, usage
from jaxrl_llm.recipe.idle import without_effect
from jaxrl_llm.recipe.implied import imply
from jaxrl_llm.recipe.keys import iter_fields, plain_values, short_repr, shorten
from jaxrl_llm.recipe.overrides import (
    ASSIGNMENT,
    Pair,
    apply_overrides,
    closest_key,
    closest_word,
    resolve_key,
    split_arguments,
)
from jaxrl_llm.removed import removed_field
from jaxrl_llm.user_file import expand_home, explain, explain_end, import_user_file

PROG = "python -m jaxrl_llm.train"
FLAGS = ("config", "algo")
"""Flags that are not keys of a recipe."""
NOT_PYTHON = "a recipe is a Python file that defines get_config(); --list shows some to start from"


class ResolvedRecipe(NamedTuple):
    """A recipe with the changes of the command line."""

    config: TrainConfig
    recipe: str
    """Path of the recipe file."""
    notes: tuple[str, ...] = ()
    """Notes that were printed."""


def from_command_line(
    argv: list[str], prog: str = PROG, *, writes: bool = True, checks: bool = True, flags: Sequence[str] = ()
) -> ResolvedRecipe:
    """Return the checked config of `--config RECIPE [--algo A] [--a.b value ...]`. Starts no jax backend.

    Implied changes (dropped settings) are printed on stderr. `--help` and `--list` print and raise
    SystemExit(0).

    Args:
        writes: the command writes to the run directory.
        checks: check the rules of `recipe.checks`.
        flags: other flags of the command, for suggestions.

    Raises:
        ConfigError: anything wrong with the recipe, a key, a value or their combination.
    """
    if "--list" in argv:
        print_and_exit(f"{list_text()}\n\n{algorithms_text()}")
    # Keys may be misspelt even without a recipe: these errors come first.
    argv, topics = split_help(argv)
    pairs = split_arguments(argv)
    name = _last(pairs, "config")
    changes = [pair for pair in pairs if pair[0] not in FLAGS]
    if name is None and topics is None:
        apply_overrides(TrainConfig(), [p for p in changes if not p[0].startswith("algo.")], [*FLAGS, *flags])
        raise ConfigError(f"--config RECIPE.py is missing.\n\n{usage(prog)}\n{list_text()}")
    # The recipe, with the algorithm and the keys of the command line.
    path = find_recipe(name) if name is not None else None
    config = load_recipe(path) if path else TrainConfig()
    config, dropped = with_algo(config, _last(pairs, "algo"))
    config, notes = _changed(config, changes, [*FLAGS, *flags])
    if topics is not None:
        recipes = [path.name for path in packaged_recipes()]
        print_and_exit(topics_text(config, topics) if topics else overview(config, prog, recipes))
    resolved = ResolvedRecipe(config, str(path))
    return _checked(resolved, dropped + notes, writes) if checks else resolved


def with_settings(
    recipe: TrainConfig | str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    printed: tuple[str, ...] = (),
) -> ResolvedRecipe:
    """Return the checked config of a recipe, given as its name or as a config, changed by Python values.

    Args:
        settings: by the keys of the command line; "algo" names another algorithm.
        printed: notes that are not printed again.

    Raises:
        ConfigError: as `from_command_line`.
    """
    path = find_recipe(os.fspath(recipe)) if isinstance(recipe, str | os.PathLike) else None
    config = load_recipe(path) if path else recipe
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"a recipe is a name, a path or a TrainConfig, not {config!r:.100}")
    algo = settings.get("algo")
    notes: list[str] = []
    if isinstance(algo, str | None):
        check_algo(config.algo)
        config, notes = with_algo(config, algo)
    else:
        check_algo(algo)
        config = dataclasses.replace(config, algo=algo)
    pairs = [(key, as_words(value)) for key, value in settings.items() if key != "algo"]
    config, more = _changed(plain_values(config), pairs)
    return _checked(ResolvedRecipe(config, str(path or ""), printed), notes + more)


def _checked(resolved: ResolvedRecipe, notes: list[str], writes: bool = True) -> ResolvedRecipe:
    """Return the recipe after `check_config`, with the run directory as a path without ~. Prints the notes,
    including notes on settings without effect.
    """
    from jaxrl_llm.recipe.checks import check_config  # imports jax: not for --help

    check_config(resolved.config, writes)
    new = [note for note in notes + without_effect(resolved.config) if note not in resolved.notes]
    for note in new:
        print(f"note: {note}", file=sys.stderr)
    run_dir = os.path.expanduser(resolved.config.run_dir)
    config = dataclasses.replace(resolved.config, run_dir=run_dir)
    return resolved._replace(config=config, notes=(*resolved.notes, *new))


def _changed(
    recipe: TrainConfig, pairs: list[Pair], flags: Sequence[str] = ()
) -> tuple[TrainConfig, list[str]]:
    """Return the config after `apply_overrides` and the changes that the given keys imply."""
    config, notes = apply_overrides(recipe, pairs, flags)
    known = dict(iter_fields(config))
    given = {resolve_key(key, known) or key.replace("-", "_") for key, _ in pairs}
    config, implied = imply(recipe, config, given)
    return config, notes + implied


def as_words(value: Any) -> list[str] | None:
    """Return a Python value as the words of the command line: (0.5, 1) -> ["0.5", "1"]; None stays None."""
    if value is None:
        return None
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _last(pairs: list[Pair], key: str) -> str | None:
    given = [words for name, words in pairs if name == key]
    if given and len(given[-1]) != 1:
        words = shorten(" ".join(given[-1])) or "nothing"
        found = next(filter(None, map(ASSIGNMENT.fullmatch, given[-1][1:])), None)
        fix = f" A setting is written --{found['key']} {shorten(found['value'])}." if found else ""
        raise ConfigError(f"--{key} takes one value, got {words!r}.{fix}")
    return given[-1][0] if given else None


def with_algo(config: TrainConfig, name: str | None) -> tuple[TrainConfig, list[str]]:
    """Return the config with another algorithm's defaults, and a note on the settings that this drops.

    The same word means another thing in another algorithm (kl_coef in the loss or in the reward), so nothing
    is carried over. Naming the algorithm that the recipe has changes nothing.
    """
    if name is None:
        return config, []
    if not name.endswith(".py") and name not in algos.ALGOS:
        answers = (translate(name) for translate in load_extensions("unknown_algorithms"))
        if answer := next(filter(None, answers), ""):
            raise ConfigError(f"--algo {shorten(name)}: unknown algorithm. {answer}")
        near, known = closest_word(name, algos.ALGOS), ", ".join(sorted(algos.ALGOS))
        raise ConfigError(
            f"--algo {shorten(name)}: unknown algorithm. Did you mean --algo {near}? "
            f"Known are {known}; your own is the path of a .py file."
        )
    algorithm = algos.load_algorithm(name)
    changed = dataclasses.replace(config, algo=algorithm.config)
    try:
        dict(iter_fields(changed))
    except Exception as error:  # an annotation of the user's Config that cannot be read
        raise ConfigError(f"--algo {name}: {explain(error)}") from error
    if config.algo.algorithm == algorithm.name:
        return config, []
    return changed, _dropped(config, name)


def _dropped(config: TrainConfig, name: str) -> list[str]:
    """Return a note that lists the settings of the recipe's algorithm that are not its defaults."""
    if not algos.is_known(config.algo):
        return []
    defaults = dict(iter_fields(algos.of(config.algo).config))
    changed = [
        f"{key} {field.value}"
        for key, field in iter_fields(config.algo)
        if key not in defaults or field.value != defaults[key].value
    ]
    if not changed:
        return []
    return [
        f"--algo {name} has its own defaults; dropped are the recipe's settings of {config.algo.algorithm}: "
        f"{', '.join(changed)}. --algo.KEY VALUE sets them again"
    ]


def packaged_dir() -> Path:
    """Return the folder of the recipes that come with jaxrl_llm."""
    spec = importlib.util.find_spec("jaxrl_llm.configs")
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).parents[2] / "configs"


def packaged_recipes() -> list[Path]:
    """Return the recipe files that come with jaxrl_llm."""
    return sorted(path for path in packaged_dir().glob("*.py") if path.stem != "__init__")


def find_recipe(name: str) -> Path:
    """Return the recipe file: `name` as a path, then among the packaged ones; ".py" may be left out.

    Raises:
        ConfigError: the file is missing, or is not a readable Python file.
    """
    known = [path.name for path in packaged_recipes()]
    if not name:
        raise ConfigError(f"--config is empty; {NOT_PYTHON}.")
    try:
        given = expand_home(name)
        for base in (given, packaged_dir() / name, packaged_dir() / given.name):
            for path in (base, base.with_name(f"{base.name}.py") if base.name else base):
                if path.is_file():
                    return _readable(name, path.resolve())
        if given.is_dir():
            inside = sorted(path.name for path in given.glob("*.py"))
            raise ConfigError(
                f"--config {name}: a folder; {NOT_PYTHON}. It has {', '.join(inside) or 'none'}."
            )
    except OSError as error:  # a name too long, no permission
        raise ConfigError(f"--config {shorten(name)}: {error.strerror}.") from None
    if not known:
        raise ConfigError(
            f"--config {shorten(name)}: no such file. This installation has no recipes (none in "
            f"{packaged_dir()}): give the path of a recipe, or install jaxrl_llm again."
        )
    # Nothing has this name.
    near = closest_word(given.name, known)
    raise ConfigError(
        f"--config {shorten(name)}: no such file, and no packaged recipe of that name. "
        f"Did you mean --config {near}? The packaged ones: {', '.join(known)}."
    )


def _readable(name: str, path: Path) -> Path:
    if path.suffix != ".py":
        raise ConfigError(f"--config {name}: {path.suffix or 'no .py'} file; {NOT_PYTHON}.")
    path.open("rb").close()
    return path


def load_recipe(path: Path) -> TrainConfig:
    """Return the result of the recipe's `get_config()`.

    Raises:
        ConfigError: the file raises (SystemExit, too), lacks get_config, or returns something else.
    """
    try:
        module = import_user_file(path, "config")
    except UserError as error:
        raise ConfigError(f"{error}{_did_you_mean(error)}") from error
    try:
        config = module.get_config() if hasattr(module, "get_config") else None
    except BaseException as error:  # the recipe is the user's code
        raise ConfigError(f"--config: {explain_end(error, path)}{_did_you_mean(error)}") from error
    if not isinstance(config, TrainConfig):
        returns = "nothing" if config is None else f"a value of type {type(config).__name__}"
        what = f"get_config() returns {returns}" if hasattr(module, "get_config") else "no get_config()"
        raise ConfigError(
            f"--config: {path}: {what}; a recipe defines get_config() and returns a TrainConfig."
        )
    check_algo(config.algo, f"--config: {path}: ")
    return plain_values(config)


def check_algo(algo: Any, where: str = "") -> None:
    """Refuse anything except a Config of an algorithm: its module or name, or a Config that is not called.

    Args:
        where: beginning of the message.

    Raises:
        ConfigError: says what to write.
    """
    if isinstance(algo, algos.AlgoConfig):
        return
    owner = getattr(algo, "__self__", algo)  # of the method grpo.Config
    name = str(getattr(owner, "name", owner))
    given = name if isinstance(owner, algos.Algorithm) else short_repr(algo)
    method = "" if owner is algo else ".Config"
    name = name if name in algos.ALGOS else "grpo"
    raise ConfigError(f"{where}algo is {given}{method}, not its settings: write algo={name}.Config().")


def list_text() -> str:
    """Return the packaged recipes, each with the first line of its docstring."""
    lines = ["recipes:"]
    for path in packaged_recipes():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"    {path.name:<22} {doc.splitlines()[0] if doc else ''}")
    return "\n".join(lines)


def algorithms_text() -> str:
    """Return the algorithms, each with the first line of its doc."""
    lines = ["algorithms (--algo NAME):"]
    lines += [f"    {name:<22} {algos.ALGOS.first_line(name)}" for name in algos.ALGOS]
    return "\n".join(lines)


def _did_you_mean(error: BaseException) -> str:
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    cls = {cls.__name__: cls for cls in config_classes()}.get(found[1]) if found else None
    if cls is None:
        return ""
    if row := removed_field([base.__name__ for base in cls.__mro__], found[2]):
        return f". This key was removed. {row.instead}"
    if "Did you mean" in str(error):  # in the message of Python 3.13 already
        return ""
    closest = closest_key(found[2], [field.name for field in dataclasses.fields(cls)])
    return f". Did you mean '{closest}'?" if closest else ""


def config_classes() -> set[type]:
    """Return TrainConfig, the dataclasses of its fields, and the Configs of the algorithms."""
    seen: set[type] = set()
    queue = [TrainConfig, *(type(algorithm.config) for algorithm in algos.ALGOS.values())]
    while queue:
        hint = queue.pop()
        if dataclasses.is_dataclass(hint) and hint not in seen:
            seen.add(hint)
            queue.extend(typing.get_type_hints(hint).values())
        queue.extend(typing.get_args(hint))
    return seen
