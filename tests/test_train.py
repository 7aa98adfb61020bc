"""Whole small runs: their files, resuming, and their ends after errors."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from jaxrl_llm.algos import prm, reward_model
from jaxrl_llm.builders.describe import next_command
from jaxrl_llm.builders.run import Run
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.config import DataConfig, TrainConfig
from jaxrl_llm.errors import ServerError
from jaxrl_llm.experience.evaluate import HeldOutResponses
from jaxrl_llm.report.log import RunLog
from jaxrl_llm.report.progress import Progress
from jaxrl_llm.structs import TrainState
from jaxrl_llm.train import Ended, UnsavedError, finish, main

TINY = [
    *("--config", "grpo_tiny.py", "--prompts_per_step", "4", "--responses_per_prompt", "4"),
    *("--eval.prompts", "8", "--warm_start.examples_per_step", "8", "--log.progress", "none"),
    *("--log.tensorboard", "false", "--mesh.data", "1", "--mesh.fsdp", "8", "--reward.workers", "1"),
]
EVAL = ("--eval.samples", "2", "--eval.sampling.temperature", "1.0")
STEP_KEYS = {
    *("step", "kind", "reward/mean", "reward/std", "accuracy", "loss", "kl", "entropy", "clip_fraction"),
    *("grad_norm", "response_tokens/mean", "truncated_fraction", "zero_variance_fraction"),
    *("mismatch/mean_abs", "mismatch/max_abs", "time/rollout", "time/reward", "time/update"),
    *("time/checkpoint", "tokens_per_second"),
}


def train(run_dir, *more, recipe=TINY):
    return main([*recipe, "--run_dir", str(run_dir), *more])


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    code = train(run_dir, "--steps", "3", "--warm_start.steps", "2", "--eval.every", "2", *EVAL)
    assert code == 0
    return run_dir


def test_a_run_leaves_what_it_promises(finished):
    lines = rows(finished)
    assert [(r["step"], r["kind"]) for r in lines] == [
        (1, "warm_start"), (2, "warm_start"), (3, "train"), (4, "train"), (5, "train"),
    ]  # fmt: skip
    assert lines[-1].keys() >= STEP_KEYS
    assert [r["step"] for r in lines if "eval/pass@1" in r] == [2, 4, 5]
    assert {"eval/pass@2", "eval/maj@2"} <= lines[-1].keys()
    assert lines[-1]["kl"] is None  # no reference, no number
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    evaluated = [s["step"] for s in samples if s.get("eval") and s["data_source"] == "task_arithmetic"]
    assert evaluated == [2] * 8 + [4] * 8 + [5] * 8 and sum("eval" not in s for s in samples) == 3 * 4
    for name in (
        "config.json",
        "samples.jsonl",
        "curve.png",
        "checkpoints/5/manifest.json",
        "hf/config.json",
    ):
        assert (finished / name).is_file(), name
    assert (finished / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_what_to_try_next_fits_what_was_trained(tmp_path):
    config = TrainConfig(data=DataConfig(path="task:preference"))
    says = lambda algo: next_command(tmp_path, replace(config, algo=algo))
    assert says(TrainConfig().algo).startswith(f"python -m jaxrl_llm generate --model {tmp_path}/hf ")
    against = f"--config ppo_reward_tiny.py --reward.models.0.path {tmp_path}/hf"
    assert says(reward_model.Config()).endswith(against)
    assert says(prm.Config()).endswith(f"{against} --reward.models.0.kind process")


def test_rollout_and_trainer_agree_on_log_probs(finished):
    """The same model function, float32: only the order of additions differs."""
    assert all(0 < r["mismatch/max_abs"] < 1e-4 for r in rows(finished) if r["kind"] == "train")


def test_the_same_command_again_has_nothing_to_do(finished, capsys):
    """Nor has the same run on another mesh."""
    before = (finished / "metrics.jsonl").read_bytes()
    again = ["--steps", "3", "--warm_start.steps", "2", "--eval.every", "2", "--mesh.data", "2"]
    assert train(finished, *again, "--mesh.fsdp", "4") == 0
    assert (finished / "metrics.jsonl").read_bytes() == before
    out = capsys.readouterr().out
    assert f"nothing to do: step 5 of 5 is done in {finished}. Raise --steps to train on" in out
    assert "continuing" not in out


def test_another_algorithm_is_told_to_use_another_folder(finished, capsys):
    assert train(finished, "--algo", "rloo", "--steps", "3", "--warm_start.steps", "2") == 2
    assert f"another run directory. Add --run_dir {finished}_rloo." in capsys.readouterr().err


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(finished, tmp_path):
    assert train(finished, "--steps", "4", "--warm_start.steps", "2", "--eval.every", "0") == 0
    assert [r["step"] for r in rows(finished)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_an_evaluation_that_an_outage_ended_is_made_up_for(tmp_path):
    """The last one, of step 2: by the next start, and once."""
    evaluated, evaluate = [], HeldOutResponses.__call__

    def failing(self, state, reference, step):
        evaluated.append(step)
        if evaluated == [0, 2]:
            raise ServerError("all servers are lost")
        return evaluate(self, state, reference, step)

    more = ["--steps", "2", "--warm_start.steps", "0", "--eval.every", "2"]
    with mock.patch.object(HeldOutResponses, "__call__", failing):
        assert [train(tmp_path, *more) for _ in range(3)] == [75, 0, 0]
    assert evaluated == [0, 2, 2]
    found = rows(tmp_path)
    assert [(r["step"], "eval/pass@1" in r, "loss" in r) for r in found] == [
        (0, True, False),
        (1, False, True),
        (2, True, True),
    ]


def test_a_changed_seed_is_refused(finished, capsys):
    assert train(finished, "--steps", "4", "--warm_start.steps", "2", "--seed", "5") == 2
    assert "seed: was 0, now 5" in capsys.readouterr().err


@pytest.mark.slow
def test_reference_after_a_supervised_start_survives_a_restart(tmp_path):
    """KL is measured against the weights after the start, also by a run that comes back later."""
    more = [
        "--warm_start.steps",
        "2",
        "--eval.every",
        "0",
        "--algo.kl_coef",
        "0.1",
        "--checkpoint.every",
        "3",
    ]
    assert train(tmp_path / "whole", "--steps", "3", *more) == 0
    assert train(tmp_path / "parts", "--steps", "1", *more) == 0
    assert train(tmp_path / "parts", "--steps", "3", *more) == 0
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert whole[2]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert whole[4]["kl"] > 1e-9
    assert [r["kl"] for r in parts] == [r["kl"] for r in whole]


@pytest.mark.slow
def test_several_minibatches_train(tmp_path):
    more = ["--minibatches_per_step", "2", "--steps", "1", "--warm_start.steps", "0", "--eval.every", "5"]
    assert train(tmp_path, *more) == 0
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]
    assert "eval/pass@1" in rows(tmp_path)[0]


@pytest.mark.slow
def test_sft_recipe_learns(tmp_path):
    recipe = ["--config", "sft_tiny.py", "--log.progress", "none", "--log.tensorboard", "false"]
    more = ["--steps", "16", "--eval.every", "0", "--mesh.fsdp", "8", "--prompts_per_step", "16"]
    assert train(tmp_path, *more, recipe=recipe) == 0
    losses = [r["loss"] for r in rows(tmp_path)]
    assert losses[0] == pytest.approx(np.log(128), abs=0.4)
    assert losses[-1] < losses[0] - 1


NAN_ALGO = """
from dataclasses import dataclass
from jaxrl_llm.algos import AlgoConfig, sft
from jaxrl_llm.algos.contract import Algorithm
@dataclass(frozen=True)
class Config(AlgoConfig):
    "Spoils every loss."
    divisor: float = 0.0
    "Divides the loss."
