"""Killed anywhere and started again by the same command, a run ends with the same bits.

A tiny run has all stages: SFT warm-up, rollouts, rewards, a frozen reference, several
updates a step, evaluation, checkpoints, export.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from distributed import End, Running, with_devices
from run_files import DIGITS

from jaxrl_llm.checkpoint.manifest import read_metrics
from jaxrl_llm.checkpoint.params import restore_params
from jaxrl_llm.host.stop import EXIT_STOPPED
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.train import main

RECIPE = '''
"""A few steps of everything."""

from pathlib import Path

from jaxrl_llm.algos import grpo
from jaxrl_llm.config import (
    CheckpointConfig, DataConfig, EvalConfig, LogConfig, ModelConfig, OptimConfig,
    RewardConfig, SourceConfig, TrainConfig, TransformerConfig, WarmStartConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=4,
        algo=grpo.Config(kl_coef=0.1),
        prompts_per_step=4,
        responses_per_prompt=4,
        minibatches_per_step=2,
        tokens_per_device=256,
        max_prompt_tokens=32,
        max_response_tokens=8,
        model=ModelConfig(
            architecture=TransformerConfig(
                vocab_size=128, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                head_dim=8, max_position=64,
            ),
            tokenizer="tiny",
            dtype="float32",
        ),
        optim=OptimConfig(learning_rate=1e-2),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"),)),
        reward=RewardConfig(name=f"{Path(__file__).with_name('reward.py')}:digits"),
        eval=EvalConfig(every=2, prompts=4),
        checkpoint=CheckpointConfig(every=1, keep=2, best_metric="reward/mean"),
        log=LogConfig(tensorboard=False),
        warm_start=WarmStartConfig(steps=2, learning_rate=1e-2, examples_per_step=4),
    )
'''
STEPS = [1, 2, 3, 4, 5, 6]  # two of the SFT warm-up, four of GRPO

SIGNALLER = """
import os, sys
name, count, number = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
module, _, path = name.partition(":")
holder = __import__(module, fromlist=["x"])
*inner, last = path.split(".")
for part in inner:
    holder = getattr(holder, part)
original, calls = getattr(holder, last), []

def signalling(*args, **kwargs):
    calls.append(1)
    if len(calls) == count:
        os.kill(os.getpid(), number)
    return original(*args, **kwargs)

setattr(holder, last, signalling)
from jaxrl_llm import train
sys.exit(train.main())
"""
"""argv: module:attribute, n, signal, then the run's own: the signal comes in the nth call of that."""

KILLS = [
    ("jaxrl_llm.checkpoint.state:write_manifest", 1),  # no checkpoint is whole yet: a fresh start
    ("jaxrl_llm.checkpoint.state:Checkpointer.save", 3),  # after the line of step 3, before its checkpoint
    ("jaxrl_llm.rollout.native.engine:NativeEngine.start", 2),  # while step 4 rolls out
    ("jaxrl_llm.checkpoint.folder:prune", 2),  # while old checkpoints are deleted
    ("jaxrl_llm.learn.learner:Learner.update", 1),
    ("jaxrl_llm.hf.export:save_model", 1),  # trained, not exported
]


def command(folder: Path, *more: str) -> list[str]:
    recipe = folder / "tiny.py"
    recipe.write_text(RECIPE)
    (folder / "reward.py").write_text(DIGITS)
    return ["--config", str(recipe), "--run_dir", str(folder / "run"), *more]


def train(folder: Path, *more: str) -> End:
    return run("-m", "jaxrl_llm.train", *command(folder, *more))


def train_with_signal(folder: Path, place: str, count: int, number: signal.Signals) -> End:
    return run("-c", SIGNALLER, place, str(count), str(int(number)), *command(folder))


def run(*argv: str) -> End:
    """On one device: these runs compile a lot and compute next to nothing."""
    return Running(argv, with_devices(1)).end()


def lines(path: Path) -> list[dict]:
    """The objects of a JSONL file without what depends on the clock."""
    timed = re.compile(r"^time/|^perf/|^goodput/|second|idle|share")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not timed.search(key)} for row in rows]


