"""Detection of lost processes: killed, aborted, their machine gone. The other processes of the run end.

Collectives wait for a lost process forever, and jax's own detector (heartbeats, 100 s) aborts with a stack
trace of C++. So every process keeps a TCP connection to process 0, whose end is seen at once: the kernel
closes it however a process ends, and its keep-alive packets find a machine that no longer answers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src import distributed  # the coordinator's key-value store has no public name

from jaxrl_llm.errors import RunError, UserError, exit_code
from jaxrl_llm.host.signals import Interrupted

KEEP_ALIVE = (10, 5, 3)  # seconds until the first packet, seconds between packets, packets: lost after 25 s
CONNECT_TIMEOUT = 60.0  # seconds
SETTLE = 2.0  # seconds in which an error may turn out to be the loss of another process
GRACE = 5.0  # seconds in which a process may end by itself after another has
UNWIND = 20.0  # seconds after which a process that ends by an error is ended
KEY = "jaxrl_llm/watch"
MAX_LINE = 4096  # bytes


@contextlib.contextmanager
def watched_processes() -> Iterator[None]:
    """While inside, end this process with a message and exit code 1 if another one of the run is lost.

    Every process enters it after `start_host`. Leaving it waits for the others; leaving it by an exception
    tells them to end as well, and has this process exit without jax's shutdown, which would wait for them.
    """
    if jax.process_count() == 1:
        yield
        return
    _delay_aborts()
    watch = _First() if jax.process_index() == 0 else _Other()
    try:
        yield
    except BaseException as error:
        watch.fail(error)
        raise
    watch.finish()


def _delay_aborts() -> None:
    """Give the watch 6 seconds before an abort of C++, such as jax's when the coordinator is lost.

    The handler of SIGABRT, which is 6, becomes the C library's `sleep`, called with the signal's number.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


