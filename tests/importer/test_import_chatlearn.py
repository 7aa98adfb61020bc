from jaxrl_import.fields import UNREAD

"""ChatLearn: scripts with and without their templates, and templates alone, numbers worked by hand."""

SCRIPT = """\
#!/bin/bash
export CHATLEARN=$(pwd)
source scripts/base_env.sh
export exp_name=sums
python chatlearn/entrypoint.py grpo \\
        --config-file template/sums.yaml \\
        runtime_args.exp_name=${exp_name} \\
        runtime_args.data_path=${CHATLEARN}/dataset/train.json \\
        runtime_args.eval_data_path=${CHATLEARN}/dataset/test.json \\
        runtime_args.output_dir=${CHATLEARN}/output/${exp_name} \\
        runtime_args.num_episode=50 \\
        runtime_args.sample_per_episode=1024 \\
        runtime_args.train_global_batch_size=256 \\
        runtime_args.train_micro_batch_size=4 \\
        runtime_args.log_args_dict.enable_wandb=True \\
        runtime_args.log_args_dict.wandb_project=sums_project \\
        models.policy_trainer.num_gpu=${num_device} \\
        models.policy_trainer.load=${CHATLEARN}/models/m \\
        models.policy_trainer.optimizer.lr=1e-6 \\
        models.policy_trainer.pos_clip_ratio=0.28 \\
        models.policy_trainer.neg_clip_ratio=0.2 \\
        models.policy.max_prompt_tokens_length=256 \\
        models.policy.max_response_tokens_length=768 \\
        models.policy.num_inference_per_prompt=16 \\
        models.policy.enable_thinking=False \\
        2>&1 | tee log_${exp_name}.log ; exit ${PIPESTATUS[0]}
"""
GSPO = SCRIPT.replace("pos_clip_ratio=0.28", "pos_clip_ratio=1e-3").replace(
    "models.policy.enable", "models.policy_trainer.use_group_sequence_policy=True models.policy.enable"
)
MEGATRON = SCRIPT.replace(
    "runtime_args.exp_name",
    "runtime_args.train_backend=megatron models.policy.load=hf/m "
    "models.policy_trainer.tensor_model_parallel_size=4 models.policy_trainer.pipeline_model_parallel_size=2 "
    "models.policy_trainer.recompute_granularity=full runtime_args.exp_name",
    1,
)
PACKED = SCRIPT.replace(
    "models.policy.enable",
    "models.policy_trainer.packing=True models.policy_trainer.max_token_in_packing=20000 "
    "models.policy_trainer.ulysses_sequence_parallel_size=2 models.policy_trainer.kl_coef=0.01 "
    "runtime_args.rollout_backend=sglang models.policy.enable",
)
TEMPLATE = """\
runtime_args:
  exp_name: from_template
  output_dir: out
  data_path: a.json,b.json
  num_episode: 7
  sample_per_episode: 64
  train_global_batch_size: 64
  save_episode_interval: 5
models:
  policy_trainer:
    load: org/m
    num_gpu: 2
    fsdp_size: ${models.policy_trainer.num_gpu}
    optimizer: {lr: 3e-6}
  ref_policy:
    load: ${models.policy_trainer.load}
  policy:
    num_inference_per_prompt: 8
    eval_temperature: 0.5
"""
EXPERTS = """\
#!/bin/bash
set -x
export CHATLEARN=$(pwd)
export MEGATRON_PATH=/opt/Megatron-LM
export PYTHONPATH=${CHATLEARN}:${MEGATRON_PATH}:${PYTHONPATH}
source scripts/base_env.sh
hf_ckpt_path=/models/Experts-30B
mcore_ckpt_path=/models/Experts-30B-mcore
exp_name="experts_gspo"
export output_dir=${CHATLEARN}/output/${exp_name}
mkdir -p $output_dir/
log_file=$output_dir/${exp_name}_rank${RANK}.log

python chatlearn/entrypoint.py grpo --config-file template/grpo_megatron.yaml \\
        runtime_args.exp_name=${exp_name} \\
        runtime_args.train_backend=megatron \\
        runtime_args.data_path=/data/math/train.json \\
        runtime_args.eval_data_path=/data/math/test.json \\
        runtime_args.output_dir=${output_dir} \\
        runtime_args.num_episode=100 \\
        runtime_args.sample_per_episode=1024 \\
        runtime_args.train_global_batch_size=256 \\
        runtime_args.train_micro_batch_size=1 \\
        runtime_args.save_episode_interval=1000000 \\
        runtime_args.eval_episode_interval=1 \\
        runtime_args.enable_eval_before_training=False \\
        runtime_args.log_args_dict.enable_tensorboard=True \\
        runtime_args.log_args_dict.tensorboard_dir=${output_dir}/tensorboard \\
        models.policy_trainer.num_gpu=16 \\
        models.policy_trainer.packing=False \\
        models.policy_trainer.bf16=True \\
        models.policy_trainer.sequence_parallel=True \\
        models.policy_trainer.use_distributed_optimizer=True \\
        models.policy_trainer.recompute_granularity='selective' \\
        models.policy_trainer.tensor_model_parallel_size=4 \\
        models.policy_trainer.pipeline_model_parallel_size=2 \\
        models.policy_trainer.expert_tensor_parallel_size=4 \\
        models.policy_trainer.expert_model_parallel_size=1 \\
        models.policy_trainer.generation_batch_size=32 \\
        models.policy_trainer.load=${mcore_ckpt_path} \\
        models.policy_trainer.optimizer.lr=2e-6 \\
        models.policy_trainer.optimizer.min_lr=2e-7 \\
        models.policy_trainer.pos_clip_ratio=2e-3 \\
        models.policy_trainer.neg_clip_ratio=1e-3 \\
        models.policy_trainer.use_group_sequence_policy=True \\
        models.reward.generation_batch_size=128 \\
        models.policy.load=${hf_ckpt_path} \\
        models.policy.tensor_model_parallel_size=4 \\
        models.policy.max_prompt_tokens_length=1024 \\
        models.policy.max_response_tokens_length=2048 \\
        models.policy.num_inference_per_prompt=32 \\
        models.policy.gpu_memory_utilization=0.75 \\
        models.policy.enable_thinking=True \\
        2>&1 | tee ${log_file} ; exit ${PIPESTATUS[0]}
"""
PARTIAL = """\
runtime_args:
  train_backend: fsdp
  rollout_backend: sglang
  exp_name: cut_rollouts
  colocation: [policy, policy_trainer, ref_policy, rollout_manager]
  data_path: /data/easy.json,/data/hard.json
  data_ratio: [3, 1]
  eval_data_path: /data/held_out.json
  data_checkpoint_path: ${runtime_args.output_dir}/data_checkpoint_path/
  output_dir: /runs/cut
  num_episode: 40
  sample_per_episode: 480
  train_micro_batch_size: 8
  train_global_batch_size: 120
  num_training_epoch: 2
  max_replay_episode: 2
  data_shuffle: False
  data_rerank: True
  eval_episode_interval: 5
  log_args_dict:
    log_dir: ${runtime_args.output_dir}
    enable_wandb: True
    wandb_project: rollouts
    wandb_name: ${runtime_args.exp_name}
models:
  policy_trainer:
    free_gpu_memory: {offload_weights: True, offload_optimizer_states: True, free_grad_buffers: True}
    optimizer: {lr: 1e-6, clip_grad: 0.5, weight_decay: 0.1, adam_beta2: 0.98}
    trainable: True
    num_gpu: 8
    fsdp_size: ${models.policy_trainer.num_gpu}
    ulysses_sequence_parallel_size: 2
    packing: True
    max_token_in_packing: 16384
    load: org/m
    gradient_checkpointing: False
    pos_clip_ratio: 0.25
    final_clip_ratio: 5.0
    entropy_coef: 0.001
    kl_coef: 0.02
  ref_policy:
    free_gpu_memory: {offload_weights: True}
    num_gpu: ${models.policy_trainer.num_gpu}
    load: ${models.policy_trainer.load}
    packing: ${models.policy_trainer.packing}
  policy:
    num_gpu: ${models.policy_trainer.num_gpu}
    tensor_model_parallel_size: 2
    num_inference_per_prompt: 12
    max_prompt_tokens_length: 512
    max_response_tokens_length: 1536
    temperature: 0.9
    top_p: 0.95
    eval_temperature: 0.2
    eval_top_k: -1
    vllm_prompt_key: question
    gpu_memory_utilization: 0.7
    enable_stage_resume: False
  reward: {num_cpu: 2, cpu_per_process: 1, generation_batch_size: 256}
  rollout_manager:
    num_inference_per_prompt: ${models.policy.num_inference_per_prompt}
    mini_response_per_prompt: 8
    max_rollout_round: 2
"""


