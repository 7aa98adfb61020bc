"""Training scripts of TRL: values, branches, data, and the rewards that are copied."""

import pytest

from jaxrl_llm.errors import UserError

PARSED = '''\
"""
accelerate launch train_mine.py --model_name_or_path org/m --max_steps 40 --num_generations 4
"""
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import get_soft_overlong_punishment

MARK = re.compile(r"#### (.*)")


def answer(text):
    found = MARK.search(text)
    return found and found[1]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.chat_template_kwargs = {"enable_thinking": False}
    training_args.model_init_kwargs = dict(revision=model_args.model_revision, dtype=model_args.dtype)
    rows = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"}, split="train[:10%]")

    def matches(completions, solution, **kwargs):
        return [float(answer(c) == s) for c, s in zip(completions, solution)]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[matches, get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)],
        train_dataset=rows,
        tools=[answer],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    open("trained", "w")
'''


def test_a_script_with_a_parser(imported, tmp_path):
    """Settings of the command in the docstring, then those of the script; no Config is called."""
    run = imported(PARSED, "train_mine.py", devices=1)
    assert run.values("model.path", "steps", "responses_per_prompt") == ("org/m", 40, 4)
    assert run.config.data.chat.template_options == '{"enable_thinking": false}'
    assert run.values("data.train.0.path", "data.train.0.split") == ("a.jsonl", "train")
    assert run.values("reward.overlong_from", "reward.overlong_to") == (384, 512)
    assert set(run.lost) == {"tools", "dataset_train_split"}
    assert run.config.reward.name.endswith("recipe_rewards.py:matches")


def test_a_reward_is_copied_without_the_training(imported, tmp_path):
    """With what it reads: imports, constants and functions of the script."""
    imported(PARSED, "train_mine.py", devices=1)
    module: dict = {}
    exec((tmp_path / "recipe_rewards.py").read_text(), module)
    assert module["matches"](["so #### 4", "5"], ["4", "5"]) == [1.0, 0.0]
    assert "GRPOTrainer" not in (tmp_path / "recipe_rewards.py").read_text()


def test_names_of_a_reward_that_only_a_run_would_tell(imported):
    text = PARSED.replace("float(answer(c) == s)", "scale * float(answer(c) == s)")
    assert "recipe_rewards.py lacks scale, which" in imported(text, "t.py", devices=1).lost["reward_funcs"]


CHANGED = """\
import functools, random; from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.rewards import think_format_reward as shaped
random.seed(0)
N = 3
N += 1
table = {}
table["x"] = 1
table.update(y=2)
try:
    from no_such_library import parse
except ImportError:
    parse = None
if N > 3:
    K = 2
else:
    K = 5
script_args, = TrlParser((GRPOConfig,)).parse_args_into_dataclasses()
def deco(function): return functools.wraps(function)(lambda *a, **b: [2 * v for v in function(*a, **b)])
@deco
def reward(completions, **kwargs):
    return [len(c) * (table["x"] + table["y"]) * N * K for c in completions if parse is None]
def scaled(completions, scale, **kwargs):
    return [scale * len(c) for c in completions]
half = functools.partial(scaled, scale=0.5)
GRPOTrainer("org/m", [reward, half, shaped], GRPOConfig("out", num_generations=4)).train()
"""


def test_a_reward_is_copied_with_all_that_changes_what_it_reads(imported, tmp_path):
    """And the trainer's arguments without names: model, rewards, Config."""
    run = imported(CHANGED, "t.py", devices=1)
    assert run.values("model.path", "run_dir", "responses_per_prompt") == ("org/m", "out", 4)
    assert [name.rpartition(":")[2] for name, _ in run.config.reward.shaping] == ["half", "format"]
    module: dict = {}
    exec((tmp_path / "recipe_rewards.py").read_text(), module)
    assert module["reward"](["ab"]) == [2 * 2 * 3 * 4 * 2] and module["half"](["ab"]) == [1.0]
    text = (tmp_path / "recipe_rewards.py").read_text()
    assert "random" not in text.partition(";")[2] and "script_args" not in text and run.lost == {}


