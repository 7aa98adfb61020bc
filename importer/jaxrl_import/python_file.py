"""Arguments of GRPOConfig(...) and its like in Python files, read from the syntax tree and never run."""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_import.algorithm_names import NO_ALGORITHM
from jaxrl_import.expressions import ARITHMETIC
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
}
"""Beginning of the names of TRL's Config and Trainer -> trainer."""
NO_TRAINERS = {
    "A2PO": "TRL estimates the values of all prompts before the run; --algo a_star_po does so within a step",
    "AsyncDistillation": "TRL's asynchronous distillation is --algo gkd with servers (docs/asynchronous.md)",
    "BCO": "of single responses there is --algo kto; BCO of pairs is --algo dpo --algo.loss bco",
    "GOLD": NO_ALGORITHM["gold"],
    "IWOPD": "there is no importance-weighted on-policy distillation; --algo gkd is without the weights",
    "NashMD": "there is no Nash-MD; TRL 1.16 has none either",
    "PPO": "TRL 1.16 has no PPO; --algo ppo is another implementation of it",
    "PRM": "TRL 1.16 has no process rewards; --algo prm learns them",
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
OF_MODEL = ("model_init_kwargs", "teacher_model_init_kwargs", "generation_kwargs")
OPERATIONS = {**ARITHMETIC, ast.Div: operator.truediv, ast.Pow: operator.pow}
COMPARISONS = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
POSITIONS = {  # trainer -> its arguments without a name, in order
    **dict.fromkeys(
        ("grpo", "gmpo", "rloo", "async_grpo"), "model reward_funcs args train_dataset eval_dataset"
    ),
    **dict.fromkeys(("dpo", "kto"), "model ref_model args data_collator train_dataset eval_dataset"),
    **dict.fromkeys(("sft", "reward", "orpo", "cpo"), "model args data_collator train_dataset eval_dataset"),
    "gkd": "model teacher_model args data_collator train_dataset eval_dataset",
    "online_dpo": "model ref_model reward_funcs args data_collator train_dataset eval_dataset",
    "distillation": "model teacher_model args train_dataset eval_dataset",
}
LARGEST, MAX_POWER = 1e15, 64
"""Bounds of the numbers in arithmetic of a file."""
READ = {
    "model",
    "teacher_model",
    "args",
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
    tree = _TakenBranches(_Reader(tree, name, variables)).visit(tree)
    calls = sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda call: call.lineno)
    configs = [call for call in calls if trainer_of(_name(call), "Config")]
    parsed = [
        n.id for call in calls if _name(call) in PARSERS for n in ast.walk(call) if isinstance(n, ast.Name)
    ]
    names = [_name(call) for call in (configs, calls)[not configs]] + parsed
    trainer = next((t for n in names for end in ("Config", "Trainer") if (t := trainer_of(n, end))), "")
    if not trainer:
        _refuse_trainers([*map(_name, calls), *parsed], calls, name)
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
    others = [f"{_name(call)} in line {call.lineno}" for call in configs if call is not config]
    return PythonSettings(trainer, settings, others, not configs)


def _of_call(call: ast.Call, trainer: str, reader: _Reader) -> dict[str, Setting]:
    """Return the settings in a call of peft's LoraConfig, TRL's ModelConfig or the trainer."""
    if _name(call) == "LoraConfig":
        defaults = {key: Setting(value, reader.where(call)) for key, value in PEFT_DEFAULTS.items()}
        return defaults | {LORA.get(key, f"peft.{key}"): value for key, value in reader.arguments(call)}
    if _name(call) in ("ModelConfig", "BitsAndBytesConfig"):
        return dict(reader.arguments(call))
    return dict(reader.of_trainer(call, trainer)) if trainer_of(_name(call), "Trainer") == trainer else {}


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


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _TakenBranches(ast.NodeTransformer):
    """Leaves out the branches of `if` that constants of the file decide against."""

    def __init__(self, reader: _Reader):
        self._reader = reader

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt]:
        self.generic_visit(node)
        taken = self._reader.value(node.test)
        if not isinstance(taken, bool | int | None):
            return node
        return (node.body if taken else node.orelse) or [ast.copy_location(ast.Pass(), node)]


