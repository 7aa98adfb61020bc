"""`python -m jaxrl_llm view RUN [RUN ...]`: runs as one HTML page that needs no server and no network.

The page is `view_page/` with the data of the runs: metrics, config and samples are JSON, compressed and
base64 encoded, so that no text of a model is ever parsed as HTML; scripts set it as text. A content security
policy admits its own script and style by their hashes, and nothing else: no request, no evaluated text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.files import load_json, replace_text
from jaxrl_llm.report import jsonl
from jaxrl_llm.report.loggers import flat_texts
from jaxrl_llm.thoughts import readable
from jaxrl_llm.tools.arguments import check_output_path, parse_arguments
from jaxrl_llm.tools.atif import AtifSource, atif_document
from jaxrl_llm.tools.config import ViewArguments
from jaxrl_llm.tools.conversation import SampleTurn, as_messages, as_text, sample_turns

METRICS, SAMPLES, CONFIG, PAGE = "metrics.jsonl", "samples.jsonl", "config.json", "view.html"
# In this order.
SCRIPTS = ["base", "plot", "curves", "evaluation", "tokens", "tree", "detail", "samples", "config", "page"]
CHUNK = 100  # samples whose values of tokens are decompressed together, when one of them is opened
MAX_POINTS = 20_000  # rows of metrics.jsonl in the page; more are thinned evenly
SHOWN = {
    *("step", "eval", "data_source", "prompt", "messages", "response", "turns", "reward", "outcome"),
    *("finish", "response_tokens", "per_token", "token_ids", "tree"),
}
"""Keys of samples.jsonl that the page has a place for; all others are shown by their names."""


@dataclass
class RunData:
    """Files of a run, as the page needs them."""

    path: Path
    name: str
    metrics: list[jsonl.Row]
    config: dict[str, Any]
    samples: list[jsonl.Row]
    notes: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        UserError: a folder is not a run, or a file cannot be written; the message has the fix.
    """
    args = parse_arguments(ViewArguments, argv, "view", positional="runs")
    if not args.runs:
        raise UserError(
            "view: no run is given. Give run directories: python -m jaxrl_llm view runs/grpo_tiny"
        )
    out = args.out or args.runs[0] / PAGE
    runs = [read_run(path, name) for path, name in zip(args.runs, run_names(args.runs), strict=True)]
    check_output_path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {out}: a page needs a name that ends in .html, such as {out}.html")
    limit_samples(runs, args.max_samples)
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.path}: {note}", file=sys.stderr)
    try:
        replace_text(out, render_page(runs), sync=False)
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written ({error.strerror}). Free some space, or set another --out"
        ) from None
    # Trajectories, beside the page.
    if args.atif:
        print(f"{args.atif}: {write_trajectories(args.atif, runs):,} trajectories (ATIF)")
    steps, samples = sum(len(run.metrics) for run in runs), sum(len(run.samples) for run in runs)
    print(f"{out}: {len(runs)} run(s), {steps:,} steps, {samples:,} samples; open it in a browser")
    return 0


