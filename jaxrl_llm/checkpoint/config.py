"""Settings of the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.ranges import Count, CountOrZero


@dataclass(frozen=True)
class CheckpointConfig:
    """Frequency, number and safety of checkpoints."""

    every: CountOrZero = 100
    """Steps between saves; 0 = only at the end."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    best_metric: str = ""
    """Also keep the best by this metric, such as eval/pass@1, of the steps that have it; "" = by none."""
    best_mode: Literal["max", "min"] = "max"
    """max = a larger best_metric is better, min = a smaller one."""
    keep_best: CountOrZero = 1
    """Best checkpoints to keep."""
    optimizer: bool = True
    """Save the optimizer state. Without it checkpoints are a third as large, and a continued run starts with
    new moments."""
    hf_every: CountOrZero = 0
    """Steps between exports of the model to exports/STEP/hf; 0 = only at the end."""
    hf_keep: CountOrZero = 0
    """Newest of these exports to keep; 0 = all."""
    async_save: bool = True
    """Write in the background while training goes on."""
    on_full_disk: Literal["continue", "stop"] = "continue"
    """A save that does not fit on the disk: warn and train on with the previous checkpoint, or stop."""
    verify: bool = True
    """Read and check every byte before a checkpoint is used; otherwise only the sizes of its files."""
