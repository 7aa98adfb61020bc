"""Lines at a run's start that depend on its settings alone."""

import pytest

from jaxrl_llm.algos import grpo, ppo, sft
from jaxrl_llm.builders.describe import filter_line
from jaxrl_llm.config import RolloutConfig, SamplingConfig, TrainConfig


def line(algo=None, **sampling):
    config = TrainConfig(
        algo=grpo.Config() if algo is None else algo,
        rollout=RolloutConfig(sampling=SamplingConfig(**sampling)),
    )
    return filter_line(config)


@pytest.mark.parametrize(
    "sampling, named",
    [
        ({"top_k": 50}, "top_k 50:"),
        ({"top_p": 0.9}, "top_p 0.9:"),
        ({"min_p": 0.05, "top_k": 20}, "top_k 20, --rollout.sampling.min_p 0.05:"),
    ],
)
def test_filters_that_act_are_named(sampling, named):
    assert line(**sampling).startswith("warning: --rollout.sampling.") and named in line(**sampling)
    assert line(ppo.Config(), **sampling) and not line(sft.Config(), **sampling)


def test_without_filters_or_with_kept_sets_there_is_no_line():
    assert line(top_k=50, top_p=0.9, kept_sets=True) == ""
    assert line() == line(temperature=0.7, stop=("\n",)) == ""
