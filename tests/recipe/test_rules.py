"""Every rule of every phase: its keys exist, it can fire, and its message names a key and the fix."""

import json
import re
from dataclasses import replace

import jax
import pytest
from refusals import refusal

from jaxrl_llm import algos
from jaxrl_llm.algos import gdpo, gkd, grpo, ppo, sft
from jaxrl_llm.config import (
    CriticConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    IndexConfig,
    LoraConfig,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    RoutingConfig,
    SamplingConfig,
    ServersConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import RopeConfig
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.plan.models import ABSTRACT_MODELS
from jaxrl_llm.recipe.checks import apply_all_rules, check_config, check_models, check_on_devices
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.recipe.rules_devices import DEVICES
from jaxrl_llm.recipe.rules_model import MODEL
from jaxrl_llm.recipe.rules_recipe import RECIPE
from jaxrl_llm.sharding.config import POLICY, reward_role
from jaxrl_llm.tools.devices import SeenDevice

RULES = RECIPE + MODEL + DEVICES
SERVED = RolloutConfig(engine="sglang", launch=1)
STOPS = RolloutConfig(sampling=SamplingConfig(stop_tokens=(10**6,)))
EXPERTS = TransformerConfig(max_position=64, moe=MoEConfig(8, 4, expert_size=12))
LINEAR = TransformerConfig(max_position=64, rope=RopeConfig(scaling="linear", factor=2.0))
TWO_SIZES = TransformerConfig(
    **{"num_layers": 2, "max_position": 64, "window_layers": (True, False), "sliding_window": 8},
    **{"local_rope": RopeConfig(), "global_heads": GlobalHeads(1, 256)},
)
INDEXED = TransformerConfig(
    **{"num_layers": 4, "max_position": 64, "num_kv_heads": 16, "head_dim": 12, "qk_norm": False},
    **{"mla": MLAConfig(16, 24, 8, 4, value_dim=8), "family": "glm_moe_dsa", "tie_embeddings": False},
    **{
        "index": IndexConfig(8, 4, 8, interleaved=True),
        "index_layers": (True, False) * 2,
        "rope": RopeConfig(),
    },
    moe=MoEConfig(8, 2, 12, 12, shared_gate=False, score="sigmoid", selection_bias=True),
)
QWEN_1 = TransformerConfig(family="qwen", max_position=64, tie_embeddings=False)
RANDOM = ModelConfig(architecture=EXPERTS, tokenizer="tiny")
CASES = {
    "field_problems": dict(steps=-1),
    "_steps_are_finite": dict(epochs=1.0),
    "_groups_compare": dict(responses_per_prompt=1),
    "_rows_fit": dict(tokens_per_device=31),
    "_something_rewards": dict(reward=RewardConfig(weight=0.0)),
    "_weights_match_rewards": dict(algo=gdpo.Config(component_weights=(1.0, 2.0))),
    "_judge_compares": dict(eval=EvalConfig(every=1, judge="generative")),
    "_teachers_exist": dict(
        algo=gkd.Config(teachers=("a",)), data=DataConfig(train=(SourceConfig("x.jsonl", teacher=1),))
    ),
    "_strict_rounds_alike": dict(strict=True, rollout=RolloutConfig(weight_noise=0.1)),
    "_rows_divide": dict(mesh=MeshConfig(sequence=5)),
    "_stages_keep_inputs": dict(mesh=MeshConfig(stage=2), model=replace(RANDOM, remat="offload")),
    "_models_are_readable": dict(model=ModelConfig(path="/no/such")),
    "_optimizers_fit": dict(optim=OptimConfig(store_param_remainders=True), lora=LoraConfig(4)),
    "_adapter_has_rank": dict(model=replace(RANDOM, adapter="a")),
    "_replay_has_rollout": dict(algo=sft.Config(), routing=RoutingConfig(replay="rollout"), model=RANDOM),
    "_servers_hold_the_base": dict(lora=LoraConfig(4, quantize="nf4"), rollout=SERVED),
    "_vllm_has_it": dict(
        rollout=RolloutConfig(engine="vllm", launch=1), servers=ServersConfig(transport="ipc")
    ),
    "_fp8_is_served": dict(servers=ServersConfig(quantization="fp8")),
    "_drafts_have_slots": dict(
        env=EnvConfig(tools=("calculator",)), rollout=RolloutConfig(slots=64, draft_tokens=7)
    ),
    "_addresses_are_right": dict(rollout=RolloutConfig(engine="sglang", servers=("@/no/file",))),
    "_gpus_are_shared": dict(rollout=SERVED, servers=ServersConfig(colocated=True)),
    "_servers_start": dict(rollout=SERVED, servers=ServersConfig(devices=("0", "1"))),
    "_indexers_fit": dict(model=replace(RANDOM, architecture=INDEXED), mesh=MeshConfig(sequence=2, stage=2)),
    "_can_be_exported": dict(model=replace(RANDOM, architecture=replace(EXPERTS, family="mixtral"))),
    "_writes_text": dict(model=replace(RANDOM, architecture=replace(EXPERTS, value_head=True))),
    "_has_positions": dict(max_response_tokens=50),
    "_yarn_has_rope": dict(model=replace(RANDOM, architecture=LINEAR, yarn_factor=4.0)),
    "_heads_divide": dict(devices="0:6", mesh=MeshConfig(tensor=3, sequence=2, sequence_parallel="ulysses")),
    "_stages_are_equal": dict(
        model=replace(RANDOM, architecture=TransformerConfig(num_layers=4, max_position=64)),
        mesh=MeshConfig(stage=8),
    ),
    "_recurrent_layers_fit": dict(
        model=replace(RANDOM, architecture=TWO_SIZES), rollout=RolloutConfig(cache="paged")
    ),
    "_stop_tokens_exist": dict(rollout=STOPS),
    "_experts_are_routed": dict(routing=RoutingConfig(balance_coef=0.1)),
    "_routes_are_reported": dict(
        model=replace(RANDOM, architecture=replace(EXPERTS, family="mixtral")),
        routing=RoutingConfig(replay="rollout"),
        rollout=SERVED,
    ),
    "_is_served": dict(model=RANDOM, rollout=SERVED),
    "_fp8_has_blocks": dict(
        model=replace(RANDOM, architecture=TransformerConfig(num_kv_heads=1, head_dim=64, max_position=64)),
        rollout=replace(SERVED, dtype="bfloat16"),
        servers=ServersConfig(quantization="fp8"),
        algo=grpo.Config(correction=replace(grpo.Config().correction, weight="token")),
    ),
    "_adapters_fit": dict(lora=LoraConfig(rank=10**4)),
    "_reward_models_have_heads": dict(
        reward=RewardConfig(models=(RewardModelConfig(path="language model"),))
    ),
    "_meshes_fit": dict(devices="0:9"),
    "_rollout_is_apart": dict(devices="0:2", rollout=RolloutConfig(max_staleness=1, devices="1:3")),
    "_memory_is_shared": dict(rollout=SERVED, servers=ServersConfig(transport="ipc")),
}
"""Name of a rule's function -> a change of a sound recipe that the rule refuses."""


def name_of(rule):
    return rule.problems.__name__


def asked(config, devices):
    known = {"language model": EXPERTS}
    return list(apply_all_rules(config, known.get, devices))


def test_each_rule_has_a_case():
    assert sorted(map(name_of, RULES)) == sorted(CASES)


def test_a_sound_recipe_is_asked_by_every_rule(config):
    found = asked(config, jax.devices())
    assert {name_of(rule) for rule, _ in found} == CASES.keys() and not any(lines for _, lines in found)
    phases = list(dict.fromkeys(rule.phase for rule, _ in asked(config, ())))
    assert phases == ["recipe", "model"]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_each_rule_can_fire(rule, config):
    found = asked(replace(config, **CASES[name_of(rule)]), jax.devices())
    (lines,) = (lines for other, lines in found if other is rule)
    assert lines and all(re.search(r"--\w", line) for line in lines)
    assert not rule.keys or any(f"--{key.split('.')[0]}" in lines[0] for key in rule.keys.split()), lines
    fix = r"\b([Ss]et|[Uu]se|[Ll]eave|[Gg]ive|[Nn]ame|[Ll]ower|[Aa]dd|expected|must|needs|is) "
    assert re.search(fix, lines[0]), lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"rollout": RolloutConfig(cache="paged")},
            "--rollout.cache paged needs pages, and the model's layers",
        ),
        ({"rollout": RolloutConfig(cache_dtype="int8")}, "--rollout.cache_dtype int8 needs pages"),
        ({"rollout": RolloutConfig(draft_tokens=2)}, "--rollout.draft_tokens 2 needs pages"),
        ({"rollout": SERVED}, "--rollout.engine is sglang: models whose layers have heads of two sizes"),
        (
            {"lora": LoraConfig(rank=300)},
            "num_kv_heads * global_heads.head_dim is 256",
        ),
    ],
)
def test_what_heads_of_two_sizes_exclude(changes, line, config):
    config = replace(config, model=replace(RANDOM, architecture=TWO_SIZES), **changes)
    assert any(line in found for _, lines in asked(config, ()) for found in lines)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mesh": MeshConfig(sequence=2)}, "--mesh.sequence is 2: an indexer reads whole rows. Set"),
        ({"mesh": MeshConfig(stage=2)}, "--mesh.stage is 2: some layers reuse the choice of an earlier"),
        ({"rollout": RolloutConfig(cache_dtype="int8")}, "cache_dtype int8 rounds the keys of the indexer."),
        ({"rollout": SERVED}, "--rollout.engine is sglang: models with latent attention"),
    ],
)
def test_what_an_indexer_excludes(changes, line, config):
    config = replace(config, model=replace(RANDOM, architecture=INDEXED))
    assert not any(lines for _, lines in asked(config, ()))
    found = [line for _, lines in asked(replace(config, **changes), ()) for line in lines]
    assert any(line in one for one in found), found


