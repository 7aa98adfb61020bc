"""Two processes of four devices give the run that one process of eight gives."""

import numpy as np
import pytest
from distributed import run_processes
from run_files import DIGITS, untimed_metrics

TRAIN = """
import sys
from jaxrl_llm.train import main
sys.exit(main(sys.argv[1:]))
"""
SIZES = {"hidden_size": 16, "mlp_size": 16, "num_layers": 1, "head_dim": 4}  # it is compiling that takes time
ARGS = [
    *("--config", "grpo_tiny.py", "--steps", "2", "--warm_start.steps", "1", "--algo.kl_coef", "0.1"),
    *("--prompts_per_step", "4", "--responses_per_prompt", "2", "--eval.prompts", "4", "--eval.every", "2"),
    *("--warm_start.examples_per_step", "8", "--tokens_per_device", "24", "--checkpoint.every", "2"),
    *("--mesh.data", "2", "--mesh.fsdp", "4", "--log.progress", "none", "--log.tensorboard", "false"),
    *("--rollout.slots", "8", "--reward.workers", "1", "--model.remat", "none"),
    *(word for field, size in SIZES.items() for word in (f"--model.architecture.{field}", str(size))),
]


ADAPTERS = ["--lora.rank", "2", "--optim.offload", "True", "--reference.offload", "True"]
PLACED = [
    *("--mesh.fsdp", "2", "--devices", "0:2", "--rollout.devices", "2:4", "--rollout.mesh.tensor", "2"),
    *("--reference.devices", "2:4", "--reference.mesh.fsdp", "4"),
]
"""Each process gives two devices to the policy, and two to rollout and reference."""


@pytest.mark.parametrize(
    ("more", "placed"),
    [
        ([], []),
        pytest.param(ADAPTERS, [], marks=pytest.mark.slow),
        pytest.param([], PLACED, marks=pytest.mark.slow),
    ],
    ids=["full", "adapters, moments on the host", "models on devices of their own"],
)
def test_two_processes_train_as_one(more, placed, tmp_path):
    (tmp_path / "reward.py").write_text(DIGITS)
    args = [*ARGS, *more, "--reward.name", f"{tmp_path / 'reward.py'}:digits"]
    run_processes(TRAIN, 1, [*args, "--run_dir", str(tmp_path / "one")], devices=8, initialize=False)
    args = [*args, *placed, "--run_dir", str(tmp_path / "two")]
    run_processes(TRAIN, 2, args, devices=4, initialize=False)
    one, two = untimed_metrics(tmp_path / "one"), untimed_metrics(tmp_path / "two")
    assert [row["step"] for row in two] == [1, 2, 3]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float):
                np.testing.assert_allclose(b[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
            else:
                assert b[key] == value, key
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in two[1:])  # something is learnt
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]
