"""veRL: scripts with Hydra overrides and YAML, numbers worked by hand."""

import pytest

GRPO = """\
#!/bin/bash
set -x
MODEL=${MODEL_PATH:-Qwen/Qwen3-1.7B}
max_response=$((1024 * 2))

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/sums/train.parquet \\
    data.val_files="['$HOME/data/sums/test.parquet', 'extra.parquet']" \\
    data.train_batch_size=256 \\
    data.max_prompt_length=384 \\
    data.max_response_length=${max_response} \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=6 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.n=4 \\
    custom_reward_function.path=rewards/sums.py \\
    custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name=sums trainer.experiment_name=first \\
    trainer.n_gpus_per_node=4 trainer.nnodes=1 \\
    trainer.save_freq=-1 trainer.test_freq=10 trainer.total_epochs=3 $@ 2>&1 | tee log.txt
"""
PPO = """\
python3 -m verl.trainer.main_ppo \\
  data.train_files=a.parquet data.train_batch_size=128 data.truncation=left \\
  actor_rollout_ref.model.path=m/policy critic.model.path=m/critic \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.name=sglang \\
  actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
  algorithm.use_kl_in_reward=True algorithm.kl_penalty=mse algorithm.kl_ctrl.type=adaptive \\
  algorithm.kl_ctrl.kl_coef=0.05 algorithm.kl_ctrl.target_kl=0.2 algorithm.lam=0.95 \\
  critic.optim.lr=2e-5 critic.optim.lr_warmup_steps_ratio=0.1 trainer.critic_warmup=7 \\
  reward_model.enable=True reward_model.model.path=m/reward \\
  actor_rollout_ref.actor.ppo_epochs=2 \\
  trainer.total_training_steps=50 trainer.project_name=p
"""
DAPO = """\
ACTOR=actor_rollout_ref.actor
ARGS=(
    algorithm.adv_estimator=grpo   # a comment
    $ACTOR.clip_ratio_low=0.2
    $ACTOR.clip_ratio_high=0.28
    $ACTOR.clip_ratio_c=10.0
    $ACTOR.loss_agg_mode=token-mean
    algorithm.filter_groups.enable=True
    +algorithm.filter_groups.max_num_gen_batches=10
)
len=4096
python3 -m recipe.dapo.main_dapo "${ARGS[@]}" \\
    data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    data.max_response_length=20480 data.train_files=dapo.parquet \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.model.path=Qwen/Qwen2.5-32B \\
    reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$len \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \\
    +reward_model.reward_kwargs.max_resp_len=20480 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \\
    actor_rollout_ref.actor.fsdp_config.fsdp_size=8 \\
    algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_is_threshold="0.5_2.0" \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \\
    algorithm.rollout_correction.rollout_rs_threshold=1.25 \\
    trainer.total_training_steps=100
"""
YAML = """\
defaults:
  - ppo_trainer
  - _self_
data:
  train_files: x.parquet
  train_batch_size: 64
  max_response_length: 1024
  apply_chat_template_kwargs: {enable_thinking: false}
actor_rollout_ref:
  model: {path: org/model, lora_rank: 32, lora_alpha: 64, target_modules: [q_proj, v_proj]}
  actor:
    ppo_mini_batch_size: 64
    loss_agg_mode: seq-mean-token-sum-norm
    policy_loss: {loss_mode: vanilla}
    megatron: {tensor_model_parallel_size: 2, context_parallel_size: 2}
  rollout: {n: 8, temperature: 0.9, top_k: -1}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
trainer: {total_training_steps: 10, experiment_name: "${data.train_files}_run"}
"""
SFT = """\
torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=train.parquet data.val_files=test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info \\
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.max_length=1000 data.train_batch_size=32 optim.lr=3e-5 \\
    data.micro_batch_size_per_gpu=2 model.partial_pretrain=org/base \\
    trainer.experiment_name=sft trainer.total_epochs=2 trainer.logger=console
"""
LOSSES = {
    "gspo": ("gspo", "token"),  # by loss_agg_mode, whose default is token-mean
    "dro": ("dro", "token"),
    "geo_mean": ("gmpo", "sequence"),
    "cispo": ("cispo", "token"),
    "kl_cov": ("kl_cov", "token"),
}


