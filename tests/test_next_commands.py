"""The command that a run prints at its end is executed, word for word, whatever the run trained."""

import json
import shlex

import pytest

from jaxrl_llm import __main__, train

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 16, "mlp_size": 16, "num_layers": 1, "head_dim": 4}
SHORT = [
    *("--steps", "1", "--prompts_per_step", "4", "--warm_start.steps", "1", "--checkpoint.every", "0"),
    *("--warm_start.examples_per_step", "4", "--log.tensorboard", "false", "--log.progress", "none"),
    *("--eval.prompts", "4", "--devices", "0:1"),
]
RANDOM = [word for name, size in SIZES.items() for word in (f"--model.architecture.{name}", str(size))]
LORA = ["--lora.rank", "2"]


def run(words, capsys):
    """Return the words of the command that a run prints at its end."""
    assert train.main([*words, *SHORT]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next:  ")]
    python, module, *command = shlex.split(line.removeprefix("next:  "))
    assert (python, module) == ("python", "-m")
    return command


def execute(command, capsys, more=()):
    """Run a printed command; one that trains has its length from SHORT."""
    module, *words = command
    if module == "jaxrl_llm.train":
        return run([*words, *more], capsys)
    assert module == "jaxrl_llm" and __main__.main(words) == 0
    return words


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("sft_tiny.py", []),
        ("dpo_tiny.py", []),
        ("ppo_tiny.py", []),
        ("grpo_tiny.py", LORA),
        ("grpo_tiny.py", ["--eval.every", "0"]),
    ],
)
def test_the_model_of_a_run_generates(recipe, more, tmp_path, capsys):
    words = ["--config", recipe, *RANDOM, *more, "--run_dir", str(tmp_path / "a run")]
    execute(run(words, capsys), capsys)
    rows = [json.loads(line) for line in (tmp_path / "a run" / "responses.jsonl").read_text().splitlines()]
    assert rows and all(row["responses"][0]["text"] is not None for row in rows)


def test_a_reward_model_of_random_weights_rewards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = run(["--config", "reward_model_tiny.py", "--run_dir", "rm"], capsys)
    command = execute(command, capsys)
    assert command[:4] == ["jaxrl_llm", "generate", "--model", "runs/ppo_reward_tiny/hf"]
    execute(command, capsys)


@pytest.mark.parametrize("lora", [[], LORA])
def test_a_reward_model_of_ones_own_model_and_pairs_rewards(lora, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(["--config", "sft_tiny.py", *RANDOM, "--run_dir", "base"], capsys)
    rows = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--model.path", "base/hf", "--data.path", "pairs.jsonl", "--data.holdout", "4"]
    command = run(["--config", "reward_model_tiny.py", *own, *lora, "--run_dir", "rm"], capsys)
    assert command[:3] == ["jaxrl_llm.train", "--config", "grpo_qwen.py"]
    execute(execute(command, capsys), capsys)
    (step,) = [json.loads(line) for line in (tmp_path / "rm_rl/metrics.jsonl").read_text().splitlines()[-1:]]
    assert "reward/mean" in step
