"""GRPO on two SGLang servers that write ahead of the trainer; few responses are long.

Command:   SGLANG_USE_CPU_ENGINE=1 python -m jaxrl_llm.train --config grpo_async.py \\
               --sglang.python .venv-sglang/bin/python
           (scripts/sglang_cpu/install.sh .venv-sglang makes that environment; docs/sglang.md)
Hardware:  any CPU with 2 cores and 8 GB for the two servers (on GPUs: --sglang.flags "")
Time:      TODO
Expected:  TODO

One prompt in 32 wants 47 sums in a row, the others one, so that a step that waits for its longest response
leaves the servers almost idle. With --rollout.max_staleness 2 they write the next two steps' responses
meanwhile, and truncated importance sampling weighs tokens that older weights wrote.
--rollout.max_staleness 0 is the synchronous run.
"""

from jaxrl_llm.algos import grpo
from jaxrl_llm.algos.correction import Correction
from jaxrl_llm.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    SGLangConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
    WarmStartConfig,
)

CPU = "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 16384"


def get_config() -> TrainConfig:
    short = SourceConfig(path="task:arithmetic", options='{"digits": 1, "terms": 3, "noise": 0.7}', weight=31)
    long = SourceConfig(path="task:steps", options='{"terms": 48}', weight=1)
    return TrainConfig(
        run_dir="runs/grpo_async",
        steps=60,
        algo=grpo.Config(kl_coef=0.0, aggregation="token", correction=Correction(weight="token")),
        prompts_per_step=32,
        responses_per_prompt=8,
        tokens_per_device=1280,
        max_prompt_tokens=104,
        max_response_tokens=216,
        model=ModelConfig(
            architecture=TransformerConfig(
                vocab_size=128,
                hidden_size=64,
                mlp_size=256,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                max_position=320,
            ),
            tokenizer="tiny",
            dtype="float32",
            remat="dots",
        ),
        optim=OptimConfig(learning_rate=5e-4, schedule="linear", b2=0.99),
        rollout=RolloutConfig(engine="sglang", launch=2, slots=16, max_staleness=2),
        sglang=SGLangConfig(flags=f"{CPU} --disable-overlap-schedule"),
        data=DataConfig(train=(short, long), eval=(short,)),
        eval=EvalConfig(every=20, prompts=128),
        checkpoint=CheckpointConfig(every=60),
        warm_start=WarmStartConfig(steps=600, learning_rate=2e-3, examples_per_step=64),
    )
