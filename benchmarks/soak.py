"""A pool whose servers are killed, leave and join at random while a run takes steps from it.

    python benchmarks/soak.py --minutes 60 --interval 20 --output soak.json

The rollout's own code (RolloutSource, ServerEngine, pool, push, probe) works on sleeping_server.py, one
process a server, by a file of addresses. Every --interval seconds one server is killed (SIGKILL; its line
stays a while), or its line goes (it finishes and ends), or a new one joins; there are always 2 to 6. After
each step the responses are counted: each group once, each token's version the one that its id tells, none
older than --staleness steps. Throughput is compared with the capacity of the listed servers: slots / pace,
from the line in the file to the kill, or to the end of the line (`throughput_of_processes`: to the end of
the process, which first finishes its responses). `slots` says where the time of their slots goes, sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from machine import report_head
from sleeping_server import BEFORE, BETWEEN, FIRST_ID, MAX_VERSIONS, sleeping_logprob

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.bridge.push import Part, Publisher
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.servers.engine import ServerEngine
from jaxrl_llm.rollout.servers.health import ServerList, run_health_checks
from jaxrl_llm.rollout.servers.pool import ServerPool

MODEL = TransformerConfig(
    vocab_size=2048, hidden_size=8, mlp_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
)
FEWEST, MOST = 2, 6  # servers
BASE = 1000  # digits of a prompt's number
SHOWN = (
    "response_tokens/mean", "staleness/mean", "rollout/wait_seconds",
    "oversample/carried", "oversample/carried_tokens", "oversample/length_ratio",
)  # fmt: skip


@dataclass
class Life:
    """One server: its process, and when it could work."""

    url: str
    process: subprocess.Popen
    start: float
    left: float = 0.0  # when its line went; 0 = it is listed
    end: float = 0.0  # 0 = alive


@dataclass
class Crowd:
    """Servers that come and go.

    Attributes:
        file: with their addresses. events: number of each kind.
    """

    folder: Path
    slots: int
    pace: float
    chance: random.Random
    lives: list[Life] = field(default_factory=list)
    leaving: list[Life] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)  # addresses of killed servers, still in the file
    events: Counter[str] = field(default_factory=Counter)
    gone: list[Life] = field(default_factory=list)

    def join(self) -> None:
        """Start a server and list it."""
        script = Path(__file__).with_name("sleeping_server.py")
        command = [sys.executable, str(script), "--slots", str(self.slots), "--pace", str(self.pace)]
        process = subprocess.Popen(
            [*command, "--faults", str(self.folder / "faults")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        port = int(process.stdout.readline())
        self.lives.append(Life(f"http://127.0.0.1:{port}", process, time.monotonic()))
        self.write()

    def disturb(self, ended: threading.Event, interval: float) -> None:
        """Change a server every `interval` seconds."""
        while not ended.wait(interval):
            self.change()

    def change(self) -> None:
        """Kill a server, have one leave, or add one."""
        self.reap()
        kinds = ["kill", "leave"] * (len(self.lives) > FEWEST) + ["join", "join"] * (len(self.lives) < MOST)
        kind = self.chance.choice(kinds)
        self.events[kind] += 1
        self.stale.clear()
        if kind == "join":
            self.join()
            return
        life = self.lives.pop(self.chance.randrange(len(self.lives)))
        if kind == "kill":
            life.process.kill()
            life.left = life.end = time.monotonic()
            self.gone.append(life)
            self.stale.append(life.url)
        self.write()
        if kind == "leave":
            life.left = time.monotonic()
            self.leaving.append(life)
            time.sleep(3.0)  # until the run has read the file twice
            life.process.send_signal(signal.SIGTERM)

    def reap(self) -> None:
        """Note the end of servers that have left."""
        for life in [life for life in self.leaving if life.process.poll() is not None]:
            life.end = time.monotonic()
            self.leaving.remove(life)
            self.gone.append(life)

    def write(self) -> None:
        """Write the file of addresses, as an orchestrator should: a new file, renamed."""
        new = self.folder / "servers.new"
        new.write_text("".join(f"{url}\n" for url in [*(life.url for life in self.lives), *self.stale]))
        new.rename(self.folder / "servers.txt")

    def server_seconds(self, since: float, *, end: str) -> float:
        """Return the seconds of all servers since a time, up to `end` of their lives: "left" or "end"."""
        now = time.monotonic()
        every = [*self.lives, *self.leaving, *self.gone]
        return sum(max((getattr(life, end) or now) - max(life.start, since), 0.0) for life in every)

    def close(self) -> None:
        """End all servers."""
        for life in [*self.lives, *self.leaving]:
            life.process.kill()
        for life in [*self.lives, *self.leaving, *self.gone]:
            life.process.wait()


class NumberTransport:
    """Weights by a file that holds the version."""

    session, can_resend = False, True

    def __init__(self, folder: Path):
        self.folder, self.version = folder, 0

    def parts(self, params, label):
        path = self.folder / label
        path.mkdir()
        (path / "version.json").write_text(str(self.version))
        yield Part(path, 1, last=True)

    async def connect(self, receiver):
        pass

    async def send(self, receiver, part, options):
        await receiver.pool.kind.send_folder(receiver, part.content, options)


class NumberedPrompts:
    """A loader whose prompts hold their number."""

    def prompts(self, start: int, count: int) -> list[Prompt]:
        ids = lambda n: np.array([1, FIRST_ID + n // BASE, FIRST_ID + n % BASE, 1], np.int32)
        return [Prompt(Example(None, str(n), answer=str(n)), ids(n), n) for n in range(start, start + count)]

    def batch(self, step: int, size: int) -> list[Prompt]:
        return self.prompts(step * size, size)

    def epochs(self, position: int) -> dict[str, float]:
        return {}


def score_all(prompts, trajectories):
    """Reward every other response."""
    for i, trajectory in enumerate(trajectories):
        trajectory.reward, trajectory.components = float(i % 2), (float(i % 2),)
    return {}


@dataclass
class Count:
    """Responses that the steps have trained on, counted."""

    groups: Counter[int] = field(default_factory=Counter)  # number of the prompt -> responses
    tokens: int = 0
    wrong_versions: int = 0  # tokens
    too_old: int = 0  # tokens
    steps: list[dict[str, float]] = field(default_factory=list)  # some metrics of each step

    def add(self, experience: Experience, step: int, staleness: int) -> None:
        """Count the responses of a step, which has the weights of version `step`."""
        for trajectory in experience.trajectories:
            _, high, low, _ = trajectory.prompt_ids.tolist()
            self.groups[(high - FIRST_ID) * BASE + low - FIRST_ID] += 1
            told = (trajectory.response_ids - FIRST_ID) % MAX_VERSIONS
            self.wrong_versions += int((told != trajectory.versions % MAX_VERSIONS).sum())
            self.too_old += int((trajectory.versions < step - staleness).sum())
        self.tokens += experience.tokens
        self.steps.append({name: float(experience.metrics.get(name, 0)) for name in SHOWN})

    def means(self) -> dict[str, float]:
        """Return the means over the steps, and the mean length of the first step."""
        of_all = {name: float(np.mean([step[name] for step in self.steps])) for name in SHOWN}
        return {**of_all, "first_step_tokens/mean": self.steps[0][SHOWN[0]]}


@dataclass
class SlotTimes:
    """Sums the seconds of the listed servers' slots by their use; a thread looks 50 times a second."""

    crowd: Crowd
    pool: ServerPool
    seconds: Counter[str] = field(default_factory=Counter)

    def watch(self, ended: threading.Event) -> None:
        """Add up until `ended`."""
        last = time.monotonic()
        while not ended.wait(0.02):
            now, slots = time.monotonic(), self.pool.slots
            listed = {life.url for life in self.crowd.lives}
            usable = [server for server in list(self.pool.servers) if server.usable and server.url in listed]
            pushed = [server for server in usable if server.update_lock.locked()]
            busy = sum(min(server.inflight, slots) for server in usable if server not in pushed)
            idle = "idle_while_requests_wait" if self.pool.places.waiting else "idle_without_requests"
            for name, count in (
                ("busy", busy),
                ("push", len(pushed) * slots),
                ("joining", (len(listed) - len(usable)) * slots),
                (idle, (len(usable) - len(pushed)) * slots - busy),
            ):
                self.seconds[name] += count * (now - last)
            last = now

    def shares(self) -> dict[str, float]:
        """Return each part's share."""
        total = sum(self.seconds.values())
        return {name: round(seconds / total, 4) for name, seconds in self.seconds.items()}


