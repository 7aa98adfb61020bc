"""TRL: command lines, YAML and Python files, numbers worked by hand."""

import pytest

GRPO = """\
accelerate launch --num_processes 4 examples/scripts/grpo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name org/math --dataset_config main \\
    --output_dir grpo-sums --learning_rate 1e-5 \\
    --max_prompt_length 256 --max_completion_length 768 \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_generations 8 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" \\
    --reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.2 \\
    --max_steps 120 --warmup_ratio 0.1 --save_steps 30 --report_to wandb --run_name sums
"""
GENERATION = (
    "trl grpo --model org/m --steps_per_generation 16 --num_generations 4 --epsilon_high 0.28 --beta 0.04 "
)
GENERATION += "--loss_type dr_grpo --scale_rewards none --use_vllm --eval_strategy steps --eval_steps 50\n"
GSPO = "trl grpo --model org/m --importance_sampling_level sequence --loss_type grpo --epsilon 3e-4 "
GSPO += "--epsilon_high 4e-4 --lr_scheduler_type constant --bf16\n"
YAML = """\
model_name_or_path: org/m
dataset_name: org/pairs
beta: 0.3
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.5]
num_train_epochs: 2
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
lr_scheduler_type: cosine
warmup_steps: 10
max_length: 2048
"""
PYTHON = '''\
"""A script of a user."""
import argparse
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-6)
args = parser.parse_args()
BATCH = 4 * 2
MODEL = "Qwen/Qwen3-1.7B"
raise SystemExit("this file is never run")

def count_words(completions, **kwargs):
    return [len(c.split()) for c in completions]

dataset = load_dataset("org/prompts", "main", split="train")
dataset = dataset.map(lambda row: row)
config = GRPOConfig(
    output_dir=f"runs/{MODEL}-grpo",
    learning_rate=args.lr,
    per_device_train_batch_size=BATCH,
    num_generations=8,
    max_completion_length=512,
    temperature=0.9,
    chat_template_kwargs={"enable_thinking": False},
)
trainer = GRPOTrainer(
    model=MODEL, args=config, reward_funcs=[count_words, "org/reward-model"], train_dataset=dataset,
    peft_config=LoraConfig(r=32),
)
trainer.train()
'''
DOCUMENTED = '''\
# Copyright
"""
python examples/scripts/kto.py \\
    --model_name_or_path org/m \\
    --per_device_train_batch_size 16 \\
    --desirable_weight 1.3 \\
    --output_dir kto
"""
from trl import KTOConfig
'''


def test_grpo_counts_sequences_and_updates(imported):
    run = imported(GRPO)
    # a generation batch of 8 x 4 processes x 2 steps = 64 sequences / 8 generations; one update of 64
    sizes = run.values("prompts_per_step", "responses_per_prompt", "minibatches_per_step", "steps")
    assert sizes == (8, 8, 1, 120)
    assert run.values("optim.warmup_steps", "checkpoint.every", "tokens_per_device") == (12, 30, 8 * 1024)
    # TRL's defaults that are not those here
    assert run.values("algo.aggregation", "algo.kl_coef", "algo.clip_high") == ("token", 0.0, 0.2)
    assert run.values("optim.schedule", "optim.final_fraction", "seed") == ("linear", 0.0, 42)
    assert run.values("model.remat", "rollout.dtype", "model.dtype") == ("full", "bfloat16", "bfloat16")
    assert run.values("lora.rank", "lora.alpha", "lora.targets") == (16, 32.0, ("q_proj", "v_proj"))
    assert run.values("reward.name", "reward.shaping") == ("math", (("format", 0.2),))
    assert run.values("data.train.0.path", "data.train.0.subset") == ("hub:org/math", "main")
    assert run.values("log.wandb", "log.name", "run_dir") == ("sums", "sums", "grpo-sums")
    # what differs is said first: TRL's dropout of adapters (0.05 by default), and its reward
    assert set(run.lost) == {"lora_dropout", "reward_funcs"}
    assert run.lost["reward_funcs"].startswith("here math, by the same library: TRL counts LaTeX alone")


