"""ChatLearn: a script with a template beside it, and the template alone, numbers worked by hand."""

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


def test_script_without_its_template(imported):
    run = imported(SCRIPT)
    # 1,024 samples / 16 responses; 1,024 / 256 updates; 4 x (256 + 768) tokens
    sizes = run.values(
        "prompts_per_step", "responses_per_prompt", "minibatches_per_step", "tokens_per_device"
    )
    assert sizes == (64, 16, 4, 4096)
    assert run.values("steps", "algo.clip_low", "algo.clip_high", "algo.loss_cap") == (50, 0.2, 0.28, 3.0)
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
    assert run.config.optim.learning_rate == 3e-6 and run.unused == {}


def test_gspo(imported):
    run = imported(GSPO)
    assert run.config.algo.algorithm == "gspo"
    assert run.values("algo.clip_high", "algo.aggregation", "algo.loss_cap") == (1e-3, "token", 3.0)


def test_megatron_has_its_hugging_face_folder_beside_it(imported):
    run = imported(MEGATRON)
    assert run.values("model.path", "mesh.tensor", "model.remat") == ("hf/m", 4, "full")
    assert "no pipeline" in run.unused["models.policy_trainer.pipeline_model_parallel_size"]


def test_packing_and_sglang(imported):
    run = imported(PACKED, engine="sglang", devices=8)
    assert run.values("tokens_per_device", "mesh.sequence", "mesh.sequence_parallel") == (20000, 2, "ulysses")
    assert run.values("rollout.launch", "algo.kl_coef", "algo.kl") == (8, 0.01, "k3")
