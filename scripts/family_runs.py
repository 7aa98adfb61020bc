"""Run 20 steps of GRPO in strict mode with a tiny model of a family, also killed and continued.

    python scripts/family_runs.py            # families of docs/families.md that have no run yet
    python scripts/family_runs.py CASE ...   # these models of tests/family_cases.py, again

A run is `grpo_tiny.py --strict true` from a folder that transformers saved, in float32 and in bfloat16.
Another one in bfloat16 is ended by SIGKILL after 10 steps, and started again by the same command. The row
in docs/families.json gets the largest difference of log-probs between rollout and update, and whether
metrics and weights of the run that was killed equal the other's in every bit. Needs the extra `test`; two
to four minutes a model on two CPU cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import families

STEPS, KILLED_AFTER = 20, 10
SETTINGS = {
    **{
        "strict": "true",
        "steps": STEPS,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "rollout.slots": 8,
    },
    **{"devices": "0:1", "eval.every": 0, "warm_start.steps": 0, "checkpoint.every": 4, "reward.workers": 1},
    **{"optim.schedule": "constant", "log.progress": "none", "log.tensorboard": "false"},
}
DTYPES = ("model.dtype", "rollout.dtype", "rollout.cache_dtype")


def measure_runs(case: str, folder: Path) -> dict[str, Any]:
    """Return {"strict": the largest difference, "continued": whether the killed run has equal bits}."""
    from run_files import DIGITS, untimed_metrics

    save_tiny_model(case, folder / "model")
    (folder / "reward.py").write_text(DIGITS)
    for name in ("float32", "bfloat16"):
        finish_run(start_run(folder, name, dtype=name))
    killed, metrics = start_run(folder, "killed", dtype="bfloat16"), folder / "killed/metrics.jsonl"
    while killed.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= KILLED_AFTER:
            killed.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    assert killed.returncode == -signal.SIGKILL, killed.returncode
    finish_run(start_run(folder, "killed", dtype="bfloat16"))

    rows = {name: untimed_metrics(folder / name) for name in ("float32", "bfloat16", "killed")}
    weights = [(folder / name / "hf/model.safetensors").read_bytes() for name in ("bfloat16", "killed")]
    steps = [row["mismatch/max_abs"] for own in rows.values() for row in own if row["kind"] == "train"]
    assert len(steps) == len(rows) * STEPS, len(steps)
    return {
        "strict": max(steps),
        "continued": rows["bfloat16"] == rows["killed"] and weights[0] == weights[1],
    }


def save_tiny_model(case: str, folder: Path) -> None:
    """Save the model of a case with the vocabulary of the tiny tokenizer."""
    import test_families

    from jaxrl_llm.data.tiny_tokenizer import make_tokenizer

    tokenizer = make_tokenizer()
    rows = {key: len(tokenizer) for key in ("vocab_size", "vocab_size_per_layer_input")}
    changes = test_families.CASES[case][1]
    own = {key: rows[key] for key in rows if key in changes}
    with mock.patch.dict(test_families.BASE, vocab_size=len(tokenizer)), mock.patch.dict(changes, own):
        test_families.oracle(case).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start_run(folder: Path, name: str, *, dtype: str) -> subprocess.Popen[bytes]:
    """Start a run, or continue it."""
    words = {
        "model.path": folder / "model",
        "run_dir": folder / name,
        "reward.name": f"{folder}/reward.py:digits",
    }
    words |= dict.fromkeys(DTYPES, dtype)
    flags = [str(word) for key, value in {**SETTINGS, **words}.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "grpo_tiny.py", *flags]
    return subprocess.Popen(command, cwd=families.ROOT, stdout=subprocess.DEVNULL)


def finish_run(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run, which must succeed."""
    assert process.wait() == 0, process.args


def main(cases: list[str]) -> None:
    """Measure the runs, one case after the other, and write each into docs/families.json and the page."""
    import test_families

    rows = json.loads(families.FILE.read_text())
    for case in cases or [case for case in test_families.EACH_FAMILY if "strict" not in rows[case]]:
        with tempfile.TemporaryDirectory() as folder:
            rows[case] |= measure_runs(case, Path(folder))
        print(case, rows[case], flush=True)
        families.FILE.write_text(json.dumps(rows, indent=1) + "\n")
        families.write_family_page(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
