"""Host memory of a recipe, as `doctor` compares it: by hand, for the 131,456 weights of grpo_tiny.py."""

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.start import Cluster
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools import host_memory
from jaxrl_llm.tools.host_memory import check_run_memory, staged_bytes, state_bytes

LAYER = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 256 + 2 * 64 + 2 * 16  # q, k, v, o; feed-forward; norms
NORMS = 2 * (2 * 64 + 2 * 16) + 64
WEIGHTS = 128 * 64 + 2 * LAYER + 64  # tied embedding, two layers, the last norm
SMALL = 256  # bytes of counters and coefficients


def recipe(*flags, name="grpo_tiny.py"):
    return from_command_line(["--config", name, *flags], "doctor", writes=False).config


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets what is free, and whether there is an accelerator."""

    def set_machine(free, accelerator=False, cluster=None):
        monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
        monkeypatch.setattr(host_memory, "has_accelerator", lambda: accelerator)
        monkeypatch.setattr(host_memory, "find_cluster", lambda: cluster)

    return set_machine


@pytest.mark.parametrize(
    ("name", "flags", "bytes_of_a_weight"),
    [
        ("grpo_tiny.py", (), 4 + 8 + 4),  # weights, moments, gradients
        ("grpo_tiny.py", ("--algo.kl_coef", "0.1", "--model.dtype", "bfloat16"), 16 + 2),  # and the reference
        ("grpo_tiny.py", ("--optim.name", "sgd", "--optim.grad_dtype", "bfloat16"), 4 + 4 + 2),
        ("grpo_tiny.py", ("--optim.offload", "True", "--optim.ema", "0.9"), 16 + 4),
        ("dpo_tiny.py", ("--reference.offload", "True"), 16 + 4),
        ("ppo_tiny.py", (), 2 * (4 + 8) + 4),  # the gradients of one model at a time
    ],
)
def test_bytes_of_the_state(name, flags, bytes_of_a_weight):
    expected = bytes_of_a_weight * WEIGHTS
    value_heads = 28 * 64 if name == "ppo_tiny.py" else 0
    norms = 2 * NORMS if "bfloat16" in flags else 0  # float32 in a reference, too
    assert expected <= state_bytes(recipe(*flags, name=name)) <= expected + value_heads + norms + SMALL


def test_a_critic_with_adapters_shares_the_frozen_weights():
    """Adapters of q: 2 layers of rank 1, 64 + 64; beside them the critic trains its value head of 64."""
    flags = ("--lora.rank", "1", "--lora.targets", "q_proj", "--optim.learning_rate", "1e-4")
    policy, critic = 2 * 128, 2 * 128 + 64
    trained = 12 * (policy + critic) + 4 * critic
    one_mesh = state_bytes(recipe(*flags, name="ppo_tiny.py"))
    assert one_mesh == pytest.approx(4 * WEIGHTS + trained, abs=SMALL)


def test_bytes_of_a_checkpoint_on_its_way_to_the_disk():
    """Weights and moments; what is offloaded counts once, and a reference is not saved."""
    offloaded = ("--optim.offload", "True", "--reference.offload", "True", "--algo.kl_coef", "0.1")
    for flags, bytes_of_a_weight in (
        ((), 4 + 8),
        (("--checkpoint.optimizer", "False"), 4),
        (("--algo.kl_coef", "0.1"), 4 + 8),
        (offloaded, 4 + 8 + 4),
        ((*offloaded, "--checkpoint.optimizer", "False"), 4 + 8 + 4),
    ):
        on_devices = 384 * 4 if "--reference.offload" in flags else 0  # the norms of the reference
        expected = bytes_of_a_weight * WEIGHTS - on_devices
        assert expected <= staged_bytes(recipe(*flags)) <= expected + SMALL, flags
    adapters = recipe("--lora.rank", "1", "--lora.targets", "q_proj", "--optim.learning_rate", "1e-4")
    assert staged_bytes(adapters) == pytest.approx(12 * 2 * (64 + 64), abs=SMALL)


@pytest.mark.slow
def test_memory_that_is_enough_for_the_state_or_for_all_arrays(machine):
    config = recipe()
    machine(2**30)
    finding = check_run_memory(config)
    assert finding.status == "ok" and finding.text.endswith("take 2.01 MiB, 1.00 GiB are free")
    machine(16 * WEIGHTS + SMALL)
    finding = check_run_memory(config)
    assert finding.status == "note" and "; up to 4.0" in finding.text and "--rollout.slots" in finding.text


@pytest.mark.slow
def test_memory_that_is_too_little_and_what_would_take_less(machine):
    machine(16 * WEIGHTS - 1)
    config = recipe("--optim.learning_rate", "1e-4")
    finding = check_run_memory(config)
    assert finding.status == "fix"
    settings = dict(host_memory.lower_settings(config, state_bytes))
    assert list(settings) == ["--optim.moments int8", "--optim.grad_dtype bfloat16", "--lora.rank 32"]
    assert settings["--optim.grad_dtype bfloat16"] == pytest.approx(14 * WEIGHTS, abs=SMALL)
    adapters = 32 * 2 * (4 * 64 + 2 * 32 + 2 * 64 + 3 * (64 + 256))  # q, o; k, v; the feed-forward
    least = 4 * WEIGHTS + 16 * adapters
    assert settings["--lora.rank 32"] == pytest.approx(least, abs=SMALL)
    assert finding.text.endswith(f"--lora.rank 32 ({least / 2**20:.2f} MiB)")
    assert list(dict(host_memory.lower_settings(recipe("--lora.rank", "8"), state_bytes))) == [
        "--optim.moments int8",
        "--optim.grad_dtype bfloat16",
        "--lora.quantize nf4",
    ]


def test_accelerators_have_the_state_in_memory_of_their_own(machine):
    machine(12 * WEIGHTS + SMALL, accelerator=True)
    assert check_run_memory(recipe()).status == "ok"
    machine(12 * WEIGHTS - 1, accelerator=True)
    finding = check_run_memory(recipe())
    assert finding.status == "fix" and "set --checkpoint.optimizer False (513.51 KiB)" in finding.text
    machine(12 * WEIGHTS - 1, accelerator=True, cluster=Cluster("slurm", 2, 0))
    assert check_run_memory(recipe()).status == "ok"  # each of two processes saves a half


def test_what_is_not_known_is_a_note(machine, monkeypatch):
    machine(None)
    finding = check_run_memory(recipe())
    assert finding.status == "note" and finding.text.endswith("how much is free is not known")
    finding = check_run_memory(recipe("--model.path", "Qwen/Qwen2.5-1.5B-Instruct"))
    assert finding.status == "note" and "size of Qwen/Qwen2.5-1.5B-Instruct is not known" in finding.text

    def refuse():
        raise UserError("JAX_NUM_PROCESSES is set but JAX_PROCESS_ID is not")

    monkeypatch.setattr(host_memory, "find_cluster", refuse)
    assert host_memory.num_processes() == 1  # `start_host` refuses it


@pytest.mark.parametrize(
    ("platforms", "gpus", "tpu", "expected"),
    [
        ("", ["H100"], False, True),
        ("", [], True, True),
        ("", [], False, False),
        ("cpu", ["H100"], True, False),
    ],
)
def test_the_memory_of_a_cpu_is_that_of_the_host(monkeypatch, platforms, gpus, tpu, *, expected):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(host_memory, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(host_memory, "has_tpu", lambda: tpu)
    assert host_memory.has_accelerator() == expected


def test_placement_does_not_matter():
    """Models on devices of their own, an asynchronous rollout among them, are counted once each."""
    apart = ("--devices", "0:1", "--rollout.devices", "1:2", "--rollout.max_staleness", "1")
    assert state_bytes(recipe(*apart)) == state_bytes(recipe())
