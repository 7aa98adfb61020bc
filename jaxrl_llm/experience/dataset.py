"""Experience from a dataset: examples in the form that the algorithm reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.reference import LogprobCache
from jaxrl_llm.learn.stage import Experience, Timer
from jaxrl_llm.structs import Params

REFERENCE_FILE = "reference_logprobs.npz"  # in a checkpoint: `LogprobCache.pack`


@dataclass
class DatasetSource:
    """Examples of a dataset; they depend only on the step. The cache belongs to the stage."""

    loader: Loader
    examples: int
    algo: AlgoConfig
    cache: LogprobCache

    def next(self, step: int, params: Params, version: int, timer: Timer) -> Experience:
        with timer("data"):
            items = dataset_items(self.loader, self.algo, step, self.examples)
        epochs = self.loader.epochs((step + 1) * self.examples)
        return Experience(items, epochs, sum(len(item.tokens) for item in items))

    def snapshot(self) -> dict[str, bytes]:
        return {REFERENCE_FILE: self.cache.pack()}

    def resume(self, files: Mapping[str, bytes], step: int, params: Params, version: int) -> None:
        """Fill the cache; the next examples follow from the step."""
        self.cache.unpack(files.get(REFERENCE_FILE, b""))


def dataset_items(loader: Loader, algo: AlgoConfig, step: int, size: int) -> list[PackItem]:
    """Return `size` examples of a dataset; a pair is two items, chosen and rejected."""
    match algos.of(algo).data:
        case "tokens":
            return [PackItem(ids, mask) for ids, mask in loader.supervised_batch(step, size)]
        case "pairs" | "labels" as kind:
            read = loader.pair_batch if kind == "pairs" else loader.label_batch
            return [_labelled(*one, label) for *both, label in read(step, size) for one in both]
        case "steps":
            return [_labelled(*example) for example in loader.step_batch(step, size)]
        case "teachers":
            return [_labelled(*example) for example in loader.teacher_batch(step, size)]
        case kind:
            raise AssertionError(f"no rows for {kind}")


def _labelled(ids: np.ndarray, mask: np.ndarray, label: float | np.ndarray) -> PackItem:
    """Return an item with one label for all its tokens, or one for each."""
    return PackItem(ids, mask, {"labels": np.broadcast_to(np.asarray(label, np.float32), ids.shape)})