def test_grpo_with_shell_variables(imported):
    run = imported(GRPO)
    sizes = run.values("prompts_per_step", "responses_per_prompt", "minibatches_per_step", "epochs")
    # 256 x 6 trajectories a step / (64 x 6) an update
    assert sizes == (256, 6, 4, 3.0) and run.config.minibatches_of == "prompts"
    # warm-up of 5 steps x 4 updates; micro-batches of 4 x (384 + 2048) tokens
    assert run.values("optim.warmup_steps", "tokens_per_device", "max_response_tokens") == (20, 9728, 2048)
    assert run.values("algo.kl_coef", "algo.kl", "algo.kl_in") == (0.002, "k3", "loss")
    # veRL's defaults that are not those here
    assert run.values("algo.aggregation", "algo.dual_clip", "optim.weight_decay") == ("token", 3.0, 0.01)
    assert run.values("model.remat", "rollout.dtype", "checkpoint.every") == ("full", "bfloat16", 0)
    assert run.values("model.path", "reward.name") == ("Qwen/Qwen3-1.7B", "rewards/sums.py:score")
    assert [source.path for source in run.config.data.eval] == ["~/data/sums/test.parquet", "extra.parquet"]
    assert run.values("eval.every", "eval.samples", "eval.sampling.temperature") == (10, 4, 0.7)
    assert run.values("run_dir", "log.wandb", "reference.offload") == ("runs/first", "sums", True)
    assert run.config.algo.algorithm == "grpo" and run.config.rollout.engine == "native"
    assert list(run.unused) == ["actor_rollout_ref.model.use_remove_padding"]
    assert "# Keys of the file that change no result:\n# actor_rollout_ref.model.use_remove" in run.text
    assert run.lost == {}
    assert "dual_clip=3.0,  # actor_rollout_ref.actor.clip_ratio_c 3.0 (veRL's default)" in run.text
    assert imported(GRPO, define=("MODEL_PATH=other",)).config.model.path == "other"


def test_warm_up_of_steps_counts_all_updates_of_a_step(imported):
    # 5 steps x 4 mini-batches x 3 passes
    run = imported(GRPO.replace("$@", "actor_rollout_ref.actor.ppo_epochs=3"))
    assert run.values("optim.warmup_steps", "ppo_epochs") == (60, 3)


def test_ppo_with_kl_in_the_reward_a_critic_and_a_reward_model(imported):
    run = imported(PPO, engine="sglang")
    assert run.config.algo.algorithm == "ppo"
    assert run.values("algo.kl_in", "algo.kl", "algo.kl_coef", "algo.kl_target") == (
        "reward",
        "k2",
        0.05,
        0.2,
    )
    assert run.values("algo.lam", "algo.gamma", "critic.loss.value_clip") == (0.95, 1.0, 0.5)
    assert run.values("critic.path", "critic.warmup_steps") == ("m/critic", 7)
    # a tenth of 50 steps, x 4 mini-batches x 2 passes
    assert run.values("critic.optim.learning_rate", "critic.optim.warmup_steps") == (2e-5, 40)
    assert run.config.reward.models[0].path == "m/reward" and run.config.reward.name == "none"
    assert run.values("data.overlong", "data.cut_side", "steps") == ("cut", "left", 50)
    # 8 GPUs, 2 a server (veRL's default)
    assert run.values("rollout.engine", "rollout.launch") == ("sglang", 4)
    assert run.config.servers.flags == "--tp 2 --mem-fraction-static 0.4"
    assert run.values("minibatches_per_step", "ppo_epochs") == (4, 2)  # 128 prompts / 32


def test_a_critics_sum_over_the_padded_length_is_a_factor(imported):
    """The squared error, times half, over 512 tokens: veRL's default response."""
    mode = "critic.loss_agg_mode=seq-mean-token-sum-norm"
    run = imported(PPO.replace("critic.optim.lr=", f"{mode} critic.optim.lr="))
    assert run.values("critic.loss.aggregation", "critic.loss.factor") == ("sequence_sum", 0.5 / 512)
    assert "scale critic.optim.learning_rate" in run.report


