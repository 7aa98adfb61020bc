"""Two processes of four devices give the run that one process of eight gives."""

import json

import numpy as np
from distributed import run_processes

TRAIN = """
import sys
from jaxrl_llm.train import main
sys.exit(main(sys.argv[1:]))
"""
ARGS = [
    *("--config", "grpo_tiny.py", "--steps", "3", "--warm_start.steps", "2"),
    *("--prompts_per_step", "8", "--responses_per_prompt", "4", "--eval.prompts", "8", "--eval.every", "2"),
    *("--checkpoint.every", "2", "--algo.kl_coef", "0.1", "--mesh.data", "2", "--mesh.fsdp", "4"),
    *("--log.progress", "none", "--log.tensorboard", "false"),
]


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "tokens_per_second", "rollout/", "reward/wall", "reward/seconds")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def test_two_processes_train_as_one(tmp_path):
    run_processes(TRAIN, 1, [*ARGS, "--run_dir", str(tmp_path / "one")], devices=8, initialize=False)
    run_processes(TRAIN, 2, [*ARGS, "--run_dir", str(tmp_path / "two")], devices=4, initialize=False)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [row["step"] for row in two] == [1, 2, 3, 4, 5]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float):
                np.testing.assert_allclose(b[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
            else:
                assert b[key] == value, key
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]