@pytest.mark.parametrize(("key", "value", "way"), [("top_k", 1, "above"), ("min_p", 1.0, "below")])
def test_a_filter_that_keeps_one_token_is_greedy(config, key, value, way):
    problem = f"{key} is 1: all 4 responses to a prompt would be the same. Set it {way} 1, to 0 for all"
    sampling = SamplingConfig(**{key: value})
    sampled = replace(config, responses_per_prompt=4, rollout=RolloutConfig(sampling=sampling))
    assert any(f"--rollout.sampling.{problem}" in line for _, lines in asked(sampled, ()) for line in lines)
    [(field, message)] = EvalConfig(every=1, samples=4, sampling=sampling).problems()
    assert f"{field} {message}".startswith(f"sampling.{problem}")
    assert not list(EvalConfig(every=1, samples=1, sampling=sampling).problems())


def test_servers_get_no_model_with_code_of_its_own(config):
    config = replace(config, model=replace(RANDOM, architecture=QWEN_1), rollout=SERVED)
    found = [line for _, lines in asked(config, ()) for line in lines]
    assert any("models that other programs run with the code of their folder" in line for line in found)


def test_recurrent_heads_divide_on_each_models_own_mesh(config):
    """The policy has 6 heads on a mesh of one, a reward model on a mesh of four."""
    [rule] = [rule for rule in MODEL if name_of(rule) == "_heads_divide"]
    hybrid = replace(config.model.architecture, layer_kinds=("conv",), num_layers=1, hidden_size=6)
    reward = RewardModelConfig(path="x", mesh=MeshConfig(sequence=4))
    config = replace(config, reward=RewardConfig(models=(reward,)))
    assert not list(rule.problems(config, {POLICY: hybrid, reward_role(0): config.model.architecture}))
    [line] = rule.problems(config, {POLICY: hybrid, reward_role(0): hybrid})
    assert line.startswith("--reward.models.0.mesh.sequence divides the 6 heads of recurrent layers among")


