"""Two slices with a slow link between them: bytes and time of an update, beside the bytes that `plan` counts.

    sudo python benchmarks/slow_link.py            # 4 minutes on 2 cores; needs Linux, root, ip and tc

Two processes, in separate network namespaces, are two slices of two devices (`--mesh.slices 2`). The
link between them has the rates of --rates, one after the other. At each rate the median time of an update of
four micro-batches is measured, and the bytes that a process sends are read from the kernel. Seconds by the
link's rate are bytes / rate, with the bytes that the compiled programs send between slices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import RESULTS, report_head

NAMES, ADDRESSES = ("slice0", "slice1"), ("10.77.0.1", "10.77.0.2")
PORT = 41_777
HOSTS = "127.0.0.1 localhost\n{address} {host}\n"
"""Of a namespace: Gloo listens at the address of the host's name."""
UPDATES, MICROBATCHES = 7, 4

WORKER = """
import json, os, sys, time
from pathlib import Path
import jax, numpy as np, optax
from jaxrl_llm.host.start import write_programs_by_rename
write_programs_by_rename()
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.plan.compiled import count_collectives
from jaxrl_llm.plan.hlo import parse
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

folder, updates, microbatches = Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
model = models.TransformerConfig(
    vocab_size=2048, hidden_size=256, mlp_size=1024, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64
)
mesh = make_mesh(MeshConfig(data=2, fsdp=2, slices=2))
built = Learner(grpo.Config(kl_coef=0.0), model, optax.adam(1e-5), StepConfig(64, 4), mesh=mesh)
rng = np.random.default_rng(0)
signals = {name: np.full(64, -1.0, np.float32) for name in ("advantages", "rollout_logprobs")}
items = [
    PackItem(rng.integers(0, 2048, 64).astype(np.int32), np.ones(64, np.float32), dict(signals))
    for _ in range(4 * microbatches)
]
with jax.set_mesh(mesh):
    make = jax.jit(models.init, static_argnums=0, out_shardings=built.param_shardings)
    state = built.init_state(make(model, jax.random.key(0)))
    across = {}
    for name, program in built.update_programs(("advantages", "rollout_logprobs")).items():
        text = program.fn.lower(*program.args).compile().as_text()
        counted = count_collectives(parse(text), 4, slices=[0, 0, 1, 1])
        across[name] = sum(stats.across for stats in counted.values())
batches = built.scorer.batches(items, 4)
assert len(batches) == microbatches

def update(state):
    state, metrics, _ = built.update_minibatch(state, batches, 64.0 * len(items), float(len(items)))
    return jax.block_until_ready(state)

for _ in range(2):
    state = update(state)
print(json.dumps(across), flush=True)
sent = lambda: int(Path("/sys/class/net/wire/statistics/tx_bytes").read_text())
for rate in iter(sys.stdin.readline, ""):
    times, start = [], sent()
    for _ in range(updates):
        begin = time.perf_counter()
        state = update(state)
        times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": times, "sent": (sent() - start) / updates}), flush=True)
"""
"""argv: address of the coordinator, number of the process, folder, updates, micro-batches. One line of stdin
starts the updates at one rate."""


def must_run(*words: str) -> None:
    """Run a command, and fail with its message."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def connect() -> None:
    """Make both namespaces and the link between them."""
    ends = [("name", "wire", "netns", name) for name in NAMES]
    must_run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        inside = ("ip", "-n", name)
        must_run(*inside, "addr", "add", f"{address}/24", "dev", "wire")
        must_run(*inside, "link", "set", "wire", "up")
        must_run(*inside, "link", "set", "lo", "up")


def limit(rate: str) -> None:
    """Give the link a rate, such as 200mbit, in both directions; "none" = no limit."""
    for name in NAMES:
        inside = ("ip", "netns", "exec", name, "tc", "qdisc")
        subprocess.run([*inside, "del", "dev", "wire", "root"], capture_output=True)
        if rate != "none":
            bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            must_run(*inside, "add", "dev", "wire", "root", *bucket)


def start(folder: Path) -> list[subprocess.Popen]:
    """Start a process in each namespace."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WORKER, f"{ADDRESSES[0]}:{PORT}"]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, str(i), str(folder), str(UPDATES), str(MICROBATCHES)],
            env={**os.environ, **flags},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(NAMES)
    ]


def last_json(process: subprocess.Popen) -> dict:
    """Return the next line of JSON that the process prints."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    sys.exit("a process ended early")


def measure_rates(rates: list[str], folder: Path) -> dict:
    """Return the bytes that the programs send between slices, and bytes and seconds of an update by rate."""
    processes = start(folder)
    try:
        (across, _) = map(last_json, processes)
        planned = 2 * (
            across["accumulate"] * MICROBATCHES + across["add"] + across["apply"]
        )  # two devices of a slice
        results = {"planned_bytes": planned, "across": across, "rates": {}}
        for rate in rates:
            limit(rate)
            time.sleep(1)
            for process in processes:
                process.stdin.write(rate + "\n")
                process.stdin.flush()
            found = [last_json(process) for process in processes]
            results["rates"][rate] = {
                "seconds": statistics.median(found[0]["seconds"]),
                "sent": max(one["sent"] for one in found),
            }
            print(rate, results["rates"][rate], flush=True)
        return results
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["none", "100mbit", "50mbit", "25mbit"])
    options = parser.parse_args()
    head = report_head(computes=False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                must_run("ip", "netns", "add", name)
                hosts = Path("/etc/netns") / name / "hosts"
                hosts.parent.mkdir(parents=True, exist_ok=True)
                hosts.write_text(HOSTS.format(address=address, host=os.uname().nodename))
            connect()
            results = measure_rates(options.rates, Path(folder))
        finally:
            for name in NAMES:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
                (Path("/etc/netns") / name / "hosts").unlink(missing_ok=True)
    print(json.dumps(head | results, indent=1))
    (RESULTS / "slow_link.json").write_text(json.dumps(head | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
