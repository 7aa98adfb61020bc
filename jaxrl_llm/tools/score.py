"""`python -m jaxrl_llm score --model DIR --data t.jsonl --out o.jsonl`: log-probs of given tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jaxrl_llm.data.chat import encode_conversation
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.files import open_rows
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import resolve_model
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.host.processes import show_warnings
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.ranges import Count, Range
from jaxrl_llm.rollout.native.shapes import bucket
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.tools.arguments import parse_arguments
from jaxrl_llm.tools.generate import (
    Dtype,
    check_output_path,
    json_line,
    load_sharded,
    open_out,
    pick_dtype,
    print_progress,
)


@dataclass(frozen=True)
class ScoreArguments:
    """Write the log-probabilities of given tokens under a model: a row for each row of the data, in order."""

    model: str
    """Hugging Face folder or hub name."""
    data: Path
    """JSONL with "tokens" (ids) or "messages" (a chat, to be rendered with the chat template)."""
    out: Path
    """JSONL to write: {"tokens": [...], "logprobs": [...]}, nats, one for each token after the first."""
    temperature: Annotated[float, Range(0.01, 100, usual="1 is usual")] = 1.0
    """Temperature of the softmax whose log-probabilities are written."""
    batch_tokens: Count = 8192
    """Tokens of one forward pass, including padding; a longer row is a batch by itself."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template that makes tokens of messages."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a model, file, row or setting that cannot be used, with the fix.
    """
    args = parse_arguments(ScoreArguments, argv, "score")
    show_warnings()
    check_kernels_setting()
    mesh = make_mesh(args.mesh)
    check_output_path(args.out, args.data)
    folder = resolve_model(args.model)
    config = read_config(folder)
    rows = list(read_tokens(args, folder, config))
    if not rows:
        raise UserError(f"{args.data} has no rows")
    dtype = pick_dtype(args.dtype)
    params = load_sharded(folder, config, mesh, TRAIN, dtype)
    forward = make_scorer(config, args.temperature, dtype, mesh)
    scores: list[list[float]] = [[] for _ in rows]
    done = 0
    with jax.set_mesh(mesh):
        for batch in batches(rows, args.batch_tokens):
            tokens, lengths = pad([rows[i] for i in batch])
            logprobs = np.asarray(forward(params, tokens, lengths))
            for i, row in zip(batch, logprobs, strict=False):
                scores[i] = row[: len(rows[i]) - 1].tolist()
            done += len(batch)
            print_progress(f"{done}/{len(rows)} rows")
    with open_out(args.out) as out:
        for tokens, logprobs in zip(rows, scores, strict=True):
            out.write(json_line({"tokens": tokens, "logprobs": logprobs}, args.model))
    return 0


def read_tokens(args: ScoreArguments, folder: Path, config: TransformerConfig) -> Iterator[list[int]]:
    """Yield the token ids of each row.

    Raises:
        UserError: a bad row; names file and line.
    """
    tokenizer = None
    for source in open_rows(SourceConfig(path=str(args.data))):
        for i in range(source.size):
            row, where = source.get(i), source.where(i)
            if isinstance(row, dict) and "tokens" in row:
                ids = row["tokens"]
            elif isinstance(row, dict) and "messages" in row:
                tokenizer = tokenizer or load_tokenizer(folder, config)
                ids = chat_tokens(tokenizer, row, where, args.chat)
            else:
                raise UserError(f'{where}: a row needs "tokens" (ids) or "messages" (a chat)')
            check_tokens(ids, where, config)
            yield ids
        for damage in source.damage:
            raise UserError(damage.reason)


def chat_tokens(tokenizer: Any, row: dict, where: str, config: ChatConfig) -> list[int]:
    """Return the token ids of a chat rendered with the template."""
    example = read_example({"messages": row["messages"]}, where, SourceConfig())
    return encode_conversation(tokenizer, example, config).tolist()


def check_tokens(ids: Any, where: str, config: TransformerConfig) -> None:
    """Raise UserError unless `ids` is a sequence of token ids of this model."""
    valid = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not valid or not ids:
        raise UserError(f'{where}: "tokens" must be a list of at least one integer')
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise UserError(f"{where}: token {outside} is outside the model's vocabulary of {config.vocab_size}")
    if len(ids) > config.max_position:
        raise UserError(
            f"{where}: {len(ids)} tokens exceed the model's {config.max_position} positions; shorten the row"
        )


def batches(rows: list[list[int]], budget: int) -> Iterator[list[int]]:
    """Yield batches of row numbers, shortest rows first; rows of a batch have the same padded width."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(bucket(len(row), 64), []).append(i)
    for width in sorted(groups):
        size = max(1, budget // width)
        for start in range(0, len(groups[width]), size):
            yield groups[width][start : start + size]


def pad(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [B, T], lengths [B]), B rounded up to a power of two: few shapes."""
    tokens = np.zeros((1 << (len(rows) - 1).bit_length(), bucket(len(rows[0]), 64)), np.int32)
    lengths = np.zeros(len(tokens), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
        lengths[b] = len(row)
    return tokens, lengths
