"""Plays tasks of an environment of verifiers 0.4 (`import verifiers.v1`), run by verifiers' own Python.

    /path/to/verifiers/bin/python examples/adapters/verifiers_player.py --gateway http://127.0.0.1:8000 \
        reverse_text --env.agent.harness.id null --env.agent.runtime.type subprocess

The other arguments are `vf-eval`'s. A row's column `task` is the position of its task in the taskset; without
one it is drawn from the row, so that all responses to a row play the same task. The environment's program
calls the policy through verifiers, which scores its trace.
"""

import json
import os
import sys
import zlib

from gateway_worker import EpisodeError, RemoteTrajectory, parser, run_worker
from pydantic_config import cli
from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.episode import Episode
from verifiers.v1.utils.loaders import load_environment


def read_arguments(words: list[str]) -> EvalConfig:
    """Return the configuration of these arguments, as `vf-eval` reads them."""
    words = with_positional_taskset(words)
    with plugin_errors():
        config_type = narrow_config(EvalConfig, words)
        sys.argv = [sys.argv[0], *words]
        return cli(config_type)


class Tasks:
    """The tasks of an environment."""

    def __init__(self, config: EvalConfig):
        self.config = config
        taskset = load_environment(config.env).taskset.select(config.select)
        if not taskset.bounded:
            raise SystemExit("the taskset is infinite: give the number of its tasks, -n 1000")
        self.tasks = list(taskset)

    async def play(self, trajectory: RemoteTrajectory) -> float | None:
        """Run the task of a row; return its reward."""
        number = trajectory.row.get("task")
        if number is None:
            number = zlib.crc32(json.dumps(trajectory.row, sort_keys=True).encode()) % len(self.tasks)
        if type(number) is not int or not 0 <= number < len(self.tasks):
            raise EpisodeError(f"the row's task is {number!r}; the taskset has {len(self.tasks)}")
        task = self.tasks[number]
        # Each trajectory has a key, and verifiers a client for each key, until the serving ends.
        name = f"JAXRL_TRAJECTORY_{abs(hash(trajectory.api_key))}"
        client = EvalClientConfig(base_url=trajectory.base_url, api_key_var=name)
        os.environ[name] = trajectory.api_key
        try:
            env = load_environment(self.config.env)
            async with env.serving():
                model = ModelContext(model="policy", client=client, sampling=self.config.sampling)
                return reward_of(await env.run_slot(env.slots(task)[0], model))
        finally:
            del os.environ[name]


def reward_of(episode: Episode) -> float | None:
    """Return the reward of an episode; None if nothing scores it.

    Raises:
        EpisodeError: it failed, was not scored, or has several agents, whose rewards are not one.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it is not complete"
        raise EpisodeError(f"verifiers: {reason}"[:500])
    if len(episode.traces) != 1:
        raise EpisodeError(f"verifiers: {len(episode.traces)} agents in one episode; a trajectory has one")
    rewards = episode.traces[0].rewards
    if unscored := [name for name, reward in rewards.items() if reward is None]:
        raise EpisodeError(f"verifiers: {', '.join(unscored)} has not scored the trace")
    return episode.traces[0].reward if rewards else None


if __name__ == "__main__":
    given, rest = parser(__doc__).parse_known_args()
    run_worker(Tasks(read_arguments(rest)).play, given)