def test_generation_batches_of_several_updates(imported):
    run = imported(GENERATION, devices=2)
    # 8 x 2 processes x 16 steps = 256 sequences / 4 = 64 prompts; updates of 8 x 2 x 1 = 16 sequences
    assert run.values("prompts_per_step", "minibatches_per_step", "epochs") == (64, 16, 3.0)
    assert run.config.minibatches_of == "responses"  # shuffled over the generation batch
    assert run.values("algo.aggregation", "algo.constant", "algo.scale") == ("constant", 512.0, "none")
    assert run.values("algo.kl_coef", "algo.clip_low", "algo.clip_high") == (0.04, 0.2, 0.28)
    assert run.values("checkpoint.every", "eval.every") == (31, 3)  # 500 and 50 updates / 16
    correction = run.config.algo.correction
    assert (correction.weight, correction.outside, correction.cap) == ("sequence", "zero", 3.0)


def test_one_process_is_assumed_aloud(imported):
    run = imported(GSPO)
    assert run.config.algo.algorithm == "gspo" and run.config.optim.schedule == "constant"
    assert run.values("algo.clip_low", "algo.clip_high", "algo.aggregation") == (3e-4, 4e-4, "sequence")
    assert "the number of processes is not in the file: 1 is assumed" in run.report


def test_dpo_of_yaml(imported):
    run = imported(YAML, "dpo_config.yaml", devices=1)
    assert run.config.algo.algorithm == "dpo" and run.values("algo.loss", "algo.beta") == ("sigmoid", 0.3)
    assert run.values("algo.nll_coef", "prompts_per_step", "epochs") == (0.5, 32, 2.0)
    assert run.values("optim.warmup_steps", "optim.schedule", "data.overlong") == (10, "cosine", "cut")
    assert run.values("max_prompt_tokens", "data.cut_side") == (1024, "right")


def test_the_trainer_of_yaml_may_have_to_be_named(imported, refusal_of):
    message = refusal_of(YAML, "config.yaml")
    assert message.startswith("/config.yaml: the trainer is not in the file. TRL has --trainer grpo|async")
    text = YAML.replace("[sigmoid, sft]", "ipo").replace("[1.0, 0.5]", "[1.0]")
    assert imported(text, "c.yaml", trainer="dpo").config.algo.length_normalized


def test_python_is_read_and_never_run(imported):
    run = imported(PYTHON, "train.py", devices=1)
    assert run.values("prompts_per_step", "optim.learning_rate", "model.path") == (1, 3e-6, "Qwen/Qwen3-1.7B")
    assert run.values("lora.rank", "lora.alpha", "rollout.sampling.temperature") == (32, 8.0, 0.9)
    assert run.values("data.train.0.path", "data.train.0.subset") == ("hub:org/prompts", "main")
    assert run.config.reward.name.endswith("recipe_rewards.py:count_words")
    assert "dataset.map" in run.lost  # rows are read as they are
    assert run.config.reward.models[0].path == "org/reward-model"
    assert run.config.run_dir == "runs/Qwen/Qwen3-1.7B-grpo"
    assert run.config.data.chat.template_options == '{"enable_thinking": false}'


def test_a_command_in_a_docstring(imported):
    run = imported(DOCUMENTED, "kto.py")
    assert run.config.algo.algorithm == "kto"
    assert run.values("prompts_per_step", "algo.desirable_weight") == (16, 1.3)


SUMS = "--multi_objective_aggregation normalize_then_sum"