def loss(inputs, config):
    value, metrics = sft.loss(inputs, sft.Config())
    return value / config.divisor, metrics
algorithm = Algorithm("nan_algo", "", "tokens", Config(), loss)
"""


@pytest.mark.slow
def test_nan_losses_stop_the_run_with_its_checkpoint_intact(tmp_path, capsys):
    """Also: an algorithm is a user's own file."""
    algo = tmp_path / "nan_algo.py"
    algo.write_text(NAN_ALGO)
    run_dir = tmp_path / "run"
    more = ["--algo", str(algo), "--warm_start.steps", "0", "--eval.every", "0", "--optim.max_nonfinite", "2"]
    assert train(run_dir, *more, "--algo.divisor", "1.0", "--steps", "1") == 0
    assert train(run_dir, *more, "--steps", "9") == 1
    said = capsys.readouterr().err
    assert "2 updates in a row had NaN or Inf in loss, gradient or weights at step 3" in said
    assert f"{run_dir}/nonfinite_step_3.npz" in said
    assert (run_dir / "nonfinite_step_3.npz").is_file()
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["1"]
    assert [r["nonfinite"] for r in rows(run_dir)] == [0.0, 1.0]


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run(tmp_path, capsys):
    reward = tmp_path / "bad.py"
    reward.write_text("def reward(sample):\n    raise KeyError('no such column')\n")
    more = ["--warm_start.steps", "0", "--eval.every", "0", "--reward.retries", "0", "--steps", "1"]
    assert train(tmp_path / "run", *more, "--reward.name", f"{reward}:reward") == 1
    assert "no such column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.path", "/no/such/model"], "/no/such/model"),
        (["--mesh.fsdp", "3"], "does not fit the 8 cpu device(s)"),
        (["--minibatches_per_step", "3"], "minibatches_per_step"),
        (["--data.path", "{tmp}/empty.jsonl"], "empty.jsonl"),
        (["--data.path", "{tmp}/corrupt.jsonl"], "corrupt.jsonl:2"),
        (["--model.tokenizer", "{tmp}"], "tokenizer"),
        (["--run_dir", "/proc/nothing"], "/proc/nothing"),
        (["--rollout.temprature", "1"], "temperature"),
        (["--reward.name", "none"], "--reward.name is none and nothing else rewards"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input_is_one_clear_message(flags, message, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "corrupt.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    assert main([*TINY, "--run_dir", str(tmp_path / "run"), "--steps", "1", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_run_whose_saves_all_failed_is_told_to_begin_anew(tmp_path):
    """There is no checkpoint to continue from."""
    nothing = mock.Mock(spec=Checkpointer, folder=tmp_path)
    nothing.has.return_value, nothing.latest.return_value = False, None
    run = mock.Mock(spec=Run, config=TrainConfig(run_dir=str(tmp_path)))
    with pytest.raises(UnsavedError, match=r"there is no checkpoint\. .* run the same .*: it begins anew\.$"):
        log = mock.Mock(spec=RunLog, progress=mock.Mock(spec=Progress))
        finish(run, nothing, log, Ended(mock.Mock(spec=TrainState), 6, ""))
