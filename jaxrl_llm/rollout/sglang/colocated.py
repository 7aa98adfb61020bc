"""Trainer and servers on the same GPUs: servers release their memory while the trainer works.

Order: release -> training -> resume the weights' memory -> new weights -> resume the cache's memory -> probe.
A server loses its weights by that, so they are always sent again.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping

from jaxrl_llm.bridge.servers import CACHE, WEIGHTS
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.config import SGLangConfig, flag_value
from jaxrl_llm.rollout.sglang.pool import ServerPool
from jaxrl_llm.rollout.sglang.server import Server

FLAG = "--enable-memory-saver"
IDLE_TIMEOUT = 30.0  # seconds until a server has no request left
MAX_FRACTION = 0.92  # of a GPU's memory for both: the rest is for CUDA contexts, graphs and communication
FRACTIONS = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # of jax; the second is its old name
XLA_DEFAULT = 0.75


async def release_memory(pool: ServerPool) -> None:
    """Have every server release its memory until new weights are sent; one that does not is left out."""
    pool.memory_released = True

    async def release(server: Server) -> None:
        try:
            # Its responses are not needed any more, and a server that is not idle would crash.
            await pool.request_bytes(server, "/abort_request", {"abort_all": True})
            await pool.request_bytes(server, f"/flush_cache?timeout={IDLE_TIMEOUT:g}", {})
            await pool.request(server, "/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})
            server.released = {CACHE, WEIGHTS}
        except ServerError as error:
            server.leave_out(error)

    await asyncio.gather(*(release(server) for server in pool.usable if not server.released))


def colocated_problems(sglang: SGLangConfig, launch: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield why trainer and servers cannot share these GPUs; `sglang` has no problem of its own.

    Args:
        launch: servers that are started here.
        environment: of the process, with jax's variables.
    """
    if not launch:
        yield "--sglang.colocated needs servers that are started here: set --rollout.launch N."
    words = shlex.split(sglang.flags)
    if flag_value(words, "--device") == "cpu":
        return
    given = flag_value(words, "--mem-fraction-static")
    if given is None:
        yield (
            "--sglang.colocated needs the servers' share of memory: for example "
            "--sglang.flags='--mem-fraction-static 0.4' with XLA_CLIENT_MEM_FRACTION=0.5 in the environment."
        )
        return
    name, own = next(((name, environment[name]) for name in FRACTIONS if environment.get(name)), ("", ""))
    server, trainer = _fraction(given), _fraction(own) if own else XLA_DEFAULT
    if server is None:
        yield f"--sglang.flags: --mem-fraction-static is {given!r}: it must be above 0 and below 1."
    if trainer is None:
        yield f"{name} is {own!r} in the environment: it must be above 0 and below 1."
    if server is None or trainer is None or environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return  # with "platform" jax gives memory back as soon as an array is deleted
    if server + trainer > MAX_FRACTION:
        yield (
            f"--sglang.colocated: the servers' --mem-fraction-static {server:g} and jax's {trainer:g} "
            f"(XLA_CLIENT_MEM_FRACTION) are more than {MAX_FRACTION:g} of a GPU together, and jax never "
            "gives its share back. Lower one of them, or set XLA_PYTHON_CLIENT_ALLOCATOR=platform."
        )


def _fraction(text: str) -> float | None:
    """Return a number in (0, 1), or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1 else None