@pytest.mark.parametrize(
    ("flags", "algo", "values"),
    [
        ("grpo --loss_type cispo --epsilon_high 5.0", "cispo", {"algo.clip_high": 4.0}),
        ("grpo --loss_type sapo", "sapo", {"algo.tau_negative": 1.05}),
        ("grpo --loss_type vespo", "vespo", {"algo.k_negative": 3.0}),
        (
            "grpo --loss_type luspo --epsilon 2e-3 --epsilon_high 2.5e-3",
            "luspo",
            {"algo.aggregation": "sequence_sum", "algo.clip_low": 2e-3, "algo.clip_high": 2.5e-3},
        ),
        ("grpo --top_entropy_quantile 0.2", "grpo", {"algo.top_entropy": 0.2}),
        ("grpo --beta 0.04", "grpo", {"algo.kl_importance": True}),  # True by default
        ("grpo --use_bias_correction_kl False --beta 0.04", "grpo", {"algo.kl_importance": False}),
        ("grpo", "grpo", {"algo.kl_importance": False, "algo.kl_coef": 0.0}),  # no KL, no weight
        ("grpo --delta 4.0", "grpo", {"algo.dual_clip": 4.0}),
        (
            "grpo --use_adaptive_entropy True --entropy_target 0.3 --entropy_coef 0.01",
            "grpo",
            {"algo.entropy_target": 0.3, "algo.entropy_delta": 0.005},
        ),
        ("gmpo", "gmpo", {"algo.clip_low": 0.4, "algo.clip_high": 0.4, "algo.aggregation": "sequence"}),
        (
            "distillation --teacher_model_name_or_path m/t --temperature 0.7",
            "gkd",
            {"algo.beta": 1.0, "algo.temperature": 0.7, "algo.teachers": ("m/t",), "responses_per_prompt": 1},
        ),
        (
            "grpo --off_policy_mask_threshold 0.5",  # exp(0.5)
            "grpo",
            {
                "algo.correction.reject": (("seq_mean_k1", 1e-9, 1.648721),),
                "algo.correction.reject_only": "negative",
                "algo.correction.of": "policy",
            },
        ),
        (f"grpo --loss_type cispo {SUMS}", "cispo", {"algo.advantage": "gdpo", "algo.clip_high": 0.0}),
        (f"grpo --importance_sampling_level sequence {SUMS}", "gspo", {"algo.advantage": "gdpo"}),
        (  # TRL weighs what is normalized: a group's deviation takes the size of a weight before it
            f"grpo {SUMS} --reward_funcs a.b c.d think_format_reward org/rm --reward_weights 2 -1 0.5 3",
            "gdpo",
            {"reward.weight": 2.0, "algo.component_weights": (2.0, 1.0, 0.5, 3.0)},
        ),
        (f"gmpo --entropy_coef 0.1 {SUMS}", "gmpo", {"algo.advantage": "gdpo", "algo.entropy_coef": 0.0}),
        ("dpo --use_weighting True", "dpo", {"algo.weighted": True}),
        ("rloo", "rloo", {"algo.kl_coef": 0.05, "algo.kl_in": "reward", "responses_per_prompt": 2}),
        ("sft", "sft", {"optim.learning_rate": 2e-5, "prompts_per_step": 8, "data.chat.loss": "chat"}),
        ("sft --assistant_only_loss True", "sft", {"data.chat.loss": "all"}),
        ("sft --completion_only_loss True", "sft", {"data.chat.loss": "all"}),
        ("sft --loss_type dft", "sft", {"algo.loss": "dft"}),
        ("sft --chat_template_path t.jinja", "sft", {"data.chat.chat_template": "t.jinja"}),
        (
            "dpo --loss_type sigmoid_norm --beta 2",
            "dpo",
            {"algo.loss": "sigmoid", "algo.length_normalized": True, "algo.beta": 2.0},
        ),
        (
            "online_dpo --loss_type ipo",
            "online_dpo",
            {"algo.dpo.loss": "ipo", "algo.dpo.length_normalized": False},
        ),
        ("reward --center_rewards_coefficient 0.01", "reward_model", {"algo.center_coef": 0.01}),
        ("dpo --loss_type apo_zero --f_divergence_type reverse_kl", "dpo", {"algo.loss": "apo_zero"}),
        ("kto --beta 0.2", "kto", {"algo.beta": 0.2, "data.shuffle": False}),  # sequential by default
    ],
)
def test_trainers_and_losses(imported, flags, algo, values):
    run = imported(f"trl {flags} --model org/m --dataset_name org/d\n", devices=1)
    assert run.config.algo.algorithm == algo
    assert run.values(*values) == tuple(values.values())


def test_the_off_policy_mask_beside_importance_weights(imported):
    run = imported("trl grpo --model org/m --use_vllm True --off_policy_mask_threshold 0.5\n", devices=1)
    assert run.values("algo.correction.weight", "algo.correction.of") == ("sequence", "old")
    assert "0.5: before a step's updates, as the importance weights are" in run.report


def test_luspo_of_token_ratios_is_noted(imported):
    text = "trl grpo --model org/m --loss_type luspo\n"
    assert "luspo's ratio here is that of the sequence" in imported(text, devices=1).report
    text = text.replace("luspo", "luspo --importance_sampling_level sequence")
    assert "luspo's ratio" not in imported(text, devices=1).report


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("grpo --loss_type cispo --importance_sampling_level sequence", "importance_sampling_level"),
        ("grpo --loss_type sapo --importance_sampling_level sequence", "importance_sampling_level"),
        ("grpo --bnb_4bit_quant_type fp4", "bnb_4bit_quant_type"),
        ("grpo --ref_model_mixup_alpha 0.5", "ref_model_mixup_alpha"),
        ("dpo --loss_type sigmoid sft --loss_weights 2.0 1.0", "loss_weights"),
        ("dpo --loss_weights 0.5", "loss_weights"),
        ("grpo --loss_type vespo --use_vllm True", "vllm_importance_sampling_mode"),
        ("sft --dataset_text_field body", "dataset_text_field"),
    ],
)
def test_settings_that_are_not_carried_over(imported, flags, key):
    run = imported(f"trl {flags} --model org/m\n", devices=1)
    assert list(run.lost) == [key] and "does not know" not in run.report


