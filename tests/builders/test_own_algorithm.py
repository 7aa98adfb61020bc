"""Mistakes in a user's own algorithm are named by line before a model is loaded."""

import jax.numpy as jnp
import pytest

from jaxrl_llm.builders.models import check_own_algorithm, make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.credit import _advantages
from jaxrl_llm.recipe import load
from jaxrl_llm.structs import Rollouts

FILE = """"Reward-weighted log-likelihood."
from dataclasses import dataclass
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Algorithm
@dataclass(frozen=True)
class Config(AlgoConfig):
    scale: float = 1.0
def advantages(rollouts, config):
    return rollouts.rewards[:, None] * rollouts.mask
def loss(inputs, config):
    each = -inputs.logprobs * inputs.advantages * inputs.mask
    return config.scale * each.sum() / inputs.num_tokens, {}
algorithm = Algorithm("mine", __doc__, "rollouts", Config(), loss, advantages=advantages)
"""


def config_of(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text)
    config = load.load_recipe(load.find_recipe("grpo_tiny.py"))
    return load.with_algo(config, str(file))[0]


def check(tmp_path, text):
    config = config_of(tmp_path, text)
    check_own_algorithm(make_stages(config, config.model.architecture, make_meshes(config))[-1])


def test_a_sound_loss_passes(tmp_path):
    check(tmp_path, FILE)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("inputs.logprobs ", "inputs.logprob ", r"mine\.py:11: AttributeError: .* no attribute 'logprob'"),
        ("inputs.logprobs ", "inputs.policy ", r"mine\.py:11: .* 'policy'\. It is called logprobs now\."),
        ("inputs.logprobs ", "inputs.old ", r"mine\.py:11: .* 'old'\. It is called old_logprobs now\."),
        ("config.scale", "config.scal", r"mine\.py:12: AttributeError: .* no attribute 'scal'"),
        ("each.sum()", "each.sum() + missing", r"mine\.py:12: NameError: name 'missing'"),
        ("* inputs.mask", "* inputs.mask[:, :3]", r"mine\.py:11: TypeError: mul got incompatible shapes"),
        (
            "num_tokens, {}",
            "num_tokens",
            r"mine\.py: loss\(.*\) -> \(scalar, dict of metrics\): TypeError",
        ),
        ("each.sum()", "each", r"mine\.py: .*TypeError: the loss is a scalar, here .* \(\d+, \d+\)"),
        ("loss(inputs, config)", "loss(inputs)", r"mine\.py: .*takes 1 positional argument but 2 were given"),
    ],
)
def test_a_loss_that_raises_is_named_by_its_line(tmp_path, right, wrong, message):
    with pytest.raises(UserError, match=rf"(?s)--algo: .*{message}"):
        check(tmp_path, FILE.replace(right, wrong))


def test_requirements_by_their_earlier_names_are_answered_with_the_present_ones(tmp_path):
    made = (
        "Algorithm('m', '', 'rollouts', Config(), loss, lambda c: Requirements(reference=True), advantages)"
    )
    text = f"{FILE}from jaxrl_llm.algos.contract import Algorithm, Requirements\nalgorithm = {made}\n"
    with pytest.raises(UserError, match=r"'reference'\. It is called ref_logprobs now\."):
        config_of(tmp_path, text)


def test_advantages_of_another_shape_are_named(tmp_path):
    config = config_of(tmp_path, FILE.replace("[:, None] * rollouts.mask", ""))
    ones = jnp.ones(3)
    rollouts = Rollouts(rewards=ones, group=jnp.zeros(3, jnp.int32), mask=jnp.ones((3, 4)), valid=ones)
    with pytest.raises(UserError, match=r"`advantages` returns \(3,\); expected an array .*, here \(3, 4\)"):
        _advantages(rollouts, config.algo)
