"""Settings of another system's file, and the reading of their values."""

from __future__ import annotations

import importlib.resources
import math
import re
import tomllib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.addresses import mask_text
from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra

UNKNOWN = re.compile("\x00([^\x00]*)\x00")
"""A part of a text that only running the file would tell, such as a shell variable: its name between NULs."""
FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".gz")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
SECRET = re.compile(r"key$|(?:^|\.)token$|secret$|password\w*$", re.IGNORECASE)
COLUMN = re.compile(
    r"(?:prompt|input|answer|label|output|response|chosen|rejected|messages|image|fn|teacher)_key$"
)
TOKEN = re.compile(r"(?:hub|hf|auth|access|api|wandb|swanlab|github|bearer|secret)_token$", re.IGNORECASE)
UNSET = "unset"
"""None in keys/*.toml: TOML has no null."""
TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class NotHereError(UserError):
    """The main trainer or loss of a file is not supported."""


class Setting(NamedTuple):
    """The value of a key in a file."""

    value: Any
    """As YAML or Python types it, or text."""
    where: str
    """File and line."""


class SourceSettings(NamedTuple):
    """All that a file says about a run."""

    system: str
    """Name in SYSTEMS."""
    trainer: str
    """Such as "ppo"; a key of the system's tables."""
    settings: Mapping[str, Setting]
    devices: int | None
    """Processes that the launcher starts; None = the file does not state it."""
    notes: list[str]


def leaves(settings: Mapping[str, Setting], known: Container[str]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings with mappings, as in Hydra's optim={lr: 1e-6}, divided into their keys.

    Args:
        known: keys whose mappings stay whole.
    """
    for key, setting in settings.items():
        if isinstance(setting.value, Mapping) and setting.value and key not in known:
            items = {f"{key}.{name}": setting._replace(value=value) for name, value in setting.value.items()}
            yield from leaves(items, known)
        else:
            yield key, setting


def key_table(name: str) -> dict[str, Any]:
    """Return keys/NAME.toml."""
    file = importlib.resources.files("jaxrl_import") / f"keys/{name}.toml"
    return tomllib.loads(file.read_text("utf-8"))


def unknown(name: str) -> str:
    """Return the mark of a part of a text that is not known, `UNKNOWN`."""
    return f"\x00{name}\x00"


def unknown_names(value: Any) -> list[str]:
    """Return the names of the parts of a value that are not known."""
    if isinstance(value, list | tuple):
        return [name for item in value for name in unknown_names(item)]
    return UNKNOWN.findall(value) if isinstance(value, str) else []


def printable(value: Any) -> str:
    """Return a value as one short line without secrets: variables that are not known as $NAME."""
    if isinstance(value, list) and unknown_names(value):
        value = ", ".join(map(str, value))
    text = mask_text(UNKNOWN.sub(r"$\1", value if isinstance(value, str) else str(value))).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:50]}...{text[-27:]}"


def same(value: Any) -> Any:
    """Return the value."""
    return value


def number(value: Any) -> float:
    """Return a number; YAML reads 1e-6 as text."""
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a number") from None
    if not math.isfinite(parsed):
        raise ValueError("a finite number")
    return parsed


def whole_number(value: Any) -> int:
    """Return a whole number, which may be spelled 1e5."""
    parsed = number(value)
    if parsed != int(parsed):
        raise ValueError("a whole number")
    return int(parsed)


def count(value: Any) -> int:
    """Return a whole number of at least 1."""
    parsed = whole_number(value)
    if parsed < 1:
        raise ValueError("a whole number of at least 1")
    return parsed


def number_list(value: Any) -> tuple[float, ...]:
    """Return the numbers of a list, or of words divided by commas or spaces."""
    return tuple(map(number, items(value)))


def two_numbers(value: Any) -> tuple[float, float]:
    """Return a lower and an upper bound, or two moments."""
    pair = number_list(value)
    if len(pair) != 2:
        raise ValueError("two numbers")
    return pair[0], pair[1]


def device_count(value: Any) -> int:
    """Return a number of devices. It changes no result, so one that is not known is left out."""
    return whole_number(value)


def memory_switch(value: Any) -> bool:
    """Return True or False of a setting that saves memory, left out as `device_count` is."""
    return switch(value)


LEFT_OUT: Mapping[Callable[[Any], Any], str] = {
    device_count: "--devices N sets devices",
    memory_switch: "it saves memory and changes no result, so it is left out; --define KEY=True sets it "
    "(bash makes nothing of a variable that is not set, and stops at it under `set -u`)",
}
"""Converter of settings that change no result -> what to do about a value that only a run would tell."""


def count_or_never(value: Any) -> int:
    """Return a number of steps between events; -1 and 0 are never."""
    return max(whole_number(value), 0)


def switch(value: Any) -> bool:
    """Return True or False."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in (*TRUE, *FALSE):
        raise ValueError("True or False")
    return word in TRUE


def text(value: Any) -> str:
    """Return text."""
    if isinstance(value, dict | list | tuple):
        raise ValueError("text")
    return str(value)


def name_text(value: Any) -> str:
    """Return a name for files, without the parts that are not known (dates, hosts)."""
    kept = re.sub(r"[^\w./~-]+", "_", UNKNOWN.sub("", text(value)))
    return re.sub(r"([_.-])(?=[_.-])", "", kept).strip("_-")


def items(value: Any) -> tuple[str, ...]:
    """Return the texts of a list, or of words divided by commas or spaces."""
    if isinstance(value, list | tuple):
        return tuple(text(item).strip(", ") for item in value)
    return tuple(word for word in re.split(r"[,\s]+", text(value).strip("[]")) if word)


def lora_targets(value: Any) -> tuple[str, ...]:
    """Return the layers with adapters; all-linear is all."""
    return tuple("all" if item in ("all-linear", "all_linear") else item for item in items(value))


def remat(value: Any) -> str:
    """Return the rematerialization of gradient checkpointing, which keeps the inputs of layers alone."""
    return "full" if switch(value) else "none"


def dtype(value: Any) -> str:
    """Return the name of a type."""
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "auto": "bfloat16"}
    word = text(value).removeprefix("torch.")
    word = names.get(word, word)
    if word not in ("float32", "bfloat16", "float16"):
        raise ValueError("bfloat16, float16 or float32")
    return word