def make_source(options: argparse.Namespace, crowd: Crowd) -> tuple[RolloutSource, NumberTransport]:
    """Return the source of a run on the crowd, and its transport."""
    config, members = ServersConfig(), ServerList(crowd.folder / "servers.txt", "sglang")
    pool = ServerPool(members(), 60.0, config.retries, options.slots, patience=60.0)
    pool.start(run_health_checks(pool, members))
    transport = NumberTransport(crowd.folder)

    def score(params, ids, temperature=1.0, routes=None):
        return np.array([sleeping_logprob(int(i), transport.version) for i in ids[1:]], np.float32)

    on_first = lambda work: work()
    publisher = Publisher(
        pool, transport, config.pause, MODEL, tolerance=1e-3, score=score, on_first=on_first
    )
    rollout = RolloutConfig(engine="sglang", servers=("http://x",))
    engine = ServerEngine(rollout, config, MODEL, pool, publisher=publisher, on_first=on_first)
    source = RolloutSource(
        NumberedPrompts(), engine, score_all, grpo.Config(), SamplingConfig(), jax.random.key(0),
        prompts=options.prompts, responses=options.responses, max_tokens=1000,
        max_staleness=options.staleness, oversample=options.oversample, steps=10**9,
    )  # fmt: skip
    return source, transport


