"""Arguments of GRPOConfig(...) and its like in Python files, read from the syntax tree and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxrl_import.algorithm_names import NO_ALGORITHM
from jaxrl_import.python_values import ScriptValues, TakenBranches, name_of, root_of
from jaxrl_import.values import NotHereError, Setting, unknown, unknown_names
from jaxrl_llm.errors import UserError

TRAINERS = {
    "GRPO": "grpo",
    "AsyncGRPO": "async_grpo",
    "GMPO": "gmpo",
    "RLOO": "rloo",
    "OnlineDPO": "online_dpo",
    "SFT": "sft",
    "DPO": "dpo",
    "KTO": "kto",
    "Reward": "reward",
    "ORPO": "orpo",
    "CPO": "cpo",
    "GKD": "gkd",
    "Distillation": "distillation",
    "PPO": "ppo",
    "PRM": "prm",
}
"""Beginning of the names of TRL's Config and Trainer -> trainer."""
NO_TRAINERS = {
    "A2PO": "TRL estimates the values of all prompts before the run; --algo a_star_po does so within a step",
    "AsyncDistillation": "TRL's asynchronous distillation is --algo gkd with servers (docs/asynchronous.md)",
    "BCO": "of single responses there is --algo kto; BCO of pairs is --algo dpo --algo.loss bco",
    "GOLD": NO_ALGORITHM["gold"],
    "IWOPD": "there is no importance-weighted on-policy distillation; --algo gkd is without the weights",
    "NashMD": "there is no Nash-MD; TRL 1.16 has none either",
    "SDFT": NO_ALGORITHM["sdft"],
    "SDPO": NO_ALGORITHM["sdpo"],
    "SSD": "TRL 1.16 has none; --algo sft learns samples from a file",
    "ServerDistillation": "the teacher is in this run: --algo gkd with --algo.teachers",
    "TPO": NO_ALGORITHM["tpo"],
    "XPO": "there is no XPO; TRL 1.16 has none either",
}
"""Prefix of the names of TRL's Config and Trainer -> why it is not supported."""
PARSERS = ("TrlParser", "HfArgumentParser")
DATASETS = ("load_dataset", "load_from_disk")
FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""First argument of load_dataset for files."""
LOADED = {
    "path", "name", "data_files", "data_dir", "split", "revision", "streaming", "num_proc", "cache_dir",
    "token", "trust_remote_code", "keep_in_memory", "download_mode", "verification_mode", "save_infos",
}  # fmt: skip
"""Arguments of load_dataset that are read, or change no row."""
ROW_CHANGES = ("map", "filter", "select", "add_column", "rename_column", "rename_columns", "train_test_split")
"""Methods of a data set that change its rows."""
OF_TRL = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
MODEL_NAMES = ("pretrained_model_name_or_path", "model_name")
"""The first argument of from_pretrained, in transformers and Unsloth."""
QUANTIZED = ("load_in_4bit", "load_in_8bit")
OF_MODEL = ("model_init_kwargs", "teacher_model_init_kwargs", "generation_kwargs")
POSITIONS = {  # trainer -> its arguments without a name, in order
    **dict.fromkeys(
        ("grpo", "gmpo", "rloo", "async_grpo"), "model reward_funcs args train_dataset eval_dataset"
    ),
    **dict.fromkeys(("dpo", "kto"), "model ref_model args data_collator train_dataset eval_dataset"),
    **dict.fromkeys(
        ("sft", "reward", "orpo", "cpo", "prm"), "model args data_collator train_dataset eval_dataset"
    ),
    "gkd": "model teacher_model args data_collator train_dataset eval_dataset",
    "online_dpo": "model ref_model reward_funcs args data_collator train_dataset eval_dataset",
    "distillation": "model teacher_model args train_dataset eval_dataset",
    "ppo": "args processing_class model ref_model reward_model train_dataset value_model data_collator "
    "eval_dataset",
}
OF_PPO = {"reward_model": "reward_model_path", "value_model": "value_model_path"}
"""Arguments of PPOTrainer -> keys of the folders that they are loaded from."""
READ = {
    "model",
    "teacher_model",
    "args",
    *OF_PPO,
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "tokenizer",
}
"""Arguments of a trainer that are treated separately, or ignored."""
FROM_COMMAND = re.compile(r"(training|model|script)_args\.|get_\w+\((training|model|script)_args\)$")
"""A value that the command line has, too."""
OF_COMMAND = re.compile(r"\x00.*\b(training|model|script)_args\.")
"""In a value that is computed from the command line."""
OF_TOKENIZER = ("chat_template", "eos_token")
ARGUMENTS = ("args", "config", "training_args", "model_args", "script_args")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
}
"""Arguments of peft's LoraConfig -> arguments of TRL's command line."""
PEFT_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}


class PythonSettings(NamedTuple):
    """The settings of a Python file."""

    trainer: str
    settings: dict[str, Setting]
    others: list[str]
    """Further calls of a Config, which are not read: name and line."""
    from_command: bool
    """True: a parser reads the settings from the command line, and the file has some of them only."""


def read_python(text: str, name: str, variables: Mapping[str, str]) -> PythonSettings | None:
    """Return the arguments of the first call of a TRL Config, else the settings in a script that parses
    arguments.

    Args:
        name: of the file, for messages.
        variables: names and their values, from outside.

    Returns:
        None: the file starts no trainer.

    Raises:
        UserError: the file is not Python, or its trainer is not supported; the message names the line.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(
            f"{name}:{line}: not Python: {getattr(error, 'msg', '') or 'nested too deeply'}. Mend the line."
        ) from None
    # The trainer, by its Config, its Trainer, or the parser of its arguments.
    tree = TakenBranches(_Reader(tree, name, variables)).visit(tree)
    calls = sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda call: call.lineno)
    configs = [call for call in calls if trainer_of(name_of(call), "Config")]
    parsed = [
        n.id for call in calls if name_of(call) in PARSERS for n in ast.walk(call) if isinstance(n, ast.Name)
    ]
    names = [name_of(call) for call in (configs, calls)[not configs]] + parsed
    trainer = next((t for n in names for end in ("Config", "Trainer") if (t := trainer_of(n, end))), "")
    if not trainer:
        _refuse_trainers([*map(name_of, calls), *parsed], calls, name)
        return None
    # Settings of all calls; the Config's override them.
    reader = _Reader(tree, name, variables)
    settings: dict[str, Setting] = {}
    for call in calls:
        settings |= _of_call(call, trainer, reader)
    config = next(
        (c for call in calls if (c := reader.config_of(call, trainer)) in configs), (configs or [None])[0]
    )
    if config:
        settings |= dict(reader.arguments(config, ("output_dir",)))
    settings |= dict(reader.assigned())
    others = [f"{name_of(call)} in line {call.lineno}" for call in configs if call is not config]
    return PythonSettings(trainer, settings, others, not configs)


