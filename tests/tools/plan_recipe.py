"""The small recipe that the tests of plans compile."""

from jaxrl_llm.algos import grpo
from jaxrl_llm.config import ModelConfig, RolloutConfig, TrainConfig
from jaxrl_llm.models import TransformerConfig

SMALL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
CONFIG = TrainConfig(
    share_prefixes=False,
    algo=grpo.Config(kl_coef=0.1), prompts_per_step=2, responses_per_prompt=8, minibatches_per_step=2,
    tokens_per_device=16, max_prompt_tokens=4, max_response_tokens=4,
    model=ModelConfig(architecture=SMALL, tokenizer="tiny"),
    rollout=RolloutConfig(slots=4, prefill_tokens=64, warm_up=True),
)  # fmt: skip
