"""The command that a run prints at its end works as it stands, and the model answers as it was trained."""

import json
import shlex
from dataclasses import replace

import pytest

from jaxrl_llm import __main__
from jaxrl_llm.algos import dpo, prm, reward_model, sft
from jaxrl_llm.builders.describe import next_command
from jaxrl_llm.config import (
    ChatConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainConfig,
)
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.train import main

SUMS = [("1+1=", "2"), ("2+5=", "7"), ("3+6=", "9"), ("4+0=", "4"), ("5+3=", "8"), ("2+1=", "3")]
TEMPLATE = (
    "{{ strftime_now('%d') }}"
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a:{% endif %}"
)
RUN = [
    *(
        "--config",
        "sft_tiny.py",
        "--steps",
        "150",
        "--prompts_per_step",
        "6",
        "--optim.learning_rate",
        "1e-2",
    ),
    *("--eval.every", "150", "--eval.prompts", "6", "--checkpoint.every", "0", "--log.tensorboard", "false"),
    *("--data.chat.system_prompt", "Add.", "--log.progress", "none", "--max_prompt_tokens", "24"),
    *("--data.chat.date", "2020-02-29"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return (run directory, what the run has printed)."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("run")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "answer": a}
        for q, a in SUMS
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    words = [*RUN, "--data.path", str(data), "--data.eval_path", str(data), "--run_dir", str(folder / "run")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words, "--data.chat.chat_template", str(folder / "template.jinja")]) == 0
    return folder / "run", out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--max_tokens", "16", "--resume", "False"]])
def test_the_printed_command_generates_right_answers(finished, more, capsys):
    run_dir, printed = finished
    (command,) = [line.removeprefix("next:  ") for line in printed.splitlines() if line.startswith("next:")]
    python, module, package, *words = shlex.split(command)
    assert (python, module, package) == ("python", "-m", "jaxrl_llm")
    assert "chat templates that write the date write 2020-02-29 for the whole run" in printed
    assert command.endswith("--chat.date 2020-02-29")
    assert __main__.main([*words, *more]) == 0
    prompts, results = (
        [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "responses.jsonl")
    )
    assert sorted(row["prompt"] for row in prompts) == sorted(question for question, _ in SUMS)
    texts = [row["responses"][0]["text"] for row in results]
    assert texts == [row["answer"] for row in prompts]


@pytest.mark.slow
def test_an_exported_model_has_the_chat_template_of_its_training(finished, tmp_path):
    run_dir, _ = finished
    assert (run_dir / "hf" / "chat_template.jinja").read_text() == TEMPLATE
    assert __main__.main(["export", "--checkpoint", str(run_dir), "--out", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == TEMPLATE


def test_generation_has_the_limits_of_training(tmp_path):
    config = TrainConfig(max_response_tokens=100)
    start = f"python -m jaxrl_llm generate --model {tmp_path}/hf --prompts {tmp_path}/prompts.jsonl"
    base = f"{start} --out {tmp_path}/responses.jsonl --temperature 0 --max_tokens 100"
    for algo in (config.algo, sft.Config(), dpo.Config()):
        assert next_command(tmp_path, replace(config, algo=algo)) == base
    stops = RolloutConfig(sampling=SamplingConfig(stop=("</answer>", "a b")))
    assert next_command(tmp_path, replace(config, rollout=stops)) == f"{base} --stop '</answer>' 'a b'"
    chat = replace(config.data.chat, parse_control_tokens=True)
    parsed = replace(config, data=replace(config.data, chat=chat))
    assert next_command(tmp_path, parsed) == f"{base} --chat.parse_control_tokens True"


SIZES = "--max_prompt_tokens 512 --max_response_tokens 1024 --tokens_per_device 8192"
CHAT = "--data.chat.render=auto --data.chat.system_prompt='' --data.chat.template_options=''"


@pytest.mark.parametrize(
    ("algo", "kind"), [(reward_model.Config(), ""), (prm.Config(), " --reward.models.0.kind process")]
)
@pytest.mark.parametrize("path", ["", "my/model"])
def test_a_reward_model_leads_to_reinforcement_learning(tmp_path, algo, kind, path):
    config = TrainConfig(algo=algo, model=ModelConfig(path=path), data=DataConfig(path="my.jsonl"))
    base = "--config ppo_reward_tiny.py"
    if path:
        base = f"--config grpo_qwen.py --reward.name none --run_dir {tmp_path}_rl --model.path my/model"
        base += f" --model.dtype bfloat16 {SIZES} {CHAT}"
    command = next_command(tmp_path, config)
    data = "--data.path my.jsonl --eval.every 0"
    assert command == f"python -m jaxrl_llm.train {base} {data} --reward.models.0.path {tmp_path}/hf{kind}"
    resolved = from_command_line(shlex.split(command)[3:]).config
    assert resolved.reward.models[0].path == f"{tmp_path}/hf"
    assert resolved.reward.name == ("none" if path else "auto")
    assert [source.path for source in resolved.data.sources("train")] == ["my.jsonl"]
    assert resolved.data.chat.system_prompt == ""


def test_the_prompts_of_pairs_are_read_as_the_run_read_them(tmp_path):
    source = SourceConfig(path="hub:org/pairs", subset="main", prompt_key="q", response_key="a")
    data = DataConfig(train=(source,), holdout=0.1, chat=ChatConfig(system_prompt="Be brief."))
    config = TrainConfig(algo=reward_model.Config(), model=ModelConfig(path="my/model"), data=data)
    resolved = from_command_line(shlex.split(next_command(tmp_path, config))[3:]).config
    (read,) = resolved.data.sources("train")
    assert (read.path, read.subset, read.prompt_key, read.response_key) == ("hub:org/pairs", "main", "q", "")
    assert (resolved.data.holdout, resolved.data.chat.system_prompt) == (0.1, "Be brief.")


def test_a_model_without_prompts_to_try_leads_to_a_chat(tmp_path):
    config = TrainConfig(algo=sft.Config())
    assert next_command(tmp_path, config, has_prompts=False) == (
        f"python -m jaxrl_llm chat --model {tmp_path}/hf"
    )
