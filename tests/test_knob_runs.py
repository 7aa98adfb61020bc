"""Whole runs with averages, epochs, exports in between, moments and a reference of another run."""

import json
import shutil

import numpy as np
import pytest
from run_files import untimed_metrics
from safetensors.numpy import load_file

from jaxrl_llm.train import main

pytestmark = pytest.mark.slow
TINY = [
    *("--config", "grpo_tiny.py", "--prompts_per_step", "4", "--responses_per_prompt", "4"),
    *("--eval.every", "0", "--warm_start.examples_per_step", "8", "--log.progress", "none"),
    *("--log.tensorboard", "false", "--devices", "0:1", "--mesh.data", "1", "--mesh.fsdp", "1"),
    *("--reward.workers", "1", "--algo.kl_coef", "0.1", "--minibatches_per_step", "2", "--ppo_epochs", "2"),
]
AVERAGED = ("--warm_start.steps", "1", "--optim.ema", "0.5", "--checkpoint.every", "1")
AVERAGED += ("--optim.schedule", "constant")  # that of a run of 1 step would end at 0

PAIRS = [
    *("--config", "dpo_tiny.py", "--steps", "7", "--prompts_per_step", "8", "--warm_start.steps", "0"),
    *("--eval.every", "0", "--log.progress", "none", "--log.tensorboard", "false", "--devices", "0:3"),
    *("--mesh.data", "3", "--mesh.fsdp", "1", "--tokens_per_device", "192", "--max_prompt_tokens", "24"),
    *("--max_response_tokens", "24", "--checkpoint.every", "1", "--checkpoint.keep", "9"),
]


def train(run_dir, *more):
    return main([*TINY, "--run_dir", str(run_dir), *map(str, more)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    assert train(run_dir, "--steps", "3", *AVERAGED, "--checkpoint.hf_every", "2") == 0
    return run_dir


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_stopped_run_continues_bit_for_bit_with_averages_and_epochs(finished, tmp_path):
    """Its exports, too."""
    for steps in ("1", "3"):
        assert train(tmp_path, "--steps", steps, *AVERAGED, "--checkpoint.hf_every", "2") == 0
    assert untimed_metrics(tmp_path) == untimed_metrics(finished)
    assert sorted(path.name for path in (finished / "exports").iterdir()) == ["2", "4"]
    for name in ("hf", "hf_ema", "exports/2/hf", "exports/2/hf_ema", "exports/4/hf"):
        files = [(run / name / "model.safetensors").read_bytes() for run in (finished, tmp_path)]
        assert files[0] == files[1], name
    last, averaged = weights(finished / "hf"), weights(finished / "hf_ema")
    assert max(np.abs(last[name] - averaged[name]).max() for name in last) > 1e-5
    rows = untimed_metrics(finished)
    assert [row["kind"] for row in rows] == ["warm_start"] + ["train"] * 3
    saved = finished / "checkpoints/4/manifest.json"
    assert "opt_state.ema.layers.q" in json.loads(saved.read_text())["arrays"]


def test_a_run_of_pairs_continues_bit_for_bit_in_its_second_epoch(tmp_path):
    """20 pairs, 8 a step: step 5 reads reference log-probs that were computed in other rows in epoch 1."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(20):
        digits = lambda: " ".join(map(str, rng.integers(0, 10, rng.integers(1, 12))))
        rows.append({"prompt": f"{rng.integers(1, 999)}=", "chosen": digits(), "rejected": digits()})
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*PAIRS, "--data.path", str(data), "--run_dir"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    stopped = shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (5, 6, 7):
        shutil.rmtree(stopped / f"checkpoints/{step}")
    assert main([*words, str(stopped)]) == 0
    assert untimed_metrics(stopped) == untimed_metrics(tmp_path / "whole")
    files = [(run / "hf/model.safetensors").read_bytes() for run in (stopped, tmp_path / "whole")]
    assert files[0] == files[1]


def test_moments_and_reference_of_another_run(finished, tmp_path):
    """From its weights the KL to them starts at 0; from others it does not, and moments are those saved."""
    anew = ["--warm_start.steps", "0", "--steps", "1", "--reference.path", finished / "hf"]
    anew += ["--minibatches_per_step", "1", "--ppo_epochs", "1"]
    model = ("--model.path", finished / "hf", "--model.tokenizer", "tiny")
    assert train(tmp_path / "same", *anew, *model, "--optim.init_from", finished) == 0
    assert train(tmp_path / "zero", *anew, *model) == 0
    assert train(tmp_path / "other", *anew) == 0
    same, zero, other = (untimed_metrics(tmp_path / name)[-1] for name in ("same", "zero", "other"))
    assert zero["kl"] == pytest.approx(0.0, abs=1e-7) and other["kl"] > 1e-3
    assert same["reward/mean"] == zero["reward/mean"] and same["update_norm"] != zero["update_norm"]


def test_checkpoints_without_moments(tmp_path, capsys):
    more = ("--warm_start.steps", "0", "--checkpoint.optimizer", "false")
    assert train(tmp_path, "--steps", "1", *more) == 0
    assert train(tmp_path, "--steps", "2", *more) == 0
    assert "moments restart" in capsys.readouterr().err
    assert [row["step"] for row in untimed_metrics(tmp_path)] == [1, 2]
