"""Algorithms as objects: their requirements, their Configs, and users' files."""

import re
from dataclasses import replace
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import chex
import jax
import jax.numpy as jnp
import pytest
from golden import loss_inputs, rollouts

from jaxrl_llm import ranges
from jaxrl_llm.algos import (
    ALGOS,
    Requirements,
    clip_cov,
    dapo,
    dpo,
    dppo,
    grpo,
    gspo,
    kto,
    learns_from_rewards,
    load_algorithm,
    of,
    ppo,
    raft,
    remax,
    requirements,
    value,
)  # fmt: skip
from jaxrl_llm.algos.config import AlgoConfig, Correction
from jaxrl_llm.algos.contract import Algorithm, Divergence, choose_old_logprobs
from jaxrl_llm.errors import UserError


def test_only_what_an_algorithm_reads_is_computed():
    needs = lambda config, **fields: requirements(config) == Requirements(**fields)
    assert needs(dapo.config, draws=4) and needs(dapo.Config(dynamic_sampling=False))
    assert needs(grpo.Config(entropy_coef=0.1), ref_logprobs=True, entropy=True)
    assert needs(ppo.config, old_logprobs=True, ref_logprobs=True, critic=True)
    assert needs(ppo.Config(critic="shared", kl_coef=0.0), values=True)
    assert needs(remax.config, greedy=True)
    assert needs(
        gspo.Config(advantage="gae", old="recompute"),
        sequences=True,
        critic=True,
        old_logprobs=True,
        old_logprobs_source="policy",
    )
    assert needs(dppo.config, old_logprobs_source="rollout")
    assert requirements(value.config) == Requirements(logprobs=False, values=True)


@pytest.mark.parametrize("algorithm", ALGOS.values(), ids=ALGOS)
def test_configs_are_static_arguments_that_name_their_algorithm(algorithm):
    config = algorithm.Config()
    assert config == algorithm.config and hash(config) == hash(algorithm.config)
    assert config.algorithm == algorithm.name and ALGOS[config.algorithm] is algorithm
    assert algorithm.doc and type(config).__doc__


@pytest.mark.parametrize("algorithm", [*ALGOS.values(), value], ids=lambda a: a.name)
def test_every_number_of_a_config_has_a_range(algorithm):
    config = algorithm.config
    if hasattr(config, "teachers"):
        config = replace(config, teachers=("teacher",))
    assert not list(ranges.problems(config))
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        types = plain_types(hint)
        assert types.isdisjoint({int, float}) or ranges.range_of(hint), f"{name} has no range"
        if types <= {float, type(None)}:
            spoilt = replace(config, **{name: float("nan")})
            assert [field for field, _ in ranges.problems(spoilt)] == [name]


def plain_types(hint):
    """Return the types in a type hint: int, float, NoneType ..."""
    parts = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if not parts or get_origin(hint) is Literal:
        return {hint}
    return {t for part in parts for t in plain_types(part)} | ({tuple} & {get_origin(hint)})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (grpo.Config(clip_low=-0.1), "clip_low"),
        (grpo.Config(component_weights=(1.0, float("nan"))), "component_weights"),
        (clip_cov.Config(covariance_low=5.0), "covariance_low"),
        (grpo.Config(old="rollout", correction=Correction("token")), "old"),
        (dpo.Config(label_smoothing=0.5), "label_smoothing"),
        (raft.Config(best=0), "best"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, field):
    assert [name for name, _ in ranges.problems(config)] == [field]


@pytest.mark.parametrize("algorithm", [*ALGOS.values(), value], ids=lambda a: a.name)
def test_an_aggregation_divides_by_a_constant_only_where_there_is_one(algorithm):
    hint = get_type_hints(type(algorithm.config)).get("aggregation")
    assert ("constant" in get_args(hint)) == hasattr(algorithm.config, "constant")


def test_equal_configs_are_traced_once():
    traced = jax.jit(chex.assert_max_traces(of(grpo.config).loss, n=2), static_argnums=1)
    for config in (grpo.Config(), grpo.Config(), grpo.Config(clip_high=0.3), grpo.Config()):
        traced(loss_inputs(), config)
    with pytest.raises(AssertionError, match="traced > 2 times"):
        traced(loss_inputs(), grpo.Config(clip_high=0.4))


