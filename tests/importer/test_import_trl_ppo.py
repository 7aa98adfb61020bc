"""TRL's PPOTrainer and PRMTrainer: values by trl/experimental/ppo/ppo_trainer.py and prm/prm_trainer.py."""

import pytest

PPO = """\
accelerate launch --num_processes 2 examples/scripts/ppo/ppo.py --model_name_or_path org/base \\
    --sft_model_path org/sft --reward_model_path org/rm --dataset_name org/prompts \\
    --per_device_train_batch_size 32 --num_mini_batches 4 --num_ppo_epochs 2 --total_episodes 1000 \\
    --learning_rate 1e-5 --warmup_steps 5 --eval_strategy steps --eval_steps 3 --save_steps 0.5 \\
    --cliprange 0.3 --cliprange_value 0.4 --vf_coef 0.2 --gamma 0.9 --lam 0.8 \\
    --kl_coef 0.1 --kl_estimator k3 --response_length 20 --temperature 0.5 --stop_token eos \\
    --missing_eos_penalty 2
"""
SCRIPT = '''\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer

"""
python mine.py --sft_model_path org/other --total_episodes 128
"""
policy = AutoModelForCausalLM.from_pretrained("org/sft")
ref_policy = AutoModelForCausalLM.from_pretrained(REFERENCE)
reward_model = AutoModelForSequenceClassification.from_pretrained("org/rm", num_labels=1)
value_model = AutoModelForSequenceClassification.from_pretrained("org/value", num_labels=1)
config = PPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=16, total_episodes=64)
trainer = PPOTrainer(config, None, policy, ref_policy, reward_model, load_dataset("org/prompts"), value_model)
'''


def test_ppo(imported):
    run = imported(PPO)
    # 32 x 2 processes are 64 responses a step, in 4 mini-batches, 2 times; 1000 / 64 steps, rounded up
    sizes = run.values(
        "prompts_per_step", "responses_per_prompt", "minibatches_per_step", "ppo_epochs", "steps"
    )
    assert sizes == (64, 1, 4, 2, 16)
    # the scheduler steps once a step: 5 of them are 5 x 4 x 2 updates here; half of 16 steps, 16 // 10 steps
    assert run.values("optim.warmup_steps", "checkpoint.every", "eval.every") == (40, 8, 1)
    loss = ("algo.clip_low", "algo.clip_high", "algo.gamma", "algo.lam", "algo.aggregation", "algo.old")
    assert run.values(*loss) == (0.3, 0.3, 0.9, 0.8, "token", "rollout")
    assert run.values("algo.kl_coef", "algo.kl", "algo.kl_in") == (0.1, "k3", "reward")
    # loss = policy + vf_coef x 0.5 x max(...); one AdamW without clipping of gradients
    critic = ("critic.loss.factor", "critic.loss.value_clip", "critic.loss.aggregation", "critic.path")
    assert run.values(*critic) == (0.1, 0.4, "token", "org/rm")
    assert run.config.critic.optim == run.config.optim
    assert run.values("optim.learning_rate", "optim.max_grad_norm", "optim.schedule") == (1e-5, 0.0, "linear")
    assert run.values("model.path", "model.tokenizer") == ("org/sft", "org/base")
    assert run.values("max_response_tokens", "rollout.sampling.temperature") == (20, 0.5)
    # 2 less for a response that all 20 tokens did not end
    reward = ("reward.name", "reward.weight", "reward.overlong_from", "reward.overlong_to")
    assert run.values(*reward) == ("overlong", 2.0, 19, 20)
    assert run.config.reward.models[0].path == "org/rm" and not run.config.rollout.sampling.ignore_eos
    assert set(run.lost) == {"stop_token"} and set(run.unused) == {"eval_steps"}


def test_defaults_of_ppo(imported):
    """PPOConfig's, among them no stop token: all 53 tokens are generated, whatever they are."""
    run = imported("python ppo.py --total_episodes 100 --missing_eos_penalty 1.0 --max_steps 7\n", devices=1)
    assert run.values("model.path", "critic.path", "steps") == ("EleutherAI/pythia-160m",) * 2 + (13,)
    keys = ("optim.learning_rate", "ppo_epochs", "max_response_tokens", "rollout.sampling.temperature")
    assert run.values(*keys) == (3e-6, 4, 53, 0.7)
    assert run.values("algo.kl_coef", "algo.kl", "algo.lam", "algo.gamma") == (0.05, "k1", 0.95, 1.0)
    assert run.values("algo.clip_low", "critic.loss.value_clip", "critic.loss.factor") == (0.2, 0.2, 0.05)
    assert run.values("rollout.sampling.ignore_eos", "reward.name", "eval.every") == (True, "none", 0)
    assert set(run.lost) == {"missing_eos_penalty"} and "max_steps" in run.unused


def test_mini_batches_within_accumulation_are_one_update(imported):
    """accelerate's `accumulate` steps the optimizer once in 16 micro-batches, of 4 mini-batches, too."""
    words = "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --num_mini_batches 4"
    run = imported(f"python ppo.py {words}\n", devices=1)
    assert run.values("minibatches_per_step", "prompts_per_step", "epochs") == (1, 16, 3.0)
    assert "num_mini_batches 4, gradient_accumulation_steps 16: 1 update an epoch" in run.report
    # a mean over micro-batches of one response
    assert run.values("algo.aggregation", "critic.loss.aggregation") == ("sequence", "sequence")


@pytest.mark.parametrize("reference, lost", [('"org/sft"', set()), ('"org/frozen"', {"ref_model"})])
def test_models_of_a_script(imported, reference, lost):
    """The script's own models, a reference other than the policy, and the command in a text after imports."""
    run = imported(SCRIPT.replace("REFERENCE", reference), "mine.py", devices=1)
    assert run.values("model.path", "critic.path", "steps") == ("org/sft", "org/value", 4)
    assert run.config.reward.models[0].path == "org/rm"
    assert run.config.data.train[0].path == "hub:org/prompts"
    assert set(run.lost) == lost


def test_settings_of_ppo_that_are_not_carried_over(imported):
    words = "--whiten_rewards --use_peft --stop_token_id 7 --model_revision v2 --ref_adapter_name a"
    run = imported(f"python ppo.py {words}\n", devices=1)
    lost = {
        "whiten_rewards",
        "use_peft",
        "lora_dropout",
        "stop_token_id",
        "model_revision",
        "ref_adapter_name",
    }
    assert set(run.lost) == lost
    assert run.config.rollout.sampling.stop_tokens == (7,)


def test_prm(imported):
    """A row is its prompt and its steps, cut at 1024 tokens; rows without steps have no label there."""
    words = "--model_name_or_path org/m --dataset_name org/steps --per_device_train_batch_size 4"
    run = imported(f"python examples/scripts/prm.py {words} --gradient_accumulation_steps 2\n", devices=2)
    assert run.config.algo.algorithm == "prm" and run.config.algo.aggregation == "token"
    assert run.values("prompts_per_step", "optim.learning_rate", "epochs") == (16, 1e-5, 3.0)
    assert run.config.max_prompt_tokens + run.config.max_response_tokens == 1024
    assert run.values("data.overlong", "data.cut_side", "data.bad_rows") == ("cut", "right", "skip")
    assert set(run.lost) == {"step_separator"} and "there its own tokens end every step" in run.report
    words += " --train_on_last_step_only --max_completion_length 64 --step_separator '||'"
    run = imported(f"python examples/scripts/prm.py {words}\n", devices=1)
    assert set(run.lost) == {"step_separator", "train_on_last_step_only", "max_completion_length"}
    assert "step_separator ||: steps end with a new line" in run.report
