"""The newest metrics of a run for Prometheus: GET /metrics, in the text format 0.0.4."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from jaxrl_llm.addresses import is_loopback
from jaxrl_llm.errors import UserError
from jaxrl_llm.report.config import LogConfig, split_address

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = 10.0  # that a reader may take for its request


class _Handler(BaseHTTPRequestHandler):
    timeout = SECONDS

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = (self.server.text if found else "GET /metrics\n").encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Server(ThreadingTCPServer):  # HTTPServer looks the name of its address up, which may take seconds
    allow_reuse_address = daemon_threads = True

    def __init__(self, address: tuple[str, int]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.text = ""
        super().__init__(address, _Handler)

    def handle_error(self, *_: object) -> None:
        """Ignore a reader that has left."""


class Prometheus:
    """A `Logger` that serves the newest value of every metric.

    Raises:
        UserError: it cannot listen at the address.
    """

    id = ""
    last_step = None

    def __init__(self, config: LogConfig, run: str):
        host, port = split_address(config.prometheus)
        self.run, self.values = run, dict[str, float]()
        try:
            self.server = _Server((host, port))
        except OSError as error:
            raise UserError(
                f"--log.prometheus {config.prometheus}: cannot listen there ({error}). Set another "
                "port, or 0 for a free one"
            ) from None
        shown, self.port = f"[{host}]" if ":" in host else host, self.server.server_address[1]
        self.line = f"metrics for Prometheus at http://{shown}:{self.port}/metrics"
        if not is_loopback(host):
            self.line += "\nWARNING: whoever reaches this port can read them (--log.prometheus)"
        threading.Thread(target=self.server.serve_forever, name="prometheus", daemon=True).start()

    def config(self, tree: dict[str, Any]) -> None:
        """Do nothing: settings are in config.json."""

    def step(self, step: int, row: Mapping[str, Any], samples: Sequence[Any]) -> None:
        """Serve the numbers of a row; a metric that it lacks keeps its value, and null is NaN."""
        numbers = {k: x for k, x in row.items() if k != "step" and (x is None or isinstance(x, int | float))}
        self.values |= {key: float("nan") if x is None else float(x) for key, x in numbers.items()}
        self.server.text = exposition(self.run, step, time.time(), self.values)

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        self.server.shutdown()
        self.server.server_close()


def exposition(run: str, step: int, seconds: float, values: Mapping[str, float]) -> str:
    """Return metrics as text: steps as a counter, the values of the newest step as gauges.

    Args:
        seconds: since 1970, at the end of the step.
        values: by name in metrics.jsonl, which becomes the label `metric`.
    """
    label = f'run="{_escaped(run)}"'
    lines = {
        "jaxrl_steps_total": ["counter", f"jaxrl_steps_total{{{label}}} {step}"],
        "jaxrl_last_step_timestamp_seconds": [
            "gauge",
            f"jaxrl_last_step_timestamp_seconds{{{label}}} {seconds:.3f}",
        ],
    }
    for key, value in values.items():
        name = metric_name(key)
        lines.setdefault(name, ["gauge"]).append(
            f'{name}{{{label},metric="{_escaped(key)}"}} {_number(value)}'
        )
    return "".join(
        f"# TYPE {name} {kind}\n" + "".join(f"{line}\n" for line in samples)
        for name, (kind, *samples) in lines.items()
    )


def metric_name(key: str) -> str:
    """Return the name of a metric in Prometheus: eval/pass@1 is jaxrl_eval_pass_at_1."""
    return "jaxrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", key.replace("@", "_at_"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Return a number as Go reads it."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
