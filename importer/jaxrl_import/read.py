"""Files of other systems -> their settings. Shell, YAML and Python are read; nothing is executed."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_import.commands import SCRIPTS, flags_of, hydra_overrides, program_of, unset_words
from jaxrl_import.python_file import read_python
from jaxrl_import.shell import Script, Word
from jaxrl_import.systems import SYSTEMS
from jaxrl_import.values import UNKNOWN, Setting, SourceSettings, printable, unknown, yaml_value
from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra

MARKS = {  # beginnings of keys that one system alone has, in YAML
    "verl": ("actor_rollout_ref.", "trainer.total_epochs", "trainer.nnodes", "model.partial_pretrain"),
    "chatlearn": ("runtime_args.", "models.policy"),
    "rl2": ("rollout.train.", "actor.model_name", "adv.", "data.train.path", "critic.model_name"),
    "openrlhf": ("ckpt.", "ds.", "actor.model_name_or_path", "pretrain", "prompt_data"),
    "trl": (
        "model_name_or_path",
        "dataset_name",
        "per_device_train_batch_size",
        "output_dir",
        "learning_rate",
    ),
}
LAUNCHERS = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")
CUT_OFF = re.compile(r"--\w|[+~]*\w+(\.\w+)+=")
"""Beginning of a setting in the place of a command."""
MAX_BYTES, MAX_KEYS = 2**22, 10_000
COMMAND = re.compile(
    r"^\s*(?:#\s*)?((?:accelerate launch|trl|python3?|torchrun)\s(?:.*\\\n)*.*)$", re.MULTILINE
)


def read_settings(
    file: Path, system: str = "", trainer: str = "", variables: Mapping[str, str] | None = None
) -> SourceSettings:
    """Return the settings of a shell script, a YAML file or a Python file.

    Args:
        system, trainer: where the file does not tell; "" = it does.
        variables: shell variables and Python names that the file does not define.

    Raises:
        UserError: the file cannot be read or is of no known kind or system; names file, line and fix.
    """
    text = _text_of(file)
    reader = {".sh": _read_shell, ".bash": _read_shell, ".slurm": _read_shell, ".sbatch": _read_shell}
    reader |= {".yaml": _read_yaml, ".yml": _read_yaml, ".py": _read_python_file}
    suffix = file.suffix or (".sh" if text.startswith("#!") else "")
    if suffix not in reader:
        raise UserError(
            f"{file}: {file.suffix or 'no suffix'}: read are shell scripts (.sh), YAML (.yaml) and "
            "Python (.py). Rename the file, or put the command into a .sh file."
        )
    try:
        return reader[suffix](text, file, system, trainer, variables=dict(variables or {}))
    except (RecursionError, MemoryError):
        raise UserError(f"{file}: nested too deeply to be read. Shorten what is nested in a copy.") from None


def _text_of(file: Path) -> str:
    if file.exists() and not file.is_file():  # a pipe would wait for ever
        raise UserError(f"{file}: no file with text. Give the path of a script or config.")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(
                f"{file}: larger than {MAX_BYTES >> 20} MiB, so no config. Give the config itself."
            )
        text = data.decode("utf-8-sig").replace("\r\n", "\n")  # -sig: some editors begin with a mark
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}. Give the path of a script or config.") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # the mark of unknown values, `values.UNKNOWN`
        raise UserError(f"{file}: not UTF-8 text. Give the path of a script or config.")
    return text


def _checked(file: Path, system: str, trainer: str) -> tuple[str, str]:
    """Return the names of system and trainer, or refuse unknown ones."""
    if not system:
        raise UserError(f"{file}: of no system that is known by its keys. Set --system {'|'.join(SYSTEMS)}.")
    if system not in SYSTEMS:
        raise UserError(f"--system {system}: unknown. Set --system {'|'.join(SYSTEMS)}.")
    trainers = SYSTEMS[system].tables
    trainer = trainer or (next(iter(trainers)) if len(trainers) == 1 else "")
    if trainer not in trainers:
        problem = f"--trainer {trainer}: unknown" if trainer else f"{file}: the trainer is not in the file"
        raise UserError(f"{problem}. {SYSTEMS[system].title} has --trainer {'|'.join(trainers)}.")
    return system, trainer


# -- shell


def _read_shell(
    text: str, file: Path, system: str, trainer: str, *, variables: dict[str, str]
) -> SourceSettings:
    script = Script(text, str(file), variables)
    own = file.name if file.suffix == ".py" else ""
    commands = [*script.commands, *_quoted_commands(script, str(file), variables)]
    # The first command of a known trainer.
    programs = [(words, *program) for words in commands if (program := program_of(words, own))]
    if not programs and system:
        programs = [(words, 0, system, trainer) for words in script.commands if len(words) > 3][-1:]
    elif not programs:
        programs = [(words, 0, *by) for words in script.commands if (by := _of_keys(words, file))][:1]
    if not programs:
        raise UserError(
            f"{file}: no command of a trainer that is known. Set --system {'|'.join(SYSTEMS)} and "
            "--trainer NAME."
        )
    words, at, own_system, own_trainer = programs[0]
    system, trainer = _checked(file, system or own_system, trainer or own_trainer)
    notes = [
        f"{file}:{words[at].line} is read; a second command in line {other[0][0].line} is not"
        for other in programs[1:2]
    ]
    following = next((b for a, b in itertools.pairwise(script.commands) if a is words), [])
    if following and CUT_OFF.match(following[0].text):
        notes.append(
            f"{file}:{following[0].line}: {printable(following[0].text)} and what follows is not read: the "
            "command ends before it, at a comment, an empty line, or a blank after a backslash"
        )
    notes += _branch_notes(script, text, file)
    # Its arguments, over the config file that it names.
    arguments = words[at + 1 :]
    if len(arguments) > MAX_KEYS:
        raise UserError(f"{file}: more than {MAX_KEYS} arguments, so no config. Give the command itself.")
    is_hydra = system in ("verl", "rl2", "chatlearn")
    notes += unset_words(words[at:], str(file)) if is_hydra else []
    settings = hydra_overrides(arguments, str(file)) if is_hydra else flags_of(arguments, str(file))
    base, base_notes = _base_config(settings, arguments, file)
    settings = _interpolated({**base, **settings}, variables)
    devices = _devices(words[:at], file)
    if system == "trl" and "num_processes" in settings:  # `trl grpo --num_processes 4` hands it to accelerate
        devices = _devices(arguments, file)
        del settings["num_processes"]
    return SourceSettings(system, trainer, settings, devices, notes=notes + base_notes)


def _of_keys(words: list[Word], file: Path) -> tuple[str, str] | None:
    """Return system and trainer, by the keys of a command that is wholly in a variable from elsewhere."""
    is_whole = UNKNOWN.fullmatch(words[0].text) and all("=" in word.text for word in words[1:2])
    system = _system_of(settings := hydra_overrides(words, str(file)) if is_whole else {})
    return (system, _trainer_of_yaml(system, settings, "")) if system else None


def _branch_notes(script: Script, text: str, file: Path) -> list[str]:
    """Return a note on each variable that a branch may change."""
    assigned = [
        f"{file}:{line}: {name} is assigned in a branch once more; its first value is used. "
        f"--define {name}=VALUE sets another"
        for name, line in script.branches.items()
        if f"${name}" in text or f"${{{name}" in text
    ]
    return assigned + [
        f"{file}:{line}: {name} has items of a branch that only a run would choose, or leave out; the first "
        "such branch counts"
        for name, line in script.array_branches.items()
        if f"${{{name}[" in text
    ]


def _quoted_commands(script: Script, name: str, variables: dict[str, str]) -> Iterator[list[Word]]:
    """Yield the commands in quoted words, as of srun bash -c "..."."""
    for word in (
        word for words in script.commands for word in words if "\n" in word.text or "&&" in word.text
    ):
        for words in Script(word.text.replace("\x00", ""), name, variables).commands:
            yield [inner._replace(line=word.line) for inner in words]


def _devices(words: list[Word], file: Path) -> int | None:
    """Return the processes that a launcher starts, by its flags or its config file."""
    flags = flags_of(words, str(file))
    for name in LAUNCHERS:
        value = flags.get(name.replace("-", "_"))
        if value and str(value.value).isdigit():
            nodes = flags.get("nnodes")
            return int(value.value) * (int(nodes.value) if nodes and str(nodes.value).isdigit() else 1)
    if config := _near(file, str(flags["config_file"].value)) if "config_file" in flags else None:
        count = _load_yaml(_text_of(config), config).get("num_processes")
        return int(count.value) if count and str(count.value).isdigit() else None
    return None


def _base_config(
    settings: dict[str, Setting], words: list[Word], file: Path
) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings of the YAML file that a command names, if it exists."""
    named = [word for word in words if not re.match(r"~|(?!--).*=", word.text, re.DOTALL)]
    flags = flags_of(named, str(file))
    settings.pop("config", None)
    folder = str(flags["config_path"].value) if "config_path" in flags else "."
    names = [str(flags[key].value) for key in ("config_file", "config") if key in flags]
    if "config_name" in flags:
        name = str(flags["config_name"].value).removesuffix(".yaml")
        if re.fullmatch(r"(ppo|sft)(_megatron)?_trainer(_engine)?", name):
            return {}, []  # the system's own defaults
        names.append(f"{folder}/{name}.yaml")
    for name in names:
        path = _near(file, name)
        if path is None:
            plain = name.replace("\x00", "$")
            return {}, [f"{plain} is not at hand: the system's defaults count for the keys that it would set"]
        return _load_yaml(_text_of(path), path), [f"{path} is read, too"]
    return {}, []