def test_old_log_probs_are_computed_only_where_the_policy_has_moved():
    source = lambda config, updates: choose_old_logprobs(of(config), requirements(config), updates)
    assert [source(grpo.config, n) for n in (1, 2)] == ["policy", "recompute"]
    assert [source(ppo.config, n) for n in (1, 2)] == ["recompute", "recompute"]
    assert [source(dppo.config, n) for n in (1, 2)] == ["rollout", "rollout"]
    assert [source(dpo.config, n) for n in (1, 2)] == ["policy", "policy"]  # a dataset's rows
    assert [source(kto.config, n) for n in (1, 2)] == ["recompute", "recompute"]


MODULE = """
from dataclasses import dataclass
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Algorithm, Divergence, Requirements

@dataclass(frozen=True)
class Config(AlgoConfig):
    beta: float = 0.5

def requires(config):
    divergence = Divergence(beta=0.0, temperature=1.0, top_k=4)
    return Requirements(
        old_logprobs=True, sum_pi_squared=True, ref_logprobs=config.beta > 0, divergence=divergence
    )

def advantages(rollouts, config):
    return config.beta * rollouts.mask

def loss(inputs, config):
    return inputs.num_tokens * config.beta, {}

algorithm = Algorithm("mine", __doc__ or "", "rollouts", Config(), loss, requires, advantages, group_size=2)
"""


def test_a_file_with_an_algorithm(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    mine = load_algorithm(str(file))
    assert mine.name == mine.config.algorithm == str(file) and of(mine.Config(beta=2.0)) is mine
    assert (mine.input, mine.data, mine.group_size, mine.select) == ("rollouts", "rollouts", 2, None)
    needs = dict(old_logprobs=True, sum_pi_squared=True, divergence=Divergence(0.0, 1.0, 4))
    assert requirements(mine.config) == Requirements(ref_logprobs=True, **needs)
    assert requirements(mine.Config(beta=0.0)) == Requirements(**needs)
    assert float(mine.loss(loss_inputs(), mine.config)[0]) == 3.5
    assert float(mine.advantages(rollouts(), mine.Config(beta=2.0)).sum()) == 28.0
    assert learns_from_rewards(mine.config)


def test_a_file_may_take_over_policy_gradients(tmp_path):
    file = tmp_path / "mine.py"
    head = (
        "from dataclasses import replace\n"
        "from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, requires as base\n"
    )
    text = re.sub(r"\ndef advantages\(.*?\n\n", "", MODULE, flags=re.DOTALL)
    of_base = "    return replace(base(config), ref_logprobs=False)\n"
    text = re.sub(r"    divergence = .*?\n    \)\n", of_base, text, flags=re.DOTALL)
    file.write_text(head + text.replace("(AlgoConfig)", "(PolicyConfig)"))
    mine = load_algorithm(str(file))
    found = requirements(mine.Config(advantage="gae", kl_in="reward", kl_coef=0.1))
    assert found.critic and found.old_logprobs and not found.ref_logprobs


def test_a_file_without_an_algorithm_is_refused(tmp_path):
    """Also one of functions and needs_* properties alone, as earlier releases read it."""
    old = '\nINPUT = "tokens"\nclass Config: needs_old = True\ndef loss(inputs, config): ...\n'
    for text, kind in (("x = 1", "rollouts"), (old, "tokens")):
        file = tmp_path / "mine.py"
        file.write_text(text)
        line = rf'lacks `algorithm = Algorithm\("mine", __doc__, "{kind}", Config\(\), loss\)`, .*requires='
        with pytest.raises(UserError, match=line):
            load_algorithm(str(file))


def test_a_file_whose_algorithm_lacks_a_part_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODULE.replace("requires, advantages,", "requires,"))
    with pytest.raises(UserError, match=r"--algo: .*: mine learns from rollouts without advantages"):
        load_algorithm(str(file))


def test_a_config_of_no_algorithm_has_none():
    with pytest.raises(AssertionError, match=r"make it with NAME\.Config"):
        of(AlgoConfig())
    with pytest.raises(AssertionError, match="without advantages"):
        Algorithm("mine", "", "rollouts", AlgoConfig(), loss=lambda inputs, config: (jnp.zeros(()), {}))