def test_each_key_exists():
    known = {key for algo in algos.ALGOS.values() for key, _ in iter_fields(TrainConfig(algo=algo.config))}
    known |= {key.rpartition(".")[0] for key in known} | {"data.train", "reward.models"}
    missing = {key for rule in RULES for key in rule.keys.split()} - known
    assert not missing


def test_sizes_that_devices_decide_are_asked_with_the_devices(config):
    rest = replace(config, mesh=MeshConfig(fsdp=1, sequence=-1), rollout=RolloutConfig(devices="0:1"))
    sizes = check_on_devices(rest, [SeenDevice(i, 0, "cpu") for i in range(8)])
    assert sizes.mesh.sequence == 8 and sizes.rollout.mesh.sequence == 1 and sizes.critic.mesh is None
    with pytest.raises(ValueError, match=r"--mesh.sequence 6 does not divide a row of 32 tokens"):
        check_on_devices(rest, [SeenDevice(i, 0, "cpu") for i in range(6)])
    strict = replace(config, strict=True, model=replace(config.model, dtype="float32"))
    with pytest.raises(ValueError, match=r"--strict works on one device, and the mesh has 8 \(fsdp 8\): "):
        check_on_devices(strict, jax.devices())
    stages = replace(strict, devices="0:2", mesh=MeshConfig(stage=2))
    with pytest.raises(ValueError, match=r"--strict works on one device, and the mesh has 2 \(stage 2\): "):
        check_on_devices(stages, jax.devices())


