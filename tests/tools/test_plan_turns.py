"""The phase of a plan that reads the next turns of conversations behind kept pages."""

import dataclasses

import pytest
from plan_recipe import CONFIG

from jaxrl_llm.config import EnvConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.plan.compiled import open_target
from jaxrl_llm.plan.plan import make_plan
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.sharding.placement import MeshConfig


@pytest.mark.slow
def test_a_plan_has_the_reading_of_next_turns():
    """99 tokens before the last one are read in rows of 112, 4 of them in 512 tokens; 4 pages of 32.

    A token multiplies 2 (8 32 2 (4 + 2) + 3 32 64) = 18,432 weights, and in each of two layers 4 (8 + 8)
    numbers with 128 keys and values. 16 conversations of 60 tokens take three calls of 448.
    The compiled program has all products with weights; of attention less is counted there.

    Pages: 4 slots have 5, one a second copy, and there is a null page; the cache is read beside 4 prompts of
    112. The floor has weights and norms of the layers, and 512 + 96 numbers of each token in each layer.
    """
    rollout = dataclasses.replace(CONFIG.rollout, cache="paged", page=32, prefill_tokens=512)
    lengths = {"max_prompt_tokens": 40, "max_response_tokens": 60, "tokens_per_device": 100}
    config = dataclasses.replace(CONFIG, rollout=rollout, mesh=MeshConfig(fsdp=1), devices="0:1", **lengths)
    with_turns = dataclasses.replace(config, env=EnvConfig(name="guess"))
    target = open_target(parse_topology("cpu"))
    (extend,) = make_plan(with_turns, target, only="extend").phases
    matrices, attention = 2 * 448 * 18_432, 2 * 448 * 64 * (128 + 128)
    assert (extend.name, extend.calls, extend.unit) == ("rollout: extend", 3, "call")
    assert extend.flops == extend.floor["flops"] == matrices + attention
    assert matrices < extend.compiled["flops"] < extend.flops and not extend.error
    weights, pages = 4 * (2 * 9_216 + 64 * 32 + 5 * 32 + 4 * 8), 4 * (4 + 1) + 1
    cache, prompts = (4 * 2 * 2 * count * 2 * 8 for count in (pages * 32, 4 * 112))
    assert extend.memory["parameters"] == extend.memory["rollout weights"] == weights
    assert extend.memory["KV cache"] == cache + prompts
    assert extend.memory["gradients"] == extend.memory["batch"] == 0 < extend.memory["activations"]
    norms, products = 4 * (4 * 32 + 4 * 8), 4 * 448 * 2 * (512 + 96)
    assert extend.floor["memory"] == 4 * 2 * 9_216 + norms + products + cache
    with pytest.raises(UserError, match=r"--only extend: no phase .* rollout: decode"):
        make_plan(config, target, only="extend")