def test_dapo_with_arrays_overlong_penalty_and_corrections(imported):
    run = imported(DAPO)
    assert run.values("algo.clip_low", "algo.clip_high", "algo.dual_clip") == (0.2, 0.28, 10.0)
    assert run.values("algo.dynamic_sampling", "algo.max_draws") == (True, 10)
    # 512 x 16 trajectories / (32 x 16)
    assert run.config.minibatches_per_step == 16
    assert run.values("reward.shaping", "reward.overlong_from", "reward.overlong_to") == (
        (("overlong", 0.5),), 16384, 20480,
    )  # fmt: skip
    assert run.values("mesh.sequence", "mesh.sequence_parallel", "mesh.fsdp", "mesh.data") == (
        4,
        "ulysses",
        8,
        -1,
    )
    assert run.config.tokens_per_device == 22528
    correction = run.config.algo.correction
    assert (correction.weight, correction.floor, correction.cap, correction.outside) == (
        "token",
        0.5,
        2.0,
        "zero",
    )
    assert correction.reject == (("seq_mean_k1", 0.8, 1.25),)  # 1 / 1.25
    assert run.config.algo.kl_coef == 0.0


def test_yaml_with_lora_dr_grpo_and_megatron(imported):
    run = imported(YAML, "config.yaml")
    assert run.values("algo.scale", "algo.aggregation", "algo.constant") == ("none", "constant", 1024.0)
    assert run.values("lora.rank", "lora.alpha", "lora.targets") == (32, 64.0, ("q_proj", "v_proj"))
    assert run.values("mesh.tensor", "mesh.sequence", "mesh.sequence_parallel") == (2, 2, "ring")
    assert run.config.data.chat.template_options == '{"enable_thinking": false}'
    assert run.values("rollout.sampling.temperature", "rollout.sampling.top_k") == (0.9, 0)
    assert run.config.run_dir == "runs/x.parquet_run"


def test_sft(imported):
    run = imported(SFT)
    assert run.config.algo.algorithm == "sft" and run.config.epochs == 2
    assert run.values("max_prompt_tokens", "max_response_tokens", "tokens_per_device") == (500, 500, 2000)
    assert run.values("optim.schedule", "optim.final_fraction", "optim.warmup_steps") == ("cosine", 0.0, 0.1)
    source = run.config.data.train[0]
    assert (source.prompt_key, source.response_key) == ("extra_info.question", "extra_info.answer")
    assert run.config.data.eval[0].prompt_key == "extra_info.question"
    assert run.values("optim.b2", "seed", "log.wandb") == (0.95, 1, "")


def test_policy_losses_and_estimators(imported):
    for loss, expected in LOSSES.items():
        loss += " actor_rollout_ref.actor.policy_loss.dro_beta=0.3" * (loss == "dro")
        text = GRPO.replace("$@", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}")
        run = imported(text)
        assert (run.config.algo.algorithm, run.config.algo.aggregation) == expected
    for estimator, algo, advantage in (
        ("rloo", "rloo", "rloo"),
        ("reinforce_plus_plus_baseline", "reinforce_pp", "reinforce_pp_baseline"),
        ("remax", "remax", "remax"),
    ):
        run = imported(GRPO.replace("estimator=grpo", f"estimator={estimator}"))
        assert (run.config.algo.algorithm, run.config.algo.advantage) == (algo, advantage)


def test_a_mini_batch_that_does_not_divide_the_batch(imported):
    # 256 / 60 are 5 updates, the last of 16 prompts; 1,536 trajectories divide into 6
    run = imported(GRPO.replace("ppo_mini_batch_size=64", "ppo_mini_batch_size=60"))
    assert run.config.minibatches_per_step == 6
    assert "are 5, the last one smaller; here updates are equal" in " ".join(
        run.text.replace("#", "").split()
    )


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_only_response_to_a_prompt_keeps_its_reward(imported, estimator):
    """veRL's mean over a group of one is 0, its deviation 1."""
    command = "python3 -m verl.trainer.main_ppo data.train_files=x trainer.total_training_steps=1 "
    run = imported(f"{command} algorithm.adv_estimator={estimator}\n")
    assert run.values("responses_per_prompt", "algo.advantage") == (1, "reward")
    assert "rollout.n 1 (veRL's default): of one response veRL has no baseline" in run.report
    two = imported(f"{command} algorithm.adv_estimator={estimator} actor_rollout_ref.rollout.n=2\n")
    assert two.values("responses_per_prompt", "algo.advantage") == (2, estimator)


