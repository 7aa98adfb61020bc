"""Checks of this machine and of a recipe on it, as `doctor` prints them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxrl_llm import models
from jaxrl_llm.bridge.servers import ServerKind
from jaxrl_llm.builders.exports import kept_exports
from jaxrl_llm.builders.pin import map_models
from jaxrl_llm.checkpoint.state import saved_arrays
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.tables import EXTRA, library_of
from jaxrl_llm.envs.config import SandboxConfig
from jaxrl_llm.envs.tools.sandbox import Sandbox
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.gguf import converted_folder, gguf_cache, read_gguf_config
from jaxrl_llm.hf.hub import SUFFIX, hub_model, hub_name_problem, parse_hub_name
from jaxrl_llm.host.devices import available_bytes
from jaxrl_llm.host.files import cache_folder
from jaxrl_llm.host.start import COMPILED, find_cluster
from jaxrl_llm.models.lora import base_config, trained_state
from jaxrl_llm.plan.models import UnknownModelError, planned_stage
from jaxrl_llm.report.loggers import EXTRAS
from jaxrl_llm.rewards.load import LIBRARIES, resolve_reward
from jaxrl_llm.rewards.sample import RewardLoadError
from jaxrl_llm.rollout.servers.auth import request_headers
from jaxrl_llm.rollout.servers.health import read_addresses
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.sharding.rules import bytes_per_device
from jaxrl_llm.tools.devices import GIB, Finding, check_devices, check_versions, run_command_line
from jaxrl_llm.tools.host_memory import all_bytes, check_run_memory, on_one_cpu
from jaxrl_llm.user_file import expand_home

MIN_SHM = GIB  # NCCL and servers exchange data in shared memory
MIN_MEMORY = 4 * GIB
MIN_DISK = 100 * 2**20  # less is a full disk: a toy model's checkpoints alone take some megabytes
HUB_TIMEOUT = 10.0  # seconds
MAX_SKEW = 2.0  # seconds between this machine and the file system


def examine(config: TrainConfig | None) -> Iterator[Finding]:
    """Yield the findings, cheap checks first.

    Args:
        config: of the run that is to start; None = none in particular.
    """
    run_dir = Path(config.run_dir if config else ".")
    yield check_python()
    yield from check_versions()
    yield report_host_memory()
    yield from [check_run_memory(config)] if config else []
    yield check_shared_memory(config is not None and config.rollout.engine != "native")
    yield check_cache(os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache_folder(COMPILED))))
    yield check_clock(existing_parent(run_dir))
    yield from check_processes()
    yield check_ports(os.environ)
    yield from check_run_disk(config) if config else [check_disk(existing_parent(run_dir), 0)]
    yield from check_hub(hub_names(config)) if config else []
    yield from check_extras(needed_packages(config) if config else [])
    yield check_sandbox(config is not None and any(tool.startswith("python") for tool in config.env.tools))
    yield from check_servers(config)
    yield from check_devices()


def check_python() -> Finding:
    """Check the interpreter."""
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("python", "note", f"{text}: Linux is the system that is tested")
    return Finding("python", "ok", text)


def report_host_memory() -> Finding:
    """Check the memory that is available to this process, of the machine or its container."""
    total = available_bytes() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{total / GIB:.1f} GiB free, {os.cpu_count()} processors"
    if total < MIN_MEMORY:
        return Finding("memory", "note", f"{text}: enough for toy models only")
    return Finding("memory", "ok", text)


def check_shared_memory(needed: bool) -> Finding:
    """Check the size of /dev/shm, which containers limit to 64 MB by default."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "note", "absent: NCCL and servers exchange data there")
    if size < MIN_SHM:
        fix = f"{size / 2**20:.0f} MiB; NCCL and servers need {MIN_SHM // GIB} GiB: docker run --shm-size=16g"
        return Finding("/dev/shm", "fix" if needed else "note", fix)
    return Finding("/dev/shm", "ok", f"{size / GIB:.1f} GiB")