def write_trajectories(folder: Path, runs: Sequence[RunData]) -> int:
    """Write RUN-STEP-NUMBER.json of each sample; return how many.

    Raises:
        UserError: a file cannot be written.
    """
    count = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for run in runs:
            version, model = (run.config.get(key, "?") for key in ("versions.jaxrl-llm", "model.path"))
            source = AtifSource(run.name, version, model or run.name)
            for index, row in enumerate(run.samples):
                name = f"{run.name.replace('/', '_')}-{row['step']:06}-{index:05}.json"
                replace_text(folder / name, json.dumps(atif_document(row, index, source)), sync=False)
                count += 1
    except OSError as error:
        raise UserError(
            f"--atif {folder}: cannot be written ({error.strerror}). Set another folder"
        ) from None
    return count


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest last parts of the paths that tell the runs apart.

    Raises:
        UserError: the same run twice.
    """
    parts = [path.resolve().parts for path in paths]
    if twice := [paths[i] for i, own in enumerate(parts) if own in parts[:i]]:
        raise UserError(f"{twice[0]}: the same run twice; give each run once")
    names = []
    for own in parts:
        lengths = range(1, len(own) + 1)
        shortest = next(n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        names.append("/".join(own[-shortest:]))
    return names


def read_run(path: Path, name: str) -> RunData:
    """Return the files of a run directory.

    Raises:
        UserError: the path is not a run directory, or has no step yet.
    """
    if not (path / METRICS).is_file():
        raise UserError(no_run_message(path))
    rows, damaged = jsonl.scan_rows(path / METRICS)
    if not rows:
        raise UserError(
            f"{path / METRICS} has no step: "
            + ("all of its lines are damaged" if damaged else "the file is empty; view the run after a step")
        )
    # Damaged or missing files become notes on the page.
    run = RunData(path, name, rows, {}, samples=[])
    note_damage(run, METRICS, damaged)
    run.samples, damaged = jsonl.scan_rows(path / SAMPLES)
    note_damage(run, SAMPLES, damaged)
    try:
        run.config = config_texts(load_json((path / CONFIG).read_bytes()))
    except FileNotFoundError:
        run.notes.append(f"{CONFIG} is missing: the page shows no settings of this run")
    except (ValueError, TypeError):
        run.notes.append(f"{CONFIG} is damaged: the page shows no settings of this run")
    if len(rows) > MAX_POINTS:
        kept = set(evenly_spaced(len(rows), MAX_POINTS))
        is_eval = lambda row: any(key.startswith("eval/") for key in row)
        run.metrics = [row for i, row in enumerate(rows) if i in kept or is_eval(row)]
        run.notes.append(f"{len(rows):,} steps; the curves show {len(run.metrics):,}, and every evaluation")
    return run


def no_run_message(path: Path) -> str:
    """Return why a path is not a run directory with steps, and the fix."""
    if (path / CONFIG).is_file():
        return f"{path} has no step yet, only {CONFIG}; view the run after a step"
    inside = sorted(shlex.quote(str(file.parent)) for file in path.glob(f"*/{METRICS}"))
    fix = f"Runs in it: {' '.join(inside)}" if inside else "Give the --run_dir of a training run"
    problem = "the folder does not exist" if not path.exists() else "it is a file"
    if path.is_dir():
        problem = f"has no {METRICS}"
    return f"{path} is not a run directory: {problem}. {fix}"


def note_damage(run: RunData, file: str, damaged: Sequence[int]) -> None:
    """Note the lines of a file that are left out."""
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        what = "1 damaged line is" if len(damaged) == 1 else f"{len(damaged)} damaged lines are"
        run.notes.append(f"{file}: {what} left out: {lines}")


def limit_samples(runs: Sequence[RunData], limit: int) -> None:
    """Thin the samples of runs that have more than their share of the limit, evenly, and note it."""
    share = max(limit // len(runs), 1)
    for run in runs:
        if (count := len(run.samples)) > share:
            run.samples = [run.samples[i] for i in evenly_spaced(count, share)]
            run.notes.append(f"{count:,} samples; the page has {share:,} (--max_samples)")


def evenly_spaced(count: int, kept: int) -> list[int]:
    """Return `kept` of the indices below `count`, evenly spaced, first and last included."""
    return [round(i * (count - 1) / max(kept - 1, 1)) for i in range(kept)]


def to_sample(row: jsonl.Row) -> dict[str, Any]:
    """Return a row of samples.jsonl as the page reads it: texts are texts, numbers are finite."""
    prompt, turns = row.get("messages"), row.get("turns")
    other = {key: value for key, value in row.items() if key not in SHOWN}
    return {
        "step": row["step"],
        "split": "eval" if row.get("eval") else "train",
        "source": as_text(row.get("data_source", "")),
        "prompt": messages(prompt) or [["prompt", as_text(row.get("prompt", ""))]],
        "response": messages(turns) or [["assistant", readable(as_text(row.get("response", "")))]],
        "reward": finite(row.get("reward")),
        "outcome": as_text(row.get("outcome", "")),
        "finish": as_text(row.get("finish", "")),
        "tokens": finite(row.get("response_tokens")),
        "other": {key: as_text(value) for key, value in other.items()},
        "per_token": token_columns(row.get("per_token")),
        "tree": list(map(turn_data, sample_turns(row))) if row.get("tree") and turns else None,
    }


def turn_data(turn: SampleTurn) -> dict[str, Any]:
    """Return a turn of a conversation as the page reads it."""
    return {
        "after": turn.after,
        "under": turn.under,
        "inputs": messages(turn.inputs),
        "text": messages([turn.text])[0] if turn.text else None,
        "calls": list(map(call_data, turn.calls)),
        "tools": [as_text(tool) for tool in turn.tools],
        "tokens": turn.tokens,
        "read": turn.read,
        "rewritten": turn.rewritten,
        "reward": finite(turn.reward),
        "trained": finite(turn.trained),
    }


def call_data(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as the page reads it: [name, value] of each argument, or what is wrong with it."""
    arguments = call.get("arguments", {})
    named = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {
        "name": as_text(call.get("name") or call.get("text") or "?"),
        "arguments": [[as_text(name), as_text(value)] for name, value in named.items()],
        "error": as_text(call.get("error") or ""),
        "answer": content_of(call["answer"]) if call.get("answer") else None,
    }


