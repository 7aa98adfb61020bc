"""Trainer and servers on the same GPUs take turns: a server at rest gives its memory back.

Order: release -> training -> resume the weights' memory -> new weights -> resume the cache's memory -> probe.
What a server held is lost meanwhile, so weights are always sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Iterator, Mapping

from jaxrl_llm.bridge.servers import CACHE, WEIGHTS
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.config import SGLangConfig
from jaxrl_llm.rollout.sglang.pool import ServerPool
from jaxrl_llm.rollout.sglang.server import Server

FLAG = "--enable-memory-saver"
IDLE = 30.0  # seconds until a server has no request left
ROOM = 0.92  # of a GPU's memory for both: the rest is for CUDA contexts, graphs and communication
SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # of jax; the second is its old name
XLA_DEFAULT = 0.75


async def rest(pool: ServerPool) -> None:
    """Every server gives its memory back; one that does not is left out. Until new weights are sent."""
    pool.resting = True

    async def one(server: Server) -> None:
        try:
            # What it still writes nobody waits for, and one that is not idle would crash.
            await pool.ask_text(server, "/abort_request", {"abort_all": True})
            await pool.ask_text(server, f"/flush_cache?timeout={IDLE:g}", {})
            await pool.ask(server, "/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})
            server.asleep = {CACHE, WEIGHTS}
        except ServerError as error:
            server.leave_out(error)

    await asyncio.gather(*(one(server) for server in pool.usable if not server.asleep))


def problems(sglang: SGLangConfig, launch: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Why trainer and servers cannot share these GPUs."""
    if not launch:
        yield "--sglang.colocated needs servers that are started here: set --rollout.launch N."
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--device")
    parser.add_argument("--mem-fraction-static")
    flags, _ = parser.parse_known_args(shlex.split(sglang.flags))
    if flags.device == "cpu":
        return
    if flags.mem_fraction_static is None:
        yield (
            "--sglang.colocated needs the servers' share of memory: for example "
            "--sglang.flags='--mem-fraction-static 0.4' with XLA_CLIENT_MEM_FRACTION=0.5 in the environment."
        )
        return
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return  # jax gives memory back as soon as an array is deleted
    server = float(flags.mem_fraction_static)
    trainer = float(next((environment[name] for name in SHARE if environment.get(name)), XLA_DEFAULT))
    if server + trainer > ROOM:
        yield (
            f"--sglang.colocated: the servers' --mem-fraction-static {server:g} and jax's {trainer:g} "
            f"(XLA_CLIENT_MEM_FRACTION) are more than {ROOM:g} of a GPU together, and jax never gives "
            "its share back. Lower one of them, or set XLA_PYTHON_CLIENT_ALLOCATOR=platform."
        )
