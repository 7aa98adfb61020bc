"""TrainConfig: everything a training run depends on, as the parts' own Configs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm import algos
from jaxrl_llm.algos import value as critic
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.checkpoint.resume import MASKED
from jaxrl_llm.checkpoint.state import CheckpointConfig
from jaxrl_llm.data.chat import ChatConfig
from jaxrl_llm.data.loader import DataConfig
from jaxrl_llm.data.rows import SourceConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.learn.optim import OptimConfig
from jaxrl_llm.models.config import RopeConfig, TransformerConfig
from jaxrl_llm.report.log import LogConfig
from jaxrl_llm.rewards.sample import RewardConfig, RewardModelConfig
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.sharding.mesh import MeshConfig

__all__ = [  # all that a recipe needs, besides its algorithm
    "ChatConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "EnvConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RopeConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SourceConfig",
    "TrainConfig",
    "TransformerConfig",
    "WarmStartConfig",
]

PACKAGES = (
    "jaxrl-llm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "transformers",
    "numpy",
)
SECRET_NAME = re.compile(
    r"(^|_)(api_?key|(access|secret|private|auth)_?key|token|secret|password|credential)$", re.I
)
URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*:)[^/\s@]+(?=@)")
SHORTEST_SECRET = 8  # characters; a shorter value of TOKEN or PASSWORD would be found in other words


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, and in which precision."""

    path: str = ""
    """Hugging Face folder or hub name to start from; "" = random weights of `architecture`."""
    architecture: TransformerConfig | None = None
    """Shape of a model with random weights; not used where `path` is set."""
    tokenizer: str = ""
    """Folder or hub name; "" = beside the model; "tiny" = the built-in character tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type that the forward and backward pass compute in; master weights are float32."""
    remat: Literal["none", "dots", "attention", "full"] = "none"
    """What the backward pass recomputes: nothing; all but matrix products and attention; all but attention
    and layer inputs (for long rows); or all but layer inputs."""
    logprob_chunk: int = 128
    """Tokens of a row whose logits exist at once."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation: eval/pass@1, and with several samples a prompt eval/pass@k and eval/maj@k."""

    every: int = 0
    """Steps between evaluations, besides the ones before the first and after the last step; 0 = never."""
    prompts: int = 64
    """Held-out prompts."""
    samples: int = 1
    """Responses to each prompt: the k of pass@k (any is correct) and maj@k (the commonest answer is)."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """How they are drawn; training draws with `rollout`'s."""


@dataclass(frozen=True)
class WarmStartConfig:
    """A short supervised start before the first step; the optimizer is made anew afterwards."""

    steps: int = 0
    """Supervised updates; 0 = none."""
    learning_rate: float = 1e-3
    """Constant learning rate of these updates."""
    examples_per_step: int = 64
    """Examples an update."""
    sources: tuple[SourceConfig, ...] = ()
    """Where the examples come from; () = the training sources, with their answers."""


