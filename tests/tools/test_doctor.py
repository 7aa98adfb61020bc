"""The checks of `doctor`: each with a machine that has the fault."""

import importlib.metadata
import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.plan.models import preset
from jaxrl_llm.recipe.load import from_command_line, packaged_recipes
from jaxrl_llm.tools import checks, devices, doctor, host_memory
from jaxrl_llm.tools.devices import Finding

H100 = [{"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "memory": 60 * 2**30}]


@pytest.fixture(autouse=True)
def devices_are_opened_anew():
    devices.open_in_process.cache_clear()


def recipe(*flags):
    return from_command_line(["--config", "grpo_tiny.py", *flags], "doctor", writes=False).config


def test_a_machine_that_is_ready(capsys, monkeypatch):
    monkeypatch.setattr(checks, "run_command_line", lambda command: "not found")
    monkeypatch.setattr(checks, "check_devices", lambda: iter([Finding("devices", "ok", "8 x TPU v5e")]))
    monkeypatch.setattr(devices, "open_in_process", lambda: 8 * H100)
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
    monkeypatch.setattr(checks, "examine", lambda config: [Finding("disk", "fix", "full")])
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 to fix"


@pytest.fixture
def quick(monkeypatch):
    """Leave out what starts processes."""
    monkeypatch.setattr(checks, "run_command_line", lambda command: "not found")
    monkeypatch.setattr(checks, "check_devices", lambda: iter(()))
    monkeypatch.setattr(checks, "hub_problem", lambda: "")
    monkeypatch.setattr(checks, "check_sandbox", lambda needed: Finding("sandbox", "ok", ""))
    monkeypatch.setattr(host_memory, "largest_bytes", lambda config: 0)  # traces a step


@pytest.mark.parametrize("name", [path.name for path in packaged_recipes()])
def test_every_packaged_recipe_is_examined(name, quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = from_command_line(["--config", name], "doctor", writes=False).config
    findings = {finding.name: finding for finding in checks.examine(config)}
    assert {"python", "versions", "disk", "sandbox"} <= findings.keys()
    known = not name.startswith("gkd")  # whose teachers are the results of other recipes
    assert bool(re.search(r"the recipe writes \d", findings["disk"].text)) == known, findings["disk"]
    assert known or re.search(r"the size of runs/\w+/hf is not known", findings["disk"].text)
    known &= not name.startswith(("ppo_reward", "ppo_smollm2"))  # whose reward models are such results
    assert bool(re.search(r"models take \d", findings["host memory"].text)) == known, findings["host memory"]


def test_a_model_whose_size_is_not_known(quick, tmp_path, monkeypatch):
    findings = list(checks.examine(recipe("--model.path", "Qwen/Qwen2.5-1.5B-Instruct")))
    (disk,) = [finding for finding in findings if finding.name == "disk"]
    assert disk.status == "note" and "the size of Qwen/Qwen2.5-1.5B-Instruct is not known" in disk.text
    assert "--model.path FOLDER" in disk.text and findings[-1].name == "sglang"  # and all that follows
    known = checks.written_bytes(recipe("--model.path", "hf://Qwen/Qwen3-0.6B@main"))
    assert known == checks.written_bytes(recipe("--model.path", "Qwen/Qwen3-0.6B")) > 2**30


@pytest.mark.parametrize(
    "flags, module, extra",
    [
        (("--log.wandb", "x"), "wandb", "wandb"),
        (("--log.mlflow", "x"), "mlflow", "mlflow"),
        (("--log.swanlab", "x"), "swanlab", "swanlab"),
        (("--data.path", "gym:chain_sum"), "reasoning_gym", "tasks"),
        (("--reward.name", "math"), "math_verify", "tasks"),
        (("--data.path", "hub:org/math-500"), "math_verify", "tasks"),
        (("--data.path", "hub:org/rows"), "datasets", "data"),
        (("--data.path", "rows.parquet"), "pyarrow", "data"),
        (("--env.tools", "mcp:server"), "mcp", "mcp"),
        (("--reference.path", "org/model/m.gguf", "--algo.kl_coef", "0.1"), "gguf", "gguf"),
    ],
)
def test_extras_that_a_recipe_needs(quick, monkeypatch, capsys, flags, *, module, extra):
    config = recipe(*flags)
    installed = {
        "wandb",
        "mlflow",
        "swanlab",
        "reasoning_gym",
        "math_verify",
        "mcp",
        "gguf",
        "datasets",
        "pyarrow",
    }
    monkeypatch.setattr(checks, "is_installed", lambda name: name in installed)
    findings = list(checks.check_extras(checks.needed_packages(config)))
    assert [finding.status for finding in findings] == ["ok"] and module in findings[0].text
    installed.remove(module)
    finding = next(checks.check_extras(checks.needed_packages(config)))
    assert finding.status == "fix" and finding.text.startswith(f"{module} is not installed, which ")
    doctor.print_findings([finding])
    assert f"pip install 'jaxrl-llm[{extra}]'" in " ".join(capsys.readouterr().out.split())
    assert list(checks.check_extras(checks.needed_packages(recipe()))) == []


def test_space_for_the_conversion_of_a_gguf_file(quick, tmp_path, monkeypatch):
    """4 bytes a weight in the cache, beside what the run writes; nothing once it is converted."""
    file, folder = tmp_path / "m.gguf", tmp_path / "cache/jaxrl_llm/gguf/m"
    file.write_bytes(b"GGUF")
    model = preset("Qwen/Qwen3-0.6B")
    monkeypatch.setattr(checks, "read_gguf_config", lambda file: model)
    monkeypatch.setattr(checks, "converted_folder", lambda file: folder)
    monkeypatch.setattr(checks, "gguf_cache", lambda: folder.parent)
    monkeypatch.setattr(checks, "written_bytes", lambda config: 2**30)
    monkeypatch.setattr(checks, "is_installed", lambda name: True)
    config = recipe("--model.path", str(file), "--run_dir", str(tmp_path / "run"))
    assert checks.converted_bytes(config) == 4 * 596_049_920
    free = SimpleNamespace(free=4 * 596_049_920 + 2**30)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: free)
    assert [finding.status for finding in checks.check_run_disk(config)] == ["ok", "ok"]
    free.free -= 1
    fix = list(checks.check_run_disk(config))[1]
    assert fix.status == "fix" and "takes 2.2 GiB" in fix.text and "XDG_CACHE_HOME" in fix.text
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert len(list(checks.check_run_disk(config))) == 1


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
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 * 2**20))
    assert checks.check_shared_memory(needed=False).status == "note"
    finding = checks.check_shared_memory(needed=True)
    assert finding.status == "fix" and finding.text.startswith("64 MiB") and "--shm-size" in finding.text


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
    assert checks.check_disk(tmp_path, 2**29).status == "ok"
    finding = checks.check_disk(tmp_path, 2**31)
    assert finding.status == "fix" and "1.0 GiB free" in finding.text and "writes 2.0 GiB" in finding.text


