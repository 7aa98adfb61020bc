"""A reward model from SmolLM2-135M-Instruct: which of two of its responses to a sum is right.

Command:   python examples/sample_pairs.py --config grpo_smollm2.py --prompts 640 \\
               --out runs/smollm2_pairs.jsonl
           python examples/sample_pairs.py --config grpo_smollm2.py --split test \\
               --prompts 512 --out runs/smollm2_pairs_test.jsonl
           python -m jaxrl_llm.train --config reward_model_smollm2.py
Hardware:  any CPU with 2 cores and 8 GB
Time:      6 minutes, without its pairs (docs/real.md)
Expected:  79% of 128 pairs of responses to other problems ranked correctly (docs/real.md);
           ppo_smollm2.py then trains on its scores
"""

import dataclasses

from jaxrl_llm.algos import reward_model
from jaxrl_llm.config import DataConfig, EvalConfig, OptimConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import dpo_smollm2

TEST_PAIRS = SourceConfig(path="runs/smollm2_pairs_test.jsonl")


def get_config() -> TrainConfig:
    base = dpo_smollm2.get_config()
    return dataclasses.replace(
        base,
        run_dir="runs/reward_model_smollm2",
        algo=reward_model.Config(),
        optim=OptimConfig(learning_rate=2e-5, warmup_steps=4),
        eval=EvalConfig(every=10, prompts=128),
        data=DataConfig(train=(dpo_smollm2.PAIRS,), eval=(TEST_PAIRS,), chat=base.data.chat),
    )