def _of_call(call: ast.Call, trainer: str, reader: _Reader) -> dict[str, Setting]:
    """Return the settings in a call of peft's LoraConfig, TRL's ModelConfig, the trainer, or Unsloth."""
    if name_of(call) == "train_on_responses_only":
        return {"assistant_only_loss": Setting(True, reader.where(call))}
    is_unsloth = name_of(call) == "get_peft_model" and any(word.arg == "r" for word in call.keywords)
    if name_of(call) == "LoraConfig" or is_unsloth:
        defaults = {key: Setting(value, reader.where(call)) for key, value in PEFT_DEFAULTS.items()}
        return defaults | {LORA.get(key, f"peft.{key}"): value for key, value in reader.arguments(call)}
    if name_of(call) in ("ModelConfig", "BitsAndBytesConfig"):
        return dict(reader.arguments(call))
    return dict(reader.of_trainer(call, trainer)) if trainer_of(name_of(call), "Trainer") == trainer else {}


def _refuse_trainers(names: list[str], calls: list[ast.Call], name: str) -> None:
    """Raise the reason if the file has an unsupported trainer of TRL."""
    for word in names:
        stem = _stem(word, "Trainer") or _stem(word, "Config")
        if stem in NO_TRAINERS:
            line = next((call.lineno for call in calls if word in ast.unparse(call)), 1)
            raise NotHereError(f"{name}:{line}: {word}: {NO_TRAINERS[stem]}.")


def trainer_of(name: str, suffix: str) -> str:
    """Return the trainer that a class is the Config or Trainer of, by the end of its name; "" = none."""
    return TRAINERS.get(_stem(name, suffix), "")


def _stem(name: str, suffix: str) -> str:
    """Return the algorithm in the name of a class, of one derived from TRL's, too; "" = none."""
    stem = name.removesuffix(suffix)
    fits = [key for key in (*TRAINERS, *NO_TRAINERS) if stem != name and stem.endswith(key)]
    return max(fits, key=len, default="")