NEW = "python3 -m verl.trainer.main_ppo data.train_files=x trainer.total_training_steps=100 "
NEW += "actor_rollout_ref.model.path=org/m algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
ACTOR = "actor_rollout_ref.actor"
REWARDS = "reward.reward_manager.name=dapo reward.reward_kwargs.overlong_buffer_cfg.enable=True "
REWARDS += "reward.reward_kwargs.overlong_buffer_cfg.len=100 data.max_response_length=1000 "
REWARDS += "reward.custom_reward_function.path=mine.py reward.custom_reward_function.name=score"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=True"
DISTILLED = "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=org/t "
LOSS = "distillation.distillation_loss"
ROPE = "actor_rollout_ref.model.override_config.rope_scaling"


@pytest.mark.parametrize(
    ("words", "algo", "values"),
    [
        (
            REWARDS,
            "grpo",
            {"reward.name": "mine.py:score", "reward.overlong_from": 900, "reward.overlong_to": 1000},
        ),
        (
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
            "grpo",
            {"mesh.sequence": 4, "mesh.sequence_parallel": "ulysses"},
        ),
        (f"{ACTOR}.megatron.expert_model_parallel_size=8", "grpo", {"mesh.expert": 8}),
        (
            f"{ACTOR}.megatron.pipeline_model_parallel_size=4 {ACTOR}.megatron.tensor_model_parallel_size=2",
            "grpo",
            {"mesh.stage": 4, "mesh.tensor": 2},
        ),
        (
            f"{ACTOR}.torchtitan.pipeline_parallel_size=4 {ACTOR}.torchtitan.tensor_parallel_size=2 "
            f"{ACTOR}.torchtitan.context_parallel_size=2 {ACTOR}.torchtitan.data_parallel_shard_size=8",
            "grpo",
            {"mesh.stage": 4, "mesh.tensor": 2, "mesh.sequence": 2, "mesh.fsdp": 8, "mesh.data": -1},
        ),
        (
            f"{ACTOR}.optim.name=SGD {ACTOR}.optim.decay_type=linear {ACTOR}.optim.min_lr_factor=0.1",
            "grpo",
            {"optim.name": "sgd", "optim.schedule": "linear", "optim.final_fraction": 0.1},
        ),
        (f"{ACTOR}.engine.pp=2 {ACTOR}.engine.tp=4", "grpo", {"mesh.stage": 2, "mesh.tensor": 4}),
        # the low and high bounds alone are read, 0.2 by default
        (f"{ACTOR}.clip_ratio=0.3", "grpo", {"algo.clip_low": 0.2, "algo.clip_high": 0.2}),
        (f"{ACTOR}.loss_agg_mode=token-sum", "grpo", {"algo.aggregation": "token_sum"}),
        (
            f"{ACTOR}.policy_loss.loss_mode=dro {ACTOR}.policy_loss.dro_beta=0.3",
            "dro",
            {"algo.beta": 0.3, "algo.aggregation": "token"},
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=dppo_kl {ACTOR}.clip_ratio_low=0.05 {ACTOR}.clip_ratio_c=20",
            "dppo",
            {
                "algo.divergence_of": "kl",
                "algo.delta_low": 0.05,
                "algo.delta_high": 0.2,
                "algo.ratio_cap": 20.0,
                "algo.old": "policy",
            },
        ),
        (
            f"{BYPASS} {CORRECTION}.rollout_is=token {CORRECTION}.rollout_rs=seq_mean_k1",
            "grpo",
            {"algo.old": "rollout", "algo.correction.weight": "none", "algo.correction.of": "policy"},
        ),
        (
            f"{BYPASS} {CORRECTION}.rollout_is=sequence {CORRECTION}.loss_type=reinforce",
            "reinforce",
            {
                "algo.old": "rollout",
                "algo.correction.weight": "sequence",
                "algo.correction.of": "policy",
                "algo.advantage": "grpo",
            },
        ),
        (
            f"{DISTILLED} {LOSS}.loss_mode=forward_kl_topk {LOSS}.topk=64 {LOSS}.use_task_rewards=False",
            "gkd",
            {
                "algo.teachers": ("org/t",),
                "algo.form": "divergence",
                "algo.beta": 0.0,
                "algo.top_k": 64,
                "algo.reward_coef": 0.0,
            },
        ),
        (
            f"{DISTILLED} {LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True {LOSS}.use_task_rewards=False",
            "gkd",
            {"algo.teachers": ("org/t",), "algo.form": "policy_gradient", "algo.clip_low": 0.2},
        ),
        # beside the task's reward an estimator of the KL to the teacher: a reference model
        (
            f"{DISTILLED} {LOSS}.loss_mode=k3 {LOSS}.distillation_loss_coef=0.5",
            "grpo",
            {"reference.path": "org/t", "algo.kl": "k3", "algo.kl_coef": 0.5, "algo.kl_in": "loss"},
        ),
        (f"{ACTOR}.optim.optimizer=SGD", "grpo", {"optim.name": "sgd", "optim.b1": 0.0}),
        (f"{ACTOR}.optim.optimizer=SGD {ACTOR}.optim.betas=[0.8,0.9]", "grpo", {"optim.b1": 0.0}),
        (f"{ACTOR}.optim.optimizer=muon", "grpo", {"optim.name": "muon", "optim.b1": 0.95}),
        (f"{ACTOR}.megatron.dtype=float16", "grpo", {"model.dtype": "float16"}),
        (f"{ACTOR}.torchtitan.dtype=float32", "grpo", {"model.dtype": "float32"}),
        (f"{ACTOR}.optim.optimizer=AdamW8bit", "grpo", {"optim.name": "adamw", "optim.moments": "int8"}),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.075", "grpo", {"optim.warmup_steps": 28}),  # int(7.5) x 4
        (f"{ACTOR}.router_replay.mode=R3", "grpo", {"routing.replay": "rollout"}),
        (
            "+data.apply_chat_template_kwargs.reasoning_effort=low",
            "grpo",
            {"data.chat.template_options": '{"reasoning_effort": "low"}'},
        ),
        ("~actor_rollout_ref.rollout.n", "grpo", {"responses_per_prompt": 1}),
    ],
)
def test_keys_of_version_0_9_1(imported, words, algo, values):
    run = imported(f"{NEW}{words}\n")
    assert run.config.algo.algorithm == algo
    assert run.values(*values) == tuple(values.values())


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2 "
            f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=5",
            None,
        ),
        ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2", None),
        (
            f"{ACTOR}.megatron.tensor_model_parallel_size=4 actor_rollout_ref.ref.megatron."
            "tensor_model_parallel_size=2",
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        ),
        (
            "critic.megatron.pipeline_model_parallel_size=2 algorithm.adv_estimator=gae",
            "critic.megatron.pipeline_model_parallel_size",
        ),
        (f"{ACTOR}.optim.decay_type=sqrt", None),
        ("actor_rollout_ref.model.lora.dropout=0.1", None),
        ("data.train_max_samples=100", None),
        (f"{LOSS}.loss_max_clamp=10 {DISTILLED}", f"{LOSS}.loss_max_clamp"),
        ("async_training.partial_rollout=True", None),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", None),
        ("reward.sandbox_fusion.url=http://x", None),
        ("reward.reward_manager.name=mine", None),
        (f"{ACTOR}.fsdp_config.model_dtype=bfloat16", None),
        (f"{ACTOR}.brand_new=1", None),
        ("algorithm.use_brand_new=True", None),
        (f"+{ACTOR}.policy_loss.enable_brand_new=True", f"{ACTOR}.policy_loss.enable_brand_new"),
        (f"{LOSS}.use_brand_new=True", None),
        (f"{ACTOR}.optim.optimizer=muon", None),
        (f"{ACTOR}.optim.muon_scale_mode=unit_rms_norm", None),
        (f"{ACTOR}.optim.override_optimizer_config.eps=1e-5", None),
        (f"{ACTOR}.megatron.override_transformer_config.moe_expert_capacity_factor=1.25", None),
        (f"{ACTOR}.megatron.override_transformer_config.moe_router_topk=2", None),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=fp8", None),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", None),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Loop", None),
        ("trainer.v1.sampler.custom_sampler.path=mine.py", None),
        (
            "algorithm.adv_estimator=gae actor_rollout_ref.model.lora_rank=8",  # there the critic is whole
            "critic.model.lora_rank",
        ),
        (f"+{ROPE}.rope_type=linear +{ROPE}.factor=2", ROPE),
        (f"+{ROPE}.rope_type=yarn +{ROPE}.factor=2 +{ROPE}.beta_fast=16", ROPE),
        (
            "+reward.custom_reward_function.reward_kwargs.scale=2",
            "reward.custom_reward_function.reward_kwargs.scale",
        ),
    ],
)
def test_what_changes_the_result_is_said_first(imported, words, key):
    run = imported(f"{NEW}{words}\n")
    assert (key or words.partition("=")[0]) in run.lost
    assert run.report.splitlines()[1].startswith("NOT CARRIED OVER: ")


