"""Arguments of GRPOConfig(...) and its like in Python files, read from the syntax tree and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.importer.shell import integer_value
from jaxrl_llm.importer.values import Setting, unknown, unknown_names

TRAINERS = {
    "GRPO": "grpo",
    "RLOO": "rloo",
    "OnlineDPO": "online_dpo",
    "SFT": "sft",
    "DPO": "dpo",
    "KTO": "kto",
    "Reward": "reward",
    "ORPO": "orpo",
    "CPO": "cpo",
    "GKD": "gkd",
}
"""Beginning of the names of TRL's Config and Trainer -> trainer."""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
}
"""Arguments of peft's LoraConfig -> those of TRL's command line."""
PEFT_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}


class PythonSettings(NamedTuple):
    """The settings of a Python file."""

    trainer: str
    settings: dict[str, Setting]
    others: list[str]
    """Further calls of a Config, which are not read: name and line."""


def read_python(text: str, name: str, variables: Mapping[str, str]) -> PythonSettings | None:
    """Return the arguments of the first call of a TRL Config; None = the file has none.

    Args:
        name: of the file, for messages.
        variables: names and their values, from outside.

    Raises:
        UserError: the file is no Python; names the line.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(
            f"{name}:{line}: not Python: {getattr(error, 'msg', error)}. Mend the line."
        ) from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if trainer_of(call, "Config")]
    if not configs:
        return None
    first = min(configs, key=lambda call: call.lineno)
    reader = _Reader(tree, name, variables)
    settings: dict[str, Setting] = {}
    for call in calls:
        if _name(call) == "LoraConfig":
            where = f"{name}:{call.lineno}"
            settings |= {key: Setting(value, where) for key, value in PEFT_DEFAULTS.items()}
            settings |= {LORA.get(key, f"peft.{key}"): value for key, value in reader.arguments(call)}
        elif _name(call) == "ModelConfig":
            settings |= dict(reader.arguments(call))
        elif trainer_of(call, "Trainer") == trainer_of(first, "Config"):
            settings |= dict(reader.of_trainer(call))
    settings |= dict(reader.arguments(first))
    others = [f"{_name(call)} in line {call.lineno}" for call in configs if call is not first]
    return PythonSettings(trainer_of(first, "Config"), settings, others)


def trainer_of(call: ast.Call, suffix: str) -> str:
    """Return the trainer whose Config or Trainer is called; "" = none."""
    name = _name(call)
    return TRAINERS.get(name.removesuffix(suffix), "") if name.endswith(suffix) else ""


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Reader:
    """Values of expressions: literals, names assigned once, defaults of add_argument."""

    def __init__(self, tree: ast.Module, name: str, variables: Mapping[str, str]):
        self._name = name
        self._nodes: dict[str, ast.expr] = {}
        self._values: dict[str, Any] = dict(variables)
        self._functions = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTION)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                self._nodes.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.Call) and _name(node) == "add_argument" and node.args:
                self._add_argument(node)

    def _add_argument(self, call: ast.Call) -> None:
        flag = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if isinstance(flag, str) and default is not None:
            key = f"args.{flag.lstrip('-').replace('-', '_')}"
            self._values.setdefault(key, self.value(default))

    def arguments(self, call: ast.Call) -> Iterator[tuple[str, Setting]]:
        """Yield the named arguments of a call."""
        for word in call.keywords:
            if word.arg:
                yield word.arg, Setting(self.value(word.value), f"{self._name}:{word.value.lineno}")
            elif isinstance(word.value, ast.Name) and isinstance(self._nodes.get(word.value.id), ast.Dict):
                items = self._nodes[word.value.id]
                for key, value in zip(items.keys, items.values, strict=True):
                    if isinstance(key, ast.Constant):
                        yield str(key.value), Setting(self.value(value), f"{self._name}:{value.lineno}")

    def of_trainer(self, call: ast.Call) -> Iterator[tuple[str, Setting]]:
        """Yield model, reward functions and data set of a call of a Trainer."""
        words = {word.arg: word.value for word in call.keywords}
        where = f"{self._name}:{call.lineno}"
        model = self.value(words["model"]) if "model" in words else None
        if isinstance(model, str) and "\x00" not in model:
            yield "model_name_or_path", Setting(model, where)
        elif loaded := self._call_named(words.get("model"), "from_pretrained"):
            yield "model_name_or_path", Setting(self.value(loaded.args[0]), where)
        if "reward_funcs" in words:
            functions = words["reward_funcs"]
            names = functions.elts if isinstance(functions, ast.List) else [functions]
            yield "reward_funcs", Setting([self._function(node) for node in names], where)
        dataset = self._call_named(words.get("train_dataset"), "load_dataset")
        if dataset and dataset.args:
            yield "dataset_name", Setting(self.value(dataset.args[0]), where)
            rest = {word.arg: word.value for word in dataset.keywords}
            if len(dataset.args) > 1 or "name" in rest:
                subset = dataset.args[1] if len(dataset.args) > 1 else rest["name"]
                yield "dataset_config", Setting(self.value(subset), where)
            if "split" in rest:
                yield "dataset_train_split", Setting(self.value(rest["split"]), where)

    def _function(self, node: ast.expr) -> str:
        """Return the name of a reward function; one of this file as FILE:NAME."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        name = node.func if isinstance(node, ast.Call) else node
        return (
            f"{self._name}:{name.id}"
            if isinstance(name, ast.Name) and self._is_local(name.id)
            else ast.unparse(name)
        )

    def _is_local(self, name: str) -> bool:
        return name not in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")

    def _call_named(self, node: ast.expr | None, name: str) -> ast.Call | None:
        """Return the call of this name that an expression comes from, through names, indices and methods."""
        for _ in range(10):
            if isinstance(node, ast.Call) and _name(node) == name and node.args:
                return node
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            elif isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Name):
                node = self._nodes.get(node.id)
        return None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression; what only running the file would tell is marked unknown."""
        key = ast.unparse(node)
        if key in self._values:
            return self._values[key]
        if isinstance(node, ast.Name) and node.id in self._nodes and depth < 10:
            return self.value(self._nodes[node.id], depth + 1)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            first = self.value(node.values[0], depth + 1)
            rest = node.values[1] if len(node.values) == 2 else ast.BoolOp(ast.Or(), node.values[1:])
            if first is None or not unknown_names(first):
                return first or self.value(rest, depth + 1)
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else str(self.value(part.value, depth + 1))
                for part in node.values
            )
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        try:
            return integer_value(node)
        except (ValueError, ZeroDivisionError):
            return unknown(key)
