"""Speed of weight transfer to SGLang servers, by transport, and of their generation.

    python benchmarks/servers.py --sglang .venv-sglang/bin/python --output benchmarks/results/servers.json

Starts servers on the CPU (scripts/sglang_cpu/install.sh), pushes a model of 58 million bfloat16 weights
(117 MB) to them a few times by disk (/dev/shm), http and group (gloo), and reports the median push: seconds
in all, of gathering (disk: writing), on the wire, and of the servers' pause, and gigabytes a second a server.
The first push of each transport is not counted: it compiles, and joins the groups. Then they generate 32
responses of 64 tokens, greedily and with log-probs, as the native engine in this process does before they are
started: medians of tokens a second after a first call that is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from machine import report_head, sglang_version

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.probe import tolerance_of
from jaxrl_llm.bridge.push import Publisher
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.engine import Engine, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.servers.engine import ServerEngine
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import ServerProcesses
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=32_000, hidden_size=512, mlp_size=1536, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64,
    tie_embeddings=False, max_position=256,
)  # fmt: skip
DTYPE = "bfloat16"
RESPONSES, TOKENS = 32, 64
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 4096 "
    "--disable-overlap-schedule"
)
SHOWN = {
    "seconds": "rollout/publish_seconds",
    "gather": "bridge/gather_seconds",
    "wire": "bridge/wire_seconds",
    "pause": "bridge/pause_seconds",
    "GB/s": "bridge/gigabytes_per_second",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang", required=True, help="interpreter that has SGLang")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket_mb", type=int, default=32)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    head = report_head()
    with contextlib.ExitStack() as closing:
        transports, tokens = measure_servers(options, closing)
    result = {**head, "machine": describe_versions(options.sglang)}
    result |= {"transports": transports, "tokens_per_second": tokens}
    print(servers_table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure_servers(
    options: argparse.Namespace, closing: contextlib.ExitStack
) -> tuple[dict, dict[str, float]]:
    """Return (transport -> medians of SHOWN, engine -> tokens a second)."""
    folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
    servers = ServersConfig(python=options.sglang, flags=FLAGS)
    shell = save_description(MODEL, folder / "shell", make_tokenizer(), DTYPE)
    rollout = RolloutConfig(engine="sglang", launch=options.servers, dtype=DTYPE, slots=RESPONSES)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    native = NativeEngine(dataclasses.replace(rollout, engine="native"), MODEL, mesh, make_tokenizer())
    speeds = {"native": tokens_per_second(native, params, options.repetitions)}  # idle servers would poll
    launched = ServerProcesses(rollout, servers, shell, folder)
    closing.callback(launched.close)
    pool = ServerPool(launched.urls, servers.timeout, servers.retries, slots=RESPONSES)
    closing.callback(pool.close)
    source = WeightSource(MODEL, DTYPE, options.bucket_mb << 20)
    group = GroupTransport(source, KINDS["sglang"], python=sys.executable, timeout=servers.timeout)
    closing.callback(group.close)
    disk = DiskTransport(folder / "weights", DTYPE, make_tokenizer())
    publisher_of = lambda transport: Publisher(
        pool,
        transport,
        servers.pause,
        MODEL,
        tolerance=tolerance_of(DTYPE, None),
        score=sequence_scorer(DTYPE, mesh),
        on_first=lambda work: work(),
        wait_for_servers=launched.wait,
    )
    medians = {}
    transports = {"disk": disk, "http": HttpTransport(source, KINDS["sglang"]), "group": group}
    for name, transport in transports.items():
        publisher = publisher_of(transport)
        pushes = [publisher.publish(params, f"{name}-{i}") for i in range(options.repetitions + 1)][1:]
        assert all(push["servers/usable"] == options.servers for push in pushes), pool.describe()
        medians[name] = {key: statistics.median(push[m] for push in pushes) for key, m in SHOWN.items()}
        medians[name]["MB"] = pushes[0]["rollout/publish_bytes"] / 1e6
    engine = ServerEngine(
        rollout,
        servers,
        MODEL,
        pool,
        publisher=publisher_of(disk),
        on_first=lambda work: work(),
        tokenizer=make_tokenizer(),
    )
    return medians, speeds | {"sglang": tokens_per_second(engine, params, options.repetitions)}


def tokens_per_second(engine: Engine, params: models.Transformer, repetitions: int) -> float:
    """Return the median over calls, of responses that all have TOKENS tokens."""
    engine.publish(params, 1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 1000, 16).astype(np.int32) for _ in range(RESPONSES)]
    todo = [Request(prompt, i, 1, TOKENS) for i, prompt in enumerate(prompts)]
    sampling, seconds = SamplingConfig(temperature=0.0, ignore_eos=True), []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        trajectories = engine.generate(todo, sampling, jax.random.key(0))
        seconds.append(time.perf_counter() - start)
    assert sum(len(one.response_ids) for one in trajectories) == RESPONSES * TOKENS
    return RESPONSES * TOKENS / statistics.median(seconds[1:])


def describe_versions(python: str) -> str:
    """Return cores, load and versions; SGLang's versions come from its interpreter."""
    ours = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "aiohttp", "torch")]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    versions = [f"python {platform.python_version()}", *ours, f"sglang {sglang_version(python)}"]
    return f"{os.cpu_count()} cores, load average at the end {load}; {', '.join(versions)}"


def servers_table(result: dict) -> str:
    """Return the results as Markdown."""
    lines = [f"`{result['command']}`", "", result["machine"], ""]
    lines += [f"| transport | MB | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 2) + "|"]
    for name, row in result["transports"].items():
        lines.append(f"| {name} | {row['MB']:.0f} | {' | '.join(f'{row[key]:.3g}' for key in SHOWN)} |")
    lines += ["", "| engine | tokens a second |", "|---|---|"]
    lines += [f"| {name} | {speed:.0f} |" for name, speed in result["tokens_per_second"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