def test_bytes_that_a_run_writes():
    """12 bytes a weight (AdamW) in each of 2 + 1 checkpoints, and 2 bytes in the export."""
    config = recipe("--model.dtype", "bfloat16", "--checkpoint.keep", "2")
    fewer = recipe("--model.dtype", "bfloat16", "--checkpoint.keep", "1")
    one = checks.written_bytes(config) - checks.written_bytes(fewer)
    weights = (checks.written_bytes(config) - 3 * one) / 2
    assert one == pytest.approx(12 * weights, rel=1e-3)
    more = ("--checkpoint.hf_every", "10", "--checkpoint.hf_keep", "3", "--optim.ema", "0.9")
    bare = recipe("--model.dtype", "bfloat16", "--checkpoint.optimizer", "false", "--steps", "100", *more)
    expected = (bare.checkpoint.keep + 1) * 8 + (3 + 1) * 2 * 2  # weights and averages, in both places
    assert checks.written_bytes(bare) == pytest.approx(expected * weights, rel=1e-3)
    apart = ("--devices", "0:1", "--rollout.devices", "1:2", "--rollout.max_staleness", "1")
    assert checks.written_bytes(recipe(*apart)) == checks.written_bytes(recipe())
    adapters = checks.written_bytes(recipe("--lora.rank", "1", "--optim.learning_rate", "1e-4"))
    assert adapters < checks.written_bytes(recipe()) / 3