class _Reader:
    """Values of expressions: literals, names with one value, defaults of add_argument."""

    def __init__(self, tree: ast.Module, name: str, variables: Mapping[str, str]):
        self._name, self._tree = name, tree
        self._nodes: dict[str, ast.expr] = {}
        self._several: set[str] = set()
        self._places: dict[str, int] = {}
        self._imported: dict[str, str] = {}
        self._values: dict[str, Any] = dict(variables)
        self._has_adapters = any(word in ast.unparse(tree) for word in ("LoraConfig(", "get_peft_config("))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
                self._imported |= names
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._several.add(node.target.id)
            elif isinstance(node, ast.Call) and _name(node) == "add_argument" and node.args:
                self._add_argument(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            first = self._nodes.setdefault(target.id, value)
            if ast.dump(first) != ast.dump(value):
                self._several.add(target.id)
        elif isinstance(target, ast.Tuple):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for i, name in enumerate(target.elts):
                if same:
                    self._assign(name, value.elts[i])
                elif isinstance(name, ast.Name) and name.id not in self._nodes:
                    # Such as train, test = load_dataset(NAME, split=["train", "test"]).
                    self._nodes[name.id], self._places[name.id] = value, i

    def _add_argument(self, call: ast.Call) -> None:
        flag = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if isinstance(flag, str) and default is not None:
            key = f"args.{flag.lstrip('-').replace('-', '_')}"
            self._values.setdefault(key, self.value(default))

    def where(self, node: ast.expr) -> str:
        """Return file and line."""
        return f"{self._name}:{node.lineno}"

    def arguments(self, call: ast.Call, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Setting]]:
        """Yield the arguments of a call; those without a name have these."""
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
        if trainer_of(_name(call), "Trainer") != trainer:
            return None
        node = _words(call, trainer).get("args")
        node = self._nodes.get(node.id) if isinstance(node, ast.Name) else node
        return node if isinstance(node, ast.Call) else None

    def assigned(self) -> Iterator[tuple[str, Setting]]:
        """Yield the arguments that the script assigns itself: training_args.KEY = VALUE."""
        for node in ast.walk(self._tree):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id in ARGUMENTS
            ):
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
            node = self._nodes.get(node.id)
        if isinstance(node, ast.Call) and _name(node) == "dict":
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
        elif loaded := self._call_named(words.get("model"), ("from_pretrained",))[0]:
            name = self.value(loaded.args[0])
            if not unknown_names(name):
                yield "model_name_or_path", Setting(name, where)
        teacher = self.value(words["teacher_model"]) if "teacher_model" in words else None
        if isinstance(teacher, str) and not unknown_names(teacher):
            yield "teacher_model_name_or_path", Setting(teacher, where)
        if "reward_funcs" in words:
            functions = words["reward_funcs"]
            listed = self._nodes.get(functions.id) if isinstance(functions, ast.Name) else functions
            nodes = listed.elts if isinstance(listed, ast.List) else [functions]
            if nodes:
                yield "reward_funcs", Setting([self._function(node) for node in nodes], where)
        yield from self._dataset(words.get("train_dataset"))
        for key in sorted(words.keys() - READ):
            if key != "peft_config" or not self._has_adapters:
                yield from self._setting(key, words[key])

    def _dataset(self, node: ast.expr | None) -> Iterator[tuple[str, Setting]]:
        """Yield the source of the rows, and the script's changes to them."""
        call, place = self._call_named(node, DATASETS)
        if node is not None and call is None and not isinstance(node, ast.Subscript):
            yield "dataset.made", Setting(ast.unparse(node), self.where(node))
        for changed in ast.walk(self._tree):
            if isinstance(changed, ast.Call) and _name(changed) in ROW_CHANGES and self._is_dataset(changed):
                yield f"dataset.{_name(changed)}", Setting(f"in line {changed.lineno}", self.where(changed))
        if call is None:
            return
        # What is loaded: path and subset are the first arguments, or have their names.
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
        # A name that only a run would tell is no source; the command line has its own.
        if isinstance(path, str | list | tuple | dict) and not unknown_names(path):
            yield "dataset_name", Setting(path, where)
        elif not OF_COMMAND.search(str(path)):
            yield "dataset.made", Setting(ast.unparse(call), where)
        for key, value in (("dataset_config", subset), ("dataset_train_split", split)):
            if isinstance(value, str) and not unknown_names(value):
                yield key, Setting(value, where)

    def _is_dataset(self, call: ast.Call) -> bool:
        """Return whether a method is called on rows that load_dataset gave."""
        root = call.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        return isinstance(root, ast.Name) and (
            "dataset" in root.id or self._call_named(root, DATASETS)[0] is not None
        )

    def _function(self, node: ast.expr) -> str:
        """Return the name of a reward function: of TRL alone, with its arguments, of this file FILE:NAME."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        call = node if isinstance(node, ast.Call) else self._nodes.get(getattr(node, "id", ""))
        if isinstance(call, ast.Call) and _name(call) in OF_TRL:
            return ast.unparse(call)
        model = self._call_named(node, ("from_pretrained",))[0]
        if model is not None and model.args:
            return "" if FROM_COMMAND.match(ast.unparse(model.args[0])) else str(self.value(model.args[0]))
        if not isinstance(node, ast.Name | ast.Attribute):
            return unknown(ast.unparse(node))
        name = ast.unparse(node)
        whole = self._imported.get(name, "")
        short = whole.rpartition(".")[2]
        if isinstance(node, ast.Attribute) or name in OF_TRL or short in OF_TRL:
            return short or name
        return whole or f"{self._name}:{name}"

    def _call_named(
        self, node: ast.expr | None, names: tuple[str, ...]
    ) -> tuple[ast.Call | None, int | None]:
        """Return the call of one of these names that gives an expression, through names, indices and methods,
        and its index if several names are assigned at once."""
        place = None
        for _ in range(10):
            if isinstance(node, ast.Call) and _name(node) in names:
                return node, place
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            elif isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Name):
                place = self._places.get(node.id, place)
                node = self._nodes.get(node.id)
        return None, None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression; a value that only a run would tell is marked unknown."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        key = ast.unparse(node)
        if key in self._values:
            return self._values[key]
        if key.startswith("torch.") and isinstance(node, ast.Attribute):
            return key
        if depth > 10 or (isinstance(node, ast.Name) and node.id in self._several):
            return unknown(key)
        if isinstance(node, ast.Name) and node.id in self._nodes:
            return self.value(self._nodes[node.id], depth + 1)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            first = self.value(node.values[0], depth + 1)
            rest = node.values[1] if len(node.values) == 2 else ast.BoolOp(ast.Or(), node.values[1:])
            if first is None or not unknown_names(first):
                return first or self.value(rest, depth + 1)
        # Text, lists and arithmetic of known values.
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else str(self.value(part.value, depth + 1))
                for part in node.values
            )
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Call) and not node.keywords:
            return self._of_call(node, [self.value(argument, depth + 1) for argument in node.args])
        if isinstance(node, ast.IfExp) and isinstance(test := self.value(node.test, depth + 1), bool):
            return self.value(node.body if test else node.orelse, depth + 1)
        operands = [self.value(operand, depth + 1) for operand in _operands(node)]
        if not operands or any(map(unknown_names, operands)):
            return unknown(key)
        try:
            return _computed(node, operands)
        except (TypeError, ValueError, ArithmeticError):
            return unknown(key)

    def _of_call(self, node: ast.Call, values: list[Any]) -> Any:
        """Return the value of len(...) or os.path.join(...) of known values."""
        known = bool(values) and not any(map(unknown_names, values))
        if known and _name(node) == "len" and isinstance(values[0], list | tuple):
            return len(values[0])
        if known and ast.unparse(node.func).endswith("path.join") and all(isinstance(v, str) for v in values):
            return posixpath.join(*values)
        return unknown(ast.unparse(node))


def _words(call: ast.Call, trainer: str) -> dict[str, ast.expr]:
    """Return the arguments of a call of a Trainer by name, also those without one."""
    named = {word.arg: word.value for word in call.keywords if word.arg}
    return dict(zip(POSITIONS[trainer].split(), call.args, strict=False)) | named


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of arithmetic, `not` or one comparison; none of another expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return [node.left, *node.comparators]
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def _computed(node: ast.expr, operands: list[Any]) -> Any:
    """Return the value of an expression of `_operands`."""
    if isinstance(node, ast.Compare):
        return COMPARISONS[type(node.ops[0])](*operands)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not operands[0]
    are_numbers = all(isinstance(operand, int | float) and abs(operand) < LARGEST for operand in operands)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and are_numbers:
        return -operands[0]
    is_text = isinstance(getattr(node, "op", None), ast.Add) and all(isinstance(o, str) for o in operands)
    if not isinstance(node, ast.BinOp) or not (are_numbers or is_text):
        raise ValueError("no arithmetic of numbers")
    if isinstance(node.op, ast.Pow) and abs(operands[1]) > MAX_POWER:
        raise ValueError("a large power")
    return OPERATIONS[type(node.op)](*operands)
