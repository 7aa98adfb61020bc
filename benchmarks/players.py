"""Learning in a real environment of verifiers, through its adapter: a tiny policy plays reverse_text.

Command:   python benchmarks/players.py --python .venv-clients-verifiers/bin/python
Hardware:  2 CPU cores
Time:      about 8 minutes on busy ones
Expected:  a mean reward of 0.54 in the first step, and above 0.8 in the last ones

The environment rewards the overlap (of difflib) of the answer with the text read backwards. It is installed
from verifiers' repository (tests/clients/test_players_real.py). Demonstrations of the SFT warm-up are flawed:
70% repeat the text as it is, which has a third of the reward. GRPO removes that mistake.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from machine import RESULTS, ROOT, report_head

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."  # verifiers'
TRAIN = (
    "--config grpo_tiny.py --env.gateway.reward post --env.max_turns 1 --prompts_per_step 2 "
    "--responses_per_prompt 16 --max_prompt_tokens 160 --max_response_tokens 48 --tokens_per_device 2048 "
    "--warm_start.steps 300 --warm_start.examples_per_step 16 --eval.every 0 --optim.schedule constant "
    "--ppo_epochs 2 --algo.kl_coef 0.03"
)
PLAYER = "reverse_text --env.agent.harness.id null --env.agent.runtime.type subprocess --copies 8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter with verifiers and reverse_text")
    parser.add_argument("--folder", type=Path, default=Path("runs/players"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder / str(options.seed)
    write_data(folder)
    # The run, and the program that plays its trajectories.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAXRL_GATEWAY_KEY": secrets.token_hex()}
    environment["PATH"] = f"{Path(options.python).parent.absolute()}:{environment['PATH']}"  # uv
    player = [options.python, str(ROOT / "examples/adapters/verifiers_player.py"), *shlex.split(PLAYER)]
    player += ["--env.taskset.dataset_name", str(folder / "tasks"), "--gateway", f"http://127.0.0.1:{port}"]
    words = f"{TRAIN} --steps {options.steps} --seed {options.seed} --env.gateway.port {port}"
    words += f" --data.train.0.path {folder}/rows.jsonl --run_dir {folder}/run"
    words += f" --warm_start.sources.0.path {folder}/demonstrations.jsonl"
    run = [sys.executable, "-m", "jaxrl_llm.train", *shlex.split(words), "--data.train.0.options", ""]
    with subprocess.Popen(player, env=environment) as worker:
        try:
            subprocess.run(run, env=environment, check=True)
        finally:
            worker.kill()
    # The result.
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if row["kind"] == "train" and "reward/mean" in row]
    result = report_head(computes=False)
    result["reward/mean"] = [round(row["reward/mean"], 4) for row in rows]
    result["env/failed_fraction"] = max(row["env/failed_fraction"] for row in rows)
    result["mismatch/max_abs"] = max(row["mismatch/max_abs"] for row in rows)
    result["seconds"] = round(sum(row["time/step"] for row in rows))
    path = RESULTS / "players.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())


def write_data(folder: Path) -> None:
    """Write the tasks of the environment, the rows of the run that name them, and demonstrations."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    texts, rng = ["abc", "cab"], random.Random(0)
    asked = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in texts]
    write_lines(folder / "tasks/train.jsonl", [{"prompt": text} for text in texts])
    write_lines(folder / "rows.jsonl", [{"messages": asked[i], "task": i} for i in range(len(texts))])
    shown = []
    for _, (text, messages) in itertools.product(range(300), zip(texts, asked, strict=True)):
        said = text[::-1] if rng.random() < 0.3 else text
        answer = {"role": "assistant", "content": f"<reversed_text>{said}</reversed_text>"}
        shown.append({"messages": [*messages, answer]})
    write_lines(folder / "demonstrations.jsonl", shown)


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
