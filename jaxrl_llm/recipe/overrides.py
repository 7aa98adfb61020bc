"""`--a.b value` on the command line -> a changed frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.extensions import load_extensions
from jaxrl_llm.recipe.keys import (
    Config,
    ConfigField,
    add_missing,
    has_type,
    inner_key,
    iter_fields,
    replace_at,
    short_repr,
    shorten,
    type_words,
)
from jaxrl_llm.removed import removed_key

Pair = tuple[str, list[str] | None]
"""Key, and the words after it; None = Python's None."""
ASSIGNMENT = re.compile(r"[+~]*(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
MIN_LIKENESS = 0.6  # of a key that is suggested: "gguf_file" and "profile" have 0.5


def split_arguments(argv: Sequence[str]) -> list[Pair]:
    """Return (key, words) pairs: ["--a.b", "1", "--c=2"] -> [("a.b", ["1"]), ("c", ["2"])].

    A negative number is a value, and so is a word with a space in its key: --servers.flags "--tp 2".

    Raises:
        ConfigError: a value without a key before it.
    """
    pairs: list[Pair] = []
    for word in argv:
        key, equals, value = word.partition("=")
        if key.startswith("--") and not (pairs and " " in key):
            pairs.append((key[2:], [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
        else:
            spelled = f"--{key.lstrip('-')} {value}" if equals else "--key value, such as --steps 100"
            spelled = f"--config {word}" if word.endswith(".py") and not equals else spelled
            raise ConfigError(f"{short_repr(word)} has no key before it. Write {shorten(spelled)}.")
    return pairs


def apply_overrides(
    config: Config, pairs: Iterable[Pair], flags: Sequence[str] = ()
) -> tuple[Config, list[str]]:
    """Return the config with each key set, in order, and notes on repeated keys.

    Args:
        config: a TrainConfig, or the arguments of a command.
        flags: other flags of the command, for suggestions.

    Raises:
        ConfigError: an unknown key (with the nearest one), a value of the wrong type or one that its part
            refuses.
    """
    set_keys, notes = set(), []
    for typed, words in pairs:
        known = dict(iter_fields(config))
        key = resolve_key(typed, known)
        if not key:
            config = add_missing(config, typed[:200].replace("-", "_").split("."))
            known = dict(iter_fields(config))
            key = resolve_key(typed, known)
        if not key:
            if row := removed_key(typed[:200]):
                raise ConfigError(f"--{typed}: this key was removed. {row.instead}")
            advice = _advice(typed[:200], known, config, flags)
            raise ConfigError(f"--{shorten(typed)}: unknown key. {advice}")
        # The value, of the key's type.
        _refuse_assignments(key, words or [], known, config)
        if known[key].is_off_at_zero and (words is None or [word.lower() for word in words] == ["none"]):
            words = ["0"]
        value = parse_words(key, known[key].hint, words)
        try:
            config = replace_at(config, key.split("."), value)
        except ValueError as error:  # a part's own check
            raise ConfigError(f"--{key}: {str(error).rstrip('.')}.") from None
        if key in set_keys:
            last = shorten("None" if words is None else " ".join(words))
            notes.append(f"--{key} is given more than once; the last counts: {last}")
        set_keys.add(key)
    return config, notes


def _refuse_assignments(key: str, words: list[str], known: dict[str, ConfigField], config: Any) -> None:
    """Refuse settings in Hydra's style, KEY=VALUE, among the words after a key.

    Raises:
        ConfigError: says how each is written here.
    """
    for found in filter(None, map(ASSIGNMENT.fullmatch, words[1:])):
        meant = resolve_key(found["key"], known)
        if not meant and known[key].hint not in (int, float, bool, str):
            continue  # one of several values
        advice = f"Write --{meant} {found['value']}." if meant else _advice(found["key"], known, config)
        raise ConfigError(f"{short_repr(found[0])}: a setting is written --KEY VALUE. {shorten(advice, 300)}")


def parse_words(key: str, hint: Any, words: list[str] | None) -> Any:
    """Return the words after --key as a value of type `hint`; None is Python's None.

    Raises:
        ConfigError: they are not one.
    """
    if words is None:
        if has_type(None, hint):
            return None
        fix = "Leave the key out for the recipe's value."
        raise ConfigError(f"--{key} is None: expected {type_words(hint)}. {fix}")
    if inner := inner_key(key, hint):
        raise ConfigError(f"--{key} is a group of fields, such as --{inner}.")
    from jaxrl_llm.recipe.values import parse_value  # imports tyro: not for --help

    try:
        return parse_value(hint, words)
    except ValueError:
        given = short_repr(" ".join(words)) if words else "nothing"
        usual = {bool: f" Write --{key} True.", str: f" Text that begins with --: --{key}='--TEXT'."}
        fix = "" if words else usual.get(hint, "")
        raise ConfigError(f"--{key}: expected {type_words(hint)}, got {given}.{fix}") from None


def resolve_key(typed: str, known: Iterable[str]) -> str:
    """Return the known key for a typed one, which may have hyphens or lack a middle part if this is
    unambiguous.

    Returns:
        "" if no key fits.
    """
    key = typed.replace("-", "_")
    if key in known:
        return key
    parent, _, name = key.rpartition(".")
    inside = [k for k in known if parent and k.startswith(f"{parent}.") and k.split(".")[-1] == name]
    return inside[0] if len(inside) == 1 else ""


def _advice(typed: str, known: dict[str, ConfigField], config: Any, flags: Sequence[str] = ()) -> str:
    """Return what to write in place of an unknown key; `flags` are known beside the fields of the config."""
    key = typed.replace("-", "_")
    if group := sorted(k for k in known if k.startswith(f"{key}.")):
        more = ", ..." if len(group) > 8 else ""
        fields = ", ".join(f"--{name}" for name in group[:8])
        return f"{key} is a group; set its fields: {fields}{more}. --help {key} shows them."
    if next_entry := _next_entry(key, known, config):
        return next_entry
    if negated := _negated(key, known):
        return f"Write --{negated} False."
    is_recipe = isinstance(config, TrainConfig)
    if is_recipe and (advice := _of_other_algorithms(key, config)):
        return advice
    near = closest_key(key, [*known, *flags])
    misspelt = bool(near and _group(key)) and _likeness(key, near)[0]
    answers = (translate(key, known) for translate in load_extensions("unknown_keys") if is_recipe)
    advice = (not misspelt and next(filter(None, answers), "")) or (near and f"Did you mean --{near}?")
    return f"{advice} --help{' all' if is_recipe else ''} lists the keys.".lstrip()


def _next_entry(key: str, known: dict[str, ConfigField], config: Any) -> str:
    """Return with which entry a list goes on, where the key is of a later one; "" = it is of none."""
    counts = {name: 0 for name, field in known.items() if field.value == ()}
    for name, index in re.findall(r"^(.+?)\.(\d+)\.", "\n".join(known), re.M):
        counts[name] = int(index) + 1
    entries = next((name for name in counts if key.startswith(f"{name}.")), "")
    index, field = re.fullmatch(r"(?:(\d+)\.)?(.*)", key.removeprefix(f"{entries}."), re.S).groups()
    count = counts.get(entries, 0)
    if not entries or (count and (index is None or int(index[:9]) < count)):
        return ""
    group = f"{entries}.{count}."
    inside = [
        name for name, _ in iter_fields(add_missing(config, group.split("."))) if name.startswith(group)
    ]
    first = resolve_key(f"{group}{field}", inside) or closest_key(f"{group}{field}", inside)
    if count:
        return first and f"{entries} has {count} in this recipe: the next one begins with --{first}."
    hint = known[entries].hint
    first = first or inner_key(entries, hint) or f"{entries} {type_words(hint)}"
    return f"{entries} is empty in this recipe: begin with --{first}."


def _negated(key: str, known: dict[str, ConfigField]) -> str:
    """Return the key that --no-KEY or --GROUP.no_KEY would switch off; "" = none."""
    plain = re.sub(r"(^|\.)no_", r"\1", key, count=1)
    switches = [k for k, field in known.items() if field.hint is bool]
    if plain == key:
        return ""
    return resolve_key(plain, switches) or next((k for k in switches if k.split(".")[-1] == plain), "")


def _of_other_algorithms(key: str, config: TrainConfig) -> str:
    """Return which algorithms have a setting that this one lacks."""
    group, _, name = key.partition(".")
    if group != "algo" or name == "algorithm":
        return ""  # before the algorithms are imported, and jax with them
    settings = {algo: dataclasses.fields(known.config) for algo, known in algos.ALGOS.items()}
    owners = [algo for algo, fields in settings.items() if name in {field.name for field in fields}]
    has_none = f"{config.algo.algorithm} has no setting {name}"
    return f"{has_none}; {', '.join(owners)} have. --algo NAME changes it." if owners else ""


def closest_key(key: str, known: Iterable[str]) -> str:
    """Return the likeliest of `known`: one of the same group first, then the one with the likest name.

    Returns:
        "" if no key is similar.
    """
    key = key[:100]
    scores = {other: _likeness(key, other) for other in known}
    near = [other for other, (_, like, *_) in scores.items() if like >= MIN_LIKENESS]
    return max(near, key=scores.__getitem__, default="")


def _likeness(key: str, other: str) -> tuple[bool, float, float, int]:
    """Return whether a key is a misspelling in its group, how alike two keys are, and their groups; of equal
    keys the one in fewer groups is likelier."""
    name, other_name = key.rpartition(".")[2], other.rpartition(".")[2]
    if name == other_name:
        like = 1.0
    elif name.startswith(f"{other_name}_"):  # stop_strings
        like = 0.75
    elif other_name.startswith(name) or name == "".join(word[:1] for word in other_name.split("_")):
        like = 0.9
    else:
        like = 0.95 * _ratio(other_name, name)
    is_misspelt = like >= 0.7 and _group(key) == _group(other)
    like = max(like, _ratio(other, key))
    return is_misspelt, like, _ratio(_group(other), _group(key)), -other.count(".")


def _ratio(text: str, typed: str) -> float:
    matcher = _matcher(typed)
    matcher.set_seq1(text)
    return matcher.ratio()


@functools.lru_cache(8)
def _matcher(typed: str) -> difflib.SequenceMatcher:
    return difflib.SequenceMatcher(None, b=typed)  # which is analysed once


def _group(key: str) -> str:
    return key.rpartition(".")[0]


def closest_word(word: str, known: Iterable[str]) -> str:
    """Return the likeliest of `known` by letters alone."""
    return difflib.get_close_matches(word[:100].lower(), known, n=1, cutoff=0.0)[0]
