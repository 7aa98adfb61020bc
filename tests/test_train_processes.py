"""Two processes of four devices give the run that one process of eight gives."""

import json

import numpy as np
import pytest
from distributed import run_processes
from run_files import DIGITS, untimed_metrics
from safetensors.numpy import load_file

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


ADAPTERS = [
    *("--lora.rank", "2", "--optim.offload", "True", "--reference.offload", "True"),
    *("--optim.ema", "0.5", "--checkpoint.hf_every", "3", "--minibatches_per_step", "2", "--ppo_epochs", "2"),
]
TWO_LAYERS = ["--model.architecture.num_layers", "2"]
STAGES = ["--mesh.data", "1", "--mesh.stage", "2"]
"""Each process is a stage."""
PLACED = [
    *("--mesh.fsdp", "2", "--devices", "0:2", "--rollout.devices", "2:4", "--rollout.mesh.tensor", "2"),
    *("--reference.devices", "2:4", "--reference.mesh.fsdp", "4"),
]
"""Each process gives two devices to the policy, and two to rollout and reference."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "placed"),
    [
        ([], []),
        (ADAPTERS, []),
        ([], PLACED),
        (TWO_LAYERS, STAGES),
    ],
    ids=["full", "adapters, moments on the host", "models on devices of their own", "a stage each"],
)
def test_two_processes_train_as_one(more, placed, tmp_path):
    check_two_processes([*ARGS, *more], [], placed, 8, tmp_path=tmp_path)


ENV = """
from jaxrl_llm.envs.env import Step

class Twice:
    async def reset(self, example, seed): pass
    async def step(self, state, turn): return Step("1", done=turn.number == 2)
"""
IN_ONE = ["--devices", "0:4", "--rollout.devices", "4:6"]
IN_TWO = ["--devices", "0:2", "--rollout.devices", "2:3"]


@pytest.mark.slow
def test_two_processes_give_a_device_each_to_asynchronous_rollout(tmp_path):
    """Conversations, whose replies process 0 shares in the thread, while the main threads share others."""
    (tmp_path / "env.py").write_text(ENV)
    args = [*ARGS, "--mesh.fsdp", "2", "--rollout.mesh.fsdp", "2", "--rollout.max_staleness", "1"]
    args += ["--steps", "3", "--env.name", f"{tmp_path / 'env.py'}:Twice"]
    args += ["--rollout.sampling.stop", *"12345"]
    check_two_processes(args, IN_ONE, IN_TWO, 6, tmp_path=tmp_path)
    assert [row["staleness/max"] for row in untimed_metrics(tmp_path / "two")[1:]] == [0, 1, 1]


def check_two_processes(args, of_one, of_two, devices, *, tmp_path):
    """Compare the runs of one process and of two with half of its devices each."""
    (tmp_path / "reward.py").write_text(DIGITS)
    args = [*args, "--reward.name", f"{tmp_path / 'reward.py'}:digits"]
    for n, name, more in ((1, "one", of_one), (2, "two", of_two)):
        words = [*args, *more, "--run_dir", str(tmp_path / name)]
        run_processes(TRAIN, n, words, devices=devices // n, initialize=False)
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
    exports = [sorted((tmp_path / name).glob("exports/*/*/*.safetensors")) for name in ("one", "two")]
    assert [[file.parent.name for file in files] for files in exports] == [
        ["adapter", "adapter_ema", "hf", "hf_ema"] * ("--optim.ema" in args)
    ] * 2
    for a, b in zip(*exports, strict=True):
        arrays = load_file(a), load_file(b)
        for name in arrays[0]:
            np.testing.assert_allclose(arrays[0][name], arrays[1][name], atol=1e-4, err_msg=name)
    samples = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "two")]
    for a, b in zip(*(map(json.loads, lines) for lines in samples), strict=True):
        tokens, same = a.pop("per_token", None), b.pop("per_token", None)
        assert a == b
        if a.get("eval"):  # no update has read it
            continue
        assert tokens["text"] == same["text"]
        logprobs = (np.array(x["logprobs"], np.float64) for x in (tokens, same))  # null = NaN
        np.testing.assert_allclose(*logprobs, rtol=1e-4, atol=1e-5)
