"""Run directories for tests of `view`, without training."""

import json
import random
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&{{DATA}}"
"""A text that leaves its element wherever it is read as HTML."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(
    folder: Path, metrics: list[dict], samples: list[dict] = (), config: dict | None = None
) -> Path:
    """Write a run directory."""
    folder.mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", metrics)
    if samples:
        write_rows(folder / "samples.jsonl", list(samples))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def conversation(step: int, reward: float, answer: str = "12") -> dict:
    """A row of samples.jsonl of a conversation with a tool."""
    call = '{"name": "calculator", "arguments": {"expression": "5+7"}}'
    return {
        "step": step,
        "prompt": "5+7=",
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "5+7="}],
        "response": f"{call}12{answer}",
        "turns": [
            {"role": "assistant", "content": call},
            {"role": "tool", "name": "calculator", "content": "12"},
            {"role": "assistant", "content": answer},
        ],
        "reward": reward,
        "outcome": "correct" if reward else "wrong",
        "finish": "stop",
        "response_tokens": 4,
        "per_token": {
            "text": [call, "12", answer, "<|im_end|>"],
            "trained": [1, 0, 1, 1],
            "advantages": [reward - 0.5, None, reward - 0.5, reward - 0.5],
            "rollout_logprobs": [-0.25, None, -1.5, -0.001],
            "logprobs": [-0.25, None, -1.25, -0.001],
            "mismatch": [0.0, None, 0.25, 0.0],
        },
    }


def agent_run(step: int = 1) -> dict:
    """A row of samples.jsonl of a program: a tool call, a sub-agent, a rewritten history, a branch."""
    said = lambda role, content, **more: {"role": role, "content": content, **more}
    ask = [said("system", "Answer."), said("user", "Rain in Paris?")]
    opening = [said("user", "Summarize: 12 mm")]
    call = {"id": "c1", "name": "weather", "arguments": {"city": "Paris", "days": 2}}
    return {
        "step": step,
        "prompt": "Rain in Paris?",
        "messages": [ask[1]],
        "response": "all",
        "turns": [
            said("assistant", "<call>"),
            *opening,
            said("assistant", "Wet."),
            said("tool", "12 mm", tool_call_id="c1"),
            said("assistant", "Yes."),
            said("user", "Sure?"),
            said("assistant", HOSTILE),
            said("tool", "no rain", tool_call_id="c1"),
            said("assistant", "No."),
        ],
        "tree": [
            {"after": -1, "tokens": [4, 6], "read": [[0, 4]], "message": 0, "reward": 0.25, "trained": 2,
             "calls": [call, {"text": "{", "error": "the JSON is broken"}],
             "opening": {"messages": ask, "tools": [{"type": "function", "function": {"name": "weather"}}]}},
            {"after": -1, "tokens": [8, 9], "read": [[0, 1], [6, 8]], "message": 2, "trained": 1,
             "opening": {"messages": opening}},
            {"after": 0, "tokens": [13, 15], "read": [[0, 1], [9, 13]], "message": 4, "trained": 2},
            {"after": 2, "tokens": [17, 18], "read": [[0, 4], [15, 17]], "message": 6, "trained": 0,
             "rewritten": True},
            {"after": 0, "tokens": [20, 21], "read": [[0, 6], [18, 20]], "message": 8, "trained": 1},
        ],
        "reward": 0.5,
        "outcome": "correct",
        "finish": "stop",
        "response_tokens": 17,
        "token_ids": {"prompt": [1, 2, 3, 4], "response": list(range(104, 121))},
        "per_token": {
            "text": [f"t{i} " for i in range(4, 21)],
            "trained": [1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1],
            "advantages": [0.5 if x else None for x in [1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]],
            "rollout_logprobs": [
                -0.125 * x if x else None for x in [1, 2, 0, 0, 3, 0, 0, 0, 0, 4, 5, 0, 0, 6, 0, 0, 7]
            ],
        },
    }  # fmt: skip


def large_run(folder: Path, steps: int = 1000, each: int = 10) -> Path:
    """Write a run of `steps` steps with `each` samples, half of them hostile, and metrics with gaps."""
    draw = random.Random(0)
    metrics = []
    for s in range(1, steps + 1):
        row = {"step": s, "kind": "warm_start" if s <= 100 else "train", "loss": 1 / s, "time/step": 0.5}
        if s > 100:
            row["reward/mean"] = s / steps + draw.gauss(0, 0.05)
        if s % 100 == 0:
            row |= {"eval/pass@1": s / steps, "eval/pass@1/gsm8k": s / steps / 2, "eval/tokens/mean": 4}
        metrics.append(row)
    metrics[-1]["<b>metric"] = 1.0
    samples = []
    for s in range(1, steps + 1):
        for i in range(each):
            row = conversation(s, float(i % 2), f"answer {s} {i}" if i % 2 else HOSTILE)
            samples.append({**row, HOSTILE: HOSTILE} if i == 0 else row)
    config = {
        "command": ["--x", HOSTILE],
        "config": {"algo": {"name": "grpo"}, HOSTILE: HOSTILE, "steps": steps},
    }
    return write_run(folder, metrics, samples, config)
