"""Help on a recipe's keys: an overview on two screens, a group or key with docs and ranges, or everything."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.ranges import field_ranges
from jaxrl_llm.recipe.keys import ConfigField, inner_key, is_config, iter_configs, iter_fields, type_words
from jaxrl_llm.recipe.overrides import closest_key, resolve_key

WIDTH = 100  # columns
INDENT = " " * 4
RUN = "run"  # the group of the keys without one
COMMON = (
    *("run_dir", "steps", "epochs", "seed", "model.path", "data.path", "data.eval_path", "data.holdout"),
    *("reward.name", "prompts_per_step", "responses_per_prompt", "minibatches_per_step"),
    *("max_prompt_tokens", "max_response_tokens", "tokens_per_device"),
    *("optim.learning_rate", "lora.rank", "algo.kl_coef", "rollout.engine", "rollout.sampling.temperature"),
    *("mesh.fsdp", "mesh.tensor", "warm_start.steps", "eval.every", "checkpoint.every", "log.wandb"),
)
"""Keys that the overview shows."""


def split_help(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the other words, and the topics after --help; None without --help."""
    start = next((i for i, word in enumerate(argv) if word in ("--help", "-h")), None)
    if start is None:
        return list(argv), None
    end = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("-")), len(argv))
    rest = [word for word in (*argv[:start], *argv[end:]) if word not in ("--help", "-h")]
    return rest, list(argv[start + 1 : end])


def print_and_exit(text: str) -> NoReturn:
    """Print on stdout and end the command; a closed reader of stdout (`| head`) does not count as an
    error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def usage(prog: str) -> str:
    """Return the command's form and its options."""
    return f"""\
usage: {prog} --config RECIPE.py [--KEY VALUE ...]

    --config RECIPE.py   a path, or one of the recipes below
    --algo NAME|FILE.py  another algorithm with its own defaults; the recipe's settings of its
                         algorithm are dropped, and printed
    --KEY VALUE          any field of the recipe: --steps 100 --mesh.fsdp 8; the last one counts;
                         a part in the middle may be left out: --rollout.temperature 0.7
    --help [TOPIC ...]   this overview; or a group (rollout), a key (optim.b1) or all, with docs,
                         ranges and the values of --config
    --list               the recipes and the algorithms, with a line about each
"""


def overview(config: TrainConfig, prog: str, recipes: Sequence[str]) -> str:
    """Return usage, the keys that most runs set, the groups of keys, and the recipes: at most 100 lines."""
    known = dict(iter_fields(config))
    lines = [usage(prog), "keys that most runs set, with their values:"]
    for key in (key for key in COMMON if key in known):
        lines += _row(f"--{key} {_spell(known[key].value)}", _doc(known[key]))
    lines += _groups(config)
    names = textwrap.wrap(", ".join(recipes), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join([*lines, "", "recipes (--list):", *names])


def arguments_text(args: Any, prog: str, needed: Mapping[str, str]) -> str:
    """Return usage, description, flags with docs, types and ranges, and groups of flags of a command.

    Args:
        args: a dataclass.
        needed: field without a default -> its form in the usage.
    """
    lines = [" ".join(["usage:", prog, *needed.values(), "[--KEY VALUE ...]"]), ""]
    lines += [*inspect.cleandoc(type(args).__doc__ or "").splitlines(), ""]
    known = {key: field for key, field in iter_fields(args) if "." not in key}
    for key in [*needed, *(key for key in known if key not in needed)]:
        head, *doc = _paragraph(key, known[key])
        lines += [f"{INDENT}{needed[key]}" if key in needed else head, *doc]
    return "\n".join([*lines, *_groups(args)])


def _groups(config: Any) -> list[str]:
    """Return a row for each group of keys, below a heading."""
    parts = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    rows = [
        line for name, part in parts if is_config(part) for line in _row(name, _group_doc(part), column=16)
    ]
    return ["", "groups of keys (--help GROUP):", *rows] if rows else []


def topics_text(config: Any, topics: Sequence[str]) -> str:
    """Return the keys of some topics with their docs, types, ranges and values.

    Args:
        topics: groups, keys or "all".

    Raises:
        ConfigError: the topic is unknown.
    """
    return "\n".join(line for topic in topics for line in _topic(config, topic))


def _topic(config: Any, topic: str) -> Iterator[str]:
    """Yield the lines of a topic: groups one by one, each with its doc."""
    known = dict(iter_fields(config))
    groups = {prefix.rstrip(".") or RUN: part for prefix, part in iter_configs(config)}
    name = topic.lstrip("-").replace("-", "_").rstrip(".")
    inside = [group for group in groups if name in (group, "all") or group.startswith(f"{name}.")]
    for group in inside:
        yield from textwrap.wrap(f"{group}: {_group_doc(groups[group])}", WIDTH)
        yield ""
        for key, field in known.items():
            if (key.rpartition(".")[0] or RUN) == group:
                yield from _paragraph(key, field)
        yield ""
    if not inside:
        yield from _keys_named(name, known, groups)


def _keys_named(name: str, known: dict[str, ConfigField], groups: dict[str, Any]) -> Iterator[str]:
    """Yield the paragraphs of a key, or of all keys that end in this name."""
    key = resolve_key(name, known)
    keys = [key] if key else [k for k in known if k.rpartition(".")[2] == name]
    if not keys:
        closest = closest_key(name, [*groups, *known])
        advice = f"Did you mean --help {closest}?" if closest else "--help all lists the keys."
        raise ConfigError(f"--help {name}: no such key or group. {advice}")
    for key in keys:
        yield from _paragraph(key, known[key])


def _paragraph(key: str, field: ConfigField) -> Iterator[str]:
    yield f"{INDENT}--{key} {_spell(field.value)}"
    text = f"{_doc(field)} {_values(key, field)}".strip()
    yield from textwrap.wrap(text, WIDTH, initial_indent=2 * INDENT, subsequent_indent=2 * INDENT)


def _values(key: str, field: ConfigField) -> str:
    """Return the type and range of a field as a sentence."""
    if inner := inner_key(key, field.hint):
        return f"A group of fields, such as --{inner}."
    allowed = field_ranges(type(field.owner))[field.name]
    words = type_words(field.hint)
    if allowed:
        words += f", {allowed}" + (f"; {allowed.usual}" if allowed.usual else "")
    return f"{words[0].upper()}{words[1:]}."


def _row(head: str, doc: str, column: int = 40) -> list[str]:
    """Return "    head    doc", the doc on two lines at most."""
    left = f"{INDENT}{_cut(head, WIDTH // 2)}  ".ljust(column)
    lines = textwrap.wrap(doc, WIDTH - len(left), max_lines=2, placeholder=" ...") or [""]
    return [f"{left}{lines[0]}".rstrip(), *(" " * len(left) + line for line in lines[1:])]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _spell(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, tuple):
        return " ".join(_spell(item) for item in value) or "(none)"
    return shlex.quote(value) if isinstance(value, str) else str(value)


def _group_doc(config: Any) -> str:
    if isinstance(config, algos.AlgoConfig) and algos.is_known(config):
        return f"Settings of {config.algorithm}. {algos.first_line(config)}"
    return inspect.cleandoc(type(config).__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _doc(field: ConfigField) -> str:
    return field_docs(type(field.owner)).get(field.name, "")


@functools.cache
def field_docs(config_class: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, from its source; {} without the source."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(config_class.__mro__)):
        for pair in itertools.pairwise(_class_bodies(base.__module__).get(base.__name__, ())):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module; `inspect.getsource` of a class is slower."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # defined in a notebook or by exec
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
