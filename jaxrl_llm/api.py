"""Python API: training and generation as on the command line, with functions and rows in place of files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.rows import Example, read_prompt_row
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.checks import check_fields
from jaxrl_llm.recipe.load import with_settings
from jaxrl_llm.report import jsonl
from jaxrl_llm.tools.generate import GenerateConfig, generate_all
from jaxrl_llm.train import execute

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
    """Some prompts and responses of each step, with rewards."""

    @property
    def model(self) -> Path:
        """Hugging Face folder of the trained model."""
        return self.run_dir / "hf"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.run_dir / "curve.png"


@dataclass(frozen=True)
class Response:
    """One generated response."""

    text: str
    tokens: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R], nats
    finish: str  # "stop" or "length"


def run(
    recipe: TrainConfig | str,
    *,
    reward: Callable[..., Any] | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    **settings: Any,
) -> RunResult:
    """Train a model by a recipe; a run directory that has checkpoints is continued.

        run("grpo_tiny.py", reward=my_reward, data=rows, steps=50, **{"optim.learning_rate": 1e-4})

    Args:
        recipe: a TrainConfig, or the name or path of a recipe file.
        reward: reward function with the signature of TRL, veRL, OpenRLHF, RL2 or `f(sample) -> float`; it
            runs in worker processes: a notebook may define it, but it cannot change the notebook's variables.
        data: training rows as dicts, with the columns that files of rows may have; they are written to
            run_dir/data/train.jsonl. None = the recipe's data.
        eval_data: held-out rows, likewise; with `data` alone nothing is evaluated.
        settings: fields by the keys of the command line, such as steps=50, algo="rloo".

    Raises:
        UserError: input that cannot work, before any expensive work. RunError: the run cannot continue.
    """
    if data is not None and eval_data is None and not {"data.eval_path", "eval.every"} & settings.keys():
        print("note: no eval_data is given, so nothing is evaluated", file=sys.stderr)
        settings["eval.every"] = 0
    resolved = with_settings(recipe, settings)
    for rows, name, key in ((data, "train", "data.path"), (eval_data, "eval", "data.eval_path")):
        if rows is not None:
            file = Path(resolved.config.run_dir) / "data" / f"{name}.jsonl"
            write_rows(rows, file)
            resolved = with_settings(resolved.config, {key: str(file)})._replace(recipe=resolved.recipe)
    ended = execute(resolved, reward=reward)
    run_dir = Path(resolved.config.run_dir)
    metrics, samples = (jsonl.read_rows(run_dir / name) for name in ("metrics.jsonl", "samples.jsonl"))
    return RunResult(run_dir, ended.step, ended.reason, metrics, samples)


def generate(
    model: str | Path,
    prompts: Sequence[str | Sequence[Mapping[str, str]] | Mapping[str, Any]],
    **settings: Any,
) -> list[list[Response]]:
    """Return responses of a model to prompts, one list for each prompt.

        generate("runs/grpo_tiny/hf", ["1 + 1 ="], n=4, max_tokens=16)

    Args:
        model: Hugging Face folder or hub name.
        prompts: text, chats (lists of {"role", "content"}), or rows as a file of prompts has them.
        settings: fields of `GenerateConfig`: n, max_tokens, temperature, top_k, top_p, seed, ...

    Raises:
        UserError: a model, prompt or setting that cannot be used.
    """
    try:
        config = GenerateConfig(**settings)
    except TypeError as error:
        raise UserError(f"generate: {str(error).replace('GenerateConfig.__init__() ', '')}") from None
    check_fields(config)
    examples = [_as_example(prompt, i) for i, prompt in enumerate(prompts)]
    return [
        [Response(t.text, t.response_ids, t.logprobs, t.finish) for t in trajectories]
        for _, responses, _ in generate_all(str(model), examples, config)
        for trajectories in responses
    ]


def _as_example(prompt: Any, i: int) -> Example:
    row = prompt
    if isinstance(prompt, str):
        row = {"prompt": prompt}
    elif isinstance(prompt, Sequence):
        row = {"messages": list(prompt)}
    return read_prompt_row(dict(row), f"prompt {i}", SourceConfig())


def write_rows(rows: Rows, file: Path) -> None:
    """Write rows as JSONL.

    Raises:
        UserError: there are no rows, or one is not a JSON object; names the row.
    """
    lines = []
    for i, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"data: row {i} cannot be written as JSON: {error}") from error
    if not lines:
        raise UserError("data: there are no rows")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
