"""TrainConfig, the settings of a run as the Configs of its parts, and the sizes that follow from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm import algos
from jaxrl_llm.algos.config import GRPO, VALUE, AlgoConfig, ValueConfig
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.data.config import ChatConfig, DataConfig, SourceConfig
from jaxrl_llm.envs.config import EnvConfig, GatewayConfig
from jaxrl_llm.learn.config import LearningRate, OptimConfig, RoutingConfig
from jaxrl_llm.models import LoraConfig, RopeConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, IndexConfig, MambaConfig, MLAConfig
from jaxrl_llm.ranges import Count, CountOrZero, Range, SecondsOrZero
from jaxrl_llm.report.config import LogConfig, profiled_steps
from jaxrl_llm.rewards.config import BUILTIN, RewardConfig, RewardModelConfig, name_problem
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig, same_responses
from jaxrl_llm.sharding.config import (
    ALL_DEVICES,
    CRITIC,
    POLICY,
    REFERENCE,
    ROLLOUT_ENGINE,
    TEACHER,
    MeshConfig,
    PlacementConfig,
    device_problems,
    reward_role,
)

__all__ = [  # all that a recipe needs, besides its algorithm
    "ChatConfig", "CheckpointConfig", "ConvConfig", "CriticConfig", "DataConfig", "DeltaConfig",
    "EnvConfig", "EvalConfig", "GatewayConfig", "HubConfig", "IndexConfig", "LogConfig", "LoraConfig",
    "MLAConfig", "MambaConfig", "MeshConfig", "MoEConfig", "ModelConfig", "OptimConfig", "ReferenceConfig",
    "RewardConfig", "RewardModelConfig", "RolloutConfig", "RopeConfig", "RoutingConfig", "SamplingConfig",
    "ScoreConfig", "ServersConfig", "SourceConfig", "TrainConfig", "TransformerConfig", "WarmStartConfig",
]  # fmt: skip

REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
"""Name of a repository of the Hugging Face hub."""
MAX_TRAJECTORIES = 2**24  # of a step: one process keeps them all in memory
ROW_MULTIPLE = 16  # of the tokens of a row on each device: two chunks of ring attention, 8 lanes each
GENERATIVE = "generative"  # the judge that is a generative reward model
Tokens = Annotated[int, Range(1, 2**24)]
DeviceTokens = Annotated[int, Range(1, 2**30)]


@dataclass(frozen=True)
class ModelConfig:
    """Model to train, its tokenizer and its precision."""

    path: str = ""
    """Hugging Face folder, GGUF file or hub name (org/model@revision) to start from; "" = random weights of
    `architecture`."""
    architecture: TransformerConfig | None = None
    """Shape of a model with random weights; not used if `path` is set."""
    adapter: str = ""
    """PEFT folder of the adapters to start from, whose settings `lora` must have; "" = new adapters. The
    reference keeps them as they are."""
    tokenizer: str = ""
    """Folder or hub name; "" = beside the model; "tiny" = the built-in character tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type that the forward and backward pass compute in; master weights are float32. float16 is for Turing
    GPUs (T4), which have no bfloat16; its loss is scaled (metric loss_scale)."""
    remat: Literal["none", "dots", "attention", "full", "offload"] = "none"
    """Activations that the backward pass recomputes: none; all but matrix products and attention; all but
    attention and layer inputs (for long rows); all but layer inputs; the same, with these in host memory."""
    yarn_factor: Annotated[float, Range(1, 1024, usual="4 is usual")] | None = None
    """Stretch the model's positions by this factor (YaRN); None = RoPE as in its config.json."""
    yarn_original: Count | None = None
    """Positions that yarn_factor multiplies; None = the model's, or those before its own YaRN."""
    logprob_chunk: Annotated[int, Range(1, 2**20, usual="128 is usual")] = 128
    """Tokens of a row whose logits are in memory at once."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for a model without weights, architecture or tokenizer."""
        if not self.path and self.architecture is None:
            yield "path", "is empty: set a folder or hub name, or model.architecture in the recipe."
        elif not self.path and not self.tokenizer:
            yield (
                "tokenizer",
                'is empty: random weights have no tokenizer. Set a folder, a hub name or "tiny".',
            )


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation: correct answers (eval/pass@1, of several samples a prompt eval/pass@k and
    eval/maj@k), rewards, scores of reward models, and the win rate against the start; or held-out loss."""

    every: CountOrZero = 0
    """Steps between evaluations, besides the ones before the first and after the last step; 0 = never."""
    prompts: Annotated[int, Range(1, 2**20)] = 64
    """Held-out prompts."""
    samples: Annotated[int, Range(1, 2**16)] = 1
    """Responses to each prompt: the k of pass@k (any is correct) and maj@k (the commonest answer is)."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Sampling of these responses; training uses `rollout.sampling`."""
    judge: str = ""
    """Pairwise judge of eval/win_rate, the responses against responses of the start: "my_judge.py:judge" with
    judge(prompt, a, b), the URL of a service, or "generative" (the one in reward.models). Empty: compare the
    scores of reward models, or of your reward function."""
    log_samples: CountOrZero = 64
    """Prompts whose response is written to samples.jsonl in each evaluation."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for several samples that would all be the same."""
        for key, problem in same_responses(self.sampling, self.samples if self.every else 1):
            yield f"sampling.{key}", problem
        if self.judge in ("auto", "none", *BUILTIN):
            yield (
                "judge",
                f"is {self.judge}: it must compare two responses; judge(prompt, a, b) of a file does.",
            )
        elif self.judge and self.judge != GENERATIVE and (problem := name_problem(self.judge)):
            yield "judge", problem


