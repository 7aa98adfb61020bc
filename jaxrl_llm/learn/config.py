"""Settings of the update: optimizer, learning rate, routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.ranges import LARGEST, Count, Fraction, Range

LearningRate = Annotated[float, Range(0, 10, open_low=True, usual="1e-6 is usual for RL, 1e-5 for SFT")]
Decay = Annotated[float, Range(0, 1, open_high=True)]


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "adafactor_unscaled", "lion", "sgd", "muon", "rmsprop", "adagrad"] = (
        "adamw"
    )
    """AdamW (arXiv 1711.05101), Adafactor (1804.04235) with steps relative to the weights' size or, unscaled,
    without (transformers' adafactor), Lion (2302.06675), SGD with momentum b1, Muon (2502.16982):
    orthogonalized momentum b1 for the matrices of the layers, AdamW for the other weights; RMSProp or
    Adagrad."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or falling to final_fraction of the peak over the run."""
    warmup_steps: Annotated[float, Range(0, LARGEST, usual="0.03 or 10 is usual")] = 0
    """Updates over which the learning rate rises from 0: a number (10), or below 1 a fraction of the updates
    of the run, rounded up."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of the run as a fraction of the peak."""
    b1: Decay = 0.9
    """Decay of the first moment; momentum of sgd and muon, for which 0.95 is usual."""
    b2: Decay = 0.999
    """Decay of the second moment (adamw, lion, muon's AdamW, rmsprop)."""
    eps: Annotated[float, Range(1e-30, 1, usual="1e-8 is usual")] = 1e-8
    """Added to the root of the second moment (adamw, muon's AdamW, rmsprop, adagrad)."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """Decoupled decay of matrices, scaled by the learning rate; norms, biases and sinks do not decay."""
    moments: Literal["float32", "int8"] = "float32"
    """Storage of the moments; int8 is blockwise and companded, embeddings, norms and biases stay float32."""
    store_param_remainders: bool = False
    """Weights are bfloat16, and the other 16 bits of the float32 masters part of the optimizer state."""
    ema: Annotated[float, Range(0, 1, open_high=True, usual="0.999 is usual")] = 0.0
    """Decay of an exponential moving average of the trained weights, one step an update, kept in float32
    beside the moments and exported to hf_ema; 0 = none."""
    init_from: str = ""
    """Run directory whose newest checkpoint has the moments to start from, of the same weights and optimizer;
    the learning-rate schedule restarts. "" = zeros."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients between the micro-batches of an update, and until it is applied."""
    offload: bool = False
    """Keep the moments in host memory; an update copies them to the devices and back, and waits for it."""
    max_grad_norm: Annotated[float, Range(0, 1e9)] = 1.0
    """Global norm that gradients are clipped to; 0 = no clipping."""
    max_nonfinite: Count = 5
    """Updates with NaN or Inf in loss, gradient or weights are skipped; so many in a row end the run."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem and fix)."""
        if self.name in ("adafactor", "adafactor_unscaled", "adagrad") and self.moments != "float32":
            kind = "a sum" if self.name == "adagrad" else "factored and small"
            yield "moments", f"is int8: {self.name}'s moments are {kind}; it must be float32."
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            steps = self.warmup_steps
            yield "warmup_steps", f"is {steps:g}: it must be a number of updates, or a fraction below 1."


@dataclass(frozen=True)
class RoutingConfig:
    """Routing of tokens to experts in training, of models with experts."""

    balance_coef: Annotated[float, Range(0, 1e3, usual="0 is usual in RL, 0.001 to 0.01 in SFT")] = 0.0
    """Coefficient of the balance loss, which moves tokens from busy experts to others: the sum over layers of
    X sum f P, with an expert's share f of the assignments, its mean score P over the whole mini-batch, and
    the number X of experts. 0 = none."""
    bias_rate: Annotated[float, Range(0, 1, usual="0 is usual in RL, 0.001 in pretraining")] = 0.0
    """Change of a router's selection bias in each update: up if an expert has less than the mean load of the
    mini-batch, down if it has more (DeepSeek-V3). 0 = the bias does not change."""
    replay: Literal["none", "old", "rollout"] = "none"
    """Experts of the policy's tokens in training: the routers' present choice (none), the policy's choice
    before the first update of the step (old, R2), or the rollout's choice (rollout, R3)."""
