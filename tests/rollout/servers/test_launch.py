"""Servers as child processes: started, watched, ended with the run."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from servers_shared import STUB, launch, until

from jaxrl_llm.builders.engines import _with_room
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.hf.config import to_hf_config
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers import launch as launching
from jaxrl_llm.rollout.servers.launch import free_ports


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
        "from servers_shared import launch\n"
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


@pytest.fixture
def sleeping(tmp_path, monkeypatch):
    """Processes in place of servers, which reply as long as they live and are not in the set `silent`."""
    program = tmp_path / "sleeps"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    launched = launch(tmp_path, count=2, python=str(program), restarts=1, start_timeout=1.0)
    launched.silent = set()
    alive = lambda url: launched.processes[launched.urls.index(url)].poll() is None
    monkeypatch.setattr(launching, "is_up", lambda url, route: url not in launched.silent and alive(url))
    monkeypatch.setattr(launching, "POLL_INTERVAL", 0.02)
    yield launched
    launched.close()


def end(launched, *indices):
    for index in indices:
        launched.processes[index].kill()
        launched.processes[index].wait()


def test_a_push_waits_for_no_server_that_has_ended_since_the_start_while_another_one_replies(sleeping):
    sleeping.wait()
    end(sleeping, 0)
    sleeping.wait()  # health checks start it again meanwhile
    sleeping.silent.add(sleeping.urls[0])
    assert sleeping.restart(sleeping.urls[0]).endswith("was started again")
    sleeping.wait()
    end(sleeping, 0)  # for the last time
    sleeping.wait()


def test_servers_that_have_all_ended_since_the_start_are_started_again_and_waited_for(sleeping, capfd):
    sleeping.wait()
    end(sleeping, 0, 1)
    sleeping.wait()
    assert sleeping.starts == [2, 2] and capfd.readouterr().err.count("and was started again\n") == 2
    end(sleeping, 0, 1)
    with pytest.raises(ServerError, match=r"the SGLang server ended with -9; .*sglang_0.log ends"):
        sleeping.wait()


def test_at_the_start_every_server_must_reply(sleeping):
    sleeping.silent.add(sleeping.urls[0])
    with pytest.raises(ServerError, match=rf"no answer from {sleeping.urls[0]} in 1 s"):
        sleeping.wait()
    end(sleeping, 1)
    with pytest.raises(ServerError, match=r"the SGLang server ended with -9; .*sglang_1.log ends"):
        sleeping.wait()


def test_an_address_with_another_protocol_is_no_server_that_is_up():
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not launching.is_up(url, "/model_info")
        thread.join()


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


def test_servers_are_told_of_two_more_positions():
    """SGLang ends a response two tokens before its context does."""
    rope = RopeConfig(scaling="yarn", factor=4.0)
    raw = to_hf_config(_with_room(TransformerConfig(max_position=64, rope=rope)))
    assert raw["max_position_embeddings"] == 66
    assert raw["rope_scaling"]["original_max_position_embeddings"] == 64


def test_a_key_in_a_variable_with_its_earlier_name_is_not_overlooked(monkeypatch):
    monkeypatch.setenv("JAXRL_SGLANG_API_KEY", "tell-4711")
    with pytest.raises(UserError, match=r"^JAXRL_SGLANG_API_KEY is called JAXRL_SERVER_API_KEY now") as error:
        auth.server_keys()
    assert "4711" not in str(error.value)
    monkeypatch.setenv(auth.API_KEY, "tell-4712")
    assert auth.server_keys() == {"--api-key": "tell-4712"}