def check_cache(folder: str) -> Finding:
    """Check that compiled programs can be kept."""
    if not folder:
        return Finding("compilation cache", "note", "off (JAX_COMPILATION_CACHE_DIR is empty)")
    if "://" in folder:
        return Finding("compilation cache", "ok", folder)
    place = existing_parent(Path(folder).expanduser())
    if not os.access(place, os.W_OK):
        fix = f"{place} cannot be written to, so each start compiles again: set JAX_COMPILATION_CACHE_DIR"
        return Finding("compilation cache", "fix", fix)
    size = 0
    for file in Path(folder).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another command renames or deletes it
            size += file.stat().st_size * file.is_file()
    text, free = f"{folder}, {size / 2**20:.0f} MiB", shutil.disk_usage(place).free
    if free < MIN_DISK:
        fix = f"{text}, but {_size(free)} are free there, so each start compiles again: free some"
        return Finding("compilation cache", "fix", f"{fix}, or set JAX_COMPILATION_CACHE_DIR")
    return Finding("compilation cache", "ok", text)


def check_clock(folder: Path) -> Finding:
    """Compare the clock with the file system's, which may be another machine's."""
    now = datetime.datetime.now(datetime.UTC)
    if now.year < 2026:
        return Finding("clock", "fix", f"{now:%Y-%m-%d}: certificates and logs need the date: timedatectl")
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            before, written, after = time.time(), os.stat(file.name).st_mtime, time.time()
    except OSError:
        return Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC")
    if not before - MAX_SKEW <= written <= after + MAX_SKEW:
        skew = f"the file system of {folder} is {written - after:+.0f} s off"
        return Finding("clock", "note", f"{skew}: synchronise both machines (chronyc makestep)")
    return Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC")


def check_processes() -> Iterator[Finding]:
    """Check that the environment describes the processes of a run, if it names several."""
    try:
        cluster = find_cluster()
    except UserError as error:
        yield Finding("processes", "fix", str(error))
        return
    if cluster:
        text = f"this is {cluster.process_id} of {cluster.num_processes}, as {cluster.method} says"
        yield Finding("processes", "ok", text)


def check_ports(environment: dict[str, str] | os._Environ) -> Finding:
    """Check that local ports can be opened; on process 0 the coordinator's."""
    address = environment.get("JAX_COORDINATOR_ADDRESS", "")
    end = address.rpartition(":")[2]
    port = int(end) if end.isdigit() and environment.get("JAX_PROCESS_ID") == "0" else 0
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port) if port else ("127.0.0.1", 0))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", "ports are at most 65535")
        fix = f"port {port or 'on 127.0.0.1'} cannot be opened ({reason})"
        return Finding("ports", "fix", f"{fix}: end the process that holds it (ss -ltnp), or choose another")
    return Finding("ports", "ok", f"{port} for the coordinator is free" if port else "can be opened")


def check_disk(folder: Path, needed: int) -> Finding:
    """Compare free space with the bytes that the recipe writes.

    Args:
        needed: bytes; 0 = no recipe was given.
    """
    if not os.access(folder, os.W_OK):
        return Finding("disk", "fix", f"{folder} cannot be written to: set --run_dir")
    free = shutil.disk_usage(folder).free
    text = f"{_size(free)} free in {folder}"
    if needed:
        text += f"; the recipe writes {_size(needed)}"
    if not needed and free < MIN_DISK:
        return Finding("disk", "fix", f"{text}: free some, or set --run_dir")
    if needed > free:
        return Finding("disk", "fix", f"{text}: free some, lower --checkpoint.keep, or set --run_dir")
    return Finding("disk", "ok", text)


