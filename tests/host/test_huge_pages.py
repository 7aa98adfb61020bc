"""Huge pages: when a command starts again to have them, and that it then has."""

import json
import os
import subprocess
import sys

import pytest

from jaxrl_llm.__main__ import start_process
from jaxrl_llm.host import huge_pages

ON_REQUEST = "always [madvise] never\n"
SHOW = """
import json, os, sys
from pathlib import Path
from jaxrl_llm.host import huge_pages
huge_pages.ENABLED = Path(sys.argv[1])
huge_pages.restart_with_them()
print(json.dumps([os.getpid(), sys.argv, os.environ.get("GLIBC_TUNABLES", "")]))
"""


@pytest.mark.parametrize(
    "setting, tunables, missing",
    [
        (ON_REQUEST, "", True),
        (ON_REQUEST, "glibc.malloc.check=0", True),
        (ON_REQUEST, "glibc.malloc.hugetlb=1", False),
        (ON_REQUEST, "glibc.malloc.hugetlb=0", False),
        ("[always] madvise never\n", "", False),
        ("always madvise [never]\n", "", False),
        (None, "", False),
    ],
)
def test_pages_that_the_system_gives_on_request(monkeypatch, tmp_path, setting, tunables, *, missing):
    monkeypatch.setattr(huge_pages, "ENABLED", tmp_path / "enabled")
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    if setting:
        huge_pages.ENABLED.write_text(setting)
    assert huge_pages.are_missing() == missing


@pytest.mark.parametrize("before", ["", "glibc.malloc.check=0"])
def test_a_restarted_command_is_the_same_process_with_the_setting_added(tmp_path, before):
    enabled = tmp_path / "enabled"
    enabled.write_text(ON_REQUEST)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": before}
    command = [sys.executable, "-c", SHOW, str(enabled), "a b", "--x=1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        pid, argv, tunables = json.loads(process.communicate(timeout=60)[0])
    assert (pid, argv) == (process.pid, ["-c", str(enabled), "a b", "--x=1"])
    assert tunables == ":".join(filter(None, (before, huge_pages.SETTING)))


@pytest.mark.parametrize(
    "platforms, device, restarts",
    [("cpu", True, True), ("", False, True), ("", True, False), ("cuda", True, False)],
)
def test_only_commands_that_compute_on_the_cpu_restart(monkeypatch, tmp_path, platforms, device, *, restarts):
    monkeypatch.setattr(huge_pages, "are_missing", lambda: True)
    monkeypatch.setattr(huge_pages, "has_devices", lambda patterns: device)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    started = []
    monkeypatch.setattr(huge_pages.os, "execve", lambda *args: started.append(args))
    huge_pages.restart_with_them()
    assert bool(started) == restarts


@pytest.mark.parametrize(
    "words, restarts",
    [
        (["--config", "grpo_tiny.py"], True),
        (["--help"], False),
        (["--config", "grpo_tiny.py", "--help"], False),
        (["--list"], False),
        ([], False),
    ],
)
def test_commands_that_end_at_once_do_not_restart(monkeypatch, words, *, restarts):
    started = []
    monkeypatch.setattr(huge_pages, "restart_with_them", lambda: started.append(words))
    start_process("train", words)
    assert bool(started) == restarts
