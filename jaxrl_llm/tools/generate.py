"""`python -m jaxrl_llm generate --model DIR --prompts p.jsonl --out o.jsonl`: responses to prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt, plain_text_warning
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import resolve_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.host.processes import show_warnings
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.ranges import LARGEST, Count, Range
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, Rules
from jaxrl_llm.structs import Params, Trajectory
from jaxrl_llm.tools.arguments import parse_arguments

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """Settings of generation."""

    n: Count = 1
    """Responses to each prompt."""
    max_tokens: Count = 256
    """Maximum tokens of a response, limited by the model's positions."""
    seed: Annotated[int, Range(0, LARGEST)] = 0
    """Response g to prompt p depends on (seed, p, g) alone, not on the other prompts or on slots."""
    slots: Annotated[int, Range(1, 65536)] = 64
    """Sequences decoded concurrently."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(GenerateConfig):
    """Generate responses to the prompts of a file: one row out for each row in, in order."""

    model: str
    """Hugging Face folder or hub name."""
    prompts: Path
    """JSONL (or JSON, CSV, Parquet, Arrow) with "prompt" (text) or "messages" (a chat, to be rendered with
    the chat template), such as samples.jsonl of a run."""
    out: Path
    """JSONL to write: {"prompt", "responses": [{"text", "tokens", "logprobs", "finish"}]}."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model, file, row or setting that cannot be used, with the fix.
    """
    args = parse_arguments(GenerateArguments, argv, "generate")
    show_warnings()
    examples = read_examples(args.prompts)
    check_output_path(args.out, args.prompts)
    done = 0
    with open_out(args.out) as out:
        for part, responses, speed in generate_all(args.model, examples, args):
            for example, trajectories in zip(part, responses, strict=True):
                out.write(json_line(to_row(example, trajectories), args.model))
            done += len(part)
            print_progress(f"{done}/{len(examples)} prompts, {speed:,.0f} tokens/s")
    return 0


def generate_all(
    model: str, examples: Sequence[Example], config: GenerateConfig
) -> Iterator[tuple[Sequence[Example], list[list[Trajectory]], float]]:
    """Load a model and yield (examples, their responses, tokens per second) for several prompts at a time.

    Raises:
        UserError: a model or prompt that cannot be used, with the fix.
    """
    check_kernels_setting()
    mesh = make_mesh(config.mesh)
    folder = resolve_model(model)
    architecture = read_config(folder)
    tokenizer = load_tokenizer(folder, architecture)
    if warning := plain_text_warning(tokenizer, examples, config.chat, "--chat.render"):
        print_progress(f"warning: {warning}")
    requests = [
        make_request(config, architecture.max_position, tokenizer, i, example)
        for i, example in enumerate(examples)
    ]
    dtype = pick_dtype(config.dtype)
    rollout = RolloutConfig(slots=config.slots, dtype=dtype)
    engine = NativeEngine(rollout, architecture, mesh, tokenizer, generation_end_ids(folder))
    engine.publish(load_sharded(folder, architecture, mesh, ROLLOUT, dtype), version=0)
    window = max(1, 8 * config.slots // config.n)  # prompts between two results
    for start in range(0, len(requests), window):
        part = requests[start : start + window]
        trajectories = engine.generate(part, config, jax.random.key(config.seed))
        responses = [trajectories[i * config.n : (i + 1) * config.n] for i in range(len(part))]
        speed = engine.metrics["rollout/tokens_per_second"]
        yield examples[start : start + window], responses, speed


def make_request(
    config: GenerateConfig, max_position: int, tokenizer: Any, i: int, example: Example
) -> Request:
    """Return prompt i as a request for `max_tokens`, or as many as the model has positions for.

    Raises:
        UserError: the prompt leaves no position for a response; names file and line.
    """
    ids = encode_prompt(tokenizer, example, config.chat)
    if len(ids) >= max_position:
        raise UserError(
            f"{example.where}: a prompt of {len(ids)} tokens leaves no position for a response, of the "
            f"model's {max_position}; shorten the prompt"
        )
    return Request(ids, i, config.n, min(config.max_tokens, max_position - len(ids)))


def to_row(example: Example, responses: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the output row of a prompt."""
    return {
        "prompt": example.text if example.messages is None else list(example.messages),
        "responses": [
            {
                "text": r.text,
                "tokens": r.response_ids.tolist(),
                "logprobs": r.logprobs.tolist(),
                "finish": r.finish,
            }
            for r in responses
        ],
    }


def read_examples(path: Path) -> list[Example]:
    """Return all prompts of a file.

    Raises:
        UserError: a bad row; names file and line.
    """
    source = open_source(SourceConfig(path=str(path)), seed=0, bad_rows="fail")
    return [source[i] for i in range(len(source))]


def load_sharded(
    folder: Path, config: models.TransformerConfig, mesh: Mesh, rules: Rules, dtype: str
) -> Params:
    """Return the weights; each device reads only its shard."""
    print_progress(f"loading {folder} as {dtype} on {mesh.size} {mesh.devices.flat[0].platform} device(s)")
    return load_params(folder, config, models.shardings(config, mesh, rules), jnp.dtype(dtype))


def pick_dtype(dtype: Dtype) -> str:
    """Return the dtype; "auto" = float32 on CPU, where bfloat16 is slow, else bfloat16."""
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def check_output_path(path: Path, source: Path | None = None, flag: str = "--out") -> None:
    """Raise UserError if a file cannot be written there, or is the one that is read, before any work.

    Args:
        source: file that is read; None = none.
        flag: that names the path.
    """
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if path.is_dir():
        raise UserError(f"{flag} {path}: a folder; give a file name in it")
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"{flag} {path}: the file that is read; it would be overwritten. Give another name")


def json_line(row: dict[str, Any], model: str) -> str:
    """Return a row of an output file.

    Raises:
        RunError: a log-prob is NaN or infinite, which JSON has no word for.
    """
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError as error:
        raise RunError(
            f"{model} computes log-probs that are NaN or infinite: its activations overflow. Try --dtype "
            "float32, or another checkpoint."
        ) from error


def open_out(path: Path):
    """Open the file on process 0, /dev/null on the others."""
    return path.open("w", encoding="utf-8") if jax.process_index() == 0 else Path("/dev/null").open("w")


def print_progress(text: str) -> None:
    """Print a line to stderr, which keeps stdout free."""
    print(text, file=sys.stderr, flush=True)
