"""Detection of lost processes (killed, aborted, machine lost), after which the others end.

Collectives wait for a lost process forever, and jax's own detector (heartbeats, 100 s) aborts with a stack
trace of C++. Therefore every process keeps a TCP connection to process 0: the kernel closes it when a process
ends, for any reason, and its keep-alive packets detect a machine that no longer answers.
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
from jaxrl_llm.host.command import hide_records
from jaxrl_llm.host.signals import Interrupted

KEEP_ALIVE = (10, 5, 3)  # seconds until the first packet, seconds between packets, packets: lost after 25 s
CONNECT_TIMEOUT = 60.0  # seconds
LOSS_DETECTION_TIME = 2.0  # seconds to wait after an error, which the loss of another process may have caused
GRACE_PERIOD = 5.0  # seconds that a process has to end by itself after another has ended
UNWIND_TIMEOUT = 20.0  # seconds that a process has to unwind after an error
ADDRESS_KEY = "jaxrl_llm/watch"  # of the coordinator's key-value store
MAX_LINE = 4096  # bytes


@contextlib.contextmanager
def watched_processes() -> Iterator[None]:
    """End this process with a message and exit code 1 if another process of the run is lost inside.

    Every process enters the context after `start_host`. Its exit waits for the others; an exit by an
    exception ends them as well, and this process skips jax's shutdown, which would wait for them.
    """
    if jax.process_count() == 1:
        yield
        return
    _delay_aborts()
    hide_raised_errors()
    watch = _First() if jax.process_index() == 0 else _Other()
    try:
        yield
    except BaseException as error:
        watch.fail(error)
        raise
    watch.finish()


def hide_raised_errors() -> None:
    """Hide the traceback that a thread of Orbax logs: waiting for the thread raises the same error.

    Otherwise a save cut off by a lost process would end with that traceback instead of our message.
    """
    hide_records("absl", "_SignalingThread.run() raised")


def _delay_aborts() -> None:
    """Delay aborts of C++, such as jax's when the coordinator is lost, by 6 seconds.

    The C library's `sleep` becomes the handler of SIGABRT and gets the signal's number, which is 6.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