def test_where_math_differs_from_rewards_of_trl_is_said(imported):
    for name, more in (("accuracy_reward", False), ("reasoning_accuracy_reward", True)):
        run = imported(f"trl grpo --model org/m --reward_funcs {name}\n", devices=1)
        said = run.lost["reward_funcs"]
        assert run.config.reward.name == "math" and f"`from trl.rewards import {name}`" in said
        assert ("reads the text after </think> alone" in said) == more


def test_vespos_weight_has_the_ratio_to_the_rollout(imported):
    """In TRL a factor of W, not a weight of the loss."""
    run = imported("trl grpo --model org/m --use_vllm True --loss_type vespo\n", devices=1)
    assert run.values("algo.old", "algo.correction.weight") == ("rollout", "none")


def test_a_key_that_is_unset_has_not_the_default(imported):
    text = "model_name_or_path: org/m\nnum_generations: 4\nmax_completion_length: {}\nbeta: 0.1\n"
    assert imported(text.format("null"), "grpo.yaml", devices=1).lost == {
        "max_completion_length": "it is unset there; here it is TRL's default, 512"
    }
    assert imported(text.format(512), "grpo.yaml", devices=1).lost == {}


def test_a_module_of_trl_is_a_command(imported):
    run = imported("accelerate launch --num_processes 2 -m trl.scripts.dpo --model org/m --beta 0.3\n")
    assert (run.config.algo.algorithm, run.config.algo.beta, run.config.prompts_per_step) == ("dpo", 0.3, 16)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (
            "aot",
            "there is no AOT: its loss pairs sequences by their ranks in the mini-batch, and a loss here "
            "sees a micro-batch. import-config --define loss_type=sigmoid takes sigmoid instead.",
        ),
        ("hinge ipo", "there is one loss at a time. import-config --define loss_type=hinge takes hinge"),
        ("zzz hinge", "there is no zzz. import-config --define loss_type=hinge takes hinge instead."),
    ],
)
def test_dpo_losses_that_are_not_here(refusal_of, losses, reason):
    assert reason in refusal_of(f"trl dpo --model org/m --loss_type {losses}\n", devices=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("grpo --loss_type new", "loss_type new: there is no such loss"),
        ("grpo --delta 1.1", "delta 1.1: below 1 + epsilon_high it bounds the ratio of good responses, too"),
        ("sft --loss_type chunky", "loss_type chunky: there is no such loss"),
        ("cpo --loss_type ipo", "loss_type ipo: cpo has no ipo"),
        ("kto --loss_type apo_zero_unpaired", "of single responses there is kto alone"),
        ("sft --optim ademamix", "optim ademamix: there is no such optimizer"),
        ("grpo --reward_funcs a b --reward_weights 1.0", "1 weights of 2 rewards: one for each"),
    ],
)
def test_what_a_run_is_about_is_refused_by_name(refusal_of, flags, message):
    assert message in refusal_of(f"trl {flags} --model org/m\n", devices=1)


OPTIMIZERS = {  # of transformers -> settings here
    "adamw_torch_fused": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw", "moments": "int8"},
    "paged_adamw_32bit": {"name": "adamw", "moments": "float32"},
    "lion_8bit": {"name": "lion", "moments": "int8"},
    "adafactor": {"name": "adafactor_unscaled"},
    "rmsprop": {"name": "rmsprop", "b2": 0.99, "eps": 1e-8},
    "adagrad": {"name": "adagrad", "eps": 1e-10},
    "sgd": {"name": "sgd", "b1": 0.0},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(imported, name):
    run = imported(f"trl sft --model org/m --optim {name}\n", devices=1)
    given = OPTIMIZERS[name]
    assert run.values(*(f"optim.{key}" for key in given)) == tuple(given.values())


def test_coupled_weight_decay_is_not_carried_over(imported):
    run = imported("trl sft --model org/m --optim rmsprop --weight_decay 0.1\n", devices=1)
    assert run.lost == {
        "weight_decay": "it is decoupled from the gradient; torch's rmsprop adds it to the gradient"
    }


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--warmup_ratio 0.07", 8),  # transformers: ceil(100 x 0.07), which is 7.000000000000001
        ("--warmup_steps 0.07", 8),
        ("--warmup_ratio 0.1 --warmup_steps 5", 5),
        ("--warmup_ratio 0.1 --lr_scheduler_type constant", 0),  # which has no warm-up there
        ("--warmup_ratio 0.1 --lr_scheduler_type constant_with_warmup", 10),
    ],
)
def test_warm_up(imported, flags, steps):
    run = imported(f"trl sft --model org/m --max_steps 100 {flags}\n", devices=1)
    assert run.config.optim.warmup_steps == steps