def top_k(value: Any) -> int:
    """Return how many tokens are sampled from; -1 is all, here 0."""
    return max(whole_number(value), 0)


def path_text(value: Any) -> str:
    """Return a path; an unknown part stays as $NAME, since users replace paths anyway."""
    return UNKNOWN.sub(r"$\1", text(value))


def paths(value: Any) -> tuple[str, ...]:
    """Return the paths of a list, or of words divided by commas or spaces."""
    return tuple(map(path_text, items(value)))


def source_path(value: Any) -> str:
    """Return the path of a data set; a hub name gets its prefix hub:."""
    path = path_text(value)
    is_file = path.startswith((".", "/", "~", "$")) or path.endswith(FILE_SUFFIXES)
    return path if is_file or not HUB_NAME.fullmatch(path) else f"hub:{path}"


def keeps_unknown(convert: Callable[[Any], Any]) -> bool:
    """Return whether a converter reads values of which parts are not known: names and paths."""
    return convert in (name_text, path_text, paths, source_path)


def yaml_value(text: str) -> Any:
    """Parse text as YAML; other text is returned unchanged."""
    if "\x00" in text:
        return text
    yaml = import_extra("yaml", "import", needed_by="import-config")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value


def choice(**names: Any) -> Callable[[Any], Any]:
    """Return a converter by a table of names; text, hyphens as underscores."""

    def convert(value: Any) -> Any:
        key = text(value).lower().replace("-", "_").replace("+", "_plus")
        if key not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return names[key]

    return convert


def convert_value(key: str, setting: Setting, convert: Callable[[Any], Any]) -> Any:
    """Return the converted value of a key.

    Raises:
        UserError: the value is none of its kind; names file, line and key.
    """
    try:
        return convert(setting.value)
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"{setting.where}: {key} is {printable(setting.value)!r}: it must be {error}. Set it right in a "
            "copy of the file."
        ) from None


def secret(value: Any) -> str:
    """Return that a key of a service is set, and not which."""
    return "set"


def is_secret(key: str) -> bool:
    """Return whether the name of a key says that its value is secret; not prompt_key, not eos_token."""
    return bool(TOKEN.search(key) or (SECRET.search(key) and not COLUMN.search(key)))