def _near(file: Path, name: str) -> Path | None:
    """Return the file of a relative name: from here, beside the script, or above it."""
    name = re.sub(r"^(\x00[^\x00]*\x00|\.)/", "", name)
    folders = [Path("."), *file.resolve().parents[:5]]
    return next((path for folder in folders if (path := folder / name).is_file()), None)


# -- YAML


def _read_yaml(
    text: str, file: Path, system: str, trainer: str, *, variables: dict[str, str]
) -> SourceSettings:
    settings = _load_yaml(text, file)
    system = system or _system_of(settings)
    system, trainer = _checked(file, system, trainer or _trainer_of_yaml(system, settings, file.stem))
    return SourceSettings(system, trainer, _interpolated(settings, variables), None, notes=[])


def _system_of(settings: Mapping[str, Setting]) -> str:
    """Return the system that alone has these keys; "" = none."""
    return next((name for name, marks in MARKS.items() if any(key.startswith(marks) for key in settings)), "")


def _trainer_of_yaml(system: str, settings: Mapping[str, Setting], stem: str) -> str:
    """Return the trainer that the keys, or the file's name, tell; "" = they do not."""
    keys = set(settings)
    if system == "verl":
        if any(key.startswith(("actor_rollout_ref", "algorithm")) for key in keys):
            return "ppo"
        return "fsdp_sft" if "model.partial_pretrain" in keys else "sft"
    if system == "rl2":
        if any(key.startswith("rollout.") for key in keys):
            return "ppo"
        if any(key.startswith("critic.") for key in keys):
            return "rm"
        return "dpo" if "actor.beta" in keys or "data.train.chosen_key" in keys else "sft"
    if system == "trl" and keys & {"num_generations", "reward_funcs", "scale_rewards", "epsilon"}:
        return "rloo" if "rloo" in stem else "grpo"
    words = SCRIPTS if system == "trl" else {}
    return next((trainer for word, trainer in words.items() if word in stem.lower()), "")


