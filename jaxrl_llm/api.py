"""Python API: training and generation as on the command line, with functions and rows in place of files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.prompt_rows import read_prompt_row
from jaxrl_llm.data.rows import Example
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.signals import interruptible
from jaxrl_llm.recipe.fields import check_fields
from jaxrl_llm.recipe.keys import plain_values
from jaxrl_llm.recipe.load import ResolvedRecipe, with_settings
from jaxrl_llm.recipe.overrides import closest_key
from jaxrl_llm.report import jsonl
from jaxrl_llm.thoughts import split_thought
from jaxrl_llm.tools.config import GenerateConfig, ModelChoice
from jaxrl_llm.tools.generation import Generator
from jaxrl_llm.tools.models import run_settings
from jaxrl_llm.train import execute

DEFAULT_RECIPE = "grpo_qwen.py"
"""Recipe whose settings a run without a recipe has."""
EVALUATION = {"data.eval_path", "data.holdout", "eval.every"}
"""Settings that say on what to evaluate."""
OF_ROWS = {
    "data.path": ("data.holdout", "steps", "epochs", "data.train.", "data.chat."),
    "data.eval_path": ("data.eval.",),
}
"""Settings, or their beginnings, that are checked together with the rows, not with the recipe's own data."""
PLACE_OF_FUNCTION = "exact"
"""Name of a reward that the checks accept where `reward_label` of a function is going to be."""
Rows = Iterable[Mapping[str, Any]]
Prompt = str | Sequence[Mapping[str, str]] | Mapping[str, Any]


@dataclass(frozen=True)
class RunResult:
    """Results of a run; its files stay in `run_dir`."""

    run_dir: Path
    steps: int
    """Steps done."""
    stopped: str
    """Reason of an early stop, such as "SIGINT"; "" = complete. The same call continues the run."""
    metrics: list[dict[str, Any]]
    """One dict a step: "step", "kind" and the metrics by name."""
    samples: list[dict[str, Any]]
    """Some prompts and responses of each step and ("eval" true) of each evaluation, with rewards."""

    @property
    def model(self) -> Path:
        """Hugging Face folder of the trained model.

        Raises:
            UserError: the run was stopped, so the model does not exist yet.
        """
        if self.stopped:
            raise UserError(
                f"{self.run_dir} was stopped by {self.stopped} after step {self.steps} and has no model yet: "
                "the same call continues it, and python -m jaxrl_llm export makes a model of its checkpoint."
            )
        return self.run_dir / "hf"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.run_dir / "curve.png"


@dataclass(frozen=True)
class Response:
    """One generated response."""

    text: str  # with the marks of thoughts, channels and calls
    tokens: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R], nats
    finish: str  # "stop" or "length"
    thought: str = ""
    answer: str = ""  # the text after the thought; "" if the thought is unfinished


