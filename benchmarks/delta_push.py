"""Bytes of `--servers.push delta` in GRPO steps of SmolLM2-135M, in bfloat16.

    python benchmarks/delta_push.py --config grpo_smollm2.py --steps 8 --eval.every 0 \\
        --model.path models/SmolLM2-135M-Instruct.Q4_1.gguf --run_dir runs/delta_push

takes the arguments of `python -m jaxrl_llm.train` and writes benchmarks/results/delta_push.json. Rollouts are
the native engine's. What it gets after each step also goes through the transport, as for vLLM servers, but to
none: "seconds" are of gathering, comparing, hashing and packing on the CPU. The first push is whole. A
receiver's copy takes each push, and is compared bit by bit.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
import time

from machine import RESULTS, report_head

from jaxrl_llm import models, train
from jaxrl_llm.bridge import vllm
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.delta import Shadow, as_bits
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.models.lora import split_params
from jaxrl_llm.rollout.native.engine import NativeEngine

BUCKET = 256 * 2**20


class Measured:
    """Measures the pushes of an engine's weights."""

    def __init__(self):
        self.rows: list[dict[str, float]] = []
        self.shadow = Shadow()
        self.leaf = self.transport = None

    def push(self, params) -> None:
        """Push weights, unless they are the same as before."""
        leaf = models.named_leaves(split_params(params)[0])[0][1]
        if leaf is self.leaf:
            return
        self.leaf = leaf
        if self.transport is None:
            encode = vllm.with_tied_head if params.config.tie_embeddings else None
            source = WeightSource(params.config, "bfloat16", BUCKET, encode)
            self.transport = DeltaTransport(source, vllm.VLLM())
        # The parts, as a push takes them.
        parts, seconds = self.transport.parts(params, str(len(self.rows))), 0.0
        sent = whole = 0
        while True:
            start = time.perf_counter()
            part = next(parts, None)
            seconds += time.perf_counter() - start
            if part is None:
                break
            whole += part.num_bytes
            sent += part.delta_bytes if part.base else part.num_bytes
            self.receive(part)
        self.rows.append({"bytes": sent, "whole": whole, "fraction": sent / whole, "seconds": seconds})
        print(f"push {len(self.rows) - 1}: {self.rows[-1]}", flush=True)

    def receive(self, part) -> None:
        """Update the receiver's copy; it is exact, or the receiver raises an error."""
        payload = part.content.changes or self.transport._whole(part.content)
        self.shadow.receive(base64.b64decode(json.loads(b"{" + payload + b"}")["update"]))
        for entry in part.content.entries:
            assert (self.shadow.tensors[entry.name] == as_bits(self.transport._held[entry.name])).all()


def main() -> None:
    measured, publish = Measured(), NativeEngine.publish

    @functools.wraps(publish)
    def measured_publish(self, params, version):
        measured.push(params)
        return publish(self, params, version)

    NativeEngine.publish = measured_publish
    report = report_head()
    code = train.main(sys.argv[1:])
    path = RESULTS / "delta_push.json"
    path.write_text(json.dumps(report | {"pushes": measured.rows}, indent=2) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