def no_timer(name: str) -> contextlib.AbstractContextManager:
    """Return a context that measures nothing."""
    return contextlib.nullcontext()


def soak(options: argparse.Namespace, folder: Path) -> dict:
    """Take steps for --minutes. Returns the counts."""
    crowd = Crowd(folder, options.slots, options.pace, random.Random(options.seed))
    for _ in range((FEWEST + MOST) // 2):
        crowd.join()
    source, transport = make_source(options, crowd)
    params, count, ended = models.init(MODEL, jax.random.key(0)), Count(), threading.Event()
    times = SlotTimes(crowd, source.engine.pool)
    threads = [
        threading.Thread(target=times.watch, args=[ended], daemon=True),
        threading.Thread(target=crowd.disturb, args=[ended, options.interval], daemon=True),
    ]
    step, start = 0, 0.0
    try:
        while step == 0 or time.monotonic() - start < 60 * options.minutes:
            transport.version = step
            new = jax.tree.map(jnp.copy, params)
            count.add(source.next(step, new, step, no_timer), step, options.staleness)
            time.sleep(options.update)
            if step == 0:  # the first step compiles
                start, first = time.monotonic(), count.tokens
                for thread in threads:
                    thread.start()
            step += 1
        seconds = time.monotonic() - start
        listed, alive = (crowd.server_seconds(start, end=end) for end in ("left", "end"))
    finally:
        ended.set()
        for thread in threads:
            with contextlib.suppress(RuntimeError):
                thread.join()
        source.engine.pool.close()
        crowd.close()
    found = (count.tokens - first) * options.pace / options.slots  # seconds of servers
    return {
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "minutes": seconds / 60,
        "steps": step,
        **counted(options, count, source, step * options.prompts, folder=folder),
        "events": dict(crowd.events),
        "mean_servers": listed / seconds,
        "joined": source.engine.pool.changes.joined,
        "lost": source.engine.pool.changes.lost,
        "sent_again": source.engine.pool.retried,
        "tokens": count.tokens - first,
        "throughput_of_capacity": found / listed,
        "throughput_of_processes": found / alive,
        "slots": times.shares(),
        **count.means(),
    }


def counted(
    options: argparse.Namespace, count: Count, source: RolloutSource, num_groups: int, *, folder: Path
) -> dict:
    """Return the numbers that must be 0, and the numbers of responses and of requests between weights and
    probe."""
    groups = source.cursor * (options.prompts if options.oversample == 1 else 1)
    expected = {*range(groups), *source.used}
    faults = (folder / "faults").read_text().splitlines() if (folder / "faults").exists() else []
    return {
        "responses": count.groups.total(),
        "groups_lost": sum(count.groups[n] < options.responses for n in expected),
        "groups_unaccounted": abs(num_groups - len(expected)),
        "groups_twice": sum(n not in expected or c > options.responses for n, c in count.groups.items()),
        "wrong_versions": count.wrong_versions,
        "too_old": count.too_old,
        "requests_before_weights_or_probe": faults.count(BEFORE),
        "requests_between_weights_and_probe": faults.count(BETWEEN),
    }


def soak_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two changes")
    parser.add_argument("--slots", type=int, default=8, help="of a server")
    parser.add_argument("--pace", type=float, default=0.01, help="seconds of a token")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--oversample", type=float, default=1.0)
    parser.add_argument("--update", type=float, default=0.2, help="seconds of an update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    options = soak_options()
    with tempfile.TemporaryDirectory() as folder:
        result = {**report_head(), **soak(options, Path(folder))}
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    wrong = (
        "groups_lost",
        "groups_unaccounted",
        "groups_twice",
        "wrong_versions",
        "too_old",
        "requests_before_weights_or_probe",
    )
    sys.exit(any(result[name] for name in wrong))


if __name__ == "__main__":
    main()
