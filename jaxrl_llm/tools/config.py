"""Configs of the commands. Imports no jax, since the commands' flags are read before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import LARGEST, Count, CountOrZero, Finite, Positive, Range
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.sharding.config import MeshConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Checkpoint and adapters of the model that a command names."""

    step: CountOrZero | None = None
    """Step of the checkpoint, if --model is the directory of a run; None = the newest."""
    adapter: str = ""
    """PEFT folder, or hub name, of adapters for the model."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Numbers, chats and devices of the model of a command."""

    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, float16 on Turing GPUs, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template, and --chat.system_prompt."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""


@dataclass(frozen=True)
class GenerateConfig(ComputeConfig, SamplingConfig):
    """Settings of generation."""

    n: Count = 1
    """Responses to each prompt."""
    max_tokens: Count = 256
    """Maximum tokens of a response, limited by the model's positions."""
    seed: Annotated[int, Range(0, LARGEST)] = 0
    """Response g to prompt p depends on (seed, p, g) alone, not on the other prompts or on slots."""
    slots: Annotated[int, Range(1, 65536)] = 64
    """Sequences decoded concurrently."""


@dataclass(frozen=True)
class SelectConfig:
    """Rewards of responses, and the rows that are written of them."""

    select: Literal["all", "best", "filter", "pairs", "conditional"] = "all"
    """all: a row for each row, every response with its reward. Others need a reward, and write rows to train
    on. best: the response with the highest reward (best of n, rejection sampling). filter: each response.
    pairs: the best against the worst. conditional: each response, its reward at the end of the prompt."""
    keep: Count = 1
    """best: responses of each prompt."""
    threshold: Finite | None = None
    """best, filter, conditional: lowest reward of a response; pairs: of the chosen one. None = any."""
    margin: Positive = 1e-6
    """pairs: smallest difference of the rewards."""
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(name="none"))
    """Rewards, as in training; none by default."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments(ModelChoice, ComputeConfig, SamplingConfig):
    """Talk to a model in the terminal; /help lists the commands. In a pipe each line of stdin is a message.

    A model without a chat template continues the text (plain).
    """

    model: str
    """Hugging Face folder, GGUF file, hub name, or directory of a run (its newest checkpoint)."""
    temperature: Annotated[float, Range(0.0, 100.0, usual="0.7 is usual, 0 is greedy")] = 0.7
    """0 = greedy."""
    max_tokens: Count = 1024
    """Maximum tokens of an answer."""
    context: Annotated[int, Range(2, LARGEST)] = 8192
    """Maximum tokens of the conversation, limited by the model's positions."""
    seed: Annotated[int, Range(0, LARGEST)] = 0
    """Answer k of a session depends on (seed, k) and the conversation."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(fsdp=1))
    """Mesh of the devices; the first device by default."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ModelChoice, GenerateConfig, SelectConfig):
    """Generate responses to the prompts of a file, and reward and select them.

    Rewards have the flags of training: --reward.name math (or my_rewards.py:f, or a URL),
    --reward.models.0.path FOLDER, --reward.models.0.weight 0.5 and so on.
    """

    model: str
    """Hugging Face folder, GGUF file, hub name, or directory of a run (its newest checkpoint)."""
    prompts: Path
    """JSONL (or JSON, CSV, Parquet, Arrow) with "prompt" (text) or "messages" (a chat, to be rendered with
    the chat template), such as samples.jsonl of a run."""
    out: Path
    """JSONL to write: {"prompt", "responses": [{"text", "tokens", "logprobs", "finish"}]}, each response with
    "reward" if one is computed, and the columns of the prompt's row. Other rows: --select."""
    resume: bool = True
    """Continue the file of a command that was killed, and refuse one that this command did not write; False =
    overwrite it."""
    batch_tokens: Count = 8192
    """Tokens of one forward pass of a reward model, including padding."""


@dataclass(frozen=True, kw_only=True)
class ScoreArguments(ModelChoice, ComputeConfig, SelectConfig):
    """Write log-probabilities under a model (--model), or rewards (--reward.name, --reward.models.0.path).

    A row of the data gives a row, in order; --select writes rows to train on instead. Rewards have the flags
    of training: --reward.name math (or my_rewards.py:f, or a URL), --reward.models.0.path FOLDER,
    --reward.models.1.path FOLDER, --reward.models.1.weight 0.5 and so on.
    """

    model: str = ""
    """Model whose log-probabilities are written: Hugging Face folder, GGUF file, hub name, or directory of a
    run (its newest checkpoint)."""
    data: Path
    """Rows with a prompt and "responses" (of generate), a response, or chosen and rejected. For log-probs
    also "tokens" (ids), or "messages" alone (a chat, to be rendered with the chat template)."""
    out: Path
    """JSONL to write. Log-probs: {"tokens": [...], "logprobs": [...]}, nats, one for each token after the
    first; of a response also "prompt_tokens", how many are the prompt's; of several {"responses": [...]} or
    {"chosen": ..., "rejected": ...} of these. Rewards: the row, with "reward", "rewards" by name and
    "outcome" added to it or its responses."""
    temperature: Annotated[float, Range(0.01, 100, usual="1 is usual")] = 1.0
    """Temperature of the softmax whose log-probabilities are written."""
    batch_tokens: Count = 8192
    """Tokens of one forward pass, including padding; a longer row is a batch by itself."""
    window: Count = 1024
    """Rows between two writes; a killed command continues after the last write."""
    resume: bool = True
    """Continue the file of a command that was killed, and refuse one that this command did not write; False =
    overwrite it."""


