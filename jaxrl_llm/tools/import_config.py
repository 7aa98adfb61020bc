"""`python -m jaxrl_llm import-config FILE --out recipe.py`: another system's config as a recipe."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.importer.fields import Assumptions, Conversion
from jaxrl_llm.importer.hints import missing_reason
from jaxrl_llm.importer.read import read_settings
from jaxrl_llm.importer.systems import SYSTEMS
from jaxrl_llm.importer.values import printable
from jaxrl_llm.ranges import Count
from jaxrl_llm.recipe.source import WIDTH, build_config, comment_lines, recipe_source
from jaxrl_llm.tools.arguments import parse_arguments

SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
KEYS_OF_DATA = re.compile(
    r"(prompt|input|answer|label|output|response|chosen|rejected|messages|image|fn)_key|tokenizer|_token"
)


@dataclass(frozen=True)
class ImportArguments:
    """Write a recipe from a config or script of veRL, OpenRLHF, TRL, RL2 or ChatLearn, which is read and
    never run: shell scripts, YAML, and Python with GRPOConfig(...). Keys without counterpart are listed."""

    file: Annotated[Path, tyro.conf.Positional]
    """Shell script, YAML file or Python file."""
    out: Path | None = None
    """Recipe to write; None = the file's name with .py, in the current folder."""
    system: Literal["", "verl", "openrlhf", "trl", "rl2", "chatlearn"] = ""
    """System that the file is of; "" = by its commands and keys."""
    trainer: str = ""
    """Trainer of the system, such as ppo, grpo, sft or dpo; "" = by the file."""
    devices: Count | None = None
    """Devices that the file is for, where it does not state them (TRL: processes)."""
    engine: Literal["native", "sglang"] = "native"
    """Engine of the rollout in the recipe."""
    define: tuple[str, ...] = ()
    """Values that only running the file would tell, NAME=VALUE: of shell variables, or Python expressions."""
    overwrite: bool = False
    """Replace the recipe where it exists."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a file that cannot be read, with file, line and fix.
    """
    args = parse_arguments(ImportArguments, argv, "import-config")
    out = args.out or Path(f"{args.file.stem}.py".replace("-", "_"))
    _check_out(out, args)
    recipe = import_recipe(dataclasses.replace(args, out=out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(recipe.source, encoding="utf-8")
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
    unused: dict[str, str]
    """Key of the file -> why it has none; "" = not known."""


def import_recipe(args: ImportArguments) -> ImportedRecipe:
    """Return the recipe that a file makes.

    Raises:
        UserError: the file, or a value in it, cannot be read.
    """
    source = read_settings(args.file, args.system, args.trainer, _definitions(args.define))
    conversion = Conversion(SYSTEMS[source.system], source, Assumptions(args.devices, args.engine))
    conversion.run()
    values = {key: result.value for key, result in conversion.results.items()}
    origins = {key: result.origin for key, result in conversion.results.items()}
    built = build_config(conversion.algo, values, origins)
    unused = {key: reason or missing_reason(key) for key, reason in conversion.unused.items()}
    notes = [
        *conversion.notes,
        *(
            f"{reason}: {origins[key]}"
            for key, reason in built.refused.items()
            if _is_set(conversion, origins[key])
        ),
    ]
    stated = {key for key, result in conversion.results.items() if result.stated}
    lines = [_unused_line(key, conversion.settings[key].value, reason) for key, reason in unused.items()]
    footer = _footer(lines)
    docstring = _docstring(args, conversion, notes)
    text = recipe_source(built.config, docstring, origins, stated, footer)
    problems = _problems(built.config)
    mapped = len(conversion.settings) - len(unused)
    report = _report(args, conversion, mapped, lines, notes, problems)
    return ImportedRecipe(text, report, mapped, unused)


def _is_set(conversion: Conversion, origin: str) -> bool:
    """Return whether the file itself, not a default, sets what a key comes from."""
    return any(origin.startswith(f"{key} ") or f", {key} " in origin for key in conversion.settings)


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


def _unused_line(key: str, value: object, reason: str) -> str:
    """Return the line of a key without counterpart; values that look secret are left out."""
    secret = SECRET.search(key) and not KEYS_OF_DATA.search(key)
    shown = "..." if secret else printable(value)
    return f"{printable(key)} {shown}: {reason or 'no counterpart is known'}"


def _footer(lines: list[str]) -> list[str]:
    if not lines:
        return ["# Every key of the file has its counterpart above."]
    return [
        "# Keys of the file without a counterpart here:",
        *(part for line in lines for part in comment_lines(line)),
    ]


def _docstring(args: ImportArguments, conversion: Conversion, notes: list[str]) -> str:
    title = f"{conversion.algo.upper()} as in {conversion.system.title}'s {args.file.name}, by import-config."
    count = conversion.devices
    devices = f"{count} device{'s' * (count > 1)} there" if count else "not stated there"
    lines = [
        title,
        "",
        f"Command:   python -m jaxrl_llm.train --config {args.out or 'recipe.py'}",
        f"Hardware:  {devices}",
        "Time:      not measured: this recipe has not been run yet",
        "Expected:  not measured either",
    ]
    if notes:
        lines += ["", "To know before a run:"]
        wrap = textwrap.TextWrapper(
            WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False
        )
        lines += [part for note in notes for part in wrap.wrap(" ".join(note.split()))]
    return "\n".join(lines)


def _problems(config: TrainConfig) -> list[str]:
    """Return what a run would refuse: paths that are absent, and values that cannot work."""
    from jaxrl_llm.recipe.checks import check_config  # imports jax: not for --help

    try:
        check_config(config, writes=False)
    except ConfigError as error:
        lines = str(error).splitlines()
        return [line.removeprefix("  - ") for line in (lines[1:] if len(lines) > 1 else lines)]
    return []


def _report(
    args: ImportArguments,
    conversion: Conversion,
    mapped: int,
    unused: list[str],
    notes: list[str],
    problems: list[str],
) -> str:
    total = mapped + len(unused)
    lines = [
        f"{args.file}: {conversion.system.title}, {conversion.trainer}; here {conversion.algo}. {mapped} of "
        f"{total} keys have a counterpart."
    ]
    lines += [f"note: {note}" for note in notes]
    lines += [f"no counterpart: {line}" for line in unused]
    lines += [f"to set: {problem}" for problem in problems]
    return "\n".join(lines)
