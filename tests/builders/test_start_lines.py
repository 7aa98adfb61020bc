"""Lines at a run's start that depend on its settings alone."""

import pytest

from jaxrl_llm.algos import grpo, ppo, sft
from jaxrl_llm.builders.describe import filter_line, frequencies_line
from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.config import RolloutConfig, SamplingConfig, TrainConfig
from jaxrl_llm.hf.config import read_config


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


def test_the_longest_sequence_chooses_one_of_two_sets_of_frequencies():
    """By default up to the original length, which transformers compares with the longest row of a batch."""
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    model = read_config({"model_type": "phi3", **sizes, "rope_scaling": rope})
    for response, name in ((24, "short_factor"), (25, "long_factor")):
        config = TrainConfig(max_prompt_tokens=40, max_response_tokens=response)
        trained = trained_config(model, config)
        assert trained.rope.is_long == (name == "long_factor")
        assert frequencies_line(trained, config.max_tokens).startswith(f"longrope: {name} for the whole run")
    assert frequencies_line(read_config({"model_type": "phi3"}), 64) == ""
