"""Lines at a run's start that depend on its settings alone."""

import json
from dataclasses import asdict, replace

import jax.numpy as jnp
import pytest

from jaxrl_llm.algos import grpo, ppo, sft
from jaxrl_llm.builders.describe import filter_line, frequencies_line, indexer_line
from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.builders.weights import check_frequencies
from jaxrl_llm.config import RolloutConfig, SamplingConfig, TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.attention import alibi_places
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig


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
        saved = json.loads(json.dumps(asdict(trained)))
        check_frequencies(saved, trained, config)
        other = trained_config(model, replace(config, max_response_tokens=49 - response))
        if other.rope.is_long != trained.rope.is_long:
            with pytest.raises(
                UserError, match=rf"longrope's {name}, for sequences .* 64 tokens, but .* 6\d "
            ):
                check_frequencies(saved, other, config)
    assert frequencies_line(read_config({"model_type": "phi3"}), 64) == ""


def test_a_frozen_indexer_is_told():
    model = TransformerConfig(index=IndexConfig(2048, 64, 128), mla=MLAConfig(512, 1536, 128, 64, 128))
    assert indexer_line(model, 2048).startswith("sparse indexer: not used, since sequences have 2,048 of ")
    assert indexer_line(model, 2049).startswith("sparse indexer: frozen. It chooses 2,048 of up to 2,049 tok")


def test_positions_of_alibi_end_where_bfloat16_does():
    """65,535 is 65,280 + 255, of 8 bits each; 65,536 + 256 needs 9 bits."""
    raw = {"model_type": "baichuan", "hidden_size": 32, "num_attention_heads": 4, "model_max_length": 2**16}
    model = read_config(raw)
    places = alibi_places(jnp.array([[65_535]]))[0, 0]
    assert (places.astype(jnp.bfloat16) == places).all() and places[:2].tolist() == [65_280, 255]
    assert model.alibi
    with pytest.raises(UserError, match=r"max_position is 65537: with alibi it must be at most 65536"):
        read_config({**raw, "model_max_length": 2**16 + 1})
