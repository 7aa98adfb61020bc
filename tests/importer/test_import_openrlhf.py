"""OpenRLHF: flags of version 0.11 and of older ones, numbers worked by hand."""

import pytest

PPO = """\
set -x
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 \\
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --vllm.enforce_eager \\
   --train.colocate_all \\
   --actor.model_name_or_path org/policy --reward.model_name_or_path org/reward \\
   --ckpt.output_dir ./out/ppo --ckpt.save_steps -1 --ckpt.save_hf \\
   --train.batch_size 64 --rollout.batch_size 256 --rollout.n_samples_per_prompt 2 \\
   --data.max_len 3000 --rollout.max_new_tokens 1000 --data.max_samples 2560 \\
   --actor.adam.lr 4e-7 --critic.adam.lr 8e-6 \\
   --algo.kl.init_coef 0.02 --algo.kl.target 6 \\
   --data.prompt_dataset org/prompts --data.input_key messages --data.apply_chat_template \\
   --reward.normalize_enable --ds.packing_samples \\
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 \\
   --critic.freezing_steps 10 \\
   --logger.wandb.key 0123456789abcdef --logger.wandb.project rlhf
"""
DAPO = """\
ROOT=$(cd "$(dirname "$0")/.." && pwd)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path org/policy --algo.advantage.estimator group_norm \\
   --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \\
   --actor.eps_clip_low_high 0.2 0.27 --algo.dynamic_filtering_enable \\
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \\
   --reward.remote_url $ROOT/reward_func.py --reward.overlong_buffer_len 256 \\
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 128 \\
   --data.max_len 2048 --train.num_episodes 2 --data.prompt_dataset a.jsonl,b.jsonl \\
   --data.prompt_probs 0.3,0.7 --ds.ring_attn_size 2 --ds.lora.rank 8
"""
OLD = """\
deepspeed --module openrlhf.cli.train_ppo_ray --pretrain org/p --reward_pretrain org/r \\
  --critic_pretrain org/c --micro_train_batch_size 8 --train_batch_size 128 \\
  --rollout_batch_size 1024 --prompt_max_len 512 --generate_max_len 768 --max_epochs 2 --enable_ema \\
  --actor_learning_rate 5e-7 --init_kl_coef 0.01 --prompt_data org/d --input_key text \\
  --advantage_estimator reinforce_baseline --n_samples_per_prompt 4 --gradient_checkpointing --bf16
"""
DPO = """\
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --ckpt.output_dir ./checkpoint/dpo --train.batch_size 256 --train.micro_batch_size 1 \\
   --model.model_name_or_path org/sft --ds.param_dtype bf16 --train.max_epochs 3 \\
   --ref.model_name_or_path org/start \\
   --data.max_len 1024 --adam.lr 5e-7 --model.beta 0.2 --model.ipo_enable \\
   --data.dataset org/pairs --data.chosen_key better --data.rejected_key worse
EOF
    # --model.label_smoothing 0.1
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
RM = "deepspeed --module openrlhf.cli.train_rm --pretrain m/m --dataset d.jsonl --max_len 600 --margin_loss"
SFT = """\
torchrun --nproc_per_node 2 -m openrlhf.cli.train_sft --model.model_name_or_path org/base \\
  --data.dataset d.jsonl --data.input_key question --data.output_key response --data.max_len 2048 \\
  --train.max_epochs 1 --train.batch_size 100 --adam.lr 5e-6 --ds.lora.rank 64 --ds.load_in_4bit