def test_script_without_its_template(imported):
    run = imported(SCRIPT)
    # 1,024 samples / 16 responses; 1,024 / 256 updates; 4 x (256 + 768) tokens
    sizes = run.values(
        "prompts_per_step", "responses_per_prompt", "minibatches_per_step", "tokens_per_device"
    )
    assert sizes == (64, 16, 4, 4096)
    assert run.values("steps", "algo.clip_low", "algo.clip_high") == (50, 0.2, 0.28)
    assert run.lost["models.policy_trainer.final_clip_ratio"].startswith("the loss has no such bound")
    assert run.values("algo.scale", "algo.aggregation", "algo.kl_coef") == ("population_std", "token", 0.0)
    assert run.values("optim.b2", "optim.weight_decay", "eval.sampling.top_k") == (0.95, 0.01, 20)
    assert run.values("run_dir", "log.wandb", "model.path") == ("./output/sums", "sums_project", "./models/m")
    assert run.config.data.chat.template_options == '{"enable_thinking": false}'
    assert "template/sums.yaml is not at hand" in run.report
    assert "models.policy_trainer.num_gpu is $num_device, not known: --devices N" in run.report


def test_script_with_its_template(imported, tmp_path):
    (tmp_path / "template").mkdir()
    (tmp_path / "template/sums.yaml").write_text(TEMPLATE)
    run = imported(SCRIPT)
    assert run.values("steps", "checkpoint.every", "eval.sampling.temperature") == (50, 5, 0.5)
    assert run.config.optim.learning_rate == 1e-6


