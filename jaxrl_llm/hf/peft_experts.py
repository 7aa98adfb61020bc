"""Adapters of experts that peft with transformers 5 wrote: of parameters that hold all experts of a layer.

A is [(experts rank), inputs] and B [outputs, (rank experts)]. Gate and up are one parameter with one A; the
outputs of gate are the first half.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.hf.names import HFTensor
from jaxrl_llm.hf.peft_config import stacked_adapters
from jaxrl_llm.models import AdaptedConfig
from jaxrl_llm.models.config import MLP
from jaxrl_llm.models.lora import MARK, named_adapters


class ExpertPart(NamedTuple):
    """The part of a tensor of all experts that is A or B of one of them."""

    name: str
    """Name of the tensor in the file."""
    shape: tuple[int, int]
    """Shape of the tensor in the file."""
    matrix: str
    """Matrix of the adapter: a or b."""
    expert: int
    rank: int
    """Rank in the file."""
    model_rank: int
    """Rank in the model; a larger rank than the file's is filled with 0."""
    outputs: slice
    """Rows of B."""

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return A [R, inputs] or B [outputs, R] of the expert; `array` is the whole tensor."""
        missing = self.model_rank - self.rank
        if self.matrix == "a":
            part = array.reshape(-1, self.rank, array.shape[1])[self.expert]
            return np.pad(part, ((0, missing), (0, 0)))
        part = array.reshape(array.shape[0], self.rank, -1)[self.outputs, :, self.expert]
        return np.pad(part, ((0, 0), (0, missing)))


def expert_parts(tensors: Sequence[HFTensor], config: AdaptedConfig, keys: JsonKeys) -> dict[str, ExpertPart]:
    """Return the name of each tensor of an expert's adapter -> its part of a file with joined experts."""
    adapters, experts = stacked_adapters(keys), config.moe.num_experts
    both = {"layers.expert_up", "layers.expert_down"} <= named_adapters(config).keys()
    found = {}
    for tensor in tensors:
        ours, index = tensor.parts[0]
        weight, _, matrix = ours.partition(MARK)
        leaf = weight.rpartition(".")[2]
        if leaf not in adapters:
            continue
        rank, joined = adapters[leaf][0], leaf != "expert_down"
        inner = ".base_layer" * (joined and both)
        layer = re.match(r".*?\.layers\.\d+", tensor.name)[0]
        rows, columns = tensor.shape
        shape = (experts * rank, columns) if matrix == "a" else (rows * (1 + joined), rank * experts)
        start = rows * (leaf == "expert_up")
        name = f"{layer}.mlp.experts{inner}.lora_{matrix.upper()}.weight"
        ranks = rank, tensor.shape[matrix == "b"]
        found[tensor.name] = ExpertPart(name, shape, matrix, index[-1], *ranks, slice(start, start + rows))
    return found


def is_plain_mlp(tensor: HFTensor) -> bool:
    """Return whether a tensor belongs to the MLP of a dense layer or a shared expert: peft does not adapt
    these layers if it adapts experts by the names of modules."""
    return tensor.parts[0][0].partition(MARK)[0].rpartition(".")[2] in MLP