"""


def test_ppo_with_a_reward_model(imported):
    run = imported(PPO)
    # 256 x 2 trajectories / 64
    assert run.values("prompts_per_step", "minibatches_per_step", "epochs") == (256, 8, 1.0)
    assert run.config.minibatches_of == "responses"
    assert run.values("max_prompt_tokens", "max_response_tokens") == (2000, 1000)
    # cosine to a tenth
    schedule = run.values("optim.schedule", "optim.final_fraction", "optim.warmup_steps", "optim.b2")
    assert schedule == ("cosine", 0.1, 0.03, 0.95)
    assert run.values("algo.kl_in", "algo.kl", "algo.kl_coef", "algo.kl_target") == (
        "reward",
        "k1",
        0.02,
        6.0,
    )
    assert run.values("algo.lam", "algo.dual_clip") == (1.0, None)
    assert "reward.clip_range [-10, 10] (OpenRLHF's default): rewards are not clipped" in run.report
    assert run.values("critic.path", "critic.warmup_steps", "critic.optim.learning_rate") == (
        "org/reward",
        10,
        8e-6,
    )
    assert run.values("reward.name", "reward.models.0.path") == ("none", "org/reward")
    assert run.values("data.chat.render", "data.train.0.prompt_key", "seed") == ("chat", "messages", 42)
    assert run.values("tokens_per_device", "checkpoint.every", "run_dir") == (16384, 0, "./out/ppo")
    assert run.config.log.wandb == "rlhf" and "0123456789" not in run.text + run.report
    assert run.lost["reward.normalize_enable"].startswith("--reward.models.0.mean, and 1 / std as its weight")


def test_dapo_of_a_job_with_a_path_beside_the_script(imported, tmp_path):
    run = imported(DAPO)
    assert run.config.reward.name == f"{tmp_path.parent}/reward_func.py:reward_func"
    assert run.values("algo.kl_in", "algo.kl", "algo.clip_high") == ("loss", "k3", 0.27)
    assert run.values("algo.aggregation", "algo.scale", "algo.dynamic_sampling") == ("token", "std", True)
    correction = run.config.algo.correction
    assert (correction.weight, correction.floor, correction.cap, correction.outside) == (
        "token",
        0.5,
        5.0,
        "zero",
    )
    assert run.values("reward.overlong_from", "reward.overlong_to") == (768, 1024)
    assert [(source.path, source.weight) for source in run.config.data.train] == [
        ("a.jsonl", 0.3),
        ("b.jsonl", 0.7),
    ]
    assert run.values("lora.alpha", "lora.targets", "mesh.sequence") == (16.0, ("all",), 2)
    assert not any(key.startswith("critic") for key in run.unused)


def test_a_sequence_mask_bounds_the_inverse_ratio(imported):
    run = imported(DAPO.replace("icepop", "seq-mask-tis --algo.advantage.is_correction_threshold 0.8 1.25"))
    assert run.config.algo.correction.reject == (("seq_mean_k1", 0.8, 1.25),)
    assert run.config.algo.correction.cap == float("inf")


CORRECTIONS = {  # level, mode, gating, threshold of 0.11.2 -> weight, floor, cap, outside, reject
    "token clip ratio 0.5 2": ("token", 0.5, 2.0, "clip", ()),
    "token mask ratio 0.5 2": ("token", 0.5, 2.0, "zero", ()),
    # the geometric mean of old / rollout within bounds; seq_mean_k1 bounds rollout / old
    "seq mask ratio 0.5 2": ("token", 0.0, float("inf"), "clip", (("seq_mean_k1", 0.5, 2.0),)),
    "seq mask binary_kl 0.02": ("token", 0.0, float("inf"), "clip", (("seq_mean_binary_kl", 0.0, 0.02),)),
    "token mask tv 0.1": ("token", 0.0, float("inf"), "clip", (("token_tv", 0.0, 0.1),)),
}


@pytest.mark.parametrize("case", CORRECTIONS)
def test_corrections_of_0_11_2(imported, case):
    level, mode, gating, *threshold = case.split()
    flags = f"--algo.advantage.is_correction_level {level} --algo.advantage.is_correction_mode {mode} "
    flags += f"--algo.advantage.is_correction_gating {gating} "
    flags += f"--algo.advantage.is_correction_threshold {' '.join(threshold)}\n"
    run = imported(f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m/m {flags}")
    got = run.config.algo.correction
    assert (got.weight, got.floor, got.cap, got.outside, got.reject) == CORRECTIONS[case]


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--actor.loss_agg_mode seq-mean-token-mean", {"algo.aggregation": "sequence"}),
        ("--actor.policy_loss_type gspo", {"algo.aggregation": "sequence"}),
        ("--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient", {"algo.kl": "k3+"}),
        ("--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.unbiased_gradient", {"algo.kl": "k2"}),
        (
            "--algo.advantage.estimator flash_reinforce",
            {"algo.advantage": "reinforce", "algo.scale": "none", "algo.aggregation": "token"},
        ),
        ("--actor.optim muon", {"optim.name": "muon", "optim.b1": 0.95, "optim.learning_rate": 0.02}),
    ],
)
def test_losses_of_0_11_2(imported, flags, values):
    run = imported(f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m/m {flags}\n")
    assert run.values(*values) == tuple(values.values())


@pytest.mark.parametrize(
    "flags",
    [
        "--reward.normalize_enable",
        "--algo.advantage.no_std_norm",
        "--reward.stop_properly_penalty_coef 0.5",
        "--reward.clip_range -5 5",
        "--data.max_samples 1000",
        "--algo.dynamic_filtering_range 0.1 0.9",
        "--ds.lora.dropout 0.1",
        "--use_kl_estimator_k3",  # of version 0.6
        "--some.new_flag 3",
    ],
)
def test_what_changes_the_result_is_said_first(imported, flags):
    run = imported(f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m/m {flags}\n")
    assert list(run.lost) == [flags.split()[0].lstrip("-")]
    assert run.report.splitlines()[1].startswith(f"NOT CARRIED OVER: {flags.split()[0].lstrip('-')}")


def test_the_learning_rate_of_muon_is_of_other_updates(imported):
    """DeepSpeed's are max(1, rows / columns) ** 0.5 of an orthogonal matrix, ours as large as AdamW's."""
    run = imported(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m/m --actor.optim muon\n"
    )
    assert list(run.lost) == ["actor.muon.lr"] and "set --optim.learning_rate" in run.report


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("ppo_ray", "--data.image_key images"),
        ("sft", "--muon.nesterov True"),
        ("sft", "--model.pretrain_mode_enable False"),
        ("rm", "--model.compute_fp32_loss_enable False"),
    ],
)
def test_a_default_that_is_stated_is_no_warning(imported, trainer, flags):
    run = imported(f"python3 -m openrlhf.cli.train_{trainer} --model.model_name_or_path m/m {flags}\n")
    assert flags.split()[0].lstrip("-") not in run.lost


def test_flags_before_0_11(imported):
    run = imported(OLD)
    assert (
        run.config.algo.advantage == "reinforce_pp_baseline" and run.config.algo.algorithm == "reinforce_pp"
    )
    assert run.values("model.path", "model.remat", "minibatches_per_step") == (
        "org/p",
        "full",
        32,
    )  # 4,096 / 128
    assert run.values("max_prompt_tokens", "max_response_tokens") == (512, 768)
    assert run.values("tokens_per_device", "optim.learning_rate") == (8 * 1280, 5e-7)
    assert run.values("ppo_epochs", "optim.ema") == (2, 0.992)


def test_dpo_in_a_here_document(imported):
    run = imported(DPO)
    assert run.config.algo.algorithm == "dpo" and run.values("algo.loss", "algo.beta") == ("ipo", 0.2)
    assert run.values("prompts_per_step", "epochs") == (256, 3.0)
    source = run.config.data.train[0]
    assert (source.path, source.response_key, source.rejected_key) == ("hub:org/pairs", "better", "worse")
    # OpenRLHF's micro-batch is of pairs: a row holds two of 1,024 tokens
    assert run.values("max_prompt_tokens", "max_response_tokens", "tokens_per_device") == (512, 512, 2048)
    assert run.config.reference.path == "org/start" and "algo.label_smoothing" not in run.text


def test_reward_model_and_sft(imported):
    run = imported(RM)
    assert run.config.algo.algorithm == "reward_model" and run.config.algo.margin is True
    assert run.values("optim.learning_rate", "max_prompt_tokens") == (9e-6, 300)
    run = imported(SFT)
    assert run.config.algo.algorithm == "sft"
    assert run.values("lora.rank", "lora.quantize", "lora.alpha") == (64, "nf4", 16.0)
    assert (
        run.config.data.train[0].input_template == "User: {}\nAssistant: "
    )  # its default without a template