def check_run_disk(config: TrainConfig) -> Iterator[Finding]:
    """Compare free space with the size of a recipe's run directory and converted GGUF files."""
    folder, written = existing_parent(Path(config.run_dir)), 0
    try:
        written = written_bytes(config)
        yield check_disk(folder, written)
    except UnknownModelError as error:
        finding = check_disk(folder, 0)
        unknown = (
            f"the size of {error.name} is not known, nor the bytes that the recipe writes: give an existing "
            "folder instead (--model.path FOLDER)"
        )
        yield finding if finding.status == "fix" else Finding("disk", "note", f"{finding.text}; {unknown}")
    if converted := converted_bytes(config):
        cache = existing_parent(gguf_cache())
        shared = written if os.stat(cache).st_dev == os.stat(folder).st_dev else 0
        free = shutil.disk_usage(cache).free
        text = f"{_size(free)} free in {cache}; converting the GGUF file takes {_size(converted)}"
        if converted + shared > free:
            yield Finding("disk", "fix", f"{text}: free some, or set XDG_CACHE_HOME to a larger disk")
        else:
            yield Finding("disk", "ok", text)


def converted_bytes(config: TrainConfig) -> int:
    """Return the bytes that converting the recipe's GGUF files takes, 4 a weight; 0 = all are converted.

    A file of the hub is not counted: its size is not known before it is downloaded.
    """
    files = {expand_home(name) for name in model_names(config)}
    files = [file for file in files if file.suffix == SUFFIX and file.is_file()]
    if not files or not is_installed("gguf"):  # `check_extras` names the fix
        return 0
    new = [file for file in files if not (converted_folder(file) / "config.json").is_file()]
    return sum(bytes_per_device(models.abstract(read_gguf_config(file))) for file in new)


def model_names(config: TrainConfig) -> list[str]:
    """Return the names of the recipe's models and tokenizers."""
    names: list[str] = []
    map_models(config, lambda name: names.append(name) or name)
    return list(filter(None, names))


def hub_names(config: TrainConfig) -> list[str]:
    """Return the recipe's models and data sets of the hub, each once: "org/model", "hub:org/data"."""
    models_ = [name for name in model_names(config) if hub_model(name)]
    data = [source.path for source in config.all_sources if source.path.startswith("hub:")]
    return list(dict.fromkeys([*models_, *data]))


def check_hub(names: Sequence[str]) -> Iterator[Finding]:
    """Check that models and data sets of the hub can be had: from its cache, or else from the network."""
    if wrong := "; ".join(filter(None, map(hub_name_problem, names))):
        yield Finding("hub", "fix", wrong)
        return
    absent = [name for name in names if not is_cached(name)]
    problem = hub_problem() if absent else ""
    if problem:
        hub = parse_hub_name(absent[0].removeprefix("hub:"))
        fix = f"fetch it on a machine with one (hf download {hub.repo if hub else absent[0]}), "
        fix += "or give a folder or file"
        text = f"{', '.join(absent)}: not in the cache, and the hub cannot be reached ({problem}): {fix}"
        # the cache of data sets has its own form, which `datasets` reads without a network
        only_data = all(name.startswith("hub:") for name in absent)
        yield Finding("hub", "note" if only_data else "fix", text)
    elif names:
        yield Finding("hub", "ok", f"{', '.join(names)}: {'the hub answers' if absent else 'in the cache'}")


def is_cached(name: str) -> bool:
    """Return whether the hub's cache has a model; False for data sets."""
    from huggingface_hub import try_to_load_from_cache  # slow, and needed for names of the hub only

    hub = parse_hub_name(name)
    if hub is None:
        return False
    return isinstance(try_to_load_from_cache(hub.repo, hub.file or "config.json", revision=hub.revision), str)


def hub_problem() -> str:
    """Return why the hub cannot be reached; "" = it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT)
    except urllib.error.HTTPError:
        return ""  # it answers
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""


def needed_packages(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (module, extra that brings it, setting that needs it) of the packages that a recipe needs."""
    sources = config.all_sources
    gym = [source.path for source in sources if source.path.startswith("gym:")]
    yield from (("reasoning_gym", "tasks", path) for path in gym[:1])
    libraries = {source.path: library_of(source.path) for source in sources}
    yield from ((library, EXTRA, path) for path, library in libraries.items() if library)
    rewards = {_reward_of(name, source.path) for name in config.reward.used for source in sources}
    yield from ((LIBRARIES[name], "tasks", f"reward {name}") for name in sorted(rewards & LIBRARIES.keys()))
    yield from (("gguf", "gguf", name) for name in model_names(config) if name.endswith(SUFFIX))
    yield from (("mcp", "mcp", f"--env.tools {name}") for name in config.env.tools if name.startswith("mcp:"))
    yield from ((name, name, f"--log.{name}") for name in EXTRAS if getattr(config.log, name))


