"""Adapters of families whose experts peft adapts as parameters alone, against peft with transformers 5."""

import pytest
from family_cases import BASE, CASES, SPECIAL
from test_peft_experts import MLP_NAMES, checked_against_peft, pytestmark  # noqa: F401  of warnings
from transformers import AutoConfig

PARAMETERS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("case", "settings", "expected"),
    [
        pytest.param("lfm2 moe", {"target_parameters": PARAMETERS[::2]}, (3, 3), marks=pytest.mark.slow),
        ("nemotron", {"target_parameters": PARAMETERS[1:]}, (3, 3)),
        ("lfm2 moe", {"target_modules": ["q_proj", "w1", "w2", "w3"]}, (3, None)),
        pytest.param(
            "nemotron", {"target_modules": ["q_proj", *MLP_NAMES[1:]]}, (3, None), marks=pytest.mark.slow
        ),
    ],
    ids=["parameters of LFM2", "parameters of Nemotron-H", "modules of LFM2", "modules of Nemotron-H"],
)
def test_peft_adapts_experts_of_families_as_parameters_alone(tmp_path, case, *, settings, expected, capfd):
    """Names of modules mean no experts: a file that has none is read for the other layers, with a line."""
    family, changes = CASES[case]
    sizes = {**BASE, **SPECIAL, **changes, "attn_implementation": "eager"}
    settings = {"target_modules": ["q_proj"], **settings}
    _, read = checked_against_peft(tmp_path, AutoConfig.for_model(family, **sizes), settings)
    assert (read.rank, read.expert_rank) == expected
    line = "theirs: no adapters of experts, which peft with transformers 5 adapts as target_parameters alone"
    assert (line in capfd.readouterr().err) == (expected[1] is None)
