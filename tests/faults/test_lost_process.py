"""A training run of two processes that loses one: the other says which, and the same command continues."""

import json
import signal
import time

import pytest
from distributed import start_processes

TRAIN = """
import sys
from jaxrl_llm.train import main
sys.exit(main(sys.argv[1:]))
"""
ARGS = [
    *("--config", "grpo_tiny.py", "--steps", "400", "--warm_start.steps", "0", "--prompts_per_step", "4"),
    *(
        "--responses_per_prompt",
        "2",
        "--tokens_per_device",
        "24",
        "--eval.every",
        "0",
        "--rollout.slots",
        "8",
    ),
    *("--checkpoint.every", "1", "--checkpoint.async_save", "false", "--log.progress", "none"),
    *("--log.tensorboard", "false", "--reward.workers", "1", "--mesh.data", "1", "--mesh.fsdp", "2"),
    *("--model.architecture.hidden_size", "16", "--model.architecture.mlp_size", "16"),
    *("--model.architecture.num_layers", "1", "--model.architecture.head_dim", "4"),
]


def steps(run_dir) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_lost_process_ends_the_run_and_the_same_command_continues(tmp_path):
    """First the process that is not the coordinator is killed; then, in the next run, the coordinator."""
    run_dir = tmp_path / "run"
    for victim in (1, 0):
        before = steps(run_dir)
        running = start_processes(TRAIN, 2, [*ARGS, "--run_dir", str(run_dir)], devices=1, initialize=False)
        while steps(run_dir) < before + 3:
            assert all(each.process.poll() is None for each in running), [each.end() for each in running]
            time.sleep(0.1)
        start = time.monotonic()
        running[victim].process.kill()
        ends = [each.end(60) for each in running]
        assert time.monotonic() - start < 30
        assert (ends[victim].code, ends[1 - victim].code) == (-signal.SIGKILL, 1)
        errors = [line for line in ends[1 - victim].stderr.splitlines() if line.startswith("error:")]
        assert errors and errors[-1].startswith(f"error: process {victim} on "), ends[1 - victim].stderr
        assert " is lost: killed" in errors[-1]
        assert "Traceback" not in ends[1 - victim].stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 5