def _reward_of(name: str, source: str) -> str:
    """Return the reward of a source; "" = no built-in one fits."""
    try:
        return resolve_reward(name, source, {})
    except RewardLoadError:
        return ""


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_extras(packages: Iterable[tuple[str, str, str]]) -> Iterator[Finding]:
    """Check that the packages of the recipe's extras can be imported; see `needed_packages`."""
    found = []
    for module, extra, setting in dict.fromkeys(packages):
        if is_installed(module):
            found.append(module)
        else:
            text = f"{module} is not installed, which {setting} needs: pip install 'jaxrl-llm[{extra}]'"
            yield Finding("extras", "fix", text)
    if found:
        yield Finding("extras", "ok", ", ".join(dict.fromkeys(found)))


def written_bytes(config: TrainConfig) -> int:
    """Return the bytes that a run has on the disk: checkpoints, one more while it is written, exports."""
    stage = planned_stage(*on_one_cpu(config))
    saved = all_bytes(saved_arrays(config.checkpoint, trained_state(stage.abstract_state())))
    kept = config.checkpoint.keep + (config.checkpoint.keep_best if config.checkpoint.best_metric else 0) + 1
    weights = bytes_per_device(models.abstract(base_config(stage.policy.model))) // 4
    exported = weights * jnp.dtype(config.model.dtype).itemsize * (2 if config.optim.ema else 1)
    return kept * saved + (1 + kept_exports(config.checkpoint, config.steps)) * exported


def check_sandbox(needed: bool) -> Finding:
    """Run a program in the sandbox of the tool `python`."""
    try:
        output = asyncio.run(Sandbox(SandboxConfig()).run("print(1 + 1)"))
    except UserError as error:
        return Finding("sandbox", "fix" if needed else "note", f"the tool `python` cannot run: {error}")
    if output.strip() != "2":
        return Finding("sandbox", "fix" if needed else "note", f"1 + 1 gave {output[:200]!r} in the sandbox")
    return Finding("sandbox", "ok", "bubblewrap runs programs of the tool `python`")


def check_servers(config: TrainConfig | None) -> Iterator[Finding]:
    """Check the servers of the recipe: their interpreter, and servers that run already."""
    python = config.servers.python if config else sys.executable
    needed = config is not None and config.rollout.engine != "native"
    package = config.rollout.engine if needed else "sglang"
    if not needed or config.rollout.launch:
        found = f"for name in ({package!r}, '{package}-cpu') for each in m.distributions(name=name)"
        code = f"import importlib.metadata as m; print(*(each.version {found}))"
        done = run_command_line([python, "-c", code])
        if isinstance(done, str) or done.returncode or not done.stdout.strip():
            text = f"not installed for {python}: pip install {package} there, or set --servers.python"
            yield Finding(package, "fix" if needed else "note", text)
        else:
            yield Finding(package, "ok", f"{done.stdout.strip()} in {python}")
    for address in _addresses(config) if needed else ():
        yield _check_server(address, KINDS[package])


def _addresses(config: TrainConfig) -> Iterator[str]:
    for name in config.rollout.servers:
        yield from read_addresses(Path(name[1:])) if name.startswith("@") else (name,)


def _check_server(address: str, kind: ServerKind) -> Finding:
    request = urllib.request.Request(
        address.rstrip("/") + kind.up_route, headers=request_headers(kind.up_route)
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            model = json.loads(reply.read() or "{}").get("model_path", "a model")
    except (OSError, ValueError) as error:
        return Finding("server", "fix", f"{address} does not answer ({error}): start it")
    return Finding("server", "ok", f"{address} serves {model}")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