def test_bytes_of_a_critic_whose_moments_are_not_saved():
    """Policy and critic have 12 bytes a weight in a checkpoint (AdamW), and 4 without their moments."""

    def checkpoint_bytes(*flags):
        sizes = [
            checks.written_bytes(recipe("--algo", "ppo", "--checkpoint.keep", keep, *flags)) for keep in "21"
        ]
        return sizes[0] - sizes[1]

    without = checkpoint_bytes("--checkpoint.optimizer", "false")
    assert checkpoint_bytes() == pytest.approx(3 * without, rel=1e-3)


def test_a_port_that_is_taken():
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        address = f"localhost:{sock.getsockname()[1]}"
        taken = checks.check_ports({"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0"})
        other = checks.check_ports({"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "1"})
    assert taken.status == "fix" and "cannot be opened" in taken.text
    assert other.status == "ok"


@pytest.mark.parametrize(
    "address, processes, text",
    [
        (
            "host0",
            "2",
            "JAX_COORDINATOR_ADDRESS=host0 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0: they must be host:",
        ),
        (
            "host0:1234",
            "",
            "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is set but JAX_NUM_PROCESSES is not: set",
        ),
        ("host0:1234", "2", "this is 0 of 2, as JAX_COORDINATOR_ADDRESS says"),
    ],
)
def test_how_the_processes_are_described(monkeypatch, quick, address, processes, *, text):
    values = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": processes, "JAX_PROCESS_ID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    findings = {finding.name: finding for finding in checks.examine(None)}
    assert text in findings["processes"].text and "ports" in findings
    assert findings["processes"].status == ("ok" if text.startswith("this is") else "fix")


def test_a_port_that_is_none():
    finding = checks.check_ports({"JAX_COORDINATOR_ADDRESS": "host0:123456", "JAX_PROCESS_ID": "0"})
    assert finding.status == "fix" and "ports are at most 65535" in finding.text


def test_a_full_disk_without_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=99 * 2**20))
    assert (
        checks.check_disk(tmp_path, 0).status == "fix" and checks.check_disk(tmp_path, 2**20).status == "ok"
    )
    finding = checks.check_cache(str(tmp_path))
    assert finding.status == "fix" and "99.0 MiB are free there, so each start compiles again" in finding.text


def test_models_of_the_hub_without_a_network(quick, tmp_path, monkeypatch):
    cache = {"org/there": str(tmp_path), "org/away": None}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repo, file, revision: cache.get(repo)
    )
    flags = ("--model.path", "org/there", "--reference.path", "org/away@main", "--algo.kl_coef", "0.1")
    names = checks.hub_names(recipe(*flags, "--data.path", "hub:org/data"))
    assert names == ["org/there", "org/away@main", "hub:org/data"]
    assert [f.status for f in checks.check_hub(names)] == ["ok"] and checks.hub_names(recipe()) == []
    monkeypatch.setattr(checks, "hub_problem", lambda: "no route to host")
    (finding,) = checks.check_hub(names)
    assert finding.status == "fix" and finding.text.startswith(
        "org/away@main, hub:org/data: not in the cache"
    )
    assert (
        "(no route to host): fetch it on a machine with one (hf download org/away), or give" in finding.text
    )
    assert [f.status for f in checks.check_hub(["hub:org/data"])] == ["note"]
    assert [f.text for f in checks.check_hub(["org/there"])] == ["org/there: in the cache"]


@pytest.mark.parametrize("name", ["org/a--b", "org/a.git", f"org/{'a' * 97}", "a" * 300])
def test_names_that_the_hub_does_not_take(name):
    (finding,) = checks.check_hub(checks.hub_names(recipe("--model.path", name)))
    assert finding.status == "fix" and finding.text.startswith(f"{name[:100]}: the hub has no such names: ")


