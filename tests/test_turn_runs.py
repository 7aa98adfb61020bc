"""A run on conversations whose turns are rewarded: it learns, and continues bit for bit."""

import numpy as np
import pytest
from run_files import untimed_metrics

from jaxrl_llm.train import main

ENV = """
from jaxrl_llm.envs.env import Step


class Ones:  # unlike whether a guess is right, it differs from the first step on
    async def reset(self, example, seed):
        return None

    async def step(self, state, turn):
        return Step("on", reward=("1" in turn.text) / 3, done=turn.last)
"""
TINY = """--config grpo_guess_tiny.py --algo gigpo --algo.keep_prompts 0.5 --env.max_turns 3
    --prompts_per_step 4 --responses_per_prompt 8 --max_response_tokens 64 --rollout.slots 32 --devices 0:1
    --optim.learning_rate 3e-3 --optim.schedule constant --warm_start.steps 0 --eval.every 0 --mesh.data 1
    --mesh.fsdp 1 --checkpoint.every 6 --log.progress none --log.tensorboard false"""


@pytest.mark.slow
def test_gigpo_learns_and_continues_bit_for_bit(tmp_path):
    (tmp_path / "ones.py").write_text(ENV)
    line = [*TINY.split(), "--env.name", str(tmp_path / "ones.py")]
    train = lambda name, steps: main([*line, "--run_dir", str(tmp_path / name), "--steps", steps])
    for name, steps in (("whole", "10"), ("parts", "6"), ("parts", "10")):
        assert train(name, steps) == 0
    whole, parts = (untimed_metrics(tmp_path / name) for name in ("whole", "parts"))
    rewards = [row["reward/mean"] for row in whole]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05, rewards
    # The engine's rounding depends on when the environment answers; no update reads its log-probs here.
    known = [{k: x for k, x in row.items() if not k.startswith("mismatch/")} for row in (*whole, *parts)]
    assert known[:10] == known[10:]
    weights = [(tmp_path / name / "hf/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