@dataclass(frozen=True)
class CriticConfig:
    """A critic with a backbone of its own (ppo); without a path it starts as a copy of the policy."""

    path: str = ""
    """Hugging Face folder or hub name to start from, such as a reward model; "" = the policy's weights."""
    warmup_steps: int = 0
    """First steps in which the critic alone learns."""
    loss: critic.Config = field(default_factory=critic.Config)
    """What it learns by."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    mesh: MeshConfig | None = None
    """Mesh of the critic, set in the recipe; None = the policy's."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Any field can be set on the command line: `--steps 100 --optim.learning_rate 1e-6`."""

    run_dir: str = "runs/default"
    """Folder of everything the run writes; the same command again continues what is there."""
    steps: int = 100
    """Training steps: one set of prompts, rolled out and learnt from."""
    seed: int = 0
    """Of weights, data order and sampling."""
    algo: AlgoConfig = field(default_factory=algos.ALGOS["grpo"].Config)
    """The algorithm's own settings; another algorithm: `--algo NAME` or `--algo my_algo.py`."""
    prompts_per_step: int = 16
    """Prompts of a step; examples of a step where the algorithm learns from examples (sft)."""
    responses_per_prompt: int = 8
    """Responses to each prompt: the group that GRPO compares."""
    minibatches_per_step: int = 1
    """Optimizer updates a step; the trajectories are divided evenly among them."""
    tokens_per_device: int = 8192
    """Tokens of a micro-batch on each device; a whole number of rows is made of them."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    max_response_tokens: int = 1024
    """Longest response; a row holds the longest prompt and response together."""
    strict: bool = False
    """Rollout (native engine) and trainer compute the same log-probs, to the last bit: mismatch/max_abs is 0.
    Slower; for experiments, and to tell a mistake from rounding. One device."""
    max_runtime: float = 0.0
    """Seconds after which the run saves and stops; 0 = no limit."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    @property
    def max_tokens(self) -> int:
        """The longest a trajectory may be."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed row: the longest trajectory, or two of them where they are compared."""
        return algos.unit(self.algo) * self.max_tokens

    @property
    def trajectories_per_step(self) -> int:
        """Prompts times responses; for an algorithm that learns from examples, the examples."""
        on_policy = algos.module_of(self.algo).INPUT == "rollouts"
        return self.prompts_per_step * (self.responses_per_prompt if on_policy else 1)


def derived(config: TrainConfig, num_devices: int) -> dict[str, int]:
    """The numbers that follow from the config and the devices; printed at the start.

    Rows are divided among data x fsdp; a micro-batch has no more of them than an update has trajectories.
    """
    sizes = config.mesh.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    sizes = {name: max(num_devices // fixed, 1) if size == -1 else size for name, size in sizes.items()}
    replicas = sizes["data"] * sizes["fsdp"]
    per_update = config.trajectories_per_step // config.minibatches_per_step
    in_budget = max(config.tokens_per_device * sizes["sequence"] // config.row_tokens, 1)
    rows = replicas * min(in_budget, math.ceil(per_update / replicas))
    return {
        "devices": num_devices,
        "trajectories_per_step": config.trajectories_per_step,
        "trajectories_per_update": per_update,
        "updates": config.steps * config.minibatches_per_step,
        "tokens_per_row": config.row_tokens,
        "rows_per_microbatch": rows,
        "tokens_per_microbatch": rows * config.row_tokens,
        "microbatches_per_update_at_most": math.ceil(per_update / rows),
    }


def dump(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON-able nested dicts, the algorithm's name in `algo.name`, secrets masked."""
    tree = _plain("", config)
    tree["algo"] = {"name": algo_name(config.algo), **tree["algo"]}
    return tree


def describe_run(config: TrainConfig, recipe: str, argv: list[str]) -> dict[str, Any]:
    """What config.json holds: command, recipe, versions, the resolved config. Never the environment."""
    installed = {dist.name for dist in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "command": [scrub(word) for word in argv],
        "recipe": recipe,
        "versions": {"python": platform.python_version(), **versions},
        "config": dump(config),
    }


def algo_name(config: AlgoConfig) -> str:
    """Its key in ALGOS, or the path of the user's file."""
    module = algos.module_of(config)
    return next((name for name, known in algos.ALGOS.items() if known is module), str(module.__file__))


def scrub(text: str) -> str:
    """Return `text` without the passwords of URLs and the values of environment variables that are secret."""
    text = URL_PASSWORD.sub(rf"\1{MASKED}", text)
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and _looks_secret(value):
            text = text.replace(value, MASKED)
    return text


def _looks_secret(value: str) -> bool:
    """Return whether a value is long and no word or number: those stand in paths and names by chance."""
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return len(value) >= (SHORTEST_SECRET if mixed else 2 * SHORTEST_SECRET)


def _plain(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return MASKED if value and SECRET_NAME.search(name) else scrub(str(value))
