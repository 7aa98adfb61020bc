"""Requests to one server during a push."""

import asyncio
from types import SimpleNamespace

import pytest

from jaxrl_llm.bridge import servers
from jaxrl_llm.bridge.servers import Receiver
from jaxrl_llm.errors import UnreachableError


class Pool:
    """A server that answers after some checks of its health; from the check `ends` on it is not well."""

    def __init__(self, answers, ends):
        self.answers, self.ends, self.checks, self.cancelled = answers, ends, 0, False

    async def request_bytes(self, server, path, body=None, timeout=0.0):
        """Answer /health as servers and what stands before them do: in text that is no JSON."""
        assert path == "/health"
        self.checks += 1
        if self.checks >= self.ends:
            raise UnreachableError(f"{server.url}: no answer to /health in {timeout:g} s")
        return b"OK"

    async def reply(self):
        try:
            while self.checks < self.answers:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return {"text": "well"}


def ask(pool):
    receiver = Receiver(pool, SimpleNamespace(url="http://server"))
    return asyncio.run(receiver.in_health(pool.reply()))


def test_a_server_that_is_well_has_time_and_one_that_is_not_is_given_up(monkeypatch):
    """Otherwise a push would wait the ten minutes of --servers.timeout for a server whose model has ended."""
    monkeypatch.setattr(servers, "QUIET_LIMIT", 0.01)
    slow = Pool(answers=3, ends=9)
    assert ask(slow) == {"text": "well"} and slow.checks == 3
    ended = Pool(answers=9, ends=2)
    with pytest.raises(UnreachableError, match="http://server: no answer to /health in 30 s"):
        ask(ended)
    assert ended.cancelled
