"""Servers as child processes: started, watched, ended with the run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_shared import STUB, launch, until

from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.sglang import auth
from jaxrl_llm.rollout.sglang import launch as launching
from jaxrl_llm.rollout.sglang.launch import free_ports


def test_launched_servers_answer_log_and_are_gone_after(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STUB)
    launched = launch(tmp_path, flags="--tp 1")
    try:
        launched.wait()
        until(lambda: "the fake server is up" in launched.logs[0].read_text())  # it replies before
    finally:
        launched.close()
    assert launched.processes[0].poll() is not None


def test_ports_are_free_and_none_that_other_sockets_get_until_they_are_taken(monkeypatch):
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(free_ports(9))) == 9 and max(free_ports(9)) < given
    (port,) = free_ports(1)
    monkeypatch.setattr(launching, "PORTS", range(port, port + 1))
    assert free_ports(1) == [port]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerError, match="0 ports of"):
        free_ports(1)


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launched = launch(tmp_path, python=sys.executable)
    with pytest.raises(ServerError, match=r"(?s)server ended with 1; .*sglang_0.log ends:.*sglang"):
        launched.wait()
    launched.close()


def test_servers_end_with_a_run_that_is_killed(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import time\n"
        "from sglang_shared import launch\n"
        "print(launch(Path(sys.argv[2])).processes[0].pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": STUB}
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    run = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    server = int(run.stdout.readline())
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    until(lambda: not runs(server))


def runs(pid):
    """Return whether a process has not ended."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends while it is read
        return False


def test_a_launched_server_that_ends_is_started_again_a_few_times(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STUB)
    launched = launch(tmp_path, restarts=2)
    (url,) = launched.urls
    try:
        assert launched.restart(url) == ""
        for starts in (2, 3):
            launched.processes[0].kill()
            launched.processes[0].wait()
            assert launched.restart(url) == (
                f"the SGLang server at {url} ended with -9 ({launched.logs[0]}) and was started again"
            )
            assert launched.starts == [starts]
        launched.processes[0].kill()
        launched.processes[0].wait()
        assert launched.restart(url) == "" and launched.processes[0].poll() == -9
    finally:
        launched.close()


def test_a_launched_server_gets_its_keys_and_nobody_sees_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STUB)
    monkeypatch.setenv(auth.API_KEY, "tell-4711")
    monkeypatch.setenv(auth.ADMIN_KEY, "change-0815")
    launched = launch(tmp_path)
    try:
        launched.wait()
        command = Path(f"/proc/{launched.processes[0].pid}/cmdline").read_text()
        log = launched.logs[0].read_text()
    finally:
        launched.close()
    assert "'--api-key', '***', '--admin-api-key', '***'" in log and "sglang.launch_server" in command
    assert not any(key in command + log for key in ("4711", "0815"))


def test_a_server_that_cannot_be_started_again_is_said_and_tried_again(tmp_path, monkeypatch):
    launched = launch(tmp_path, restarts=2)
    (url,) = launched.urls
    launched.close()
    start = launched._start

    def fails(index):
        launched.starts[index] += 1
        raise OSError("no space left")

    monkeypatch.setattr(launched, "_start", fails)
    assert launched.restart(url).endswith("and could not be started again: no space left")
    monkeypatch.setattr(launched, "_start", start)
    assert launched.restart(url).endswith("and was started again")
    launched.close()
