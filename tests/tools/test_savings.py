"""Settings that save memory: one list, whose flags are what they state, and which `plan` and `doctor` use."""

import dataclasses

import pytest
from plan_recipe import CONFIG

from jaxrl_kernels.chips import GIB
from jaxrl_llm.plan.plan import MEMORY_KINDS, PhaseCost, Plan
from jaxrl_llm.plan.report import advise
from jaxrl_llm.plan.savings import MEMORY_SETTINGS
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools.host_memory import lower_settings, staged_bytes, state_bytes

NEEDED = {
    "optim.store_param_remainders": ("--model.dtype", "bfloat16"),
    "lora.rank": ("--optim.learning_rate", "1e-4"),
    "lora.quantize": ("--optim.learning_rate", "1e-4", "--lora.rank", "8"),
}
"""Setting -> flags of a recipe that it is for."""
FLAGS = [setting.flag for setting in MEMORY_SETTINGS]


def recipe(*flags):
    return from_command_line(["--config", "grpo_tiny.py", *flags], "doctor", writes=False).config


@pytest.mark.parametrize("setting", MEMORY_SETTINGS, ids=FLAGS)
def test_a_flag_changes_a_recipe_as_the_setting_does(setting):
    needed = NEEDED.get(setting.key, ())
    before = recipe(*needed)
    assert setting.applies(before)
    assert setting.changed(before) == recipe(*needed, *setting.flag.split())


def test_adapters_are_advised_once():
    with_adapters = recipe(*NEEDED["lora.quantize"])
    for setting in MEMORY_SETTINGS:
        expected = setting.key not in ("lora.rank", "optim.store_param_remainders")
        assert setting.applies(with_adapters) == expected, setting.flag


def test_a_plan_advises_the_settings_in_their_order():
    """A reference, moments and gradients in float32 on the device: all that saves memory of a device."""
    memory = dict.fromkeys((*MEMORY_KINDS, "activations"), 0.0) | {
        kind: 8.0 * GIB for kind in ("parameters", "optimizer", "gradients", "frozen models")
    }
    costs = dict(flops=1e12, collectives={}, roofline={}, compile_seconds=1.0, error="")
    phase = PhaseCost("update: accumulate", memory, 1, "call", **costs)
    mesh = {"data": 1, "fsdp": 4, "expert": 1, "tensor": 1, "sequence": 1}
    plan = Plan("a model", "v5e-4", mesh, 16.0 * GIB, phases=[phase], derived={}, versions={})
    lines = advise(plan, dataclasses.replace(CONFIG, tokens_per_device=64, prompts_per_step=64)).advice
    advised = [flag for flag in FLAGS if any(f" {flag}" in line for line in lines)]
    assert [line.split(". ")[1].split(",")[0].split(":")[0] for line in lines[1:-1]] == advised
    assert advised == [
        *("--optim.offload True", "--reference.offload True", "--optim.moments int8"),
        *("--optim.grad_dtype bfloat16", "--lora.rank 32"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "least", "settings"),
    [
        # The host has moments either way, on the CPU; remainders are bytes of the weights.
        (
            ("--optim.offload", "True", "--model.dtype", "bfloat16", "--optim.learning_rate", "1e-4"),
            state_bytes,
            ["--optim.moments int8", "--optim.grad_dtype bfloat16", "--lora.rank 32"],
        ),
        # On an accelerator the host has the reference, beside the checkpoint on its way to the disk.
        (
            ("--reference.offload", "True", "--algo.kl_coef", "0.1", "--optim.learning_rate", "1e-4"),
            staged_bytes,
            [
                *("--checkpoint.optimizer False", "--optim.moments int8", "--reference.offload False"),
                "--lora.rank 32",
            ],
        ),
    ],
)
def test_doctor_advises_the_settings_that_save_memory_of_the_host(flags, least, settings):
    assert list(dict(lower_settings(recipe(*flags), least))) == settings