@dataclass(eq=False)
class _Peer:
    """Other end of a connection."""

    socket: socket.socket
    process: int = -1  # -1 = not known yet
    host: str = ""
    received: bytes = b""
    introduced: bool = False  # it has this process's number
    ended: bool = False  # the process has finished, or announced its end

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; ignore a closed connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class _Watch:
    """Base class of process 0 and of the others: a thread that reads from `peers`."""

    index: int = field(default_factory=jax.process_index)
    token: str = ""
    peers: list[_Peer] = field(default_factory=list)
    failed: bool = False  # this process ends with an error
    farewell: dict[str, str] = field(default_factory=dict)  # for the peers, once this process ends
    loss: str = ""  # message about a lost process; "" = none is lost
    finished: threading.Event = field(default_factory=threading.Event)  # all peers have ended
    alone: threading.Event = field(default_factory=threading.Event)  # all connections are closed
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def finish(self) -> None:
        """Announce to the peers that this process has finished, and wait for them."""
        self.leave("")
        self.finished.wait()

    def fail(self, error: BaseException) -> None:
        """Announce to the peers that this process ends with an error, unless a lost process caused it."""
        time.sleep(LOSS_DETECTION_TIME)
        if self.loss and not isinstance(error, UserError | RunError | SystemExit):
            time.sleep(UNWIND_TIMEOUT)  # the thread ends the process
        self.failed = True
        stopped = isinstance(error, Interrupted)
        self.leave("stopped by a signal" if stopped else f"{type(error).__name__}: {error}".splitlines()[0])
        code = exit_code(error)
        atexit.register(self.exit, code)  # before jax's own handler, which was registered earlier
        timer = threading.Timer(UNWIND_TIMEOUT, os._exit, [code])
        timer.daemon = True
        timer.start()

    def leave(self, reason: str) -> None:
        """Announce to the peers that this process ends; reason "" = it has finished."""
        self.farewell = {"ended": reason[:200]}
        for peer in list(self.peers):
            if peer.introduced:  # else `introduce` sends it
                peer.send(self.farewell)
        self.update_events()

    def exit(self, code: int) -> None:
        """Exit without jax's shutdown, which would wait for all others."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.index == 0:
            self.alone.wait(GRACE_PERIOD + LOSS_DETECTION_TIME)
        os._exit(code)

    def update_events(self) -> None:
        """Set `finished` and `alone` if their conditions hold."""
        if not self.loss and all(peer.ended for peer in self.peers if peer.process >= 0):
            self.finished.set()
        if not self.peers:
            self.alone.set()

    def connected(self, connection: socket.socket) -> _Peer:
        """Register a new connection, to read from it."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEP_ALIVE, strict=True):
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = _Peer(connection)
        self.peers.append(peer)
        self.selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def introduce(self, peer: _Peer) -> None:
        """Send a peer this process's number, with the token that only processes of the run have."""
        peer.send({"token": self.token, "process": self.index, "host": socket.gethostname()})
        peer.introduced = True
        if self.farewell:
            peer.send(self.farewell)

    def read(self, seconds: float | None = None) -> None:
        """Handle messages of the peers for some seconds; None = forever."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or (self.peers and time.monotonic() < end):
            for key, _ in self.selector.select(None if end is None else 0.1):
                if key.data is None:
                    with contextlib.suppress(OSError):  # already closed
                        self.connected(key.fileobj.accept()[0])
                elif not self._receive(key.data):
                    self._closed(key.data)

    def _receive(self, peer: _Peer) -> bool:
        """Handle the data that has arrived; return whether the connection is still open."""
        try:
            data = peer.socket.recv(MAX_LINE)
            *lines, peer.received = (peer.received + data).split(b"\n")
            for line in lines:
                self.handle(peer, json.loads(line))
            return bool(data) and len(peer.received) < MAX_LINE
        except OSError:  # reset, or no answer to keep-alive packets
            return False
        except (ValueError, KeyError, TypeError, AttributeError):  # not a process of this run
            peer.process = -1
            return False

    def _closed(self, peer: _Peer) -> None:
        self.selector.unregister(peer.socket)
        peer.socket.close()
        self.peers.remove(peer)
        if peer.process >= 0 and not peer.ended:
            self.lose(peer.process, peer.host, "")
        self.update_events()

    def handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Handle one message."""
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
            self.update_events()

    def lose(self, process: int, host: str, reason: str) -> None:
        """End this process because another is lost; GRACE_PERIOD later if that one announced its end."""
        problem = f"has ended ({reason})" if reason else "is lost: killed, or its machine is lost"
        self.loss = (
            f"error: process {process} on {host} {problem}. Process {self.index} cannot continue without "
            "it and ends; its checkpoints are kept: start all processes again with the same command."
        )
        if reason:
            self.read(GRACE_PERIOD)
        if self.failed:
            return
        print(self.loss, file=sys.stderr, flush=True)
        if self.index == 0:  # the last: the others abort when the coordinator goes
            self.read(GRACE_PERIOD + LOSS_DETECTION_TIME)
        os._exit(1)


class _First(_Watch):
    """Process 0: the peer of all others, to which it announces a lost process."""

    def __init__(self):
        super().__init__(token=secrets.token_hex(16))
        families = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        listener = socket.create_server(("", 0), backlog=1024, **families)
        self.selector.register(listener, selectors.EVENT_READ)
        address = {"port": listener.getsockname()[1], "token": self.token}
        distributed.global_state.client.key_value_set(ADDRESS_KEY, json.dumps(address))
        threading.Thread(target=self.read, name="watch", daemon=True).start()

    def lose(self, process: int, host: str, reason: str) -> None:
        """Announce the loss to the others, then end this process."""
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
        host = self.first = state.coordinator_address.rpartition(":")[0].strip("[]")
        try:
            timeout_ms = round(CONNECT_TIMEOUT * 1000)
            address = json.loads(state.client.blocking_key_value_get(ADDRESS_KEY, timeout_ms))
            connection = socket.create_connection((host, address["port"]), CONNECT_TIMEOUT)
        except (OSError, RuntimeError) as error:
            print(
                f"process {self.index} cannot connect to process 0 on {host} ({error}): it will "
                "notice the loss of another process after 100 seconds, and abort",
                file=sys.stderr,
            )
            return
        connection.settimeout(None)
        self.token = address["token"]
        self.introduce(self.connected(connection))
        threading.Thread(target=self.read, name="watch", daemon=True).start()

    def _closed(self, peer: _Peer) -> None:
        if peer.process < 0 and not self.farewell:  # process 0 is lost before it has introduced itself
            peer.process, peer.host = 0, self.first
        super()._closed(peer)