@pytest.mark.parametrize(
    ("trainer", "flags", "every", "origin"),
    [
        # transformers' TrainingArguments.__post_init__ takes the interval of logging; TRL's default is 10
        ("sft", "", 10, "logging_steps 10 (TRL's default)"),
        ("async_grpo", "", 1, "logging_steps 1 (TRL's default)"),
        ("sft", "--logging_steps 25", 25, "logging_steps 25"),
        ("sft", "--logging_steps 0.07", 8, "logging_steps 0.07"),  # ceil(100 x 0.07), 7.000000000000001
        ("sft", "--eval_steps 0", 10, "eval_steps 0, logging_steps 10 (TRL's default)"),
        ("sft", "--eval_steps 0 --logging_steps 5", 5, "eval_steps 0, logging_steps 5"),
        ("sft", "--eval_steps 0.25 --logging_steps 5", 25, "eval_steps 0.25"),
        ("sft", "--eval_steps 40 --logging_steps 5", 40, "eval_steps 40"),
    ],
)
def test_evaluation_without_an_interval_has_that_of_logging(imported, trainer, flags, *, every, origin):
    text = f"trl sft --model org/m --max_steps 100 --eval_strategy steps {flags}\n"
    run = imported(text, devices=1, trainer=trainer)
    assert run.config.eval.every == every and f"every={every},  # {origin}\n" in run.text
    assert run.config.checkpoint.every == 500  # save_steps, of which logging is no part


def test_intervals_of_checkpoints(imported):
    every = lambda flags: imported(f"trl sft --model org/m {flags}\n", devices=1).config.checkpoint.every
    assert every("--logging_steps 5") == 500
    assert every("--save_steps 0") == 0  # there as here: the last alone
    assert every("--save_steps 0.5 --max_steps 90") == 45


def test_a_ratio_of_unknown_updates_is_noted(imported):
    run = imported("trl sft --model org/m --eval_strategy steps --logging_steps 0.1\n", devices=1)
    assert run.config.eval.every == 1
    assert (
        "logging_steps 0.1 is a ratio of updates that are not known: eval.every is 1" in run.text + run.report
    )


MAPPINGS = """\
model_name_or_path: org/m
num_generations: 4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.25}
chat_template_kwargs: {enable_thinking: false}
model_init_kwargs: {attn_implementation: sdpa, rope_theta: 5000}
datasets:
  - {path: org/a, name: main, split: train, fraction: 0.3}
  - {path: json, data_files: [b.jsonl], split: "train[:10%]"}
"""


def test_mappings_of_yaml(imported):
    run = imported(MAPPINGS, "grpo.yaml", devices=1)
    assert run.values("optim.final_fraction", "data.chat.template_options") == (
        0.25,
        '{"enable_thinking": false}',
    )
    first, second = run.config.data.train
    assert (first.path, first.subset, first.weight, second.path) == ("hub:org/a", "main", 0.3, "b.jsonl")
    assert (second.split, set(run.lost)) == ("train", {"datasets", "model_init_kwargs.rope_theta"})
    kwargs = "{dtype: bfloat16, revision: v2, quantization_config: {load_in_4bit: true}}"
    run = imported(f"model_name_or_path: org/m\nbeta: 0.1\nmodel_init_kwargs: {kwargs}\n", "dpo.yaml")
    assert run.config.model.path == "org/m@v2"
    assert set(run.lost) == {"dtype", "model_init_kwargs.quantization_config.load_in_4bit"}


@pytest.mark.parametrize("name", ["XPO", "SDPO", "TPO", "GOLD"])
def test_trainers_that_are_not_here_are_refused_by_name(refusal_of, name):
    text = f"from trl.experimental import {name}Config, {name}Trainer\n{name}Trainer(args={name}Config())\n"
    assert refusal_of(text, "t.py").startswith(f"/t.py:2: {name}Trainer: ")


