"""`python -m jaxrl_llm generate --model DIR --prompts p.jsonl --out o.jsonl`: responses to prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.rows import Example, SourceConfig
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import resolve
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, Rules
from jaxrl_llm.structs import Params, Trajectory

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Args:
    """Responses of a model to the prompts of a file: one row out for each row in, in order."""

    model: str
    """Hugging Face folder or hub name."""
    prompts: Path
    """JSONL (or JSON, CSV, Parquet, Arrow) with "prompt" (text) or "messages" (a chat, templated)."""
    out: Path
    """JSONL to write: {"prompt", "responses": [{"text", "tokens", "logprobs", "finish"}]}."""
    n: int = 1
    """Responses to each prompt."""
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest."""
    max_tokens: int = 256
    """Response tokens at most."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    seed: int = 0
    """Response g to row p depends on (seed, p, g) alone, not on the other rows or on --slots."""
    slots: int = 64
    """Sequences decoded side by side."""
    dtype: Dtype = "auto"
    """Of weights and activations; auto = float32 on CPU, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """How a row becomes tokens."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the devices share the work."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a model, file, row or setting that cannot be used, with the fix.
    """
    args = tyro.cli(Args, args=argv, prog="python -m jaxrl_llm generate")
    if args.n < 1:
        raise UserError(f"--n must be at least 1, not {args.n}")
    mesh = make_mesh(args.mesh)
    examples = read_examples(args.prompts)
    check_writable(args.out)
    folder = resolve(args.model)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, config)
    requests = [make_request(args, config, tokenizer, i, example) for i, example in enumerate(examples)]
    dtype = pick_dtype(args.dtype)
    rollout = RolloutConfig(slots=args.slots, dtype=dtype)
    engine = NativeEngine(rollout, config, mesh, tokenizer, generation_end_ids(folder))
    engine.publish(load_sharded(folder, config, mesh, ROLLOUT, dtype), version=0)
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p, args.stop)
    window = max(1, 8 * args.slots // args.n)  # rows between two writes
    with open_out(args.out) as out:
        for start in range(0, len(requests), window):
            part = requests[start : start + window]
            trajectories = engine.generate(part, sampling, jax.random.key(args.seed))
            for i, example in enumerate(examples[start : start + window]):
                responses = trajectories[i * args.n : (i + 1) * args.n]
                out.write(json.dumps(to_row(example, responses)) + "\n")
            speed = engine.metrics["rollout/tokens_per_second"]
            say(f"{start + len(part)}/{len(requests)} prompts, {speed:,.0f} tokens/s")
    return 0


def make_request(args: Args, config: models.TransformerConfig, tokenizer: Any, i: int, example: Example):
    """Row i as a request.

    Raises:
        ValueError: the row does not fit the model; names file and line.
    """
    ids = encode_prompt(tokenizer, example, args.chat)
    if len(ids) + args.max_tokens > config.max_position:
        raise UserError(
            f"{example.where}: a prompt of {len(ids)} tokens and --max_tokens {args.max_tokens} exceed the "
            f"model's {config.max_position} positions; shorten the prompt or lower --max_tokens"
        )
    return Request(ids, i, args.n, args.max_tokens)


def to_row(example: Example, responses: list[Trajectory]) -> dict[str, Any]:
    """What is written for one prompt."""
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
    """All prompts; a bad row raises ValueError with file and line."""
    source = open_source(SourceConfig(path=str(path)), seed=0, bad_rows="fail")
    return [source[i] for i in range(len(source))]


def load_sharded(
    folder: Path, config: models.TransformerConfig, mesh: Mesh, rules: Rules, dtype: str
) -> Params:
    """The weights, each device reading only its shard."""
    say(f"loading {folder} as {dtype} on {mesh.size} {mesh.devices.flat[0].platform} device(s)")
    return load_params(folder, config, models.shardings(config, mesh, rules), jnp.dtype(dtype))


def pick_dtype(dtype: Dtype) -> str:
    """float32 on CPU, where bfloat16 is slow; bfloat16 elsewhere."""
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def check_writable(path: Path, key: str = "--out") -> None:
    """Before minutes of work, not after."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{key} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if path.is_dir():
        raise UserError(f"{key} {path}: a folder; give a file name in it")


def open_out(path: Path):
    """The file, on the first of several processes; nothing on the others."""
    return path.open("w", encoding="utf-8") if jax.process_index() == 0 else Path("/dev/null").open("w")


def say(text: str) -> None:
    """Progress, on stderr: stdout stays clean."""
    print(text, file=sys.stderr, flush=True)
