"""Settings of the rollout: which engine, and how each of them works."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.bridge.update import Pause
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine import SamplingConfig


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout engine and how it draws."""

    engine: Literal["native", "sglang"] = "native"
    """Who writes the responses: this process's own devices, or a pool of SGLang servers."""
    servers: tuple[str, ...] = ()
    """SGLang servers that run already, as http://host:port; or @file, a text file with one address a line,
    which is read again every second: servers may join and leave."""
    launch: int = 0
    """SGLang servers to start on this machine, as child processes; their logs go to the run directory."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How responses are drawn."""
    slots: int = 64
    """Sequences decoded side by side (on each server); more wait. Costs cache memory, never changes text."""
    chunk: int = 32
    """Tokens decoded between two looks of the host (refill, stop strings)."""
    prefill_tokens: int = 4096
    """Prompt tokens, padding included, that one forward reads at most (a longer prompt goes alone)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; norms, softmax and log-probs are float32."""
    cache: Literal["auto", "ring", "paged"] = "auto"
    """Keys and values in a ring, with room for the longest sequence in every slot; or in pages, for as many
    tokens as there are, a prompt's shared by its samples. auto = paged where a kernel reads pages (TPU,
    Hopper), else ring, which plain JAX reads faster."""
    cache_dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"] | None = None
    """Type of cached keys and values; None = dtype. Those of 8 bits (a scale for each token and head) need
    pages; log-probs then differ more from the trainer's."""
    page: int = 128
    """Tokens of a page of the paged cache."""
    pages: int | None = None
    """Pages that each device has; None = enough for all slots, or what its memory can hold. With fewer,
    samples wait for others to end."""
    max_staleness: int = 0
    """Steps that servers may write ahead of the trainer: while it learns, the responses of the next steps are
    written, and go on under new weights as these come. 0 = rollout and training take turns."""
    warm_up: bool = False
    """Compile every size of every program before the first step, not when a size is first met: a slower
    start (seconds for a small model, minutes for a large one), and no pause later."""
    weight_noise: float = 0.0
    """Noise on the weights that training rolls out with, relative to each weight's own size and new every
    step: an experiment in how much mismatch between rollout and trainer an algorithm bears."""

    def __post_init__(self):
        for name in ("slots", "chunk", "prefill_tokens", "page", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"rollout.{name} must be at least 1, not {value}")
        if self.cache == "ring" and self.cache_dtype in ("int8", "float8_e4m3fn"):
            raise UserError(f'rollout.cache_dtype={self.cache_dtype} needs rollout.cache="paged"')
        if self.max_staleness < 0:
            raise UserError(f"rollout.max_staleness must be at least 0, not {self.max_staleness}")


@dataclass(frozen=True)
class SGLangConfig:
    """How SGLang servers are started, reached and given weights."""

    python: str = sys.executable
    """Interpreter that has sglang, for servers that are started here."""
    flags: str = ""
    """More flags for them, as on SGLang's own command line: "--tp 2 --mem-fraction-static 0.6"."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server started here, such as 0,1 2,3; none given = that of the run."""
    start_timeout: float = 600.0
    """Seconds a server may take until it answers."""
    timeout: float = 600.0
    """Seconds one response, or one change of weights, may take."""
    retries: int = 3
    """Times that a response is tried, on one server or another, before the run stops."""
    transport: Literal["disk", "http", "group", "ipc"] = "disk"
    """How weights reach the servers: files that they read (disk), in requests (http), over a torch process
    group (group), or as handles of memory on GPUs that trainer and server share (ipc). http and ipc send
    pickles to the servers; nothing receives one."""
    pause: Pause = "retract"
    """What becomes of responses in flight when weights change: broken off and asked for again (abort), back
    in the server's queue and read anew under the new weights (retract), or gone on with on keys and values of
    the old weights (in_place: the shortest pause; wants algo.correction)."""
    bucket_bytes: int = 256 * 2**20
    """Bytes of weights that http, group and ipc send at once; a larger tensor goes alone."""
    group_backend: Literal["gloo", "nccl"] = "gloo"
    """Of the process group: gloo over TCP, nccl between GPUs."""
    relay_python: str = sys.executable
    """Interpreter that has torch, for the processes that are the trainer's end of the groups."""
    patience: float = 300.0
    """Seconds to wait for a server when none can be used or all are too busy; then the run saves and ends."""
    restarts: int = 3
    """Times that a server started here is started again when it ends by itself."""
    router: str = ""
    """Address of an SGLang router, http://host:port, that gets what is to be generated; weights still go to
    each of the servers. "" = each response goes to the least busy server."""
    colocated: bool = False
    """Servers started here share their GPUs with the trainer: they give memory back while it trains."""
    folder: str = ""
    """Where the weights are written for the servers to read: a path they see too. "" = a folder in /dev/shm
    (memory) for servers started here, else in the run directory."""
    probe_tolerance: float | None = None
    """Largest mean difference of log-probs, nats, between a server and the trainer on fixed tokens after
    each change of weights; beyond it the server is left out. None = 1e-3 in float32, 0.1 in bfloat16."""
