"""The checks of `doctor`: each with a machine that has the fault."""

import importlib.metadata
import json
import os
import socket
from types import SimpleNamespace

import pytest

from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools import devices, doctor
from jaxrl_llm.tools.devices import Finding

H100 = [{"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "memory": 60 * 2**30}]


def recipe(*flags):
    return from_command_line(["--config", "grpo_tiny.py", *flags], "doctor", writes=False).config


def test_a_machine_that_is_ready(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "run_command_line", lambda command: "not found")
    monkeypatch.setattr(doctor, "check_devices", lambda: iter([Finding("devices", "ok", "8 x TPU v5e")]))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready" and any("8 x TPU v5e" in line for line in lines)
    assert doctor.main(["--json", "True", "--config", "grpo_tiny.py"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {
        "python",
        "versions",
        "memory",
        "/dev/shm",
        "clock",
        "ports",
        "disk",
        "sandbox",
    } <= findings.keys()
    assert "the recipe writes" in findings["disk"]["text"]


def test_a_fix_is_counted_and_gives_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda config: [Finding("disk", "fix", "full")])
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 to fix"


def test_versions_that_do_not_belong_together(monkeypatch):
    installed = {"jax": "0.10.2", "libtpu": "0.0.50", "jaxlib": "0.10.2", "flax": "0.12.8"}
    monkeypatch.setattr(devices, "package_version", lambda name: installed.get(name, ""))
    requires = [
        "jaxlib<=0.10.2,>=0.10.2",
        'libtpu==0.0.42.*; extra == "tpu"',
        'jax-cuda13-plugin==0.10.2; extra == "cuda13"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: requires)
    assert devices.unmet_requirements("jax", ("tpu", "cuda13")) == ["libtpu 0.0.50, but jax needs ==0.0.42.*"]
    installed |= {"libtpu": "0.0.42.1", "jax": "0.11.2"}
    (finding,) = devices.check_versions()
    assert finding.status == "fix" and "flax 0.12.8 does not work with jax 0.11.2" in finding.text
    installed.pop("jaxlib")
    assert "jaxlib is not installed" in devices.unmet_requirements("jaxrl-llm", ())


def test_small_shared_memory(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 * 2**20))
    assert doctor.check_shared_memory(needed=False).status == "note"
    finding = doctor.check_shared_memory(needed=True)
    assert finding.status == "fix" and finding.text.startswith("64 MiB") and "--shm-size" in finding.text


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
    assert doctor.check_disk(tmp_path, 2**29).status == "ok"
    finding = doctor.check_disk(tmp_path, 2**31)
    assert finding.status == "fix" and "1.0 GiB free" in finding.text and "writes 2.0 GiB" in finding.text


def test_bytes_that_a_run_writes():
    """12 bytes a weight (AdamW) in each of 2 + 1 checkpoints, and 2 bytes in the export."""
    config = recipe("--model.dtype", "bfloat16", "--checkpoint.keep", "2")
    fewer = recipe("--model.dtype", "bfloat16", "--checkpoint.keep", "1")
    one = doctor.written_bytes(config) - doctor.written_bytes(fewer)
    weights = (doctor.written_bytes(config) - 3 * one) / 2
    assert one == pytest.approx(12 * weights, rel=1e-3)
    more = ("--checkpoint.hf_every", "10", "--checkpoint.hf_keep", "3", "--optim.ema", "0.9")
    bare = recipe("--model.dtype", "bfloat16", "--checkpoint.optimizer", "false", "--steps", "100", *more)
    expected = (bare.checkpoint.keep + 1) * 8 + (3 + 1) * 2 * 2  # weights and averages, in both places
    assert doctor.written_bytes(bare) == pytest.approx(expected * weights, rel=1e-3)
    adapters = doctor.written_bytes(recipe("--lora.rank", "1", "--optim.learning_rate", "1e-4"))
    assert adapters < doctor.written_bytes(recipe()) / 3


def test_a_port_that_is_taken():
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        address = f"localhost:{sock.getsockname()[1]}"
        taken = doctor.check_ports({"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0"})
        other = doctor.check_ports({"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "1"})
    assert taken.status == "fix" and "cannot be opened" in taken.text
    assert other.status == "ok"


def test_a_clock_that_differs_from_the_file_system(tmp_path, monkeypatch):
    assert doctor.check_clock(tmp_path).status == "ok"
    real = os.stat
    late = lambda name, **options: SimpleNamespace(st_mtime=real(name).st_mtime + 90)
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os, "stat", late)
        finding = doctor.check_clock(tmp_path)
    assert finding.status == "note" and "+90 s off" in finding.text


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    assert doctor.check_cache(str(tmp_path)).status == "ok"
    assert doctor.check_cache("").status == "note" and doctor.check_cache("gs://bucket/cache").status == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    assert doctor.check_cache(str(tmp_path / "new")).status == "fix"


def test_hopper_under_jax_0_12(monkeypatch):
    monkeypatch.setattr(devices, "package_version", lambda name: "0.12.0.1")
    findings = list(devices.describe_devices(H100, [("NVIDIA H100", "580.1", 2000)]))
    assert [finding.status for finding in findings] == ["ok", "note", "note"]
    assert "1 x NVIDIA H100 80GB HBM3, 60 GiB each" in findings[0].text
    assert "2000 MiB" in findings[1].text and "jax[cuda13]<0.12" in findings[2].text
    monkeypatch.setattr(devices, "package_version", lambda name: "0.11.2")
    assert len(list(devices.describe_devices(H100, []))) == 1


@pytest.mark.parametrize(
    "plugin, driver, status, text",
    [
        ("", "580.65", "fix", "no GPU plugin: pip install 'jaxrl-llm[cuda]'"),
        ("jax-cuda13-plugin", "550.54", "fix", "550.54 is too old for jax-cuda13-plugin: 580 or newer"),
        ("jax-cuda12-plugin", "550.54", "ok", "NVIDIA 550.54"),
    ],
)
def test_drivers(monkeypatch, plugin, driver, status, text):
    monkeypatch.setattr(devices, "package_version", lambda name: "0.10.2" if name == plugin else "")
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [("NVIDIA H100", driver, 0)])
    monkeypatch.setattr(devices, "run_command_line", lambda command: "no answer within 120 s")
    findings = list(devices.check_devices())
    assert findings[0].status == status and text in findings[0].text
    if plugin:
        assert "jax cannot open them (no answer within 120 s)" in findings[-1].text


def test_an_accelerator_that_jax_does_not_see():
    cpu = [{"platform": "cpu", "kind": "cpu", "memory": 0}]
    (finding,) = devices.describe_devices(cpu, [("NVIDIA L4", "580.1", 0)])
    assert finding.status == "fix" and "jaxrl-llm[cuda]" in finding.text


def test_the_list_of_gpus(monkeypatch):
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    reply = SimpleNamespace(returncode=0, stdout="NVIDIA H100, 580.65.06, 4\nNVIDIA H100, 580.65.06, [N/A]\n")
    monkeypatch.setattr(devices, "run_command_line", lambda command: reply)
    assert devices.nvidia_gpus() == [("NVIDIA H100", "580.65.06", 4)]


def test_servers_that_do_not_answer():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        config = recipe("--rollout.engine", "sglang", "--rollout.servers", address)
        (finding,) = doctor.check_sglang(config)
    assert finding.status == "fix" and f"{address} does not answer" in finding.text