@dataclass(eq=False)
class _Peer:
    """The other end of a connection."""

    socket: socket.socket
    process: int = -1  # -1 = not known yet
    host: str = ""
    received: bytes = b""
    ended: bool = False  # it has finished, or announced its end

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, if the other end is still there."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class _Watch:
    """The part that process 0 and the others share: a thread that reads from `peers`."""

    index: int = field(default_factory=jax.process_index)
    token: str = ""
    peers: list[_Peer] = field(default_factory=list)
    failed: bool = False  # this process ends by an error
    loss: str = ""  # why this process cannot go on; "" = it can
    finished: threading.Event = field(default_factory=threading.Event)  # all peers have ended
    alone: threading.Event = field(default_factory=threading.Event)  # all connections are closed
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def finish(self) -> None:
        """Tell the peers that this process has finished, and wait for them."""
        self.leave("")
        self.finished.wait()

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this process ends by an error, unless that comes from the loss of another."""
        time.sleep(SETTLE)
        if self.loss and not isinstance(error, UserError | RunError | SystemExit):
            time.sleep(UNWIND)  # the thread ends the process
        self.failed = True
        stopped = isinstance(error, Interrupted)
        self.leave("stopped by a signal" if stopped else f"{type(error).__name__}: {error}".splitlines()[0])
        code = exit_code(error)
        atexit.register(self.exit, code)  # before jax's own handler, which was registered earlier
        timer = threading.Timer(UNWIND, os._exit, [code])
        timer.daemon = True
        timer.start()

    def leave(self, reason: str) -> None:
        """Tell the peers that this process ends; "" = it has finished."""
        for peer in list(self.peers):
            peer.send({"ended": reason[:200]})
        self.count()

    def exit(self, code: int) -> None:
        """Exit without jax's shutdown, which would wait for all others."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.index == 0:
            self.alone.wait(GRACE + SETTLE)
        os._exit(code)

    def count(self) -> None:
        """Set the events that are true by now."""
        if not self.loss and all(peer.ended for peer in self.peers if peer.process >= 0):
            self.finished.set()
        if not self.peers:
            self.alone.set()

    def connected(self, connection: socket.socket) -> _Peer:
        """Read from a new connection from now on."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEP_ALIVE, strict=True):
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = _Peer(connection)
        self.peers.append(peer)
        self.selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def introduce(self, peer: _Peer) -> None:
        """Tell a peer which process this is; the token, known to the run alone, proves it."""
        peer.send({"token": self.token, "process": self.index, "host": socket.gethostname()})

    def read(self, seconds: float | None = None) -> None:
        """Act on what peers send, for so long; None = for ever."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or (self.peers and time.monotonic() < end):
            for key, _ in self.selector.select(None if end is None else 0.1):
                if key.data is None:
                    with contextlib.suppress(OSError):  # it has gone again
                        self.connected(key.fileobj.accept()[0])
                elif not self._receive(key.data):
                    self._closed(key.data)

    def _receive(self, peer: _Peer) -> bool:
        """Act on what has come; return whether more may come."""
        try:
            data = peer.socket.recv(MAX_LINE)
            *lines, peer.received = (peer.received + data).split(b"\n")
            for line in lines:
                self.handle(peer, json.loads(line))
            return bool(data) and len(peer.received) < MAX_LINE
        except OSError:  # reset, or no answer to keep-alive packets
            return False
        except (ValueError, KeyError, TypeError, AttributeError):  # not one of ours
            peer.process = -1
            return False

    def _closed(self, peer: _Peer) -> None:
        self.selector.unregister(peer.socket)
        peer.socket.close()
        self.peers.remove(peer)
        if peer.process >= 0 and not peer.ended:
            self.lose(peer.process, peer.host, "")
        self.count()

    def handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Act on one message."""
        if peer.process < 0:
            if message["token"] != self.token:
                raise ValueError("not a process of this run")
            peer.process, peer.host = int(message["process"]), str(message["host"])
            if self.index == 0:
                self.introduce(peer)
        elif "lost" in message:
            self.lose(*message["lost"])
        elif "ended" in message:
            peer.ended = True
            if message["ended"]:
                self.lose(peer.process, peer.host, str(message["ended"]))
            self.count()

    def lose(self, process: int, host: str, reason: str) -> None:
        """End this process for want of another; after a while, if that one has announced its end."""
        what = f"has ended ({reason})" if reason else "is lost: killed, or its machine is gone"
        self.loss = (
            f"error: process {process} on {host} {what}. Process {self.index} cannot go on without "
            "it and ends; its checkpoints stand: start all processes again with the same command."
        )
        if reason:
            self.read(GRACE)
        if self.failed:
            return
        print(self.loss, file=sys.stderr, flush=True)
        if self.index == 0:  # the last: the others abort when the coordinator goes
            self.read(GRACE + SETTLE)
        os._exit(1)


class _First(_Watch):
    """Process 0: the peer of all others, which it tells of a lost process."""

    def __init__(self):
        super().__init__(token=secrets.token_hex(16))
        everywhere = (
            {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        )
        listener = socket.create_server(("", 0), backlog=1024, **everywhere)
        self.selector.register(listener, selectors.EVENT_READ)
        place = {"port": listener.getsockname()[1], "token": self.token}
        distributed.global_state.client.key_value_set(KEY, json.dumps(place))
        threading.Thread(target=self.read, name="watch", daemon=True).start()

    def lose(self, process: int, host: str, reason: str) -> None:
        """Tell the others before this process ends, too."""
        if not self.failed:
            for peer in list(self.peers):
                peer.send({"lost": [process, host, reason]})
                peer.ended = True
        super().lose(process, host, reason)


class _Other(_Watch):
    """A process other than the first, which is its one peer."""

    def __init__(self):
        super().__init__()
        state = distributed.global_state
        host = state.coordinator_address.rpartition(":")[0].strip("[]")
        try:
            place = json.loads(state.client.blocking_key_value_get(KEY, round(CONNECT_TIMEOUT * 1000)))
            connection = socket.create_connection((host, place["port"]), CONNECT_TIMEOUT)
        except (OSError, RuntimeError) as error:
            print(
                f"process {self.index} cannot connect to process 0 on {host} ({error}): it will "
                "notice the loss of another process after 100 seconds, and abort",
                file=sys.stderr,
            )
            return
        connection.settimeout(None)
        self.token = place["token"]
        self.introduce(self.connected(connection))
        threading.Thread(target=self.read, name="watch", daemon=True).start()
