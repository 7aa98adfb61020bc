"""`python -m jaxrl_llm import-config FILE --out recipe.py`: another system's config as a recipe."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxrl_import.fields import Assumptions, Conversion
from jaxrl_import.hints import missing_reason
from jaxrl_import.read import read_settings
from jaxrl_import.recipe_text import WIDTH, build_config, comment_lines, recipe_source
from jaxrl_import.reward_file import extract_functions
from jaxrl_import.systems import SYSTEMS
from jaxrl_import.values import path_text
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.ranges import Count
from jaxrl_llm.tools.arguments import parse_arguments


@dataclass(frozen=True)
class ImportArguments:
    """Write a recipe from a config or script of veRL, OpenRLHF, TRL, RL2 or ChatLearn, which is read and
    never run: shell scripts, YAML, and Python with a TRL trainer. Lists settings that are not carried
    over."""

    file: Path
    """Shell script, YAML file or Python file."""
    out: Path | None = None
    """Recipe to write; None = the file's name with .py, in the current folder."""
    system: Literal["", "verl", "openrlhf", "trl", "rl2", "chatlearn"] = ""
    """System that the file is of; "" = by its commands and keys."""
    trainer: str = ""
    """Trainer of the system, such as ppo, grpo, sft or dpo; "" = by the file."""
    devices: Count | None = None
    """Devices that the file is for, if it does not state them (TRL: processes)."""
    engine: Literal["native", "sglang"] = "native"
    """Engine of the rollout in the recipe."""
    define: tuple[str, ...] = ()
    """Values in the place of the file's, NAME=VALUE: of shell variables, of Python expressions, which only
    running the file would tell, or of keys (KEY= leaves one out)."""
    overwrite: bool = False
    """Replace an existing recipe."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a file that cannot be read, with file, line and fix.
    """
    args = parse_arguments(ImportArguments, argv, "import-config", positional="file")
    out = args.out or Path(f"{args.file.stem}.py".replace("-", "_"))
    _check_out(out, args)
    recipe = import_recipe(dataclasses.replace(args, out=out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in {out: recipe.source, **recipe.files}.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}). Set another --out.") from None
    print(recipe.report)
    print(f"recipe: {out}\nnext: python -m jaxrl_llm.train --config {out} --help")
    return 0


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe and what could not be carried over."""

    source: str
    """Text of the recipe file."""
    report: str
    """Lines for the terminal."""
    mapped: int
    """Keys of the file with a counterpart."""
    lost: dict[str, str]
    """Key that changes the result and is not carried over -> the replacement."""
    unused: dict[str, str]
    """Key of the file that changes no result -> why it has no counterpart; "" = not known."""
    files: dict[Path, str]
    """Further files that the recipe names -> text."""


def import_recipe(args: ImportArguments) -> ImportedRecipe:
    """Return the recipe for a file.

    Raises:
        UserError: the file, or a value in it, cannot be read, or its trainer is not supported.
    """
    define = _definitions(args.define)
    source = read_settings(args.file, args.system, args.trainer, define)
    system = SYSTEMS[source.system]
    conversion = Conversion(system, source, Assumptions(args.devices, args.engine, define))
    conversion.run()
    files = _reward_file(args, conversion)
    values = {key: result.value for key, result in conversion.results.items()}
    origins = {key: result.origin for key, result in conversion.results.items()}
    built = build_config(conversion.algo, values, origins)
    for key, reason in built.refused.items():
        conversion.lost |= dict.fromkeys(_keys_of(conversion, origins[key]), reason)
    unused = {key: reason or missing_reason(key) for key, reason in conversion.unused.items()}
    stated = {key for key, result in conversion.results.items() if result.stated}
    footer = _footer([_line(conversion, key, reason) for key, reason in unused.items()])
    text = recipe_source(built.config, _docstring(args, conversion), origins, stated, footer=footer)
    mapped = len(conversion.settings) - len({*unused, *conversion.lost} & set(conversion.settings))
    problems = [line for line in _problems(built.config) if not any(str(path) in line for path in files)]
    report = _report(args, conversion, (mapped, len(unused)), problems)
    return ImportedRecipe(text, report, mapped, conversion.lost, unused=unused, files=files)


def _keys_of(conversion: Conversion, origin: str) -> list[str]:
    """Return the keys, set by the file itself, that a key here comes from."""
    return [key for key in conversion.settings if origin.startswith(f"{key} ") or f", {key} " in origin]


def _reward_file(args: ImportArguments, conversion: Conversion) -> dict[Path, str]:
    """Return the file of the rewards that a training script defines, which the recipe names from here on.

    Importing the script itself would start its training in the workers of rewards.
    """
    script, rewards = f"{args.file}:", {}
    name, shaping = conversion.value_of("reward.name", ""), conversion.value_of("reward.shaping", ())
    names = [reward for reward in (name, *(reward for reward, _ in shaping)) if reward.startswith(script)]
    if not names:
        return rewards
    out = args.out or Path("recipe.py")
    path = out.with_name(f"{out.stem}_rewards.py")
    _check_out(path, args)
    functions = [reward.removeprefix(script) for reward in names]
    text = args.file.read_text(encoding="utf-8-sig")
    rewards[path], missing = extract_functions(text, args.file.name, functions)
    moved = {reward: f"{path}:{reward.removeprefix(script)}" for reward in names}
    for key, value in (
        ("reward.name", moved.get(name, name)),
        ("reward.shaping", tuple((moved.get(n, n), weight) for n, weight in shaping)),
    ):
        if key in conversion.results:
            conversion.results[key] = conversion.results[key]._replace(value=value)
    conversion.notes.append(
        f"{', '.join(functions)} of {args.file.name}: copied to {path}, with what they read"
    )
    if missing:
        conversion.lost["reward_funcs"] = f"{path} lacks {', '.join(missing)}, which only a run would tell"
    return rewards


def _definitions(pairs: tuple[str, ...]) -> Mapping[str, str]:
    wrong = next((pair for pair in pairs if "=" not in pair), "")
    if wrong:
        raise UserError(f"--define {wrong}: it must be NAME=VALUE.")
    return dict(pair.split("=", 1) for pair in pairs)


def _check_out(out: Path, args: ImportArguments) -> None:
    if out.suffix != ".py":
        raise UserError(f"--out {out}: a recipe is a Python file. Set --out {out.with_suffix('.py')}.")
    if out.exists() and (not args.overwrite or out.resolve() == args.file.resolve()):
        raise UserError(f"--out {out}: exists. Set another --out, or --overwrite True.")


def _line(conversion: Conversion, key: str, reason: str) -> str:
    """Return the line of a key without counterpart."""
    shown = " ".join(path_text(conversion.origin(key)).split())
    return f"{shown}: {reason or 'no counterpart is known'}"


def _lost_lines(conversion: Conversion) -> list[str]:
    return [_line(conversion, key, reason) for key, reason in conversion.lost.items()]


def _footer(lines: list[str]) -> list[str]:
    if not lines:
        return []
    return [
        "# Keys of the file that change no result:",
        *(part for line in lines for part in comment_lines(line)),
    ]


def _docstring(args: ImportArguments, conversion: Conversion) -> str:
    title = f"{conversion.algo.upper()} as in {conversion.system.title}'s {args.file.name}, by import-config."
    count = conversion.devices
    devices = f"{count} device{'s' * (count > 1)} there" if count else "not stated there"
    lines = [
        title,
        *_listed("Not the same run as there, since these change the result and are not carried over:",
                 _lost_lines(conversion)),
        "",
        f"Command:   python -m jaxrl_llm.train --config {args.out or 'recipe.py'}",
        f"Hardware:  {devices}",
        "Time:      not measured: this recipe has not been run yet",
        "Expected:  not measured either",
        *_listed("To know before a run:", conversion.notes),
    ]  # fmt: skip
    return "\n".join(lines)


def _listed(heading: str, items: list[str]) -> list[str]:
    """Return the lines of a list with its heading; none of an empty one."""
    wrap = textwrap.TextWrapper(WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False)
    lines = [part for item in items for part in wrap.wrap(" ".join(item.split()))]
    return ["", heading, *lines] if lines else []


def _problems(config: TrainConfig) -> list[str]:
    """Return the problems that a run would refuse: missing paths, and values that cannot work."""
    from jaxrl_llm.recipe.checks import check_config  # imports jax: not for --help

    try:
        check_config(config, writes=False)
    except ConfigError as error:
        lines = str(error).splitlines()
        return [line.removeprefix("  - ") for line in (lines[1:] if len(lines) > 1 else lines)]
    return []


def _report(
    args: ImportArguments, conversion: Conversion, counts: tuple[int, int], problems: list[str]
) -> str:
    """Return the lines for the terminal, what changes the result first.

    Args:
        counts: keys that are carried over, and keys that change no result.
    """
    lost = _lost_lines(conversion)
    lines = [
        f"{args.file}: {conversion.system.title}, {conversion.trainer}; here {conversion.algo}. Keys: "
        f"{counts[0]} carried over, {len(lost)} not although they change the result, {counts[1]} without "
        "effect on it (at the end of the recipe)."
    ]
    lines += [f"NOT CARRIED OVER: {line}" for line in lost]
    lines += [f"note: {note}" for note in conversion.notes]
    lines += [f"to set: {problem}" for problem in problems]
    return "\n".join(lines)