@pytest.mark.parametrize(
    "words",
    [
        f"{ACTOR}.torchtitan.attn_type=flex {ACTOR}.torchtitan.spmd_backend=spmd_types",
        f"{ACTOR}.torchtitan.activation_checkpoint=selective {ACTOR}.torchtitan.mixed_precision=False",
        "trainer.device=npu", f"{ACTOR}.profiler.enable=True", "ray_kwargs.ray_init.num_cpus=8",
        "actor_rollout_ref.rollout.enforce_eager=True", "data.train_max_samples=-1", f"{ACTOR}.shuffle=False",
        "critic.megatron.pipeline_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.ref.megatron."
        "pipeline_model_parallel_size=2",
        "actor_rollout_ref.model.override_config.attention_dropout=0.0",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.bias_dropout_fusion=True",
        f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
        f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
        f"{ACTOR}.optim.optimizer=muon {ACTOR}.optim.muon_match_adamw_update_rms=True",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=auto",
        "algorithm.adv_estimator=gae actor_rollout_ref.model.lora_rank=8 critic.model.lora_rank=8",
        "data.image_key=images", "actor_rollout_ref.model.lora.dropout_position=pre",
        "actor_rollout_ref.rollout.multi_turn.format=hermes", "trainer.v1.sampler.max_off_policy_threshold=8",
        f"{ACTOR}._target_=verl.workers.config.FSDPActorConfig", f"{ACTOR}.brand_new=null",
    ],
)  # fmt: skip
def test_what_changes_no_result_is_no_warning(imported, words):
    assert imported(f"{NEW}{words}\n").lost == {}