def run(
    recipe: TrainConfig | str | os.PathLike[str] = "",
    *,
    model: str | os.PathLike[str] = "",
    reward: Callable[..., Any] | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    **settings: Any,
) -> RunResult:
    """Train a model by a recipe; a run directory with checkpoints is continued.

        run(model="Qwen/Qwen3-0.6B", data=rows, reward=my_reward)
        run("grpo_tiny.py", reward=my_reward, data=rows, steps=50, **{"optim.learning_rate": 1e-4})

    Args:
        recipe: a TrainConfig, or the name or path of a recipe file; "" = DEFAULT_RECIPE, with a note.
        model: the setting model.path: folder, GGUF file or hub name; "" = the recipe's model.
        reward: reward function with the signature of TRL, veRL, OpenRLHF, RL2 or `f(sample) -> float`; it
            runs in worker processes: a notebook may define it, but it cannot change the notebook's variables.
            A finished run is not continued with another one, see `reward_label`.
        data: training rows as dicts, with the columns that files of rows may have; they are written to
            run_dir/data, under a name made of their content: a run cannot be continued with other rows.
            None = the recipe's data.
        eval_data: held-out rows, in the same form; with `data` alone nothing is evaluated.
        settings: fields by the keys of the command line, such as steps=50, algo="rloo".

    An interrupt (Ctrl-C, the stop button of a notebook) ends the run after its step, with its state saved:
    `RunResult.stopped` is "SIGINT". A second one stops it at once.

    Raises:
        UserError: input that cannot work, before any expensive work. RunError: the run cannot continue.
        KeyboardInterrupt: interrupted before the first step, or twice.
    """
    if reward is not None and not callable(reward):
        raise UserError(
            f'reward: {reward!r:.100} is not a function; a built-in reward is **{{"reward.name": NAME}}'
        )
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"model: {model!r:.100} is not the path of a model or its hub name")
    if not recipe:
        recipe = DEFAULT_RECIPE
        print(
            f"note: no recipe is named, so settings come from {recipe} (python -m jaxrl_llm.train "
            f"--config {recipe} --help shows them), except for the given ones",
            file=sys.stderr,
        )
    settings |= {"model.path": os.fspath(model)} if model else {}
    if data is not None and eval_data is None and not EVALUATION & settings.keys():
        print(
            'note: no eval_data is given, so nothing is evaluated; **{"data.holdout": 0.1} holds out a tenth',
            file=sys.stderr,
        )
        settings["eval.every"] = 0
    # Rows become files of the run directory; a function becomes a name in the config.
    resolved = with_rows(recipe, settings, {"data.path": data, "data.eval_path": eval_data}, reward)
    run_dir = Path(resolved.config.run_dir)
    if reward is not None:
        name = reward_label(reward)
        total = resolved.config.steps + resolved.config.warm_start.steps
        refuse_other_reward(run_dir, name, total)
        config = resolved.config
        config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, name=name))
        resolved = resolved._replace(config=config)
    # Ctrl-C ends the run after its step, and keeps the notebook.
    with interruptible():
        ended = execute(resolved, reward=reward)
    metrics, samples = (jsonl.read_rows(run_dir / name) for name in ("metrics.jsonl", "samples.jsonl"))
    return RunResult(run_dir, ended.step, ended.reason, metrics, samples=samples)


def with_rows(
    recipe: TrainConfig | str | os.PathLike[str],
    settings: dict[str, Any],
    given: Mapping[str, Rows | None],
    reward: Callable[..., Any] | None,
) -> ResolvedRecipe:
    """Return the recipe with settings and, as files of the run directory, rows from memory.

    Args:
        given: rows by the key of their file; None = no rows.
        reward: function that will replace the recipe's reward.
    """
    of_rows = {
        path: {key: settings.pop(key) for key in list(settings) if key.startswith(OF_ROWS[path])}
        for path, rows in given.items()
        if rows is not None
    }
    if reward is not None and "data.path" in of_rows:
        of_rows["data.path"]["reward.name"] = PLACE_OF_FUNCTION  # the task is no longer the recipe's
    resolved = with_settings(recipe, settings)
    for (key, rows), name in zip(given.items(), ("train", "eval"), strict=True):
        if rows is not None:
            file = write_rows(rows, Path(resolved.config.run_dir) / "data", name)
            own = with_settings(resolved.config, {key: str(file), **of_rows[key]}, printed=resolved.notes)
            resolved = own._replace(recipe=resolved.recipe)
    return resolved