def test_a_reward_that_has_no_name_is_refused(refusal_of):
    text = CHANGED.replace("half, shaped]", "functools.partial(scaled, scale=2)]")
    assert refusal_of(text, "t.py").endswith("partial(scaled, scale=2): give --define reward_funcs=VALUE")


def test_a_reward_of_a_relative_import_is_named(imported):
    text = PARSED.replace("import re\n", "import re\nfrom .utils import scale\n")
    text = text.replace("float(answer(c) == s)", "scale * float(answer(c) == s)")
    assert "recipe_rewards.py lacks scale, which" in imported(text, "t.py", devices=1).lost["reward_funcs"]


VALUES = """\
import os, torch
from trl import DPOConfig, DPOTrainer
LR, KIND = 1e-5, "b"
lr = 1e-5
other = DPOConfig("other", beta=0.9)
if KIND == "a":
    config = DPOConfig("a", loss_type="ipo")
elif not KIND != "b":
    config = DPOConfig(output_dir="b", learning_rate=lr * 2, warmup_ratio=1 / 10, max_steps=2**5 * 10,
                       beta=0.5 if KIND == "b" else 0.1, max_length=2048 // 2)
trainer = DPOTrainer("org/m", None, config, train_dataset=ROWS)
"""


@pytest.mark.parametrize(
    ("rows", "values", "lost"),
    [
        ('load_dataset(path="json", data_files=os.path.join("x", "d.jsonl"), split="train")',
         {"path": "x/d.jsonl"}, set()),
        ('load_dataset(path="org/d", name="main", revision="v1")["train"]',
         {"path": "hub:org/d@v1", "subset": "main"}, set()),
        ('load_dataset("json", data_files="d.jsonl", field="rows")', {"path": "d.jsonl"}, {"dataset.field"}),
        ('load_dataset("org/d", data_dir="part")', {"path": "hub:org/d"}, {"dataset.files"}),
        ('load_dataset("json", data_files=find())', {}, {"dataset.made"}),
    ],
)  # fmt: skip
def test_values_of_a_script(imported, rows, values, lost):
    """The Config that the trainer gets, in the branch that constants take; what is loaded."""
    run = imported(VALUES.replace("ROWS", rows), "t.py", devices=1)
    keys = ("model.path", "run_dir", "optim.learning_rate", "optim.warmup_steps", "steps", "algo.beta")
    assert run.values(*keys) == ("org/m", "b", 2e-5, 32, 320, 0.5)
    sources = [getattr(run.config.data.train[0], name) for name in values]
    assert sources == list(values.values()) and run.lost.keys() == lost
    assert "DPOConfig in line 5 is not read" in run.report and "line 7" not in run.report


@pytest.mark.parametrize(
    ("change", "message"),
    [("lr = 1e-5\n", "lr = 1e-5\nlr = 2e-5\n"), ("lr = 1e-5\n", "lr = 1e-5\nlr += 1e-5\n")],
)
def test_a_name_with_several_values_is_not_known(refusal_of, change, message):
    text = VALUES.replace(change, message)
    assert "learning_rate is $lr * 2: give --define" in refusal_of(text, "t.py")


def test_settings_that_a_script_gathers_are_named(imported):
    text = VALUES.replace("beta=0.9)", "**more)").replace("None, config", "None, other")
    assert "settings that only a run would tell" in imported(text, "t.py").lost["**more"]


def test_a_reward_of_another_file(imported):
    text = PARSED.replace("import re\n", "import re\nfrom mine.rewards import score\n")
    run = imported(text.replace("[matches,", "[score,"), "t.py", devices=1)
    assert run.config.reward.name == "mine/rewards.py:score"


def test_a_default_in_place_of_a_flag(imported):
    text = "parser.add_argument('--lr', default=0.5)\nparser.add_argument('--n', default=0)\n"
    text += "GRPOConfig(learning_rate=args.lr or 0.25, num_generations=args.n or 4, beta=args.other or 1)\n"
    with pytest.raises(UserError, match=r"beta is .args\.other or 1"):
        imported(text, "train.py")
    values = imported(text.replace(", beta=args.other or 1", ""), "train.py")
    assert values.values("optim.learning_rate", "responses_per_prompt") == (0.5, 4)