class _Reader(ScriptValues):
    """Settings in the calls of a script."""

    def __init__(self, tree: ast.Module, name: str, variables: Mapping[str, str]):
        super().__init__(tree, name, variables)
        self._tree = tree
        self._has_adapters = any(word in ast.unparse(tree) for word in ("LoraConfig(", "get_peft_config("))

    def arguments(self, call: ast.Call, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Setting]]:
        """Yield the arguments of a call; the ones without a name have these names."""
        for key, node in zip(names, call.args, strict=False):
            yield from self._setting(key, node)
        for word in call.keywords:
            if word.arg:
                yield from self._setting(word.arg, word.value)
                continue
            items = dict(self._items(word.value))
            what = f"**{ast.unparse(word.value)}"
            yield from items.items() or [(what, Setting("...", self.where(word.value)))]

    def config_of(self, call: ast.Call, trainer: str) -> ast.Call | None:
        """Return the call of a Config that a call of a Trainer names."""
        if trainer_of(name_of(call), "Trainer") != trainer:
            return None
        node = _words(call, trainer).get("args")
        node = self.nodes.get(node.id) if isinstance(node, ast.Name) else node
        return node if isinstance(node, ast.Call) else None

    def assigned(self) -> Iterator[tuple[str, Setting]]:
        """Yield what the script assigns itself, as training_args.KEY or tokenizer.chat_template, and its own
        classes of trainers."""
        for node in ast.walk(self._tree):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(_stem(base.rpartition(".")[2], "Trainer") for base in bases):
                yield "trainer_class", Setting(f"{node.name}({', '.join(bases)})", self.where(node))
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not isinstance(target, ast.Attribute):
                continue
            holder = re.sub(r"^\w+\.(?=args$)", "", ast.unparse(target.value))  # trainer.args
            if holder in ARGUMENTS or (target.attr in OF_TOKENIZER and isinstance(target.value, ast.Name)):
                yield from self._setting(target.attr, node.value)

    def _setting(self, key: str, node: ast.expr) -> Iterator[tuple[str, Setting]]:
        if key in OF_MODEL:  # each of its keys is a key by itself
            for inner, setting in self._items(node):
                # Of the command line, or of a call that is read by itself.
                known = inner == "quantization_config" or OF_COMMAND.search(str(setting.value))
                if not known:
                    yield f"{key}.{inner}", setting
        elif key != "args" and not FROM_COMMAND.match(ast.unparse(node)):
            yield key, Setting(self.value(node), self.where(node))

    def _items(self, node: ast.expr | None) -> Iterator[tuple[str, Setting]]:
        """Yield the items of {...}, of dict(...), or of a name for one of them."""
        if isinstance(node, ast.Name):
            node = self.nodes.get(node.id)
        if isinstance(node, ast.Call) and name_of(node) == "dict":
            yield from (
                (w.arg, Setting(self.value(w.value), self.where(w.value))) for w in node.keywords if w.arg
            )
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), Setting(self.value(value), self.where(value))

    def of_trainer(self, call: ast.Call, trainer: str) -> Iterator[tuple[str, Setting]]:
        """Yield model, reward functions, data set and the further arguments of a call of a Trainer."""
        words = _words(call, trainer)
        where = self.where(call)
        model = self.value(words["model"]) if "model" in words else None
        if isinstance(model, str) and not unknown_names(model):
            yield "model_name_or_path", Setting(model, where)
        elif loaded := self.call_named(words.get("model"), ("from_pretrained",))[0]:
            policy = "sft_model_path" if trainer == "ppo" else "model_name_or_path"
            for key, setting in self._loaded(loaded):
                yield (policy if key == "model_name_or_path" else key), setting
        for word in OF_PPO.keys() & words.keys():
            yield from self._setting(OF_PPO[word], self._path_of(words[word]) or words[word])
        teacher = self.value(words["teacher_model"]) if "teacher_model" in words else None
        if isinstance(teacher, str) and not unknown_names(teacher):
            yield "teacher_model_name_or_path", Setting(teacher, where)
        if "reward_funcs" in words:
            functions = words["reward_funcs"]
            listed = self.nodes.get(functions.id) if isinstance(functions, ast.Name) else functions
            nodes = listed.elts if isinstance(listed, ast.List) else [functions]
            if nodes:
                yield "reward_funcs", Setting([self._function(node) for node in nodes], where)
        yield from self._dataset(words.get("train_dataset"))
        # A reference that is loaded as the model is the model at the start, as here.
        start, reference = (self._path_of(words.get(word)) for word in ("model", "ref_model"))
        is_start = start is not None and reference is not None and ast.dump(start) == ast.dump(reference)
        for key in sorted(words.keys() - READ):
            if not (key == "ref_model" and is_start) and (key != "peft_config" or not self._has_adapters):
                yield from self._setting(key, words[key])

    def _path_of(self, node: ast.expr | None) -> ast.expr | None:
        """Return the first argument of the from_pretrained that gives a model."""
        call = self.call_named(node, ("from_pretrained",))[0]
        named = [word.value for word in call.keywords if word.arg in MODEL_NAMES] if call else []
        return next(iter([*call.args[:1], *named]), None) if call else None

    def _loaded(self, call: ast.Call) -> Iterator[tuple[str, Setting]]:
        """Yield the model that from_pretrained gives, and the settings that it is loaded with."""
        for key, setting in self.arguments(call, MODEL_NAMES[:1]):
            if key in MODEL_NAMES and not unknown_names(setting.value):
                yield "model_name_or_path", setting
            elif key in QUANTIZED:
                yield key, setting
            elif key not in (*MODEL_NAMES, "quantization_config") and not (
                key.startswith("**") or OF_COMMAND.search(str(setting.value))
            ):
                yield f"model_init_kwargs.{key}", setting

    def _dataset(self, node: ast.expr | None) -> Iterator[tuple[str, Setting]]:
        """Yield the source of the rows, and the script's changes to them."""
        call, place = self.call_named(node, DATASETS)
        if node is not None and call is None and not isinstance(node, ast.Subscript):
            yield "dataset.made", Setting(ast.unparse(node), self.where(node))
        for changed in ast.walk(self._tree):
            if (
                isinstance(changed, ast.Call)
                and name_of(changed) in ROW_CHANGES
                and self._is_dataset(changed)
            ):
                yield f"dataset.{name_of(changed)}", Setting(f"in line {changed.lineno}", self.where(changed))
        if call is None:
            return
        # The path and the subset are the first arguments, or have their names.
        where = self.where(call)
        rest = {word.arg: self.value(word.value) for word in call.keywords if word.arg}
        rest |= dict(zip(("path", "name"), map(self.value, call.args), strict=False))
        path, subset, split = (rest.get(key) for key in ("path", "name", "split"))
        files = rest.get("data_files") or rest.get("data_dir")
        if path in FILE_FORMATS:
            path, subset = files, None
        elif files:
            yield "dataset.files", Setting(files, where)
        elif isinstance(rest.get("revision"), str) and isinstance(path, str):
            path = f"{path}@{rest['revision']}"
        for key in sorted(rest.keys() - LOADED):
            yield f"dataset.{key}", Setting(rest[key], where)
        if isinstance(split, list | tuple) and place is not None and place < len(split):
            split = split[place]
        # Only a run would tell some names; a name of the command line is a setting of it.
        if isinstance(path, str | list | tuple | dict) and not unknown_names(path):
            yield "dataset_name", Setting(path, where)
        elif not OF_COMMAND.search(str(path)):
            yield "dataset.made", Setting(ast.unparse(call), where)
        for key, value in (("dataset_config", subset), ("dataset_train_split", split)):
            if isinstance(value, str) and not unknown_names(value):
                yield key, Setting(value, where)

    def _is_dataset(self, call: ast.Call) -> bool:
        """Return whether a method is called on rows that load_dataset gave."""
        root = root_of(call)
        return isinstance(root, ast.Name) and (
            "dataset" in root.id or self.call_named(root, DATASETS)[0] is not None
        )

    def _function(self, node: ast.expr) -> str:
        """Return the name of a reward function: of TRL alone, with its arguments, of this file FILE:NAME."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        call = node if isinstance(node, ast.Call) else self.nodes.get(getattr(node, "id", ""))
        if isinstance(call, ast.Call) and name_of(call) in OF_TRL:
            return ast.unparse(call)
        model = self.call_named(node, ("from_pretrained",))[0]
        if model is not None and model.args:
            return "" if FROM_COMMAND.match(ast.unparse(model.args[0])) else str(self.value(model.args[0]))
        if not isinstance(node, ast.Name | ast.Attribute):
            return unknown(ast.unparse(node))
        name = ast.unparse(node)
        whole = self.imported.get(name, "")
        short = whole.rpartition(".")[2]
        if isinstance(node, ast.Attribute) or name in OF_TRL or short in OF_TRL:
            return short or name
        return whole or f"{self.name}:{name}"


def _words(call: ast.Call, trainer: str) -> dict[str, ast.expr]:
    """Return the arguments of a call of a Trainer by name, also an argument without one."""
    named = {word.arg: word.value for word in call.keywords if word.arg}
    return dict(zip(POSITIONS[trainer].split(), call.args, strict=False)) | named
