"""Checks of a config: what is accepted, and each message word for word; sizes that follow from it."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refusal

from jaxrl_llm.algos import a_star_po, dpo, gkd, grpo, ppo, reward_model, sft
from jaxrl_llm.algos.config import ClippedConfig
from jaxrl_llm.builders.data import open_loaders
from jaxrl_llm.builders.sizes import derived, mean_context
from jaxrl_llm.config import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    SamplingConfig,
    ScoreConfig,
    SourceConfig,
    TransformerConfig,
    WarmStartConfig,
)
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.models import LoraConfig, RopeConfig
from jaxrl_llm.models.mixer_config import MambaConfig
from jaxrl_llm.recipe.checks import check_config

HYBRID = ModelConfig(
    architecture=TransformerConfig(
        family="nemotron_h", num_layers=3, max_position=64, qk_norm=False, tie_embeddings=False,
        mlp_gate=False, activation="relu2", layer_kinds=("mamba", "attention", "mlp"), one_branch=True,
        rope_layers=(False,) * 3, rope=RopeConfig(theta=1e4), norm_eps=1e-5, mamba=MambaConfig(heads=24),
    ),
    tokenizer="tiny",
)  # fmt: skip


def test_a_sound_config_passes_and_its_folder_is_made(config):
    check_config(config)
    assert list(Path(config.run_dir).iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(responses_per_prompt=1),
            "--responses_per_prompt is 1: grpo compares the responses to one prompt, so it would have "
            "nothing to compare. Set it to 2 or more; 8 is usual.",
        ),
        (
            dict(responses_per_prompt=1, algo=a_star_po.Config()),
            "--responses_per_prompt is 1: optimal_value compares the responses to one prompt, so it would "
            "have nothing to compare. Set it to 2 or more; 8 is usual.",
        ),
        (
            dict(responses_per_prompt=1, algo=ppo.Config(keep_prompts=0.5)),
            "--responses_per_prompt is 1: keep_prompts compares the responses to one prompt, so it would "
            "have nothing to compare. Set it to 2 or more; 8 is usual.",
        ),
        (
            dict(algo=grpo.Config(advantage="gigpo")),
            "--algo.advantage gigpo compares turns, and responses have one. Set --env.name, --env.tools or "
            "--env.gateway.command, with --env.max_turns 2 or more; or --algo.advantage grpo.",
        ),
        (
            dict(responses_per_prompt=1, algo=ppo.Config(dynamic_sampling=True)),
            "--responses_per_prompt is 1: dynamic sampling keeps prompts whose responses have different "
            "rewards, so it would keep none. Set it to 2 or more, or --algo.dynamic_sampling False.",
        ),
        (
            dict(prompts_per_step=3, responses_per_prompt=5, minibatches_per_step=4),
            "--minibatches_per_step is 4: it must divide the 15 trajectories of a step (prompts_per_step x "
            "responses_per_prompt). Set it to 3 or 5.",
        ),
        (
            dict(reward=RewardConfig(weight=0.0, models=(RewardModelConfig(path="rm", weight=0.0),))),
            "--reward.weight is 0 and nothing else rewards, so every reward would be 0. Set a reward model "
            "(--reward.models.0.path FOLDER), an environment (--env.name) or --reward.weight 1.",
        ),
        (
            dict(eval=EvalConfig(every=1, judge="generative")),
            "--eval.judge generative needs a language model that compares: --reward.models.0.path FOLDER "
            "--reward.models.0.kind generative, with --reward.models.0.weight 0 for evaluation alone.",
        ),
        (
            dict(eval=EvalConfig(every=1, judge="exact")),
            "--eval.judge is exact: it must compare two responses; judge(prompt, a, b) of a file does.",
        ),
        (
            dict(algo=reward_model.Config(), eval=EvalConfig(judge="http://host")),
            "--eval.judge compares responses, and reward_model generates none. Set --eval.judge ''.",
        ),
        (
            dict(algo=grpo.Config(kl_coef=0.1), reference=ReferenceConfig(path="/no/such")),
            "--reference.path /no/such: no such folder. Set a Hugging Face folder (config.json and "
            "*.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(
                optim=OptimConfig(store_param_remainders=True), checkpoint=CheckpointConfig(optimizer=False)
            ),
            "--optim.store_param_remainders is True: the rest of each weight is optimizer state, which "
            "--checkpoint.optimizer False does not save. Set one of them the other way.",
        ),
        (
            dict(optim=OptimConfig(init_from="runs/a"), warm_start=WarmStartConfig(steps=1)),
            "--optim.init_from: the SFT warm-up would start with these moments. Set --warm_start.steps 0.",
        ),
        (
            dict(critic=CriticConfig(optim=OptimConfig(ema=0.9))),
            "--critic.optim.ema is 0.9: no critic is exported. Set it to 0.",
        ),
        (
            dict(algo=sft.Config(), ppo_epochs=2),
            "--ppo_epochs is 2: sft learns from a data set, not responses. Set it to 1.",
        ),
        (
            dict(reward=RewardConfig(weight=0.0)),
            "--reward.weight is 0 and nothing else rewards, so every reward would be 0. Set a reward model "
            "(--reward.models.0.path FOLDER), an environment (--env.name) or --reward.weight 1.",
        ),
        (
            dict(algo=gkd.Config()),
            "--algo.teachers is empty: set the Hugging Face folder or hub name of a teacher.",
        ),
        (
            dict(
                algo=gkd.Config(teachers=("a",)), data=DataConfig(train=(SourceConfig("x.jsonl", teacher=1),))
            ),
            "--data.train.0.teacher is 1: algo.teachers has 1, from 0.",
        ),
        (dict(steps=-1), "--steps is -1: it must be at least 0 and at most 2,147,483,647."),
        (dict(seed=2**63), f"--seed is {2**63}: it must be at least 0 and at most 2,147,483,647."),
        (dict(seed=10**5000), "--seed is <int> (int): expected a whole number."),
        (dict(max_runtime=10**400), f"--max_runtime is 1{'0' * 47}...{'0' * 48} (int): expected a number."),
        (
            dict(steps=0),
            "--steps is 0, and so is --warm_start.steps: nothing to train. Set one of them.",
        ),
        (
            dict(prompts_per_step=10**9),
            "--prompts_per_step is 1000000000: it must be at least 1 and at most 1,048,576.",
        ),
        (
            dict(prompts_per_step=2**20, responses_per_prompt=2**16),
            "--prompts_per_step is 1048576: with --responses_per_prompt 65536 a step has 68,719,476,736 "
            "trajectories; it must have at most 16,777,216.",
        ),
        (
            dict(minibatches_per_step=0),
            "--minibatches_per_step is 0: it must be at least 1 and at most 1,048,576.",
        ),
        (dict(max_runtime=-1.0), "--max_runtime is -1.0: it must be at least 0 and at most 1,000,000,000."),
        (
            dict(optim=OptimConfig(learning_rate=float("nan"))),
            "--optim.learning_rate is nan: it must be above 0 and at most 10; 1e-6 is usual for RL, 1e-5 for "
            "SFT.",
        ),
        (
            dict(critic=CriticConfig(optim=OptimConfig(b1=1.0))),
            "--critic.optim.b1 is 1.0: it must be at least 0 and below 1.",
        ),
        (
            dict(max_response_tokens=50),
            "--max_prompt_tokens 16 + --max_response_tokens 50 is more than the model's 64 positions. "
            "Set --max_response_tokens 48 or less, or --model.yarn_factor 2.",
        ),
        (
            dict(tokens_per_device=31),
            "--tokens_per_device is 31: less than one row of 32 tokens (max_prompt_tokens + "
            "max_response_tokens). Set --tokens_per_device 32 or more.",
        ),
        (
            dict(score=ScoreConfig(31)),
            "--score.tokens_per_device is 31: less than one row of 32 tokens (max_prompt_tokens + "
            "max_response_tokens). Set --score.tokens_per_device 32 or more.",
        ),
        (
            dict(mesh=MeshConfig(sequence=5)),
            "--mesh.sequence 5 does not divide a row of 32 tokens (max_prompt_tokens + max_response_tokens) "
            "into two chunks a device. Set --max_response_tokens 24.",
        ),
        (
            dict(mesh=MeshConfig(tensor=3, sequence=4, sequence_parallel="ulysses")),
            "--mesh.sequence_parallel ulysses divides the 16 query heads among tensor x sequence = 12 "
            "devices, and 16 is not a multiple of 12. Set --mesh.sequence_parallel ring, or a smaller "
            "--mesh.sequence.",
        ),
        (
            dict(model=HYBRID, mesh=MeshConfig(tensor=2, sequence=8)),
            "--mesh.sequence divides the 24 heads of recurrent layers among tensor x sequence = 16 devices, "
            "and 24 is not a multiple of 16. Set a smaller --mesh.sequence or --mesh.tensor.",
        ),
        (
            dict(model=ModelConfig()),
            "--model.path is empty: set a folder or hub name, or model.architecture in the recipe.",
        ),
        (
            dict(model=ModelConfig(architecture=TransformerConfig())),
            "--model.tokenizer is empty: random weights have no tokenizer. "
            'Set a folder, a hub name or "tiny".',
        ),
        (
            dict(model=ModelConfig(path="/no/such")),
            "--model.path /no/such: no such folder. Set a Hugging Face folder (config.json and "
            "*.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(model=ModelConfig(path="model.gguf")),
            "--model.path model.gguf: no such file. Set a Hugging Face folder (config.json and "
            "*.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(model=ModelConfig(path="https://huggingface.co/org/m")),
            "--model.path https://huggingface.co/org/m: no such folder. A model of the hub is written org/m.",
        ),
        (
            dict(model=ModelConfig(path="org/m:Q4_K_M")),
            "--model.path org/m:Q4_K_M: no such folder. A model of the hub is written org/m/FILE.gguf, by "
            "the file of Q4_K_M.",
        ),
        (
            dict(data=DataConfig()),
            "--data.path is empty: set a file or folder, hub:OWNER/NAME, task:NAME (generated) or gym:NAME, "
            "or data.train in the recipe.",
        ),
        (
            dict(model=ModelConfig(path="x" * 5000)),
            f"--model.path {'x' * 48}...{'x' * 48}: no such folder. Set a Hugging Face folder "
            "(config.json and *.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(model=ModelConfig(path="~no_such_user/m")),
            "--model.path ~no_such_user/m: no such folder. Set a Hugging Face folder (config.json and "
            "*.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(env=EnvConfig(tool_timeout=0.0)),
            "--env.tool_timeout is 0.0: it must be above 0 and at most 1,000,000; 30 is usual.",
        ),
        (
            dict(env=EnvConfig(max_calls=0)),
            "--env.max_calls is 0: it must be at least 1 and at most 10000; 16 is usual.",
        ),
        (
            dict(env=EnvConfig(toolbox=ToolsConfig(python=SandboxConfig(seconds=math.nan)))),
            "--env.toolbox.python.seconds is nan: it must be at least 0.01 and at most 3600.",
        ),
        (
            dict(reward=RewardConfig(workers=0)),
            "--reward.workers is 0: it must be at least 1 and at most 1024; one a processor is usual.",
        ),
        (
            dict(reward=RewardConfig(models=(RewardModelConfig(path="m", mean=2e6),))),
            "--reward.models.0.mean is 2000000.0: it must be at least -1,000,000 and at most 1,000,000.",
        ),
        (dict(run_dir=""), "--run_dir is empty. Set --run_dir to a folder that can be written."),
        (dict(steps="3"), "--steps is '3' (str): expected a whole number."),
        (dict(steps=True), "--steps is True (bool): expected a whole number."),
        (
            dict(env=MeshConfig),
            "--env is <class 'jaxrl_llm.sharding.config.MeshConfig'> (type): expected EnvConfig.",
        ),
        (
            dict(data=DataConfig(train=[])),
            "--data.train is [] (list): expected any number of values, each SourceConfig.",
        ),
        (dict(algo=ClippedConfig()), "--algo: ClippedConfig of no algorithm; make it with NAME.Config(...)."),
        (
            dict(data=DataConfig(overlong="drop")),
            "--data.overlong is 'drop' (str): expected one of filter, cut, fail.",
        ),
    ],
)
def test_what_cannot_work_names_the_key_and_the_fix(config, change, message):
    assert refusal(check_config, replace(config, **change)) == message


def test_a_config_in_the_place_of_another_is_refused(config):
    message = refusal(check_config, replace(config, optim=MeshConfig()))
    assert message.startswith("--optim is MeshConfig(data=1, ")
    assert message.endswith(" (MeshConfig): expected OptimConfig.")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingConfig(top_p=0.0), "top_p is 0.0: it must be above 0 and at most 1; 1.0 keeps all tokens."),
        (
            SamplingConfig(temperature=0.0),
            "temperature is 0: all 8 responses to a prompt would be the same. Set it above 0 (1.0 is usual "
            "for training, 0.6 for evaluation) or ask for 1 response.",
        ),
    ],
)
def test_sampling_that_cannot_be(config, sampling, message):
    sampled = replace(config, rollout=replace(config.rollout, sampling=sampling))
    assert refusal(check_config, sampled) == f"--rollout.sampling.{message}"
    evaluated = replace(config, eval=replace(config.eval, every=1, samples=8, sampling=sampling))
    assert refusal(check_config, evaluated) == f"--eval.sampling.{message}"


def test_a_greedy_group_is_none_where_no_responses_are_sampled(config):
    greedy = SamplingConfig(temperature=0.0)
    check_config(replace(config, algo=sft.Config(), rollout=replace(config.rollout, sampling=greedy)))


def test_an_evaluation_needs_held_out_rows_and_takes_all_where_there_are_few(config, tmp_path, caplog):
    few = DataConfig(train=(SourceConfig(path="task:arithmetic", options='{"size": 20}'),))
    config = replace(config, data=few, eval=EvalConfig(every=1))
    held_out = open_loaders(config, make_tokenizer(), {})["eval"]
    assert len(held_out.eval_set(config.eval.prompts)) == 20
    assert "--eval.prompts 64: 20 prompts are used; the held-out data has 20 rows" in caplog.text
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    without = replace(config, data=DataConfig(path=str(tmp_path / "a.jsonl")))
    assert refusal(open_loaders, without, make_tokenizer(), {}) == (
        "--eval.every is 1: no held-out data to evaluate on. Hold out a part of the training rows "
        "(--data.holdout 0.1), give some (--data.eval_path FILE), or set --eval.every 0, for no evaluation."
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataConfig(path="a.jsonl", eval_path="b.jsonl", holdout=0.1),
            "--data.holdout is 0.1: it must be 0 if eval_path is set (b.jsonl).",
        ),
        (
            DataConfig(path="task:arithmetic", holdout=200),
            "--data.holdout is 200: it must be 0 for generated data, which has a held-out tenth.",
        ),
        (
            DataConfig(path="a.jsonl", holdout=1.5),
            "--data.holdout is 1.5: it must be a number of rows, or a fraction below 1.",
        ),
    ],
)
def test_what_cannot_be_held_out(config, data, message):
    assert refusal(check_config, replace(config, data=data)) == message


def test_generated_data_has_no_epochs(config):
    message = "--epochs is 2: task:arithmetic is generated, without an end. Set --steps N --epochs 0."
    assert refusal(check_config, replace(config, epochs=2.0)) == message
    check_config(replace(config, data=DataConfig(path="a.jsonl"), epochs=2.0, steps=0))


def test_huge_sizes_are_refused_at_once(config):
    began = time.process_time()
    huge = replace(config, mesh=MeshConfig(sequence=2**20), max_response_tokens=2**24 - 1)
    assert "does not divide a row" in refusal(check_config, huge)
    steps = replace(config, prompts_per_step=2**20 - 3, responses_per_prompt=16, minibatches_per_step=2**20)
    assert "Set it to 16 or 1048573." in refusal(check_config, steps)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang"}, "--rollout.engine is sglang: it needs either --rollout.servers"),
        (
            {"engine": "sglang", "launch": 1, "servers": ("http://127.0.0.1:1",)},
            "--rollout.engine is sglang: it needs either",
        ),
        ({"engine": "sglang", "servers": ("a:1",)}, "--rollout.servers is wrong: 'a:1' is no address"),
        (
            {"engine": "sglang", "servers": ("http://10.1.2.3:1",)},
            "--rollout.servers is wrong: http://10.1.2.3:1 is plain http to another host, and",
        ),
        (
            {"engine": "sglang", "servers": ("@none.txt",)},
            "--rollout.servers is @none.txt: it must be a text",
        ),
        (
            {"engine": "sglang", "servers": ("@a.txt", "http://127.0.0.1:1")},
            "--rollout.servers is @a.txt http://127.0.0.1:1: it must be addresses, or one @file",
        ),
    ],
)
def test_servers_that_cannot_be(config, settings, message):
    chosen = replace(config, rollout=replace(config.rollout, **settings))
    assert refusal(check_config, chosen).startswith(message)


def test_addresses_in_a_file_are_checked_too(config, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("http://127.0.0.1:1\nhost:1\n")
    chosen = replace(config, rollout=replace(config.rollout, engine="sglang", servers=(f"@{file}",)))
    assert refusal(check_config, chosen) == (
        f"--rollout.servers is @{file}: 'host:1' is no address; write http://host:port."
    )
    alone = replace(chosen, servers=replace(chosen.servers, colocated=True, flags="--device cpu"))
    file.write_text("http://127.0.0.1:1\n")
    assert refusal(check_config, alone).startswith("--servers.colocated needs servers that are started here")


def test_drafts_for_conversations_need_few_slots(config):
    """Without conversations the slots shrink to them."""
    rollout = replace(config.rollout, slots=64, draft_tokens=7)
    check_config(replace(config, rollout=rollout))
    tools = replace(config, env=EnvConfig(tools=("calculator",)), rollout=rollout)
    check_config(replace(tools, rollout=replace(rollout, slots=8)))
    assert refusal(check_config, tools) == (
        "--rollout.draft_tokens 7: conversations keep all 64 slots to the end, and drafts are for 8 at most. "
        "Set --rollout.slots 8, --rollout.draft_slots 64 or --rollout.draft_tokens 0."
    )


def test_an_interpreter_for_servers_must_exist(config):
    chosen = replace(config, rollout=replace(config.rollout, engine="sglang", launch=1))
    check_config(chosen)
    named = replace(chosen, servers=replace(chosen.servers, devices=("0", "1")))
    assert refusal(check_config, named) == "--servers.devices names 2, --rollout.launch is 1."
    missing = replace(chosen, servers=replace(chosen.servers, python="/no/python"))
    assert refusal(check_config, missing) == "--servers.python is '/no/python': no such program."
    relayed = replace(chosen, servers=replace(chosen.servers, transport="group", python="/no/python"))
    assert refusal(check_config, relayed) == "--servers.python is '/no/python': no such program."


def test_weights_in_8_bits_need_servers_in_bfloat16_and_a_correction(config):
    correction = replace(config.algo.correction, weight="token")
    rollout = replace(config.rollout, engine="sglang", launch=1, dtype="bfloat16")
    servers = replace(config.servers, quantization="fp8")
    good = replace(config, algo=replace(config.algo, correction=correction), rollout=rollout, servers=servers)
    check_config(good)
    key = "--servers.quantization fp8"
    assert refusal(check_config, replace(good, rollout=replace(config.rollout, dtype="bfloat16"))) == (
        f"{key} is for SGLang servers: add --rollout.engine sglang, or set --servers.quantization none."
    )
    assert refusal(check_config, replace(good, algo=config.algo)) == (
        f"{key}: responses are of rounded weights, and without a correction the policy learns as if they "
        "were its own. Set --algo.correction.weight token (truncated importance sampling), with an algorithm "
        "that has it (docs/algorithms.md)."
    )
    for change, message in (
        (dict(rollout=replace(rollout, dtype="float32")), "Set --rollout.dtype bfloat16."),
        (dict(lora=LoraConfig(rank=8)), "Set --servers.quantization none, or --lora.rank 0."),
        (
            dict(servers=replace(servers, transport="ipc")),
            "has no --servers.transport ipc: set disk, http or group.",
        ),
        (dict(strict=True), "Set --rollout.engine native."),
    ):
        message_of = refusal(check_config, replace(good, **change))
        assert message in message_of, message_of


def test_memory_is_shared_with_servers_that_are_started_here_alone(config):
    rollout = replace(config.rollout, engine="sglang", servers=("http://127.0.0.1:1",))
    shared = replace(config, rollout=rollout, servers=replace(config.servers, transport="ipc"))
    assert refusal(check_config, shared).startswith(
        "--servers.transport ipc shares the memory of GPUs with servers"
    )


def test_several_problems_are_told_at_once(config):
    message = refusal(check_config, replace(config, responses_per_prompt=1, tokens_per_device=8))
    first, *problems = message.splitlines()
    assert first == "the config has several problems:"
    assert [line.split(" is ")[0] for line in problems] == [
        "  - --responses_per_prompt",
        "  - --tokens_per_device",
    ]


def test_sft_needs_no_group(config):
    check_config(replace(config, algo=sft.Config(), responses_per_prompt=1))


def test_a_hub_name_is_no_missing_folder(config, tmp_path, monkeypatch):
    check_config(replace(config, model=ModelConfig(path="Qwen/Qwen3-0.6B")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "no such folder" in refusal(check_config, replace(config, model=ModelConfig(path="models/qwen")))
    assert "no such folder" in refusal(check_config, replace(config, model=ModelConfig(path="./qwen")))


def test_a_run_dir_that_is_a_file_is_refused(config, tmp_path):
    (tmp_path / "taken").write_text("")
    for run_dir in (tmp_path / "taken", tmp_path / "taken" / "below"):
        message = refusal(check_config, replace(config, run_dir=str(run_dir)))
        assert message.startswith(f"--run_dir {run_dir}: cannot be written (")
        assert message.endswith("Set --run_dir to a folder that can be written.")


def test_nothing_of_this_starts_a_jax_backend(tmp_path):
    code = (
        "import sys\nfrom jax._src import xla_bridge\nfrom jaxrl_llm.recipe.load import from_command_line\n"
        "from jaxrl_llm.builders.sizes import derived\nfrom jaxrl_llm.recipe.dump import dump\n"
        "c = from_command_line(sys.argv[1:]).config\n"
        "dump(c), derived(c, 8)\nprint(xla_bridge.backends_are_initialized(), 'matplotlib' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, "--config", "grpo_tiny.py", "--run_dir", str(tmp_path)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


# -- derived numbers


def test_derived_numbers_by_hand(config):
    config = replace(
        config,
        steps=10,
        prompts_per_step=6,
        responses_per_prompt=4,
        minibatches_per_step=2,
        tokens_per_device=100,
        share_prefixes=False,
    )
    assert derived(config, 4) == {
        "devices": 4,
        "trajectories_per_step": 24,
        "trajectories_per_update": 12,
        "updates": 20,
        "tokens_per_row": 32,
        "rows_per_microbatch": 12,  # 3 rows of 32 in 100 tokens, on each of 4 devices
        "tokens_per_microbatch": 384,
        "microbatches_per_update_at_most": 1,
        "rows_per_scored_microbatch": 12,
    }
    assert derived(replace(config, ppo_epochs=3), 4) == {**derived(config, 4), "updates": 60}
    uneven = derived(replace(config, minibatches_per_step=4), 1)  # 3 rows of 32 in 100 tokens
    assert uneven["trajectories_per_update"] == 6  # on average: 8 of two prompts, or 4 of one
    assert uneven["microbatches_per_update_at_most"] == 3
    score = lambda tokens: derived(replace(config, score=ScoreConfig(tokens)), 4)[
        "rows_per_scored_microbatch"
    ]
    assert score(64) == 8 and score(10_000) == 24  # a step has 24 trajectories
    split_rows = replace(config, mesh=MeshConfig(tensor=2, sequence=2), tokens_per_device=16)
    assert derived(split_rows, 8)["rows_per_microbatch"] == 2  # one row of 32 over 2 x 16 tokens, 2 replicas
    rest_is_sequence = MeshConfig(fsdp=2, sequence=-1)
    assert derived(replace(split_rows, mesh=rest_is_sequence), 8)["rows_per_microbatch"] == 4  # 64 tokens
    roomy = replace(config, tokens_per_device=10_000)
    assert derived(roomy, 8)["rows_per_microbatch"] == 16  # 12 trajectories need no more
    assert derived(replace(config, algo=sft.Config()), 4)["trajectories_per_step"] == 6


def test_rows_for_shared_prompts_by_hand(config):
    """Prompts of 24 tokens and responses of 8: 32 + 3 (8 + 1) = 59 tokens for the four to a prompt."""
    sizes = {"max_prompt_tokens": 24, "max_response_tokens": 8, "tokens_per_device": 200}
    config = replace(config, prompts_per_step=6, responses_per_prompt=4, **sizes)
    numbers = lambda devices=1, **changes: tuple(
        derived(replace(config, **changes), devices)[name]
        for name in ("tokens_per_row", "rows_per_microbatch", "microbatches_per_update_at_most")
    )
    assert numbers() == (64, 3, 2)  # a multiple of 16; one row for each prompt
    assert numbers(devices=4) == (64, 8, 1)
    assert numbers(minibatches_per_step=3) == (64, 2, 1)  # 2 prompts
    assert numbers(minibatches_per_step=4) == (64, 2, 1)  # 2 prompts in two of them, 1 in the others
    mixed = {"minibatches_of": "responses"}
    assert numbers(minibatches_per_step=4, **mixed) == (64, 3, 2)  # 6 trajectories, maybe of all 6 prompts
    assert numbers(minibatches_per_step=8) == (64, 3, 1)  # 3 trajectories; more mini-batches than prompts
    assert numbers(tokens_per_device=50) == (32, 1, 24)  # a row is no longer than the budget
    assert numbers(tokens_per_device=63) == (32, 1, 24)
    assert numbers(score=ScoreConfig(40)) == (32, 6, 4)
    assert numbers(responses_per_prompt=8, tokens_per_device=110) == (96, 1, 6)  # 32 + 7 x 9 = 95
    assert numbers(responses_per_prompt=9, tokens_per_device=110) == (96, 1, 12)  # 104: 8 of the 9 fit
    assert numbers(responses_per_prompt=1) == (32, 6, 1)
    for off in ({"share_prefixes": False}, {"algo": sft.Config()}):
        assert numbers(**off)[0] == 32
    assert numbers(mesh=MeshConfig(fsdp=1, sequence=2), tokens_per_device=100, devices=2)[0] == 64
    assert numbers(mesh=MeshConfig(fsdp=1, sequence=3), tokens_per_device=100, devices=3)[0] == 96
    assert config.row_tokens == 64 and replace(config, algo=dpo.Config()).row_tokens == 64


@pytest.mark.parametrize(
    ("prompt", "response", "changes", "keys"),
    [
        (1024, 64, {}, (1024 * 512 + 8 * 64 * (1024 + 32)) / (1024 + 8 * 64)),  # 693
        (512, 1024, {"tokens_per_device": 16_384}, (512 * 256 + 8 * 1024 * 1024) / (512 + 8 * 1024)),  # 979
        (4, 4, {"tokens_per_device": 16}, (4 * 4 * 2 + 32 * 6) / (4 * 4 + 32)),  # two responses a row of 16
        (1024, 64, {"share_prefixes": False}, 1088 / 2),
        (1024, 64, {"responses_per_prompt": 1}, 1088 / 2),
        (1024, 64, {"algo": sft.Config()}, 1088 / 2),
    ],
)
def test_mean_keys_of_a_token_by_hand(config, prompt, response, changes, *, keys):
    """A prompt's tokens read half of it, a response's all of the prompt and half of their response."""
    sizes = {"max_prompt_tokens": prompt, "max_response_tokens": response, "responses_per_prompt": 8}
    config = replace(config, **{"tokens_per_device": 8192, **sizes, **changes})
    assert mean_context(config) == pytest.approx(keys)