def _load_yaml(text: str, file: Path) -> dict[str, Setting]:
    """Return the leaves of a YAML file by dotted keys.

    Raises:
        UserError: the text is not a YAML mapping; the message names the line.
    """
    yaml = import_extra("yaml", "import", needed_by=str(file))
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UserError(
            f"{file}:{line}: not YAML: {getattr(error, 'problem', error)}. Mend the line."
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{file}: YAML that cannot be read ({error}). Mend the file.") from None
    if not isinstance(values, dict) or node is None:
        raise UserError(f"{file}:1: YAML, but no mapping of keys to values. Give the config itself.")
    if _is_larger(values, MAX_KEYS * 10):
        raise UserError(f"{file}: more than {MAX_KEYS * 10} values, so no config. Give the config itself.")
    settings: dict[str, Setting] = {}
    _flatten(node, values, "", str(file), settings=settings)
    return {
        key: setting
        for key, setting in settings.items()
        if key.split(".")[0] not in ("defaults", "hydra", "env")
    }


def _is_larger(value: Any, limit: int) -> bool:
    """Return whether nested values are more than `limit`, each counted as often as aliases repeat it."""
    waiting, count = [value], 0
    while waiting and count <= limit:
        item = waiting.pop()
        count += 1
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return count > limit


def _flatten(
    node: Any, values: dict[Any, Any], prefix: str, name: str, *, settings: dict[str, Setting]
) -> None:
    if len(settings) > MAX_KEYS:
        raise UserError(f"{name}: more than {MAX_KEYS} keys, so no config. Give the config itself.")
    children = {key.value: child for key, child in node.value}
    for key, value in values.items():
        child = children.get(str(key), node)  # a key that << merges has no node here
        if isinstance(value, dict) and child.id == "mapping" and value and child is not node:
            _flatten(child, value, f"{prefix}{key}.", name, settings=settings)
        elif value != "???":  # OmegaConf's mark of a value to give
            settings[f"{prefix}{key}"] = Setting(value, f"{name}:{child.start_mark.line + 1}")


def _interpolated(settings: dict[str, Setting], variables: Mapping[str, str]) -> dict[str, Setting]:
    """Replace OmegaConf's ${a.b} in settings by the values of these keys."""

    def replaced(value: Any, key: str, depth: int) -> Any:
        if not isinstance(value, str) or "${" not in value or depth > 10:
            return value
        whole = INTERPOLATION.fullmatch(value)
        if whole:
            return replaced(_referenced(whole[1], key, settings, variables), key, depth + 1)
        joined = INTERPOLATION.sub(lambda match: str(_referenced(match[1], key, settings, variables)), value)
        return replaced(joined, key, depth + 1)

    return {key: setting._replace(value=replaced(setting.value, key, 0)) for key, setting in settings.items()}


def _referenced(inside: str, key: str, settings: Mapping[str, Setting], variables: Mapping[str, str]) -> Any:
    """Return the value of an interpolation: a key's value, oc.select's default, or an unknown part."""
    resolver, colon, arguments = inside.partition(":")
    name, _, default = arguments.partition(",") if colon else (inside, "", "")
    name = name.strip()
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}"
    if resolver == "oc.env" and name in variables:
        return variables[name]
    if name in settings:
        return settings[name].value
    if colon and default:
        return yaml_value(default.strip())
    return None if resolver == "oc.select" or not colon else unknown(name)