def messages(chat: Any) -> list[list[str]]:
    """Return [role, content] of each message; [] without a chat."""
    rows = as_messages(chat) if isinstance(chat, list) else []
    return [[as_text(row.get("role", "?")), content_of(row)] for row in rows]


def content_of(message: dict[str, Any]) -> str:
    """Return the content of a message, with its tool calls as JSON."""
    content = as_text(message.get("content") or "")
    return "\n".join([content, as_text(message["tool_calls"])] if message.get("tool_calls") else [content])


def finite(value: Any) -> float | None:
    """Return a finite number, None for all else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None


def token_columns(columns: Any) -> dict[str, Any] | None:
    """Return the values of tokens with every array as long as the texts; None if they are unusable."""
    texts = columns.get("text") if isinstance(columns, dict) else None
    if not texts or not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
        return None
    arrays = {name: x for name, x in columns.items() if isinstance(x, list) and len(x) == len(texts)}
    constants = {name: x for name, x in columns.items() if not isinstance(x, list)}
    numbers = {name: [finite(x) for x in array] for name, array in arrays.items() if name != "text"}
    return {"text": texts} | numbers | {name: finite(x) for name, x in constants.items()}


def config_texts(tree: dict[str, Any]) -> dict[str, str]:
    """Return the values of config.json as texts, by dotted keys without the prefix "config"."""
    command = {"command": " ".join(tree["command"])} if "command" in tree else {}
    return {key.removeprefix("config."): text for key, text in flat_texts({**tree, **command})}


def metric_columns(rows: Sequence[jsonl.Row]) -> dict[str, list[float | None]]:
    """Return the metrics by name, one number per row (6 digits), None for a row without the metric."""
    seen = Counter(key for row in rows for key, value in row.items() if finite(value) is not None)
    rounded = lambda x: x if x is None or isinstance(x, int) else float(f"{x:.6g}")
    return {key: [rounded(finite(row.get(key))) for row in rows] for key in seen if key != "step"}


def render_page(runs: Sequence[RunData]) -> str:
    """Return the HTML of the page."""
    folder = resources.files("jaxrl_llm.tools") / "view_page"
    asset = lambda name: (folder / name).read_text(encoding="utf-8")
    style, script = asset("page.css"), "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{source_hash(script)}'; style-src '{source_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(", ".join(run.name for run in runs)),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": "\n".join(data_elements(runs)),
    }
    head, *rest = asset("page.html").split("{{")
    for part in rest:
        name, _, tail = part.partition("}}")
        head += parts[name] + tail
    return head


def data_elements(runs: Sequence[RunData]) -> Iterable[str]:
    """Yield the page's elements of data: all runs, then samples and chunks of token values of each."""
    yield data_element("runs", [run_summary(run) for run in runs])
    for r, run in enumerate(runs):
        samples = [to_sample(row) for row in run.samples]
        without = [{**s, "per_token": s["per_token"] is not None} for s in samples]
        yield data_element(f"samples-{r}", without)
        for start in range(0, len(samples), CHUNK):
            values = [s["per_token"] for s in samples[start : start + CHUNK]]
            if any(values):
                yield data_element(f"tokens-{r}-{start // CHUNK}", values)


def run_summary(run: RunData) -> dict[str, Any]:
    """Return name, notes, config and metrics of a run, for the page."""
    return {
        "name": run.name,
        "path": os.fspath(run.path),
        "notes": run.notes,
        "config": run.config,
        "steps": [row["step"] for row in run.metrics],
        "kinds": [as_text(row.get("kind", "train")) for row in run.metrics],
        "metrics": metric_columns(run.metrics),
        "samples": len(run.samples),
        "chunk": CHUNK,
    }


def data_element(name: str, value: Any) -> str:
    """Return an element with compressed JSON; base64 has no character that HTML reads."""
    packed = gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), 6, mtime=0)
    return f'<script type="application/gzip" id="{name}">{base64.b64encode(packed).decode()}</script>'


def source_hash(source: str) -> str:
    """Return the hash by which a Content-Security-Policy admits an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