def assert_same_run(
    folder: Path, whole: Path, steps: Sequence[int] = STEPS, read: Callable[[Path], list[dict]] = lines
) -> None:
    """Same metrics and samples line by line, same weights and export bit by bit."""
    run, expected = folder / "run", whole / "run"
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert read(run / name) == read(expected / name)
    (step, weights, *_), (last, others, *_) = restore_params(run), restore_params(expected)
    assert step == last == steps[-1]
    for mine, theirs in zip(jax.tree.leaves(weights), jax.tree.leaves(others), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    exported = sorted((expected / "hf").glob("*.safetensors"))
    assert exported and all(path.read_bytes() == (run / "hf" / path.name).read_bytes() for path in exported)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    end = train(folder)
    assert end.code == 0, end.stderr
    rows = lines(folder / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == STEPS
    assert (
        rows[-1]["reward/std"] > 0 and rows[-1]["grad_norm"] > 0 and rows[-1]["kl"] > 0
    )  # something is learnt
    assert [row["step"] for row in rows if "eval/win_rate" in row] == [4, 6]  # against step 2
    return folder


@pytest.mark.slow
def test_stopped_by_budget_killed_stopped_by_signal(tmp_path, whole):
    end = train(tmp_path, "--max_runtime", "0.001")
    assert end.code == EXIT_STOPPED, end.stderr
    assert (tmp_path / "run/checkpoints/0/manifest.json").is_file()

    place, count = KILLS[0]
    assert train_with_signal(tmp_path, place, count, signal.SIGKILL).code == -signal.SIGKILL

    end = train_with_signal(tmp_path, "jaxrl_llm.learn.learner:Learner.update", 4, signal.SIGTERM)
    assert end.code == EXIT_STOPPED, end.stderr
    assert "resuming with max_runtime: was 0.001, now 0.0" in end.stderr
    assert "SIGTERM: saving after this step, then stopping" in end.stderr
    assert [row["step"] for row in lines(tmp_path / "run/metrics.jsonl")] == STEPS[:4]
    assert restore_params(tmp_path / "run")[0] == 4
    # What was saved on the way out can be the best, too.
    expected = lines(whole / "run/metrics.jsonl")[3]["reward/mean"]
    assert read_metrics(tmp_path / "run/checkpoints/4")["reward/mean"] == expected

    end = train(tmp_path)
    assert end.code == 0, end.stderr
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_stopped_by_budget_and_by_a_signal_in_one_process(tmp_path, monkeypatch, capfd):
    """As in processes of their own, which takes a minute: see the slow tests."""
    more = ["--warm_start.steps", "0", "--steps", "3", "--eval.every", "0"]
    run = lambda folder, *words: main(command(folder, *more, *words))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    assert run(whole) == 0
    assert run(parts, "--max_runtime", "0.001") == EXIT_STOPPED
    assert restore_params(parts / "run")[0] == 0
    update, calls = Learner.update, []

    def signalling(*args, **named):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args, **named)

    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", signalling)
        assert run(parts) == EXIT_STOPPED
    assert "SIGTERM: saving after this step, then stopping; again = exit at once" in capfd.readouterr().err
    assert restore_params(parts / "run")[0] == 2
    assert run(parts) == 0
    assert_same_run(parts, whole, steps=[1, 2, 3])


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path, whole):
    for place, count in KILLS:
        end = train_with_signal(tmp_path, place, count, signal.SIGKILL)
        assert end.code == -signal.SIGKILL, f"{place} was not called {count} times: {end.stdout}{end.stderr}"
    for _ in range(2):  # the second time there is nothing left to do
        end = train(tmp_path)
        assert end.code == 0, end.stderr
        assert_same_run(tmp_path, whole)


SAVING = "saving after this step, then stopping"
SIGNALS = [  # place, call, signal, exit code, announcement
    ("jaxrl_llm.builders.run:load_model_config", 1, signal.SIGINT, 130, "stopping"),
    ("jaxrl_llm.experience.evaluate:HeldOutResponses.__call__", 1, signal.SIGINT, 75, SAVING),
    ("jaxrl_llm.checkpoint.state:Checkpointer.save", 2, signal.SIGTERM, 75, SAVING),
    ("jaxrl_llm.checkpoint.state:Checkpointer.restore", 1, signal.SIGTERM, 143, "stopping"),
    ("jaxrl_llm.experience.evaluate:HeldOutResponses.__call__", 1, signal.SIGTERM, 75, SAVING),
    ("jaxrl_llm.hf.export:save_model", 1, signal.SIGINT, 0, "exporting the model, then done"),
]


@pytest.mark.slow
def test_signals_at_many_moments(tmp_path, whole):
    """Start-up, evaluation, save, restore, the last step and export: each ends as host/stop.py says."""
    for place, count, number, code, announcement in SIGNALS:
        end = train_with_signal(tmp_path, place, count, number)
        assert end.code == code, f"{place}: {end.stdout}{end.stderr}"
        assert end.stderr.count(f"{number.name}: {announcement}") == 1, place
        assert "Traceback" not in end.stderr
    assert train(tmp_path).code == 0
    assert_same_run(tmp_path, whole)