def reward_label(function: Callable[..., Any]) -> str:
    """Return the name of a reward function and a hash of its source, which config.json and checkpoints keep.

    The hash does not cover other code that the function calls, nor a function whose source Python lacks.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return f"Python function {name}"
    return f"Python function {name}, {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def refuse_other_reward(run_dir: Path, name: str, total: int) -> None:
    """Refuse a finished run of another reward: its results would be returned as if they were of this one.

    Args:
        name: of `reward_label`.
        total: steps of the run, if the config states them.

    Raises:
        UserError: gives both names, and the fix; or the run's config.json is missing or damaged.
    """
    rows = jsonl.read_rows(run_dir / "metrics.jsonl")
    if not rows or rows[-1]["step"] < total or not (run_dir / "hf").is_dir():
        return
    was = run_settings(run_dir)["reward"]["name"]
    if was != name:
        raise UserError(
            f"{run_dir} has a finished run of another reward ({was}; now {name}), so nothing would be "
            "trained. Set another run_dir, or more steps to train on with the new reward."
        )


def generate(
    model: str | Path,
    prompts: Sequence[Prompt],
    *,
    step: int | None = None,
    adapter: str | Path = "",
    **settings: Any,
) -> list[list[Response]]:
    """Return responses of a model to prompts, one list for each prompt.

        generate("runs/grpo_tiny/hf", ["1 + 1 ="], n=4, max_tokens=16)

    Args:
        model: Hugging Face folder, GGUF file, hub name, or directory of a run (its newest checkpoint).
        step: of the run's checkpoint; None = the newest.
        adapter: PEFT folder, or hub name, of adapters for the model.
        prompts: text, chats (lists of {"role", "content"}), or rows as a file of prompts has them.
        settings: fields of `GenerateConfig`: n, max_tokens, temperature, top_k, top_p, seed, ...

    Raises:
        UserError: a model, prompt or setting that cannot be used.
    """
    known = [field.name for field in dataclasses.fields(GenerateConfig)]
    if unknown := next((name for name in settings if name not in known), ""):
        near = closest_key(unknown, known)
        advice = f"Did you mean {near}?" if near else f"Known are {', '.join(known)}."
        raise UserError(f"generate: {unknown}: unknown setting. {advice}")
    # Check everything before the model is loaded.
    config = plain_values(GenerateConfig(**settings))
    check_fields(config)
    if isinstance(prompts, str | Mapping):
        raise UserError("generate: prompts is one prompt, a list of prompts is expected: [prompt]")
    examples = [_as_example(prompt, i) for i, prompt in enumerate(prompts)]
    choice = ModelChoice(step=step, adapter=str(adapter))
    return [
        [
            Response(t.text, t.response_ids, t.logprobs, t.finish, *split_thought(t.text, t.opens_thought))
            for t in trajectories
        ]
        for _, responses, _ in Generator(str(model), examples, config, choice).windows()
        for trajectories in responses
    ]


def _as_example(prompt: Any, i: int) -> Example:
    row = prompt
    if isinstance(prompt, str):
        row = {"prompt": prompt}
    elif isinstance(prompt, Sequence):
        row = {"messages": list(prompt)}
    elif not isinstance(prompt, Mapping):
        raise UserError(f"prompt {i} is {prompt!r:.100}: expected text, a chat or a row")
    return read_prompt_row(dict(row), f"prompt {i}", SourceConfig())


def write_rows(rows: Rows, folder: Path, name: str) -> Path:
    """Write rows as JSONL. Return the file: "train_1a2b3c4d5e6f.jsonl", for the name "train".

    Raises:
        UserError: the value is not a list of rows, or a row is not a JSON object; the message names row and
            column.
    """
    if isinstance(rows, str | Path | Mapping):
        raise UserError(
            f"data: {type(rows).__name__} given, a list of rows (dicts) expected; the rows of a file are the "
            'setting **{"data.path": FILE}'
        )
    lines = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            fix = '; df.to_dict("records") makes rows of a DataFrame' if hasattr(rows, "iterrows") else ""
            raise UserError(f"data: row {i} is {row!r:.100}: expected a dict of columns{fix}")
        lines.append(_json_line(row, f"data: row {i}"))
    if not lines:
        raise UserError("data: the list of rows is empty")
    text = "".join(lines).encode()
    file = folder / f"{name}_{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(text)
    os.replace(partial, file)  # a run that reads it reads on
    return file


def _json_line(row: Mapping[str, Any], where: str) -> str:
    """Return a row as a line of JSON. Raises UserError with the column that it cannot hold."""
    write = functools.partial(json.dumps, allow_nan=False, default=_plain_value)
    try:
        return write(dict(row)) + "\n"
    except (TypeError, ValueError) as error:
        for name, value in row.items():
            try:
                write({name: value})
            except (TypeError, ValueError):
                where += f", column {name}"
                break
        raise UserError(f"{where} cannot be written as JSON: {error}") from error


def _plain_value(value: Any) -> Any:
    """Return numbers and arrays of numpy, as tables hold them, as numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
