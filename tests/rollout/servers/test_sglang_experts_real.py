"""A mixture of experts on a real SGLang server on a CPU: text, log-probs, pushes, chosen experts."""

import dataclasses

import jax
import numpy as np
import pytest
from real_sglang import FLAGS, MODEL, NEEDED, PYTHON, assert_like_native, engine_on, started
from servers_shared import KEY, native
from test_sglang_real import requests
from test_sglang_train import rows

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import RopeConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.recipe.rules_model import WITHOUT_SERVED_ROUTES
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.validate import routed_experts
from jaxrl_llm.train import main

pytestmark = NEEDED
EXPERTS = dataclasses.replace(
    MODEL, family="qwen3_moe", tie_embeddings=False, initializer_range=0.2,
    moe=MoEConfig(8, 3, expert_size=32),
)  # fmt: skip
GREEDY = SamplingConfig(temperature=0.0)
OTHERS = {
    "mixtral": dataclasses.replace(EXPERTS, family="mixtral", mlp_size=32, qk_norm=False),
    "olmoe": dataclasses.replace(
        EXPERTS, family="olmoe", mlp_size=32, num_kv_heads=4, qk_norm_over_heads=True, norm_eps=1e-5,
        moe=MoEConfig(8, 3, expert_size=32, normalize=False),
    ),
    "glm4_moe": dataclasses.replace(
        EXPERTS, family="glm4_moe", qkv_bias=True, rope=RopeConfig(partial_rotary=0.5),
        moe=MoEConfig(
            8, 3, expert_size=32, shared_size=32, shared_gate=False, score="sigmoid", scale=1.5,
            selection_bias=True, dense_layers=1,
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """On one server; a bucket has 2 of a layer's 8 experts."""
    folder, flags = tmp_path_factory.mktemp("experts"), ("--enable-return-routed-experts",)
    with started(folder, 1, model=EXPERTS, more_flags=flags) as launched:
        made = engine_on(
            launched.urls, HttpTransport(WeightSource(EXPERTS, "float32", 20_000), KINDS["sglang"]), EXPERTS
        )
        yield made
        made.pool.close()


def weights(seed):
    return models.init(EXPERTS, jax.random.key(seed))


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_text_and_log_probs_are_those_of_the_native_engine(engine, seed):
    metrics = engine.publish(weights(seed), seed)
    assert metrics["bridge/probe_mean_abs"] < 1e-5
    mine = engine.generate(requests(), GREEDY, KEY)
    for a, b in zip(mine, native(weights(seed), GREEDY, requests(), EXPERTS), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist() and a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_array_equal(a.routes, b.routes)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family, tmp_path):
    """Text, log-probs and routes of the native engine. SGLang computes OLMoE with an epsilon of 1e-5."""
    assert_like_native(OTHERS[family], tmp_path, requests(), routes=family not in WITHOUT_SERVED_ROUTES)


def test_a_run_replays_routes_that_the_trainers_routers_choose_too(tmp_path):
    """One GRPO step on a server that the run starts: every token but the last of a response has a route."""
    args = [
        *("--config", "grpo_moe_tiny.py", "--routing.replay", "rollout", "--steps", "1", "--devices", "0:1"),
        *("--rollout.engine", "sglang", "--rollout.launch", "1", "--servers.python", PYTHON),
        *("--servers.flags", FLAGS, "--prompts_per_step", "4", "--responses_per_prompt", "2"),
        *(
            "--model.architecture.tie_embeddings",
            "false",
            "--warm_start.steps",
            "2",
            "--eval.every",
            "0",
            "--reward.workers",
            "1",
            "--log.progress",
            "none",
        ),
        *("--log.tensorboard", "false", "--run_dir", str(tmp_path)),
    ]
    assert main(args) == 0
    [step] = [row for row in rows(tmp_path) if row["kind"] == "train"]
    assert step["moe/route_agreement"] > 0.999 and step["mismatch/max_abs"] < 1e-4


def test_text_and_chosen_experts_are_those_of_transformers(engine, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    engine.publish(weights(0), 2)
    folder = save_model(weights(0), EXPERTS, tmp_path / "hf", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in requests(tokens=12):
        prompt = request.prompt_ids.tolist()
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
            "return_routed_experts": True,
            "routed_experts_start_len": 0,
        }
        reply = engine.pool.run(engine.pool.request(engine.pool.servers[0], "/generate", body))
        text = torch.tensor([prompt + reply["output_ids"]])
        with torch.no_grad():
            out = model(text, output_router_logits=True)
        assert out.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == reply["output_ids"]
        expected = [np.sort(layer.topk(3, dim=-1).indices.numpy())[:-1] for layer in out.router_logits]
        chosen = routed_experts(reply["meta_info"], body, 12, EXPERTS)
        np.testing.assert_array_equal(chosen, np.stack(expected, axis=1))


def test_the_probe_sees_two_experts_that_change_places(engine, monkeypatch):
    """The down projections of experts 2 and 5 of layer 1."""
    source = engine.publisher.transport.source
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    swapped = {name.format(2): name.format(5), name.format(5): name.format(2)}
    groups = [[t._replace(name=swapped.get(t.name, t.name)) for t in group] for group in source.groups]
    monkeypatch.setattr(source, "groups", groups)
    with pytest.raises(ServerError, match="log-probs differ from the trainer's"):
        engine.publish(weights(3), 3)
    monkeypatch.undo()
    assert engine.publish(weights(3), 4)["servers/usable"] == 1
