"""GRPO on any reasoning-gym task: Qwen3-0.6B on generated problems, with no data to download.

Command:   pip install 'jaxrl-llm[tasks]'
           python -m jaxrl_llm.train --config grpo_qwen_gym.py
           python -m jaxrl_llm.train --config grpo_qwen_gym.py --data.path gym:spell_backward
Hardware:  meant for one accelerator with 80 GB, or a slice such as TPU v5e-8 (all devices share the
           parameters); less memory: --model.remat full, --tokens_per_device 4096
Time:      not measured: this recipe has not been run yet
Expected:  not measured either

Task settings are JSON: --data.train.0.options '{"min_terms": 3, "max_terms": 6}'. Held out: problems of the
same task that training never draws. KL off, clip-higher 0.28 and the token mean are DAPO's.
"""

from jaxrl_llm.algos import grpo
from jaxrl_llm.config import (
    ChatConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainConfig,
)

SYSTEM_PROMPT = "Think step by step, then write only the final answer inside <answer></answer>."


def get_config() -> TrainConfig:
    return TrainConfig(
        run_dir="runs/grpo_qwen_gym",
        steps=200,
        algo=grpo.Config(kl_coef=0.0, clip_high=0.28, aggregation="token"),
        prompts_per_step=64,
        responses_per_prompt=8,
        minibatches_per_step=2,
        tokens_per_device=16_384,
        max_prompt_tokens=512,
        max_response_tokens=1024,
        model=ModelConfig(path="Qwen/Qwen3-0.6B", dtype="bfloat16", remat="dots"),
        rollout=RolloutConfig(dtype="bfloat16"),
        optim=OptimConfig(learning_rate=1e-6, warmup_steps=10),
        data=DataConfig(
            train=(SourceConfig(path="gym:chain_sum"),),
            chat=ChatConfig(
                render="chat", system_prompt=SYSTEM_PROMPT, template_options='{"enable_thinking": false}'
            ),
        ),
        reward=RewardConfig(name="gym", workers=4),
        eval=EvalConfig(
            every=20, prompts=256, samples=4, sampling=SamplingConfig(temperature=0.7, top_p=0.8, top_k=20)
        ),
        checkpoint=CheckpointConfig(every=20, best_metric="eval/pass@1"),
    )
