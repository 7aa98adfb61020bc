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
    *("--warm_start.examples_per_step", "8", "--tokens_per_device", "28", "--checkpoint.every", "2"),
    *("--mesh.data", "2", "--mesh.fsdp", "4", "--log.progress", "none", "--log.tensorboard", "false"),
    *("--rollout.slots", "8", "--reward.workers", "1", "--model.remat", "none"),
    *(word for field, size in SIZES.items() for word in (f"--model.architecture.{field}", str(size))),
]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["--lora.rank", "2", "--optim.offload", "True"], marks=pytest.mark.slow)],
    ids=["full", "adapters, moments on the host"],
)
def test_two_processes_train_as_one(more, tmp_path):
    check_two_processes([*ARGS, *more], [], [], 8, tmp_path)


ENV = """
from jaxrl_llm.envs.env import Step

class Twice:
    async def reset(self, example, seed): pass
    async def step(self, state, turn): return Step("1", done=turn.number == 2)
"""


@pytest.mark.slow
def test_two_processes_give_a_device_each_to_asynchronous_rollout(tmp_path):
    """Conversations, whose replies process 0 shares in the thread, while the main threads share others."""
    (tmp_path / "env.py").write_text(ENV)
    args = [
        *ARGS,
        "--mesh.fsdp",
        "2",
        "--rollout.mesh.fsdp",
        "2",
        "--rollout.max_staleness",
        "1",
        "--steps",
        "3",
    ]
    args += ["--env.name", f"{tmp_path / 'env.py'}:Twice", "--rollout.sampling.stop", *"12345"]
    one = ["--devices", "0:4", "--rollout.devices", "4:6"]
    check_two_processes(args, one, ["--devices", "0:2", "--rollout.devices", "2:3"], 6, tmp_path)
    assert [row["staleness/max"] for row in untimed_metrics(tmp_path / "two")[1:]] == [0, 1, 1]


def check_two_processes(args, of_one, of_two, devices, tmp_path):
    """Compare the runs of one process and of two with half of its devices each."""
    (tmp_path / "reward.py").write_text(DIGITS)
    args = [*args, "--reward.name", f"{tmp_path / 'reward.py'}:digits"]
    one, two = (
        [*args, *more, "--run_dir", str(tmp_path / n)] for more, n in ((of_one, "one"), (of_two, "two"))
    )
    run_processes(TRAIN, 1, one, devices=devices, initialize=False)
    run_processes(TRAIN, 2, two, devices=devices // 2, initialize=False)
    one, two = untimed_metrics(tmp_path / "one"), untimed_metrics(tmp_path / "two")
    assert [row["step"] for row in two] == list(range(1, len(one) + 1)) and len(one) > 2
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
