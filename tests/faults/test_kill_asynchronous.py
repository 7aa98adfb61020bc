"""Asynchronous rollout on devices of its own, killed and started again: the same bits as without."""

import re
import signal

import pytest
import test_kill
from distributed import Running, with_devices
from test_kill import SIGNALLER, assert_same_run, command, lines

from jaxrl_llm.host.stop import EXIT_STOPPED
from jaxrl_llm.rollout.partial import unpack_responses

AHEAD = ["--rollout.max_staleness", "2", "--devices", "0:2", "--rollout.devices", "2:3"]
STEPS = [1, 2, 3, 4, 5, 6, 7, 8]  # two of the SFT warm-up, six of GRPO
ARGS = [*AHEAD, "--steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "9"]

KILLS = [
    ("jaxrl_llm.checkpoint.state:write_manifest", 1, signal.SIGKILL, -9),
    ("jaxrl_llm.learn.learner:Learner.update", 4, signal.SIGKILL, -9),  # while later steps are generated
    ("jaxrl_llm.learn.learner:Learner.update", 2, signal.SIGTERM, EXIT_STOPPED),
    ("jaxrl_llm.rollout.native.schedule:Scheduler._decode", 2, signal.SIGKILL, -9),  # in the thread
]


def run(folder, *argv, more=()):
    folder.mkdir(exist_ok=True)
    return Running([*argv, *command(folder, *ARGS, *more)], with_devices(3)).end()


def train(folder, *more):
    end = run(folder, "-m", "jaxrl_llm.train", more=more)
    assert end.code == 0, end.stderr


def untimed(path):
    """As `lines`, without the throughput of this process's own rollout."""
    timed = re.compile(r"^rollout/")
    return [{k: v for k, v in row.items() if not timed.search(k)} for row in lines(path)]


STAGES = ["--mesh.stage", "2", "--rollout.mesh.fsdp", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], STAGES], ids=["fsdp", "a pipeline"])
def test_killed_ahead_of_training(tmp_path, more):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, *more)
    rows = lines(whole / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == STEPS
    assert [row["staleness/max"] for row in rows[2:]] == [0, 2, 4, 4, 4, 4]  # two updates a step
    assert [row["staleness/mean"] for row in rows[2:]] == [0, 2, 4, 4, 4, 4]
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows[2:])
    saved = unpack_responses((whole / "run/checkpoints/4/rollouts.npz").read_bytes())
    versions = {draw: {v for one in made for v in one.versions} for draw, (made,) in saved.items()}
    assert versions == {2: {0}, 3: {2}}
    for place, count, number, code in KILLS:
        end = run(killed, "-c", SIGNALLER, place, str(count), str(int(number)), more=more)
        assert end.code == code, f"{place}: {end.stdout}{end.stderr}"
    train(killed, *more)
    assert_same_run(killed, whole, STEPS, untimed)


COARSE = """
def coarse(solution_str, ground_truth):  # few values, so that groups without variance are frequent
    return float(len(solution_str) % 3 == 0)
"""


@pytest.mark.slow
def test_killed_with_adapters_and_dynamic_sampling(tmp_path):
    """Without environments: when these reply decides which turns are in a batch, and so the last bits."""
    (tmp_path / "coarse.py").write_text(COARSE)
    more = ["--algo", "dapo", "--algo.max_draws", "3", "--lora.rank", "2", "--max_response_tokens", "24"]
    more += ["--rollout.sampling.stop", *"12345", "--reward.name", f"{tmp_path / 'coarse.py'}:coarse"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, *more)
    rows = lines(whole / "run/metrics.jsonl")
    draws, ages = ({row[name] for row in rows[2:]} for name in ("dynamic/draws", "staleness/max"))
    assert len(draws) > 1 and 0 < max(ages) <= 4, (draws, ages)  # some steps update nothing
    place = "jaxrl_llm.learn.learner:Learner.update"
    for count, number, code in ((5, signal.SIGKILL, -9), (2, signal.SIGTERM, EXIT_STOPPED)):
        end = run(killed, "-c", SIGNALLER, place, str(count), str(int(number)), more=more)
        assert end.code == code, f"{end.stdout}{end.stderr}"
    train(killed, *more)
    assert_same_run(killed, whole, STEPS, untimed)


HYBRID = {
    "max_position=64,": """max_position=64, norm_offset=1.0, attention_gate=True, qk_norm=True,
                layer_kinds=("delta", "attention"), delta=DeltaConfig(2, 4, 8, 8), family="qwen3_5_text",""",
    "CheckpointConfig,": "CheckpointConfig, DeltaConfig,",
    "optim=OptimConfig(": 'optim=OptimConfig(moments="int8", ',
}


@pytest.mark.slow
def test_a_hybrid_killed_ahead_of_training(tmp_path, monkeypatch):
    """Its checkpoint has parts of responses, whose states are computed again, and 8-bit moments."""
    recipe = test_kill.RECIPE
    for old, new in HYBRID.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    monkeypatch.setattr(test_kill, "RECIPE", recipe)
    whole, killed, more = tmp_path / "whole", tmp_path / "killed", ("--steps", "4")
    train(whole, *more)
    rows = lines(whole / "run/metrics.jsonl")
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows[2:])
    place, count, number, code = KILLS[1]
    end = run(killed, "-c", SIGNALLER, place, str(count), str(int(number)), more=more)
    assert end.code == code, f"{end.stdout}{end.stderr}"
    train(killed, *more)
    assert_same_run(killed, whole, STEPS[:6], untimed)
