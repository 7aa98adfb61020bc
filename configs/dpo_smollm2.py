"""DPO of SmolLM2-135M-Instruct on pairs of its responses: a right one and a wrong one to each sum.

Command:   python examples/sample_pairs.py --config grpo_smollm2.py --prompts 640 \\
               --out runs/smollm2_pairs.jsonl
           python -m jaxrl_llm.train --config dpo_smollm2.py
           python -m jaxrl_llm.train --config dpo_smollm2.py --algo kto --run_dir runs/kto_smollm2
Hardware:  any CPU with 2 cores and 8 GB
Time:      7 minutes, without its pairs (docs/real.md)
Expected:  held-out accuracy rises from 0.03 to 0.28, with KTO to 0.35 (docs/real.md)

The model writes 8 responses to each of 640 training problems and the verifier judges them, so that nothing
but the model and a rule is needed for the data. KTO reads the same file: a pair is two labelled responses.
"""

import dataclasses

from jaxrl_llm.algos import dpo
from jaxrl_llm.config import DataConfig, OptimConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import grpo_smollm2

PAIRS = SourceConfig(path="runs/smollm2_pairs.jsonl")


def get_config() -> TrainConfig:
    base = grpo_smollm2.get_config()
    return dataclasses.replace(
        base,
        run_dir="runs/dpo_smollm2",
        algo=dpo.Config(),
        prompts_per_step=16,
        optim=OptimConfig(learning_rate=1e-5, warmup_steps=4),
        data=DataConfig(train=(PAIRS,), eval=base.data.eval, chat=base.data.chat),
    )