def test_mappings_as_values_are_their_keys(imported):
    """Hydra merges a mapping into the group; YAML's merge keys give one without a place in the file."""
    run = imported(
        f"{NEW}{ACTOR}.optim='{{lr: 3e-6, weight_decay: 0.5}}' '+{ACTOR}.policy_loss={{x: {{y: 2}}}}'\n"
    )
    assert run.values("optim.learning_rate", "optim.weight_decay") == (3e-6, 0.5)
    assert list(run.lost) == [f"{ACTOR}.policy_loss.x.y"]
    shared = "a: &a\n  optim: {lr: 4.0e-6}\nactor_rollout_ref:\n  model: {path: m/m}\n  actor:\n    <<: *a\n"
    run = imported(f"{shared}algorithm: {{adv_estimator: grpo}}\ndata: {{train_files: x}}\n", "a.yaml")
    assert run.config.optim.learning_rate == 4e-6


def test_a_variable_of_settings_that_is_not_in_the_script_is_said(imported):
    run = imported(f"source common.sh\n{NEW}$COMMON $@\n")
    assert "run.sh:2: $COMMON is not in the file" in run.report and "--define COMMON=WORDS" in run.report
    run = imported(f"{NEW}$COMMON\n", define=(f"COMMON=trainer.seed=7 {ACTOR}.ppo_epochs=2",))
    assert run.values("seed", "ppo_epochs") == (7, 2) and "$COMMON" not in run.report


def test_the_name_of_a_config_is_one_word(imported):
    run = imported(f"{NEW}--config-name=mine.yaml ~{ACTOR}.optim.lr_warmup_steps\n")
    assert "./mine.yaml is not at hand" in run.report