def test_cpo_gkd_and_online_dpo(imported):
    run = imported(
        "python examples/scripts/cpo.py --loss_type simpo --simpo_gamma 0.7 --model_name_or_path m/m\n"
    )
    assert run.config.algo.algorithm == "simpo" and run.config.algo.gamma == 0.7
    run = imported("python gkd.py --model_name_or_path m/m --teacher_model_name_or_path m/t --lmbda 1.0\n")
    assert run.config.algo.algorithm == "gkd" and run.config.algo.teachers == ("m/t",)
    assert run.values("max_response_tokens", "max_prompt_tokens", "responses_per_prompt") == (128, 896, 1)
    run = imported("python online_dpo.py --model_name_or_path m/m --reward_model_path m/r --beta 0.2\n")
    assert run.config.algo.dpo.beta == 0.2 and run.config.reward.models[0].path == "m/r"


def test_packing_changes_what_an_update_has(imported):
    """TRL's batch counts packed rows."""
    assert "--prompts_per_step rows" in imported("trl sft --model org/m --packing True\n").lost["packing"]
    assert imported("trl sft --model org/m --packing False\n").lost == {}


def test_processes_behind_the_command_of_trl_count(imported):
    """`trl sft --num_processes 4` starts them by accelerate."""
    run = imported("trl sft --model_name_or_path org/m --num_processes 4 --per_device_train_batch_size 2\n")
    assert (run.config.prompts_per_step, run.lost) == (8, {})


@pytest.mark.parametrize(
    ("words", "neutral"),
    [
        ("teacher_model_revision v2", "teacher_model_revision main"),
        ("vllm_sync_frequency 4", "vllm_sync_frequency 1"),
        ("accelerator_config.split_batches True", "accelerator_config.split_batches False"),
    ],
)
def test_another_teacher_and_staler_weights_are_said_first(imported, words, neutral):
    command = "python gkd.py --model_name_or_path m/m --teacher_model_name_or_path m/t --lmbda 1.0 --"
    before = set(imported(f"{command}{neutral}\n").lost)
    assert set(imported(f"{command}{words}\n").lost) == {*before, words.split()[0]}


UNSLOTH = """\
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/m", load_in_4bit=True, max_seq_length=99)
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=12, target_modules=["q_proj"], random_state=1)
trainer = SFTTrainer(model=model, args=SFTConfig(max_steps=7, learning_rate=2e-4))
trainer = train_on_responses_only(trainer, instruction_part="U", response_part="A")
"""


def test_scripts_of_unsloth(imported):
    """It loads by other names, adds adapters by a call of its own, and masks all but the answers."""
    run = imported(UNSLOTH, "t.py", devices=1)
    wanted = {"model.path": "org/m", "lora.quantize": "nf4", "lora.rank": 4, "lora.alpha": 12.0}
    wanted |= {"lora.targets": ("q_proj",), "data.chat.loss": "all", "steps": 7}
    assert run.values(*wanted) == tuple(wanted.values()) and run.lost == {}
    whole = imported(UNSLOTH.partition("trainer = train_on")[0], "t.py", devices=1)
    assert whole.values("data.chat.loss") == ("chat",)


def test_settings_of_a_loaded_model_and_tokenizer_are_said_first(imported):
    text = """\
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("org/m", rope_theta=5, attn_implementation="sdpa", **kwargs)
tokenizer.chat_template = "{{ messages }}"
DPOTrainer(model=model, args=DPOConfig(output_dir="o"))
"""
    run = imported(text, "t.py", devices=1)
    assert (run.config.model.path, set(run.lost)) == (
        "org/m",
        {"model_init_kwargs.rope_theta", "chat_template"},
    )


def test_a_class_of_the_scripts_own_and_late_assignments(imported):
    """A trainer that computes another loss imports its own, and its arguments may change after it is made."""
    text = """\
from trl import DPOConfig, DPOTrainer
class Mine(DPOTrainer):
    def compute_loss(self, *args): ...
t = Mine(model="org/m", args=DPOConfig(output_dir="o", beta=0.1))
t.args.learning_rate = 3e-6
"""
    run = imported(text, "t.py", devices=1)
    assert run.lost == {"trainer_class": "what a script's own code does is not carried over"}
    assert run.config.optim.learning_rate == 3e-6