def test_template_alone(imported):
    run = imported(TEMPLATE, "template.yaml")
    assert run.values("prompts_per_step", "minibatches_per_step", "steps") == (8, 1, 7)
    assert [source.path for source in run.config.data.train] == ["a.json", "b.json"]
    assert run.config.optim.learning_rate == 3e-6 and set(run.unused.values()) <= {UNREAD}


def test_gspo(imported):
    run = imported(GSPO)
    assert run.config.algo.algorithm == "gspo"
    assert run.values("algo.clip_high", "algo.aggregation") == (1e-3, "token")


def test_megatron_has_its_hugging_face_folder_beside_it(imported):
    run = imported(MEGATRON)
    assert run.values("model.path", "mesh.tensor", "model.remat") == ("hf/m", 4, "full")
    assert run.values("mesh.stage") == (2,)


def test_packing_and_sglang(imported):
    run = imported(PACKED, engine="sglang", devices=8)
    assert run.values("tokens_per_device", "mesh.sequence", "mesh.sequence_parallel") == (20000, 2, "ulysses")
    assert run.values("rollout.launch", "algo.kl_coef", "algo.kl") == (8, 0.01, "k3")


def test_a_script_of_a_megatron_run_with_experts(imported):
    run = imported(EXPERTS, engine="sglang")
    # 1,024 samples / 32 responses; 1,024 / 256 updates; 1 x (1,024 + 2,048) tokens
    sizes = run.values(
        "prompts_per_step", "responses_per_prompt", "minibatches_per_step", "tokens_per_device"
    )
    assert sizes == (32, 32, 4, 3072)
    algo = run.values("algo.clip_low", "algo.clip_high", "algo.aggregation", "algo.scale")
    assert run.config.algo.algorithm == "gspo" and algo == (1e-3, 2e-3, "token", "population_std")
    assert run.values("model.path", "model.remat", "mesh.tensor") == ("/models/Experts-30B", "attention", 4)
    assert run.values("steps", "checkpoint.every", "eval.every") == (100, 1_000_000, 1)
    assert run.values("run_dir", "rollout.launch") == ("./output/experts_gspo", 4)  # 16 GPUs / tp 4
    assert run.values("servers.flags") == ("--tp 4 --mem-fraction-static 0.75",)
    assert run.config.data.chat.template_options == '{"enable_thinking": true}'
    without = {key.rpartition(".")[2] for key in run.unused}
    assert {"min_lr", "expert_tensor_parallel_size"} <= without
    assert not {"pos_clip_ratio", "num_gpu", "recompute_granularity"} & without


def test_a_template_with_two_sources_and_a_rollout_manager(imported):
    run = imported(PARTIAL, "partial.yaml", engine="sglang")
    # 480 samples / 12 responses; 480 / 120 updates, twice
    assert run.values("prompts_per_step", "minibatches_per_step", "ppo_epochs") == (40, 4, 2)
    sources = run.config.data.train
    assert [(source.path, source.weight) for source in sources] == [
        ("/data/easy.json", 3.0),
        ("/data/hard.json", 1.0),
    ]
    assert {source.prompt_key for source in (*sources, *run.config.data.eval)} == {"question"}
    assert run.values("algo.kl_coef", "algo.entropy_coef") == (0.02, 0.001)
    assert "models.policy_trainer.final_clip_ratio 5.0" in run.report
    assert run.values("algo.clip_low", "algo.clip_high") == (0.2, 0.25)
    assert run.values("optim.max_grad_norm", "optim.b2", "optim.learning_rate") == (0.5, 0.98, 1e-6)
    assert run.values("mesh.sequence", "mesh.sequence_parallel") == (2, "ulysses")
    assert run.values("tokens_per_device", "max_response_tokens") == (16384, 1536)
    assert run.values("rollout.sampling.top_p", "eval.sampling.temperature") == (0.95, 0.2)
    assert run.values("reference.offload", "model.remat", "data.shuffle") == (True, "none", False)
    assert run.values("rollout.launch", "servers.flags") == (4, "--tp 2 --mem-fraction-static 0.7")
    assert run.values("log.wandb", "log.name", "run_dir") == ("rollouts", "cut_rollouts", "/runs/cut")
    manager = {key: why for key, why in run.unused.items() if "rollout_manager" in key}
    assert set(manager.values()) == {"The engine spreads requests itself"} and len(manager) == 3
