"""README's own model, data and reward, as it stands, with SmolLM2-135M-Instruct: the reward rises."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_real_model import ENVIRONMENT, WEIGHTS

from jaxrl_llm.report import jsonl

README = (Path(__file__).parents[1] / "README.md").read_text()
SMALL = [  # for two CPU cores; the recipe's own sizes are for an accelerator
    *("--model.dtype", "float32", "--rollout.dtype", "float32", "--steps", "5", "--prompts_per_step", "8"),
    *("--minibatches_per_step", "1", "--max_prompt_tokens", "48", "--max_response_tokens", "16"),
    *("--tokens_per_device", "1792", "--optim.learning_rate", "2e-5", "--optim.warmup_steps", "0"),
    *("--algo.kl_coef", "0", "--eval.every", "0", "--checkpoint.every", "0", "--log.tensorboard", "False"),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}: run make real, or set JAXRL_SMOLLM2"),
]


def own_files(folder):
    """Write README's reward and rows like its row; return its command for them."""
    block = README.partition("Your own model, data and reward:\n")[2].partition("\n## Use")[0]
    command = re.search(r"    (python -m jaxrl_llm\.train .*?)\n\n", block, re.DOTALL)[1].replace("\\\n", " ")
    row = json.loads(re.search(r"A line of `my.jsonl` is\n`(.*?)`", block)[1])
    assert row == {"prompt": "What is 3 + 4?", "answer": "7"}
    rows = [
        {"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 21) for b in range(1, 21)
    ]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(re.search(r"```python\n(import re.*?)```", block, re.DOTALL)[1])
    return shlex.split(command.replace("/path/to/Qwen3-0.6B", str(WEIGHTS)))[3:]


def test_the_reward_of_readmes_command_rises(tmp_path):
    words = [sys.executable, "-m", "jaxrl_llm.train", *own_files(tmp_path), *SMALL]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the recipe's system prompt" in done.stderr and "is left out" in done.stderr
    assert re.search(
        r"first prompt \(my\.jsonl:\d+\): chat template .*'<\|im_start\|>system.*What is", done.stdout
    )
    rewards = [row["reward/mean"] for row in jsonl.read_rows(tmp_path / "runs/mine/metrics.jsonl")]
    assert len(rewards) == 5 and np.mean(rewards[3:]) > np.mean(rewards[:2]) + 0.1, rewards
