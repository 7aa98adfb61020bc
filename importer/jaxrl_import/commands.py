"""Commands that start a trainer: which trainer it is, and the settings in its words."""

from __future__ import annotations

import re

from jaxrl_import.shell import Word
from jaxrl_import.values import UNKNOWN, Setting, printable, yaml_value

PROGRAMS = {  # pattern of a word of a command -> system, trainer; the first that fits
    r"verl\.trainer\.fsdp_sft_trainer\w*|.*verl/trainer/fsdp_sft_trainer\w*\.py": ("verl", "fsdp_sft"),
    r"verl\.trainer\.sft_trainer\w*|.*verl/trainer/sft_trainer\w*\.py": ("verl", "sft"),
    r"(verl|recipe)\.[\w.]*main_\w+|.*\bmain_(ppo|dapo)\w*\.py|verl\.[\w.]*_main": ("verl", "ppo"),
    r"openrlhf\.cli\.train_ppo\w*": ("openrlhf", "ppo"),
    r"openrlhf\.cli\.train_(sft|dpo|rm)": ("openrlhf", r"\1"),
    r"trl\.scripts\.(dpo|grpo|kto|reward|rloo|sft|distillation)": ("trl", r"\1"),
    r"RL2\.trainer\.(ppo|sft|dpo|rm)": ("rl2", r"\1"),
    r".*\bchatlearn/entrypoint\.py|chatlearn\.entrypoint": ("chatlearn", "grpo"),
}
MARKS = re.compile(r"verl|recipe|main_|openrlhf|RL2|chatlearn|trl\.scripts|\.py$")
"""Text in the name of a trainer's program."""
SCRIPTS = {  # begin of the name of a script of TRL, or word after `trl` -> trainer
    "reward_modeling": "reward", "online_dpo": "online_dpo", "grpo": "grpo", "gspo": "grpo", "gmpo": "gmpo",
    "rloo": "rloo", "sft": "sft", "dpo": "dpo", "kto": "kto", "orpo": "orpo", "cpo": "cpo", "gkd": "gkd",
    "reward": "reward", "distillation": "distillation", "ppo": "ppo", "prm": "prm",
}  # fmt: skip


def program_of(words: list[Word], own: str = "") -> tuple[int, str, str] | None:
    """Return (place in the words, system, trainer) of the program that a command starts; None = another.

    Args:
        own: name of a script that counts as a program of TRL; the script itself tells the trainer.
    """
    for at, word in enumerate(words):
        if not MARKS.search(word.text) and not (at and words[at - 1].text == "trl"):
            continue
        for pattern, (system, trainer) in PROGRAMS.items():
            if match := re.fullmatch(pattern, word.text):
                return at, system, match.expand(trainer)
        script = word.text.rpartition("/")[2]
        is_command = at and words[at - 1].text == "trl"
        if is_command or script.endswith(".py"):
            trainer = next(
                (SCRIPTS[stem] for stem in SCRIPTS if script.removesuffix(".py").startswith(stem)), ""
            )
            if trainer or script == own:
                return at, "trl", trainer
    return None


def hydra_overrides(words: list[Word], name: str) -> dict[str, Setting]:
    """Return the overrides key=value; + adds a key and ~ removes it."""
    settings = {}
    for word in words:
        key, equals, value = word.text.partition("=")
        if key.startswith("~") or (equals and not key.startswith("-")):
            value = None if key.startswith("~") else yaml_value(value)
            settings[key.lstrip("+~")] = Setting(value, f"{name}:{word.line}")
    return settings


def unset_words(words: list[Word], name: str) -> list[str]:
    """Return a note on each word that is a variable from elsewhere, which may hold several overrides."""
    return [
        f"{name}:{word.line}: {printable(word.text)} is not in the file, and what it adds to the command is "
        f"not read: give --define {unset[1]}=WORDS"
        for word in words
        if (unset := UNKNOWN.fullmatch(word.text))
    ]


def flags_of(words: list[Word], name: str) -> dict[str, Setting]:
    """Return the arguments --key value ...; a key alone is True."""
    settings: dict[str, Setting] = {}
    key, values, line = "", [], 0
    for word in [*words, Word("--", 0)]:
        if word.text.startswith("--") or re.fullmatch("-[A-Za-z]", word.text):
            if key:
                value = True if not values else yaml_value(values[0]) if len(values) == 1 else values
                settings[key] = Setting(value, f"{name}:{line}")
            flag, equals, value = word.text.removeprefix("-").removeprefix("-").partition("=")
            key, values, line = flag.replace("-", "_"), [value] if equals else [], word.line
        else:
            values.append(word.text)
    return settings