def test_yarn_over_the_config_json(imported):
    words = f"+{ROPE}.rope_type=yarn +{ROPE}.factor=4 +{ROPE}.original_max_position_embeddings=32768"
    run = imported(f"{NEW}{words}\n")
    assert run.values("model.yarn_factor", "model.yarn_original") == (4.0, 32_768)
    assert run.lost == {}
    alone = imported(f"{NEW}+{ROPE}.type=yarn +{ROPE}.factor=2.5\n")
    assert alone.values("model.yarn_factor", "model.yarn_original") == (2.5, None)


def test_stages_of_servers_are_theirs(imported):
    words = "actor_rollout_ref.rollout.pipeline_model_parallel_size=2 "
    words += "actor_rollout_ref.rollout.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8"
    run = imported(f"{NEW}{words}\n", engine="sglang")
    assert run.values("servers.flags", "rollout.launch", "mesh.stage") == (
        "--tp 4 --pp-size 2 --mem-fraction-static 0.5",
        1,
        1,
    )


def test_dro_without_its_penalty_is_refused(imported, refusal_of):
    """As in veRL, whose default is None."""
    text, key = f"{NEW}{ACTOR}.policy_loss.loss_mode=dro\n", f"{ACTOR}.policy_loss.dro_beta"
    message = f"/run.sh: {key}: it is not set, and must be. import-config --define {key}=VALUE sets it."
    assert refusal_of(text) == message
    assert imported(text, define=(f"{key}=0.3",)).config.algo.beta == 0.3


def test_paths_keep_the_variables_that_are_not_known(imported):
    run = imported(
        f"{NEW}".replace("org/m", "$ROOT/models/m").replace("files=x", "files=$ROOT/x.parquet") + "\n"
    )
    assert run.values("model.path", "data.train.0.path") == ("$ROOT/models/m", "$ROOT/x.parquet")


def test_sft_of_0_9_1_and_before(imported):
    words = "data.train_files=x model.path=org/m trainer.total_training_steps=10\n"
    run = imported(f"torchrun -m verl.trainer.sft_trainer {words}")
    assert run.values("optim.learning_rate", "optim.schedule", "optim.b2") == (1e-3, "constant", 0.999)
    run = imported(f"torchrun -m verl.trainer.fsdp_sft_trainer {words}")
    assert run.values("optim.learning_rate", "optim.schedule", "optim.b2") == (1e-5, "cosine", 0.95)


def test_an_unset_variable_that_only_saves_memory_is_left_out(imported, refusal_of):
    """bash makes nothing of ${True}, or stops; the key changes no result, so the training is the same."""
    key = "actor_rollout_ref.actor.megatron.optimizer_offload"
    run = imported(f"python3 -m verl.trainer.main_ppo \\\n  actor_rollout_ref.rollout.n=3 {key}=${{True}}\n")
    assert run.values("optim.offload", "responses_per_prompt") == (False, 3)
    assert f"run.sh:2: {key} is $True, not known: it saves memory" in run.report
    run = imported(f"python3 -m verl.trainer.main_ppo {key}=${{True}}\n", define=(f"{key}=True",))
    assert run.config.optim.offload
    # a key that changes the result is asked for
    message = refusal_of("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=${True}\n")
    assert "actor_rollout_ref.rollout.n is $True: give --define True=VALUE" in message


@pytest.mark.parametrize("given", ["", "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer"])
def test_a_command_in_a_variable(imported, refusal_of, given):
    """Without its value the keys tell the trainer; with it, from file or outside, it is words, as in bash."""
    text = "$COMMAND \\\n  data.train_batch_size=32 optim.lr=3e-6 trainer.total_epochs=2\n"
    runs = (
        [imported(text, define=(f"COMMAND={given}",)), imported(f"COMMAND='{given}'\n{text}")]
        if given
        else []
    )
    for run in runs or [imported(text)]:
        assert run.config.algo.algorithm == "sft"
        assert run.values("prompts_per_step", "optim.learning_rate", "epochs") == (32, 3e-6, 2.0)
        assert ("run.sh:1: $COMMAND is not in the file" in run.report) == (not given)
        assert ("4 devices there" in run.text) == bool(given)
    # a program of one's own may do anything with the keys
    assert "no command of a trainer" in refusal_of(f"$PYTHON mine.py {text.partition(' ')[2]}")