def test_the_directory_of_a_run_is_not_a_model_and_its_model_is_named(config, tmp_path):
    """Its config.json, of the recipe, is not read as a model's."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    (run / "config.json").write_text('{"config": {}}')
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    here = replace(config, model=ModelConfig(path=str(folder)))
    runs = {
        "model.path": replace(here, model=ModelConfig(path=str(run))),
        "critic.path": replace(here, algo=ppo.Config(), critic=CriticConfig(path=str(run))),
        "reference.path": replace(here, reference=ReferenceConfig(path=str(run))),
    }
    judged = replace(here, reward=RewardConfig(models=(RewardModelConfig(path=str(run)),)))
    for key, wrong in runs.items():
        assert f"--{key} {run}: a run directory, of a run that has not exported" in refusal(
            check_config, wrong
        )
    (run / "hf").mkdir()
    (run / "hf/config.json").write_text("{}")
    for key, wrong in runs.items():
        line = f"--{key} {run}: a run directory; its trained model is {run}/hf"
        assert refusal(check_config, wrong) == line
    with pytest.raises(UserError, match=rf"^{run}: a run directory; its trained model is {run}/hf$"):
        check_config(judged)
    with pytest.raises(UserError, match=rf"^{run}: a run directory; its trained model is {run}/hf$"):
        ABSTRACT_MODELS.config(str(run))


def test_a_local_model_is_checked_by_its_config_json(config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    here = replace(config, model=ModelConfig(path=str(folder)))
    assert refusal(check_config, here) == (
        f"--model.path {folder}: no config.json in it, so it is not a Hugging Face model folder."
    )
    (folder / "config.json").write_text("{")
    assert f"--model.path {folder}: {folder}/config.json: not JSON" in refusal(check_config, here)
    llama = {"model_type": "llama", "max_position_embeddings": 20}
    (folder / "config.json").write_text(json.dumps(llama))
    assert refusal(check_config, here) == (
        "--max_prompt_tokens 16 + --max_response_tokens 16 is more than the model's 20 positions. "
        "Set --max_response_tokens 4 or less, or --model.yarn_factor 2."
    )
    dynamic = {"factor": 2.0, "rope_theta": 10_000.0}
    for rope in (
        {"rope_scaling": {"type": "dynamic", **dynamic}},
        {"rope_parameters": {"rope_type": "dynamic", **dynamic}},
    ):
        (folder / "config.json").write_text(json.dumps(llama | rope))
        assert '"dynamic" RoPE would go on, but rotates all keys again' in refusal(check_config, here)
    (folder / "config.json").write_text(json.dumps(llama | {"max_position_embeddings": 32}))
    check_config(here)
    assert "more than the model's 31 positions" in refusal(
        *(check_models, config),
        {POLICY: replace(config.model.architecture, max_position=31, num_heads=4)},
    )
