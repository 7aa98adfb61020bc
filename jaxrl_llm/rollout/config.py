"""Settings of the rollout: sampling, the engine, and how each of them works."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.bridge.servers import PauseMode
from jaxrl_llm.ranges import LARGEST, Count, CountOrZero, Fraction, Range, Seconds, SecondsOrZero
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.sharding.config import PlacementConfig

EIGHT_BITS = ("int8", "float8_e4m3fn")
MIN_TEMPERATURE = 0.01  # below it logits / temperature overflow
MAX_STOP_LENGTH = 1000  # characters; the text after each chunk is searched for all stop strings
MAX_STOPS = 256
MAX_KEPT = 128  # ids of a kept set: the trainer reads as many rows of the head for each token


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of tokens. Log-probs are of the full softmax at `temperature`, but for `kept_sets`."""

    temperature: Annotated[float, Range(0.0, 100.0, usual="1.0 is usual for training, 0 is greedy")] = 1.0
    """0 = greedy."""
    top_k: CountOrZero = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: Annotated[float, Range(0.0, 1.0, open_low=True, usual="1.0 keeps all tokens")] = 1.0
    """Keep the smallest set of tokens with at least this probability (nucleus)."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this times the likeliest."""
    kept_sets: bool = False
    """Log-probs of rollout, policy and reference are over the tokens that the filters keep of each token's
    prediction, as it was drawn; these sets are kept with the trajectories. Without, importance weights under
    filters are biased. Needs top_k."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    stop_tokens: tuple[Annotated[int, Range(0, LARGEST)], ...] = ()
    """Token ids that end a response, besides the tokenizer's end token; kept in it."""
    ignore_eos: bool = False
    """Generate max_tokens tokens: no end token and no stop string ends a response (benchmarks)."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the strings that end a response: none with `ignore_eos`."""
        return () if self.ignore_eos else self.stop

    def stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids that end a response, once each: none with `ignore_eos`.

        Args:
            eos_ids: end tokens of the model and its tokenizer.
        """
        return () if self.ignore_eos else tuple(dict.fromkeys((*eos_ids, *self.stop_tokens)))

    @property
    def num_kept(self) -> int:
        """Return the maximum size of a kept set; 0 = no kept sets."""
        return self.top_k if self.kept_sets else 0

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if self.kept_sets and not 1 <= self.top_k <= MAX_KEPT:
            yield ("kept_sets", f"is True with top_k {self.top_k}: it must have a top_k of 1 to {MAX_KEPT}.")
        if self.kept_sets and not self.temperature:
            yield "kept_sets", "is True: it must have a temperature above 0, greedy tokens have no choice."
        if 0 < self.temperature < MIN_TEMPERATURE:
            yield (
                "temperature",
                f"is {self.temperature:g}: it must be 0 (greedy) or at least {MIN_TEMPERATURE}.",
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                yield (
                    "stop",
                    f"has a string of {len(text)} characters: each must have 1 to {MAX_STOP_LENGTH}.",
                )
        for name in ("stop", "stop_tokens"):
            if len(getattr(self, name)) > MAX_STOPS:
                yield name, f"has {len(getattr(self, name))} entries: at most {MAX_STOPS} are allowed."


@dataclass(frozen=True)
class RolloutConfig(PlacementConfig):
    """The rollout engine and its sampling."""

    engine: Literal["native", "sglang", "vllm"] = "native"
    """Engine that generates the responses: on this process's own devices, or in a pool of SGLang or vLLM
    servers."""
    servers: tuple[str, ...] = ()
    """Servers that run already, as http://host:port; or @file, a text file with one address a line,
    which is read again every second: servers may join and leave."""
    launch: Annotated[int, Range(0, 1024)] = 0
    """Servers to start on this machine, as child processes; their logs go to the run directory."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling of training rollouts; evaluation has eval.sampling."""
    slots: Annotated[int, Range(1, 65536, usual="64 is usual")] = 64
    """Sequences decoded at once (on each server); more wait. Costs cache memory, never changes text."""
    chunk: Annotated[int, Range(1, 65536, usual="32 is usual")] = 32
    """Tokens decoded per device call; between calls the host looks for stop strings and refills slots."""
    prefill_tokens: Count = 4096
    """Largest prefill batch in tokens, padding included (a longer prompt is prefilled alone)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations; norms, softmax and log-probs are float32. float16, for Turing GPUs,
    needs the native engine."""
    cache: Literal["auto", "ring", "paged"] = "auto"
    """KV cache: for every slot a ring buffer as long as the longest sequence; or pages, allocated as
    sequences grow, with a prompt's pages shared by its responses. auto = paged if a kernel reads pages (TPU,
    Hopper) and the model has no recurrent layers, else ring, which plain JAX reads faster, with pages for
    conversations between turns."""
    cache_dtype: Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"] | None = None
    """Type of cached keys and values; None = dtype. 8-bit types (one scale per token and head) need the paged
    cache; log-probs then differ more from the trainer's."""
    page: Annotated[int, Range(1, 65536, usual="128 is usual")] = 128
    """Tokens per page of the paged cache."""
    pages: Count | None = None
    """Pages on each device; None = enough for all slots, or as many as fit. With fewer, responses wait until
    others have finished; with more, conversations keep their pages while they wait for a slot."""
    draft_tokens: Annotated[int, Range(0, 63, usual="7 is usual")] = 0
    """Draft tokens that a slot reads with its last one, in one forward: what followed the same few tokens
    earlier in the text, its group or the last epoch. They make text that repeats itself faster, and never
    change it. 0 = none."""
    draft_slots: Annotated[int, Range(1, 65536, usual="8 is usual")] = 8
    """Largest number of running sequences with drafts: the tail of long responses, when a forward pass takes
    as long for several tokens as for one."""
    max_staleness: Annotated[int, Range(0, 1000, usual="1 to 4 are usual")] = 0
    """Bounded staleness of asynchronous rollout: largest number of steps by which rollout may run ahead of
    training. The responses of the next steps are generated while the trainer learns: on servers, where they
    continue under new weights when these arrive, or by the native engine on --rollout.devices, with the
    weights of this many steps before. 0 = synchronous: rollout and training alternate."""
    oversample: Annotated[float, Range(1.0, 2.0, usual="1.25 to 2 are usual")] = 1.0
    """Over-sampling on servers: prompts whose responses are in progress, over the prompts of a step. A step
    takes the first complete groups; the others go on, and are waited for `max_staleness` steps after their
    start. 1 = none: steps take all prompts in order."""
    warm_up: bool = False
    """Compile every shape of every program of rollout, scoring and update before the first step, several at
    a time, instead of at its first use: a slower start (seconds for a small model, minutes for a large one),
    and no pause later."""
    weight_noise: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Gaussian noise on the rollout's weights, relative to the size of each weight and new in every step: an
    experiment in how much mismatch between rollout and trainer an algorithm tolerates."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem), for rules across fields."""
        yield from super().problems()
        if self.engine != "native" and self.is_own:
            yield (
                "mesh" if self.mesh else "devices",
                "is for the native engine: servers have separate devices (--servers.devices, "
                "--servers.flags). Leave it out, or set --rollout.engine native.",
            )
        if self.engine != "native" and self.sampling.kept_sets:
            yield (
                "sampling.kept_sets",
                "is for the native engine: servers do not report tokens kept by filters. Set it to False.",
            )
        if self.cache == "ring" and self.cache_dtype in EIGHT_BITS:
            yield "cache_dtype", f"is {self.cache_dtype}: it needs --rollout.cache paged."
        # Drafts.
        if self.draft_tokens and self.engine != "native":
            yield (
                "draft_tokens",
                f"is {self.draft_tokens}: it is for the native engine. Set it to 0; servers have "
                'other drafts, such as SGLang with --servers.flags "--speculative-algorithm NGRAM".',
            )
        if self.draft_tokens and self.cache == "ring":
            yield (
                "draft_tokens",
                f"is {self.draft_tokens}: rejected drafts would overwrite a ring. Set --rollout.cache "
                "paged (or auto), or --rollout.draft_tokens 0.",
            )
        if self.engine != "native" and self.dtype == "float16":
            yield "dtype", "is float16: it needs --rollout.engine native; servers take float32 and bfloat16."
        # Servers, and devices of asynchronous rollout.
        if self.engine == "native" and (self.servers or self.launch):
            name = "servers" if self.servers else "launch"
            yield name, "is for servers: add --rollout.engine sglang or vllm."
        yield from self._asynchronous_problems()
        if self.engine != "native" and bool(self.servers) == bool(self.launch):
            yield (
                "engine",
                f"is {self.engine}: it needs either --rollout.servers http://host:port (running ones) or "
                "--rollout.launch N (N are started on this machine).",
            )
        from_file = [url for url in self.servers if url.startswith("@")]
        if from_file and len(self.servers) > 1:
            yield "servers", f"is {' '.join(self.servers)}: it must be addresses, or one @file with them."
        for url in () if from_file else self.servers:
            if problem := auth.address_problem(url, self.engine):
                yield "servers", f"is wrong: {problem}"

    def _asynchronous_problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem), for rules of asynchronous rollout."""
        if self.engine == "native" and self.max_staleness and not self.devices:
            yield (
                "max_staleness",
                f"is {self.max_staleness}: the native engine generates while the trainer learns only on "
                "separate devices. Add them, such as --devices 0:4 --rollout.devices 4:8, or "
                "--rollout.engine sglang; or set it to 0.",
            )
        if self.oversample > 1 and (self.engine == "native" or not self.max_staleness):
            yield (
                "oversample",
                f"is {self.oversample:g}: it needs --rollout.engine sglang or vllm, and at least 1 as "
                "--rollout.max_staleness, the steps that a response may be carried. Set them, or "
                "--rollout.oversample 1.",
            )


@dataclass(frozen=True)
class ServersConfig:
    """Start, requests and weight updates of servers."""

    python: str = sys.executable
    """Interpreter that has sglang or vllm, for servers that are started here; with transport group, one that
    has torch, for the trainer's end of the groups."""
    flags: str = ""
    """More flags for them, as on the server's own command line: "--tp 2 --mem-fraction-static 0.6"."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server started here, such as 0,1 2,3; none given = the run's."""
    start_timeout: Seconds = 600.0
    """Seconds a server may take until it replies."""
    timeout: Seconds = 600.0
    """Seconds one response, or one change of weights, may take."""
    retries: Annotated[int, Range(1, 1000, usual="3 is usual")] = 3
    """Times that a response is tried, on one server or another, before the run stops."""
    transport: Literal["disk", "http", "group", "ipc"] = "disk"
    """Transport of weights to the servers: files that they read (disk), requests (http), a torch process
    group, gloo over TCP (group), or handles of memory on GPUs that trainer and server share (ipc). http and
    ipc send pickles to SGLang servers; nothing receives one. vLLM has disk and, with our plugin, http and
    group."""
    push: Literal["full", "delta"] = "full"
    """full: each push sends all weights. delta: it sends the bits that have changed since the version that a
    server holds, and all weights to a server that holds another one. Needs http, or group of vLLM."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: linear layers are sent and computed in 8 bits, in blocks of 128 x 128 with a scale each; needs
    algo.correction, and rollout.dtype bfloat16 for all else."""
    pause: PauseMode = "retract"
    """Responses in flight when weights change: aborted and requested again (abort), back in the server's
    queue and prefilled again under the new weights (retract), or continued on keys and values of the old
    weights (in_place: the shortest pause; needs algo.correction)."""
    bucket_bytes: Annotated[int, Range(1, 2**40, usual="256 MiB is usual")] = 256 * 2**20
    """Bytes of weights that http, group and ipc send at once; a larger tensor goes alone."""
    patience: SecondsOrZero = 300.0
    """Seconds to wait for a server when none can be used or all are too busy; then the run saves and ends."""
    restarts: CountOrZero = 3
    """Times that a server started here is started again when it ends by itself."""
    router: str = ""
    """Address of a router, http://host:port, that gets the requests to generate; weights still go to
    each of the servers. "" = each response goes to the least busy server."""
    colocated: bool = False
    """Servers started here share their GPUs with the trainer: they release memory while it trains."""
    folder: str = ""
    """Folder in which transport disk writes the weights: a path that the servers see too. "" = a folder in
    /dev/shm (memory) for servers started here, else in the run directory."""
    probe_tolerance: Annotated[float, Range(0.0, 100.0, open_low=True)] | None = None
    """Largest mean difference of log-probs, nats, between a server and the trainer: on fixed tokens after
    each push, and on the responses. Beyond it the server is left out. None = 1e-3 in float32, 0.1 in
    bfloat16, 0.4 with quantization fp8."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem), for rules across fields."""
        try:
            names = {word.partition("=")[0] for word in shlex.split(self.flags)}
        except ValueError as error:
            yield "flags", f"is {self.flags!r}: {error}. Write it as for a shell."
        else:
            for name in names & auth.FLAGS.keys():
                yield "flags", f"holds the value of {name}, which `ps` shows: set {auth.FLAGS[name]} instead."
        if self.router and (problem := auth.address_problem(self.router)):
            yield "router", f"is wrong: {problem}"
        if self.push == "delta" and (self.transport in ("disk", "ipc") or self.quantization != "none"):
            needed = "transport http (vLLM: or group) and quantization none"
            yield "push", f"is delta, which needs {needed}. Set these, or full."
        if self.transport == "group" and not shutil.which(self.python):
            yield "python", f"is {self.python!r}: no such program."


def flag_value(words: Sequence[str], name: str) -> str | None:
    """Return the last value of `--name value` or `--name=value`; None = it is not there."""
    value = None
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, equals, rest = word.partition("=")
        if flag == name:
            value = rest if equals else after
    return value


def same_responses(sampling: SamplingConfig, count: int) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) of sampling by which all of several responses to a prompt would be the same."""
    greedy = {
        "temperature": (0, "Set it above 0 (1.0 is usual for training, 0.6 for evaluation)"),
        "top_k": (1, "Set it above 1, to 0 for all tokens,"),
        "min_p": (1, "Set it below 1, to 0 for all tokens,"),
    }
    for key, (value, fix) in greedy.items():
        if count > 1 and getattr(sampling, key) == value:
            problem = f"is {value}: all {count} responses to a prompt would be the same."
            yield key, f"{problem} {fix} or ask for 1 response."
