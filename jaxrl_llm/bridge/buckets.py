"""Buckets: the trainer's sharded weights as whole Hugging Face tensors of one type, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.bridge.push import Part
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import export_tensors
from jaxrl_llm.hf.folder import list_problems
from jaxrl_llm.hf.gather import gather_tensors, group_by_size
from jaxrl_llm.hf.names import Encode, HFTensor, stored_dtype, tensor_bytes
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Params

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together."""

    tensors: list[HFTensor]
    arrays: list[Any]  # values of the tensors: numpy on the host, jax on every device
    dtype: str

    def bytes(self) -> list[memoryview]:
        """Return their memory, one after the other; on the host."""
        return [array.reshape(-1).view(np.uint8).data for array in self.arrays]


class WeightSource:
    """Buckets of a model's weights, without the value head, which only training needs.

    Args:
        dtype: "float32" or "bfloat16", type of sent tensors; tensors of another type are in separate buckets.
        limit: bytes of a bucket; a larger tensor is a separate bucket.
        encode: of tensors that are not sent in `dtype`; None = all are.
    """

    def __init__(self, config: TransformerConfig, dtype: str, limit: int, encode: Encode | None = None):
        self.tensors = [t for t in export_tensors(config, encode) if t.name != "score.weight"]
        self.dtype = dtype
        self.groups = [
            group
            for own, itemsize in ITEMSIZE.items()
            if (tensors := [t for t in self.tensors if stored_dtype(t, dtype) == own])
            for group in group_by_size(tensors, itemsize, limit)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of one push."""
        return sum(map(self._num_bytes, self.groups))

    def check_names(self, expected: Mapping[str, tuple[int, ...]], folder: str) -> None:
        """Compare names and shapes with a model's: a server ignores unknown names.

        Args:
            expected: name -> shape.
            folder: source of `expected`, for the message.

        Raises:
            UserError: names are missing or unknown, or shapes differ.
        """
        sent = {tensor.name: tensor.shape for tensor in self.tensors}
        both = sent.keys() & expected.keys()
        problems = {
            "missing": sorted(expected.keys() - sent.keys()),
            "unknown": sorted(sent.keys() - expected.keys()),
            "of another shape": sorted(name for name in both if tuple(expected[name]) != tuple(sent[name])),
        }
        if found := list_problems(problems):
            raise UserError(f"the weights for the servers do not match {folder}: {found}")

    def parts(self, params: Params, on_device: bool = False) -> Iterator[Part]:
        """Gather the weights, a `Bucket` a part; two are in memory. A collective: process 0 gets them.

        Args:
            on_device: every device gets whole tensors, and nothing comes to the host.
        """
        params = models.without_value_head(params)
        first = jax.process_index() == 0
        arrays_of = gather_tensors(params, self.groups, self.dtype, replicated=on_device)
        for i, (tensors, arrays) in enumerate(zip(self.groups, arrays_of, strict=True)):
            if on_device:
                jax.block_until_ready(arrays)  # else later buckets would fill the devices
            else:
                arrays = [np.ascontiguousarray(array) for array in arrays]
            content = Bucket(tensors, arrays, stored_dtype(tensors[0], self.dtype)) if first else None
            yield Part(content, self._num_bytes(tensors), i == len(self.groups) - 1)

    def _num_bytes(self, tensors: list[HFTensor]) -> int:
        return sum(tensor_bytes(tensor, self.dtype) for tensor in tensors)
