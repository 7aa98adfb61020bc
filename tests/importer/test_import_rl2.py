"""RL2: Hydra overrides behind torchrun, and YAML, numbers worked by hand."""

REINFORCE = """\
torchrun \\
    --nproc_per_node=4 \\
    -m RL2.trainer.ppo \\
    rollout.train.path=train@org/Sums \\
    rollout.train.prompts_per_rollout=96 \\
    rollout.train.responses_per_prompt=4 \\
    rollout.train.sampling_params.max_new_tokens=900 \\
    "rollout.train.sampling_params.stop=['</answer>']" \\
    rollout.train.apply_chat_template=false \\
    rollout.test.path=test@org/Sums \\
    rollout.env_path=envs/sums.py \\
    actor.model_name=org/base \\
    actor.max_length_per_device=8192 actor.update_per_rollout=2 actor.tis_coef=2 \\
    trainer.project=Sums trainer.experiment_name=sums_reinforce \\
    trainer.total_steps=200 trainer.test_freq=8 trainer.save_freq=32
"""
GAE = """\
torchrun --nnodes=2 --nproc_per_node=8 -m RL2.trainer.ppo rollout.train.path=data/x.jsonl \\
  rollout.train.prompts_per_rollout=16 rollout.train.responses_per_prompt=1 adv.estimator=gae adv.lamda=0.9 \\
  actor.model_name=org/a critic.model_name=org/c actor.cp_size=2 actor.freeze_steps=4 actor.kl.coef=0.01 \\
  actor.kl.type=reward actor.max_length_per_device=4096 trainer.total_steps=40 trainer.use_wandb=false
"""
YAML = """\
rollout:
  train:
    {path: x.jsonl, prompts_per_rollout: 8, responses_per_prompt: 8, sampling_params: {max_new_tokens: 64}}
actor:
  model_name: org/a
  max_length_per_device: 4096
  avg_level: sequence
  kl: {coef: 0.1, type: loss}
adv: {norm_var: true}
trainer: {total_steps: 4, experiment_name: y}
"""
RM = """\
torchrun --nproc_per_node=4 -m RL2.trainer.rm data.train.path=org/pairs data.train.max_length=2048 \\
    critic.model_name=org/m critic.max_length_per_device=8192 trainer.experiment_name=rm
"""
DPO = RM.replace("RL2.trainer.rm", "RL2.trainer.dpo actor.beta=0.3").replace("critic.", "actor.")
SFT = RM.replace("RL2.trainer.rm", "RL2.trainer.sft").replace("critic.", "actor.") + "trainer.n_epochs=3\n"


def test_reinforce_with_the_prompts_mean(imported):
    run = imported(REINFORCE)
    assert run.values("algo.advantage", "algo.scale", "algo.aggregation") == ("grpo", "none", "token")
    # min_lr 1e-7 of 1e-6
    assert run.values("minibatches_per_step", "optim.warmup_steps", "optim.final_fraction") == (2, 0.03, 0.1)
    assert run.values("optim.schedule", "optim.weight_decay", "algo.kl_coef") == ("cosine", 0.01, 0.0)
    correction = run.config.algo.correction
    assert (correction.weight, correction.cap, correction.of) == ("token", 2.0, "policy")
    assert run.values("env.name", "reward.name") == ("envs/sums.py", "none")
    assert run.values("rollout.sampling.stop", "data.chat.render") == (("</answer>",), "plain")
    assert run.values("data.train.0.path", "data.eval.0.split") == ("hub:org/Sums", "test")
    assert run.values("steps", "tokens_per_device", "algo.dynamic_sampling") == (200, 8192, True)
    assert run.unused == {}


def test_ppo_on_two_nodes(imported):
    run = imported(GAE, engine="sglang")
    assert run.config.algo.algorithm == "ppo" and run.config.algo.lam == 0.9
    assert run.values("algo.kl_in", "algo.kl", "algo.kl_coef") == ("reward", "k1", 0.01)
    assert run.values("critic.path", "critic.warmup_steps", "critic.optim.learning_rate") == (
        "org/c",
        4,
        5e-6,
    )
    assert run.values("mesh.sequence", "rollout.launch", "log.wandb") == (2, 16, "")
    assert run.config.servers.flags == "--tp 1 --mem-fraction-static 0.6"


def test_one_response_a_prompt_has_the_batchs_mean(imported):
    run = imported(GAE.replace("gae", "reinforce"))
    assert run.values("algo.advantage", "algo.scale") == ("reinforce", "none")
    assert run.config.algo.dynamic_sampling is False and "dropped and replaced" not in run.report + run.text
    assert run.unused["critic.model_name"] == "there is no critic with adv.estimator reinforce"


def test_yaml(imported):
    run = imported(YAML, "c.yaml")
    assert run.values("algo.scale", "algo.aggregation", "algo.kl", "algo.kl_in") == (
        "std",
        "sequence",
        "k2",
        "loss",
    )
    assert run.values("max_response_tokens", "run_dir") == (64, "runs/y")


def test_reward_model_dpo_and_sft(imported):
    run = imported(RM)
    assert run.values("epochs", "optim.learning_rate", "algo.margin") == (1.0, 5e-6, False)
    assert run.values("max_prompt_tokens", "data.cut_side") == (1024, "right")
    run = imported(DPO)
    assert run.config.algo.algorithm == "dpo" and run.config.algo.beta == 0.3
    run = imported(SFT)
    assert run.config.algo.algorithm == "sft" and run.config.epochs == 1