@dataclass(frozen=True)
class ExportArguments:
    """Write the model of a checkpoint, with config and tokenizer, as a Hugging Face folder, or as a GGUF file
    for llama.cpp and Ollama."""

    checkpoint: Path
    """Directory of the run (its --run_dir)."""
    out: Path
    """Folder to write; or a GGUF file, NAME.gguf, with NAME.Modelfile beside it."""
    overwrite: bool = False
    """Replace an earlier export; nothing else is ever replaced."""
    step: CountOrZero | None = None
    """Step of the checkpoint; None = the newest."""
    dtype: Literal["float32", "float16", "bfloat16", "q8_0"] = "bfloat16"
    """Type of the weights; q8_0, 8 bits with a scale for each 32 weights, is for GGUF files."""
    ema: bool = False
    """Export the exponential moving average of the weights (--optim.ema)."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer, if the run's is missing; "" = the run's."""
    carry: bool = True
    """Copy the parts of the base folder that are not trained: a vision tower, layers of multi-token
    prediction. False = write the language model alone, which servers that you start for a run need."""
    push: str = ""
    """Repository of the Hugging Face hub, ORG/NAME, that the folder is uploaded to, with a model card; the
    token comes from HF_TOKEN."""
    private: bool = False
    """Make a new repository private; an existing one keeps its visibility."""


@dataclass(frozen=True)
class PlanArguments:
    """Compile a recipe's training step for devices that this machine need not have; print memory,
    collectives, FLOPs and roofline.

    All other flags are flags of `python -m jaxrl_llm.train`: --config RECIPE.py, --mesh.fsdp 8, --model.path
    Qwen/Qwen3-8B, ... Nothing is run, allocated or downloaded.
    """

    topology: str = ""
    """Devices to compile for: v4-N, v5e-N, v5p-N, v6e-N, tpu7x-N, a shape such as v5e:4x4; a GPU
    or several: h100, h200, b200, a100, a100-40, l4, rtx4090, t4, h100x8 (above 8 on hosts of 8); or cpu (the
    devices of this process)."""
    json: Path | None = None
    """File to write all results to."""
    only: str = ""
    """Compile only phases whose names contain one of these words, separated by commas: update,decode."""
    records: bool = False
    """List the largest model that trains on each device and its longest rows, estimated, with the command
    that compiles each (docs/records.md); without a recipe. The devices are those of --topology, several
    separated by commas, or all of the page."""


@dataclass(frozen=True)
class DoctorArguments:
    """Check devices, drivers, versions, memory, disk, sandbox, servers, cache, clock and ports of this
    machine, each with "ok" or the fix.

    With --config RECIPE.py, and any flags of training, the needs of the recipe are checked too: disk space
    for its checkpoints, the extras of this package, its servers, its sandbox; and each rule on its settings.
    """

    json: bool = False
    """Print the findings as JSON."""


@dataclass(frozen=True)
class ViewArguments:
    """Write training runs as one HTML page: curves, evaluation, samples and differences of their configs."""

    runs: tuple[Path, ...] = ()
    """Run directories (--run_dir), one or more."""
    out: Path | None = None
    """HTML file to write; by default view.html in the first run directory."""
    max_samples: Count = 10_000
    """Samples in the page, over all runs; more are thinned evenly over the steps."""
    atif: Path | None = None
    """Folder in which each of these samples is also written as a trajectory (ATIF), a JSON file each."""


def gives_rewards(config: RewardConfig) -> bool:
    """Return whether a verifier or a reward model is set."""
    return config.name != "none" or bool(config.models)


def check_selection(config: SelectConfig, rewarded: bool) -> None:
    """Refuse a selection of responses that nothing rewards.

    Raises:
        UserError: with the fix.
    """
    if config.select != "all" and not rewarded:
        raise UserError(
            f"--select {config.select}: nothing rewards the responses. Set a verifier (--reward.name math, "
            "or my_rewards.py:f) or a reward model (--reward.models.0.path FOLDER)."
        )