# -- Python


def _read_python_file(
    text: str, file: Path, system: str, trainer: str, *, variables: dict[str, str]
) -> SourceSettings:
    # Flags of the documented command, then the keys that the file sets.
    found = _documented_command(text, file, variables)
    flags = (
        {}
        if found is None
        else _read_shell(found, file, "trl", trainer or "sft", variables=variables).settings
    )
    given = {f"args.{key}": setting.value for key, setting in flags.items()}
    python = read_python(text, str(file), {**given, **variables})
    if python is None and found is None:
        raise UserError(
            f"{file}: no trainer of TRL, such as GRPOTrainer(...), and no command of one in its docstring. "
            "Put the command that starts it into a .sh file."
        )
    if python is None:
        return _read_shell(found, file, system, trainer, variables=variables)
    # Settings of the file, over the settings of the command.
    system, trainer = _checked(file, system or "trl", trainer or python.trainer)
    notes = [f"{file}: {other} is not read" for other in python.others]
    if found is None or not python.from_command:
        if python.from_command:
            notes.append(
                f"{file} takes settings from its command line, which is not here: TRL's defaults count; "
                "--define KEY=VALUE sets one"
            )
        return SourceSettings(system, trainer, python.settings, None, notes=notes)
    command = _read_shell(found, file, system, trainer, variables=variables)
    return command._replace(settings={**command.settings, **python.settings}, notes=[*notes, *command.notes])


def _documented_command(text: str, file: Path, variables: dict[str, str]) -> str | None:
    """Return the first command of a trainer in the texts at the top level of a file, at its line, or None."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = text.splitlines()
    for node in body:
        if ast.get_docstring(ast.Module([node], [])) is None:
            continue
        docstring = "\n".join(["", *lines[: node.end_lineno]][node.lineno :])
        for match in COMMAND.finditer(docstring):
            command = re.sub(r'"\s*,\s*"', '" "', match[1].replace('"""', ""))
            shell = "\n" * (node.lineno - 1 + docstring.count("\n", 0, match.start(1))) + command
            if any(program_of(words, file.name) for words in Script(shell, str(file), variables).commands):
                return shell
    return None
