"""GRPO on grade-school maths: Qwen3-0.6B on GSM8K, from the hub or from a local folder.

Command:   python -m jaxrl_llm.train --config grpo_qwen.py
           python -m jaxrl_llm.train --config grpo_qwen.py --model.path ./Qwen3-0.6B \\
               --data.train.0.path ./gsm8k/train.jsonl --data.eval.0.path ./gsm8k/test.jsonl
Hardware:  meant for one accelerator with 80 GB, or a slice such as TPU v5e-8 (all devices share the
           parameters); less memory: --model.remat full, --tokens_per_device 4096
Time:      measured for its parts, on one H200 (benchmarks/results/gpu_h200.json): an update of this model
           65,116 tokens/s in rows of 4,624 tokens, with 17.5 GiB of the GPU's memory at the peak; the
           rollout 29,057 tokens/s with 8 responses to each of 32 prompts (512 tokens in, 128 out). The
           run as a whole has not been measured
Expected:  not measured: how far the accuracy on GSM8K rises is not known

Learning rate, KL (k3, 0.001) and lengths come from veRL's published GRPO example for GSM8K; 8 responses a
prompt are GRPO's usual group. Thinking is off, so that answers fit 1024 tokens; held-out sampling is what
Qwen3's model card advises without thinking.
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

SYSTEM_PROMPT = "Think step by step, then write the final answer as \\boxed{number}."


def get_config() -> TrainConfig:
    gsm8k = "hub:openai/gsm8k"
    return TrainConfig(
        run_dir="runs/grpo_qwen",
        steps=200,
        algo=grpo.Config(kl_coef=0.001, kl="k3", aggregation="token"),
        prompts_per_step=64,
        responses_per_prompt=8,
        minibatches_per_step=2,
        tokens_per_device=16_384,
        max_prompt_tokens=512,
        max_response_tokens=1024,
        model=ModelConfig(path="Qwen/Qwen3-0.6B", dtype="bfloat16", remat="dots"),
        rollout=RolloutConfig(dtype="bfloat16"),
        optim=OptimConfig(learning_rate=1e-6, warmup_steps=10, weight_decay=0.01),
        data=DataConfig(
            train=(SourceConfig(path=gsm8k, subset="main"),),
            eval=(SourceConfig(path=gsm8k, subset="main", split="test"),),
            chat=ChatConfig(
                render="chat", system_prompt=SYSTEM_PROMPT, template_options='{"enable_thinking": false}'
            ),
        ),
        reward=RewardConfig(name="gsm8k", workers=4),
        eval=EvalConfig(
            every=20, prompts=256, samples=4, sampling=SamplingConfig(temperature=0.7, top_p=0.8, top_k=20)
        ),
        checkpoint=CheckpointConfig(every=20, best_metric="eval/pass@1"),
    )
