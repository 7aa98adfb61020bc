"""Asynchronous rollout on devices of its own, killed and started again: the same bits as without."""

import os
import re
import signal

import pytest
from distributed import Running
from test_kill import SIGNALLER, assert_same_run, command, lines

from jaxrl_llm.host.stop import EXIT_STOPPED
from jaxrl_llm.rollout.partial import unpack_responses

AHEAD = ["--rollout.max_staleness", "2", "--devices", "0:2", "--rollout.devices", "2:3"]
STEPS = [1, 2, 3, 4, 5, 6, 7, 8]  # two of the SFT warm-up, six of GRPO
ARGS = [*AHEAD, "--steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "9"]

KILLS = [
    ("jaxrl_llm.learn.learner:Learner.update", 4, signal.SIGKILL, -9),  # while later steps are generated
    ("jaxrl_llm.rollout.native.schedule:Scheduler._decode", 9, signal.SIGKILL, -9),  # in the thread
    ("jaxrl_llm.learn.learner:Learner.update", 2, signal.SIGTERM, EXIT_STOPPED),
    ("jaxrl_llm.checkpoint.state:write_manifest", 1, signal.SIGKILL, -9),
]


def run(folder, *argv):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    return Running([*argv, *command(folder, *ARGS)], env).end()


def untimed(path):
    """As `lines`, without the throughput of this process's own rollout."""
    timed = re.compile(r"^rollout/")
    return [{k: v for k, v in row.items() if not timed.search(k)} for row in lines(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    end = run(folder, "-m", "jaxrl_llm.train")
    assert end.code == 0, end.stderr
    return folder


@pytest.mark.slow
def test_killed_ahead_of_training(tmp_path, whole):
    rows = lines(whole / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == STEPS
    assert [row["staleness/max"] for row in rows[2:]] == [0, 2, 4, 4, 4, 4]  # two updates a step
    assert [row["staleness/mean"] for row in rows[2:]] == [0, 2, 4, 4, 4, 4]
    assert all(row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows[2:])
    saved = unpack_responses((whole / "run/checkpoints/4/rollouts.npz").read_bytes())
    assert {draw: {v for one in responses for v in one.versions} for draw, (responses,) in saved.items()} == {
        2: {0},
        3: {2},
    }
    for place, count, number, code in KILLS:
        end = run(tmp_path, "-c", SIGNALLER, place, str(count), str(int(number)))
        assert end.code == code, f"{place}: {end.stdout}{end.stderr}"
    end = run(tmp_path, "-m", "jaxrl_llm.train")
    assert end.code == 0, end.stderr
    assert_same_run(tmp_path, whole, STEPS, untimed)
