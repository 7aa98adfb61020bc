"""Overrides and checks: what is accepted, and each message word for word."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl_llm.algos import grpo, sft
from jaxrl_llm.algos.clipped import ClippedConfig
from jaxrl_llm.config import (
    DataConfig,
    EnvConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RewardModelConfig,
    SamplingConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
    derived,
    describe_run,
    dump,
)
from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.checks import check, check_model
from jaxrl_llm.recipe.overrides import leaves, override, split


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return TrainConfig(
        run_dir=str(tmp_path / "run"),
        max_prompt_tokens=16,
        max_response_tokens=16,
        model=ModelConfig(architecture=TransformerConfig(max_position=64), tokenizer="tiny"),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"), SourceConfig(path="b.jsonl"))),
    )


def changed(config, line: str) -> TrainConfig:
    return override(config, split(line.split()))


def refusal(action, *args) -> str:
    with pytest.raises(UserError) as caught:
        action(*args)
    return str(caught.value)


# -- overrides


def test_a_value_reaches_its_field_in_both_spellings_and_the_last_one_wins(config):
    after = changed(config, "--steps 7 --steps=9 --optim.learning_rate 3e-4 --mesh.fsdp -1 --run_dir /x=y")
    assert (after.steps, after.optim.learning_rate, after.mesh.fsdp, after.run_dir) == (9, 3e-4, -1, "/x=y")
    assert after.optim.b1 == config.optim.b1
    assert after.model is config.model


def test_every_kind_of_field_is_set_from_text(config):
    line = "--data.shuffle false --algo.dual_clip 3 --algo.kl k1 --data.train.1.weight 2 --model.remat full"
    after = changed(config, line)
    assert (after.data.shuffle, after.algo.dual_clip, after.algo.kl) == (False, 3.0, "k1")
    assert [source.weight for source in after.data.train] == [1.0, 2.0]
    assert after.data.train[0] is config.data.train[0]
    assert changed(after, "--algo.dual_clip None").algo.dual_clip is None
    stops = override(
        config, split(["--eval.sampling.stop", "a b", "c", "--eval.sampling.stop_tokens", "-1", "5"])
    )
    assert (stops.eval.sampling.stop, stops.eval.sampling.stop_tokens) == (("a b", "c"), (-1, 5))
    assert override(config, [("eval.sampling.stop", [])]).eval.sampling.stop == ()
    assert override(config, split(["--data.train.0.options=--x 1"])).data.train[0].options == "--x 1"
    spaced = override(config, split(["--sglang.flags", "--tp 2 --device cpu", "--steps", "3"]))
    assert (spaced.sglang.flags, spaced.steps) == ("--tp 2 --device cpu", 3)
    assert changed(config, "--model.architecture.rope.theta 5").model.architecture.rope.theta == 5.0


def test_a_level_may_be_left_out_where_it_is_clear_and_hyphens_are_underscores(config):
    after = changed(config, "--rollout.temperature 0.7 --eval.top_p 0.5 --prompts-per-step 3")
    assert after.rollout.sampling.temperature == 0.7
    assert (after.eval.sampling.top_p, after.prompts_per_step) == (0.5, 3)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("stpes", "steps"),
        ("lr", "optim.learning_rate"),
        ("learning_rate", "optim.learning_rate"),
        ("temperature", "rollout.sampling.temperature"),
        ("rollout.temprature", "rollout.sampling.temperature"),
        ("optim.temperature", "rollout.sampling.temperature"),
        ("responses_per_prompts", "responses_per_prompt"),
        ("algo.clip", "algo.clip_low"),
        ("data.train.1.wieght", "data.train.1.weight"),
        ("model.archtecture.hidden_size", "model.architecture.hidden_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(config, typed, nearest):
    message = refusal(override, config, [(typed, ["1"])])
    assert message == f"--{typed}: unknown key. Did you mean --{nearest}? --help lists all keys."


def test_keys_that_are_no_fields(config):
    assert refusal(changed, config, "--mesh 4") == (
        "--mesh: unknown key. mesh is a group; set its fields: "
        "--mesh.data, --mesh.fsdp, --mesh.sequence, --mesh.sequence_parallel, --mesh.tensor."
    )
    assert refusal(changed, config, "--data.eval.0.path x") == (
        "--data.eval.0.path: unknown key. data.eval is not set in this recipe, so it has no fields; "
        "set it in the recipe file."
    )
    assert refusal(changed, config, "--data.eval x") == (
        "--data.eval has fields of its own; set it in the recipe file."
    )
    assert refusal(split, ["steps", "4"]) == (
        "'steps' has no key before it. Write --key value, such as --steps 100."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps 1.5", "--steps: expected a whole number, got '1.5'."),
        ("--steps ten", "--steps: expected a whole number, got 'ten'."),
        ("--steps 1 2", "--steps: expected a whole number, got '1 2'."),
        ("--steps", "--steps: expected a whole number, got nothing."),
        ("--optim.learning_rate fast", "--optim.learning_rate: expected a number, got 'fast'."),
        ("--data.shuffle maybe", "--data.shuffle: expected True or False, got 'maybe'."),
        ("--algo.kl k4", "--algo.kl: expected one of k1, k2, k3, abs, k1+, k3+, got 'k4'."),
        ("--algo.dual_clip x", "--algo.dual_clip: expected a number or None, got 'x'."),
        (
            "--eval.sampling.stop_tokens 1 x",
            "--eval.sampling.stop_tokens: expected any number of values, each a whole number, got '1 x'.",
        ),
    ],
)
def test_a_value_of_the_wrong_type_names_key_value_and_type(config, line, message):
    assert refusal(changed, config, line) == message


def test_a_value_that_its_part_refuses(config):
    message = "--rollout.slots is 0: it must be at least 1 and at most 65536; 64 is usual."
    assert refusal(check, changed(config, "--rollout.slots 0")) == message


def test_leaves_lists_every_field_once(config):
    keys = [key for key, _ in leaves(config)]
    assert len(keys) == len(set(keys))
    assert {"run_dir", "steps", "seed", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.sequence"} <= set(keys)
    assert {"checkpoint.every", "model.path", "data.train.1.path", "model.architecture.rope.theta"} <= set(
        keys
    )


# -- checks


def test_a_sound_config_passes_and_its_folder_is_made(config):
    check(config)
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
            dict(prompts_per_step=3, responses_per_prompt=5, minibatches_per_step=4),
            "--minibatches_per_step 4 does not divide the 15 trajectories of a step (prompts_per_step x "
            "responses_per_prompt). Set it to 3 or 5.",
        ),
        (dict(steps=-1), "--steps is -1: it must be at least 0."),
        (dict(minibatches_per_step=0), "--minibatches_per_step is 0: it must be at least 1."),
        (dict(max_runtime=-1.0), "--max_runtime is -1.0: it must be at least 0."),
        (
            dict(optim=OptimConfig(learning_rate=0.0)),
            "--optim.learning_rate is 0.0: it must be positive; 1e-6 is usual for RL, 1e-5 for sft.",
        ),
        (
            dict(optim=OptimConfig(learning_rate=float("nan"))),
            "--optim.learning_rate is nan: it must be positive; 1e-6 is usual for RL, 1e-5 for sft.",
        ),
        (
            dict(max_response_tokens=50),
            "--max_prompt_tokens 16 + --max_response_tokens 50 is more than the model's 64 positions. "
            "Set --max_response_tokens 48 or less.",
        ),
        (
            dict(tokens_per_device=31),
            "--tokens_per_device is 31: less than one row of 32 tokens (max_prompt_tokens + "
            "max_response_tokens). Set --tokens_per_device 32 or more.",
        ),
        (
            dict(mesh=MeshConfig(sequence=5)),
            "--mesh.sequence 5 does not divide a row of 32 tokens (max_prompt_tokens + max_response_tokens) "
            "into two chunks a device. Set --max_response_tokens 24.",
        ),
        (
            dict(mesh=MeshConfig(tensor=3, sequence=4, sequence_parallel="ulysses")),
            "--mesh.sequence_parallel ulysses divides the 16 query heads among tensor x sequence = 12 "
            "devices, which does not come out even. Set --mesh.sequence_parallel ring, or a smaller "
            "--mesh.sequence.",
        ),
        (
            dict(model=ModelConfig()),
            "--model.path is empty: set a folder or hub name, or model.architecture in the recipe.",
        ),
        (
            dict(model=ModelConfig(architecture=TransformerConfig())),
            '--model.tokenizer is empty: random weights bring none. Set a folder, a hub name or "tiny".',
        ),
        (
            dict(model=ModelConfig(path="/no/such")),
            "--model.path /no/such: no such folder. Set a Hugging Face folder (config.json and "
            "*.safetensors) or a hub name such as Qwen/Qwen3-0.6B.",
        ),
        (
            dict(data=DataConfig()),
            "--data.path is empty: set a file or folder, hub:OWNER/NAME, task:NAME (generated) or gym:NAME, "
            "or data.train in the recipe.",
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
            dict(reward=RewardConfig(models=(RewardModelConfig(path="m", scale=0.0),))),
            "--reward.models.0.scale is 0.0: it must be at least 1e-06 and at most 1,000,000.",
        ),
        (dict(run_dir=""), "--run_dir is empty. Set --run_dir to a folder that can be written."),
        (dict(steps="3"), "--steps is '3' (str): expected a whole number."),
        (dict(steps=True), "--steps is True (bool): expected a whole number."),
        (
            dict(data=DataConfig(overlong="drop")),
            "--data.overlong is 'drop' (str): expected one of filter, cut, fail.",
        ),
    ],
)
def test_what_cannot_work_names_the_key_and_the_fix(config, change, message):
    assert refusal(check, replace(config, **change)) == message


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
    assert refusal(check, sampled) == f"--rollout.sampling.{message}"
    evaluated = replace(config, eval=replace(config.eval, every=1, samples=8, sampling=sampling))
    assert refusal(check, evaluated) == f"--eval.sampling.{message}"


def test_a_greedy_group_is_none_where_no_responses_are_sampled(config):
    greedy = SamplingConfig(temperature=0.0)
    check(replace(config, algo=sft.Config(), rollout=replace(config.rollout, sampling=greedy)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang"}, "--rollout.engine is sglang: it needs either --rollout.servers"),
        (
            {"engine": "sglang", "launch": 1, "servers": ("http://127.0.0.1:1",)},
            "--rollout.engine is sglang: it needs either",
        ),
        ({"launch": 1}, "--rollout.launch is for SGLang servers: add --rollout.engine sglang."),
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
        ({"engine": "sglang", "launch": -1}, "--rollout.launch is -1: it must be at least 0"),
    ],
)
def test_servers_that_cannot_be(config, settings, message):
    chosen = replace(config, rollout=replace(config.rollout, **settings))
    assert refusal(check, chosen).startswith(message)


def test_addresses_in_a_file_are_checked_too(config, tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("http://127.0.0.1:1\nhost:1\n")
    chosen = replace(config, rollout=replace(config.rollout, engine="sglang", servers=(f"@{file}",)))
    message = f"--rollout.servers is @{file}: 'host:1' is no address; write http://host:port."
    assert refusal(check, chosen) == message
    alone = replace(chosen, sglang=replace(chosen.sglang, colocated=True, flags="--device cpu"))
    file.write_text("http://127.0.0.1:1\n")
    assert refusal(check, alone).startswith("--sglang.colocated needs servers that are started here")


def test_an_interpreter_for_servers_must_exist(config):
    chosen = replace(config, rollout=replace(config.rollout, engine="sglang", launch=1))
    check(chosen)
    named = replace(chosen, sglang=replace(chosen.sglang, devices=("0", "1")))
    assert refusal(check, named) == "--sglang.devices names 2, --rollout.launch is 1."
    missing = replace(chosen, sglang=replace(chosen.sglang, python="/no/python"))
    assert refusal(check, missing) == "--sglang.python is '/no/python': no such program."
    relayed = replace(chosen, sglang=replace(chosen.sglang, transport="group", relay_python="/no/python"))
    assert refusal(check, relayed) == "--sglang.relay_python is '/no/python': no such program."


def test_memory_is_shared_with_servers_that_are_started_here_alone(config):
    rollout = replace(config.rollout, engine="sglang", servers=("http://127.0.0.1:1",))
    shared = replace(config, rollout=rollout, sglang=replace(config.sglang, transport="ipc"))
    assert refusal(check, shared).startswith("--sglang.transport ipc shares the memory of GPUs with servers")


def test_several_problems_are_told_at_once(config):
    message = refusal(check, replace(config, responses_per_prompt=1, tokens_per_device=8))
    first, *problems = message.splitlines()
    assert first == "the config has several problems:"
    assert [line.split(" is ")[0] for line in problems] == [
        "  - --responses_per_prompt",
        "  - --tokens_per_device",
    ]


def test_sft_needs_no_group(config):
    check(replace(config, algo=sft.Config(), responses_per_prompt=1))


def test_a_local_model_is_checked_by_its_config_json(config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    here = replace(config, model=ModelConfig(path=str(folder)))
    assert refusal(check, here) == (
        f"--model.path {folder}: no config.json in it, so it is no Hugging Face model folder."
    )
    (folder / "config.json").write_text("{")
    assert f"--model.path {folder}: {folder}/config.json is not JSON" in refusal(check, here)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    assert refusal(check, here) == (
        "--max_prompt_tokens 16 + --max_response_tokens 16 is more than the model's 20 positions. "
        "Set --max_response_tokens 4 or less."
    )
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 32}))
    check(here)
    assert "more than the model's 31 positions" in refusal(
        check_model, config, MeshConfig(fsdp=8).sizes, 31, 4
    )


def test_a_hub_name_is_no_missing_folder(config, tmp_path, monkeypatch):
    check(replace(config, model=ModelConfig(path="Qwen/Qwen3-0.6B")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "no such folder" in refusal(check, replace(config, model=ModelConfig(path="models/qwen")))
    assert "no such folder" in refusal(check, replace(config, model=ModelConfig(path="./qwen")))


def test_a_run_dir_that_is_a_file_is_refused(config, tmp_path):
    (tmp_path / "taken").write_text("")
    for run_dir in (tmp_path / "taken", tmp_path / "taken" / "below"):
        message = refusal(check, replace(config, run_dir=str(run_dir)))
        assert message.startswith(f"--run_dir {run_dir}: cannot be written (")
        assert message.endswith("Set --run_dir to a folder that can be written.")


def test_nothing_of_this_starts_a_jax_backend(tmp_path):
    code = (
        "import sys\nfrom jax._src import xla_bridge\nfrom jaxrl_llm.recipe.load import from_command_line\n"
        "from jaxrl_llm.config import dump, derived\nc = from_command_line(sys.argv[1:]).config\n"
        "dump(c), derived(c, 8)\nprint(xla_bridge.backends_are_initialized(), 'matplotlib' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, "--config", "grpo_tiny.py", "--run_dir", str(tmp_path)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


# -- derived numbers, dump, secrets


def test_derived_numbers_by_hand(config):
    config = replace(
        config,
        steps=10,
        prompts_per_step=6,
        responses_per_prompt=4,
        minibatches_per_step=2,
        tokens_per_device=100,
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
    }
    split_rows = replace(config, mesh=MeshConfig(tensor=2, sequence=2), tokens_per_device=16)
    assert derived(split_rows, 8)["rows_per_microbatch"] == 2  # one row of 32 over 2 x 16 tokens, 2 replicas
    rest_is_sequence = MeshConfig(fsdp=2, sequence=-1)
    assert derived(replace(split_rows, mesh=rest_is_sequence), 8)["rows_per_microbatch"] == 4  # 64 tokens
    roomy = replace(config, tokens_per_device=10_000)
    assert derived(roomy, 8)["rows_per_microbatch"] == 16  # 12 trajectories need no more
    assert derived(replace(config, algo=sft.Config()), 4)["trajectories_per_step"] == 6


def test_the_dump_is_json_and_complete(config):
    tree = json.loads(json.dumps(dump(config), allow_nan=False))
    assert {f.name for f in dataclasses.fields(TrainConfig)} == set(tree)
    as_json = json.loads(json.dumps(dataclasses.asdict(grpo.Config())))
    assert tree["algo"] == {"name": as_json.pop("algorithm"), **as_json}
    assert tree["model"]["architecture"]["max_position"] == 64
    assert tree["data"]["train"][1]["path"] == "b.jsonl"
    assert dump(replace(config, max_runtime=float("inf")))["max_runtime"] == "inf"


@dataclasses.dataclass(frozen=True)
class Secretive(ClippedConfig):
    api_key: str = "abc123"
    auth_token: str = "abc123"
    password: str = ""
    stop_tokens: str = "kept"
    prompt_key: str = "kept"


def test_secrets_are_masked(config, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    config = replace(config, algo=Secretive(), model=replace(config.model, path="https://u:hunter2@host/m"))
    run = describe_run(config, "r.py", ["--model.path", "https://u:hunter2@host/m"])
    text = json.dumps(run)
    assert "hunter2" not in text
    assert "abc123" not in text
    algo = run["config"]["algo"]
    assert [algo[k] for k in ("api_key", "auth_token", "password", "stop_tokens", "prompt_key")] == (
        ["***", "***", "", "kept", "kept"]
    )
    assert run["command"] == ["--model.path", "https://u:***@host/m"]
    assert run["versions"]["jax"].count(".") >= 2