def test_data_of_the_hub_with_another_name(monkeypatch):
    monkeypatch.setattr(checks, "hub_problem", lambda: "no route to host")
    (finding,) = checks.check_hub(["hub:-data"])
    assert "(hf download hub:-data)" in finding.text


def test_why_the_hub_cannot_be_reached(monkeypatch):
    with socket.socket() as sock:  # bound, without a listener
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{sock.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert "Connection refused" in checks.hub_problem()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert checks.hub_problem() == "HF_HUB_OFFLINE is set"


def test_a_clock_that_differs_from_the_file_system(tmp_path, monkeypatch):
    assert checks.check_clock(tmp_path).status == "ok"
    real = os.stat
    late = lambda name, **options: SimpleNamespace(st_mtime=real(name).st_mtime + 90)
    with monkeypatch.context() as patch:
        patch.setattr(checks.os, "stat", late)
        finding = checks.check_clock(tmp_path)
    assert finding.status == "note" and "+90 s off" in finding.text


def test_a_program_of_the_cache_may_be_renamed_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "written.tmp").symlink_to(tmp_path / "gone")
    (tmp_path / "program-cache").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(Path, "is_file", lambda file: True)  # as just before
    assert checks.check_cache(str(tmp_path)).text == f"{tmp_path}, 3 MiB"


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    assert checks.check_cache(str(tmp_path)).status == "ok"
    assert checks.check_cache("").status == "note" and checks.check_cache("gs://bucket/cache").status == "ok"
    monkeypatch.setattr(checks.os, "access", lambda folder, mode: False)
    assert checks.check_cache(str(tmp_path / "new")).status == "fix"


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
def test_drivers(monkeypatch, plugin, driver, status, *, text):
    monkeypatch.setattr(devices, "package_version", lambda name: "0.10.2" if name == plugin else "")
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [("NVIDIA H100", driver, 0)])
    monkeypatch.setattr(devices, "run_command_line", lambda command: "no answer within 120 s")
    findings = list(devices.check_devices())
    assert findings[0].status == status and text in findings[0].text
    if plugin:
        assert "jax cannot open them (no answer within 120 s)" in findings[-1].text


def test_a_platform_that_this_machine_lacks(monkeypatch):
    monkeypatch.setattr(devices, "nvidia_gpus", list)
    monkeypatch.setattr(devices, "has_tpu", lambda: False)
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")  # of the process that opens the devices
    (finding,) = devices.check_devices()
    assert finding.status == "fix"
    assert finding.text.startswith("JAX_PLATFORMS=abacus: jax finds no such device (Unable to initialize ")


def test_an_accelerator_that_jax_does_not_see():
    cpu = [{"platform": "cpu", "kind": "cpu", "memory": 0}]
    (finding,) = devices.describe_devices(cpu, [("NVIDIA L4", "580.1", 0)])
    assert finding.status == "fix" and "jaxrl-llm[cuda]" in finding.text


@pytest.mark.parametrize("device", ["accel0", "vfio/0", ""])
def test_a_tpu_without_its_plugin(device, monkeypatch, tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio/vfio").touch()  # the container device, which machines without a TPU have, too
    (tmp_path / device).touch()
    monkeypatch.setattr(devices, "TPU_DEVICES", [f"{tmp_path}/{x[5:]}" for x in devices.TPU_DEVICES])
    cpu = [{"platform": "cpu", "kind": "cpu", "memory": 0}]
    (finding,) = devices.describe_devices(cpu, [])
    assert finding.status == ("fix" if device else "note")
    assert ("pip install 'jaxrl-llm[tpu]'" in finding.text) == bool(device)


def test_huge_pages_that_the_allocator_does_not_request(monkeypatch):
    monkeypatch.setattr(devices.huge_pages, "are_missing", lambda: True)
    (finding,) = devices.check_huge_pages()
    assert finding.status == "note"
    assert "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in finding.text


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
        (finding,) = checks.check_servers(config)
    assert finding.status == "fix" and f"{address} does not answer" in finding.text