@dataclass(frozen=True)
class HubConfig:
    """Upload of the trained model to the Hugging Face hub, by the token HF_TOKEN."""

    push: str = ""
    """Repository, ORG/NAME, that gets run_dir/hf and a model card at the end of the run; "" = none."""
    private: bool = False
    """Make a new repository private; an existing one keeps its visibility."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for text that names no repository."""
        if self.push and not REPOSITORY.fullmatch(self.push):
            yield "push", f"is {self.push!r:.100}: it must be the name of a repository, ORG/NAME."


@dataclass(frozen=True)
class WarmStartConfig:
    """SFT warm-up before the first step; the optimizer state is reset afterwards."""

    steps: CountOrZero = 0
    """Supervised updates; 0 = none."""
    learning_rate: LearningRate = 1e-3
    """Constant learning rate of these updates."""
    examples_per_step: Annotated[int, Range(1, 2**20)] = 64
    """Examples an update."""
    sources: tuple[SourceConfig, ...] = ()
    """Sources of the examples; () = the training sources, with their answers."""


@dataclass(frozen=True)
class CriticConfig(PlacementConfig):
    """Critic with its own backbone (ppo); without a path it starts as a copy of the policy."""

    path: str = ""
    """Hugging Face folder or hub name to start from, such as a reward model; a language model gets a score
    head of zeros. "" = the policy's weights."""
    warmup_steps: CountOrZero = 0
    """First steps, in which only the critic is trained; the policy's schedule spans the steps after them."""
    loss: ValueConfig = VALUE
    """Value loss of the critic."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    """Optimizer and learning-rate schedule of the critic."""


@dataclass(frozen=True)
class ReferenceConfig(PlacementConfig):
    """Frozen models that score a step: the reference of the KL penalty, or teachers."""

    path: str = ""
    """Hugging Face folder, GGUF file or hub name of the reference; "" = the model as it was at the start,
    with model.adapter, or after the SFT warm-up. Read where the algorithm needs a reference."""
    offload: bool = False
    """Keep the weights in host memory; each layer is copied to the devices while it computes."""


@dataclass(frozen=True)
class ScoreConfig:
    """Forward passes before the update: old and reference log-probs, values, reward models."""

    tokens_per_device: DeviceTokens | None = None
    """Tokens of a micro-batch on each device, rounded down to whole rows; None = as in the update."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Any field can be set on the command line: `--steps 100 --optim.learning_rate 1e-6`."""

    run_dir: str = "runs/default"
    """Folder of everything that the run writes; the same command again continues the run."""
    steps: CountOrZero = 100
    """Training steps: one set of prompts, rolled out and learned from."""
    epochs: Annotated[float, Range(0, 1e6, usual="1 to 3 are usual")] = 0.0
    """Passes over the training rows, in place of `steps`: prompts_per_step rows a step, the last step filled
    from the next pass; learning-rate schedules decay over them. 0 = `steps` counts."""
    seed: CountOrZero = 0
    """Seed of weights, data order and sampling."""
    algo: AlgoConfig = GRPO
    """Algorithm and its settings; another algorithm: `--algo NAME` or `--algo my_algo.py`."""
    prompts_per_step: Annotated[int, Range(1, 2**20)] = 16
    """Prompts of a step; examples of a step where the algorithm learns from examples (sft)."""
    responses_per_prompt: Annotated[int, Range(1, 2**16)] = 8
    """Responses to each prompt: the group that GRPO compares."""
    minibatches_per_step: Annotated[int, Range(1, 2**20)] = 1
    """Mini-batches of a step, each an optimizer update; the trajectories are divided evenly among them."""
    minibatches_of: Literal["prompts", "responses"] = "prompts"
    """prompts: all responses to a prompt are in one mini-batch, whose rows hold the prompt once; mini-batches
    may differ by a prompt. responses: they are mixed over all mini-batches; so they are, too, in a step with
    fewer prompts than mini-batches."""
    ppo_epochs: Annotated[int, Range(1, 1024, usual="1 to 4 are usual")] = 1
    """Passes over the mini-batches of a step, each in a different order; old log-probs and values are from
    before the first pass. For algorithms that learn from responses."""
    tokens_per_device: DeviceTokens = 8192
    """Tokens of a micro-batch on each device, rounded down to whole rows."""
    max_prompt_tokens: Tokens = 512
    """Longest prompt."""
    max_response_tokens: Tokens = 1024
    """Longest response; a row holds the longest prompt and response together."""
    share_prefixes: bool = True
    """A row of the trainer holds a prompt once, then all responses to it (or a chosen and a rejected one)
    that fit. Not with dynamic RoPE or cuDNN's attention."""
    strict: bool = False
    """Rollout (native engine) and trainer compute bit-equal log-probs: mismatch/max_abs is 0. Slower; for
    experiments, and to distinguish errors from rounding. One device."""
    devices: str = ALL_DEVICES
    """Devices of the policy, and of each model without separate devices: all, or a range such as 0:4 (devices
    0 to 3 of each process)."""
    max_runtime: SecondsOrZero = 0.0
    """Seconds after which the run saves and stops; 0 = no limit."""
    profile: str = ""
    """Steps to profile, FIRST:LAST with both (3:5 = 3, 4 and 5, as in metrics.jsonl), or one; "" = none. The
    trace is written to RUN/profile."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: PlacementConfig = field(default_factory=PlacementConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    log: LogConfig = field(default_factory=LogConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for the devices, the profile and the sizes of a step."""
        yield from device_problems(self.devices)
        yield from self._profile_problems()
        trajectories, updates = self.trajectories_per_step, self.minibatches_per_step
        if trajectories > MAX_TRAJECTORIES:
            yield (
                "prompts_per_step",
                f"is {self.prompts_per_step}: with --responses_per_prompt {self.responses_per_prompt} a step "
                f"has {trajectories:,} trajectories; it must have at most {MAX_TRAJECTORIES:,}.",
            )
        elif trajectories % updates:
            choices = " or ".join(map(str, nearest_divisors(trajectories, updates)))
            yield (
                "minibatches_per_step",
                f"is {updates}: it must divide the {trajectories} trajectories of a step (prompts_per_step x "
                f"responses_per_prompt). Set it to {choices}.",
            )
        if self.ppo_epochs > 1 and not algos.of(self.algo).on_rollouts:
            name = algos.of(self.algo).name
            yield (
                "ppo_epochs",
                f"is {self.ppo_epochs}: {name} learns from a data set, not responses. Set it to 1.",
            )

    def _profile_problems(self) -> Iterator[tuple[str, str]]:
        try:
            steps = profiled_steps(self.profile)
        except ValueError as error:
            yield "profile", str(error)
            return
        total = self.warm_start.steps + self.steps
        if steps and steps[-1] > total and not self.epochs:  # of epochs, `with_steps` checks it
            yield "profile", f"is {self.profile!r}: the run has {total} steps, from 1 to {total}."

    @property
    def profiled(self) -> range:
        """Steps to profile, numbered from 1."""
        return profiled_steps(self.profile)

    @property
    def placements(self) -> dict[str, PlacementConfig]:
        """Placement of each model by its role, the prefix of its keys; the policy's keys have no prefix."""
        return {
            POLICY: PlacementConfig(mesh=self.mesh, devices=self.devices),
            ROLLOUT_ENGINE: self.rollout,
            REFERENCE: self.reference,
            CRITIC: self.critic,
            TEACHER: self.teacher,
            **{reward_role(i): model for i, model in enumerate(self.reward.models)},
        }

    @property
    def reward_models(self) -> dict[str, RewardModelConfig]:
        """Role -> reward model, of those that the run loads: models of weight 0 only with an evaluation."""
        models = {reward_role(i): model for i, model in enumerate(self.reward.models)}
        return {role: model for role, model in models.items() if model.weight or self.eval.every}

    def mesh_of(self, role: str) -> MeshConfig:
        """Return the axis sizes of a model by its role: its own, or the policy's."""
        role = TEACHER if role.startswith(TEACHER) else role
        return self.placements[role].mesh or self.mesh

    @property
    def max_tokens(self) -> int:
        """Length of the longest trajectory."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def shares_prompts(self) -> bool:
        """True if the trainer's rows hold a prompt once for several responses or contexts of the policy."""
        several = self.responses_per_prompt > 1 or self.env.active
        return self.share_prefixes and several and algos.of(self.algo).on_rollouts

    @property
    def min_row_tokens(self) -> int:
        """Length of the longest trajectory, or of two if they are compared."""
        return algos.of(self.algo).group_size * self.max_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed row: the minimum, or if responses share their prompt, all responses to it or as
        many as the tokens of a micro-batch allow."""
        longest = self.min_row_tokens
        shards = [self.mesh_of(role).sequence for role in self.placements if role != ROLLOUT_ENGINE]
        if not self.shares_prompts or min(shards) < 0:
            return longest
        multiple = ROW_MULTIPLE * math.lcm(*shards)
        # Each response after the first begins with a copy of the last token of the prompt.
        more = (self.responses_per_prompt - 1) * (self.max_response_tokens + 1)
        row = -(-(self.max_tokens + more) // multiple) * multiple
        tokens = min(self.tokens_per_device, self.score.tokens_per_device or self.tokens_per_device)
        budget = max(tokens * min(shards) // longest, 1) * longest
        return min(row, budget)

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Sources of training, evaluation and warm-up."""
        return (*self.data.sources("train"), *self.data.sources("eval"), *self.warm_start.sources)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step."""
        return self.minibatches_per_step * self.ppo_epochs

    @property
    def is_on_policy(self) -> bool:
        """True where the weights before a step's first update generate all of its tokens."""
        return self.rollout.max_staleness == 0 and self.rollout.weight_noise == 0

    @property
    def dtypes(self) -> dict[str, str]:
        """Key -> type of the products that the trainer's devices compute."""
        native = {"--rollout.dtype": self.rollout.dtype} if self.rollout.engine == "native" else {}
        return {"--model.dtype": self.model.dtype, **native}

    @property
    def trajectories_per_step(self) -> int:
        """Prompts times responses; for an algorithm that learns from examples, the examples."""
        on_rollouts = algos.of(self.algo).on_rollouts
        return self.prompts_per_step * (self.responses_per_prompt if on_rollouts else 1)


def nearest_divisors(number: int, near: int) -> list[int]:
    """Return the two divisors of `number` nearest to `near`, ascending; 1 has only one."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    return sorted(sorted(divisors, key=lambda n: (abs(n - near), n))[:2])
