"""The commands that start servers, and their environment."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl_llm.bridge import vllm
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig, flag_value
from jaxrl_llm.rollout.servers import auth

START = """
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(OSError, AttributeError):  # Linux alone has it: 1 is PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the run that started this server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
START_WITH_KEYS = """
import logging, os, runpy, sys
keys = {flag: os.environ[name] for flag, name in FLAGS.items() if os.environ.get(name)}
make = logging.getLogRecordFactory()
def without_keys(*args, **kwargs):
    record = make(*args, **kwargs)
    text = record.getMessage()
    if any(key in text for key in keys.values()):
        for key in keys.values():
            text = text.replace(key, "***")
        record.msg, record.args = text, ()
    return record
logging.setLogRecordFactory(without_keys)
sys.argv[1:] += [word for pair in keys.items() for word in pair]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""  # SGLang takes keys on its command line alone, and logs it: here neither `ps` nor the log shows them
ROUTES_FLAG = "--enable-return-routed-experts"
MEMORY_SAVER = "--enable-memory-saver"
CPU_LORA = ("--lora-backend", "torch_native")  # other backends are GPU kernels
PLUGIN = "jaxrl_vllm_plugin"
MODULES = {
    "vllm_plugin.py": PLUGIN,
    "sglang_loader.py": "jaxrl_sglang_loader",
    "delta.py": "jaxrl_delta",
    "transports/relay.py": "jaxrl_relay",
}
"""Files of bridge/ that run in servers -> their names there."""
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def server_command(
    config: RolloutConfig, servers: ServersConfig, model: Path, port: int, *, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command that starts one server; `servers.flags` come last and override the others."""
    make = _vllm_words if config.engine == "vllm" else _sglang_words
    words = make(config, servers, flags)
    place = ["--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype, "--load-format", "dummy"]
    model_flag = "--model" if config.engine == "vllm" else "--model-path"
    server = [servers.python, *words[0], model_flag, str(model), *place, *words[1]]
    return [sys.executable, "-I", "-c", START, str(os.getpid()), *server, *shlex.split(servers.flags)]


def _sglang_words(
    config: RolloutConfig, servers: ServersConfig, flags: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return SGLang's module, and its flags."""
    module = ("-m", "sglang.launch_server")
    if auth.server_keys():
        module = ("-c", f"FLAGS = {auth.FLAGS}{START_WITH_KEYS}")
    on_cpu = flag_value(shlex.split(servers.flags), "--device") == "cpu"
    return module, [
        *("--max-running-requests", str(config.slots), "--skip-server-warmup"),
        *([MEMORY_SAVER] if servers.colocated else []),
        *flags,
        *(CPU_LORA if "--enable-lora" in flags and on_cpu else []),
    ]


def _vllm_words(
    config: RolloutConfig, servers: ServersConfig, flags: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return vLLM's module, and its flags."""
    return ("-m", "vllm.entrypoints.openai.api_server"), [
        *("--max-num-seqs", str(config.slots), "--logprobs-mode", vllm.LOGPROBS, "--enable-scale-out"),
        *("--generation-config", "vllm", "--weight-transfer-config", json.dumps({"backend": vllm.BACKEND})),
        *flags,
    ]


def server_environment(engine: str, plugins: Path) -> Mapping[str, str]:
    """Return the environment variables of a server, in addition to the run's.

    Args:
        engine: "sglang" or "vllm".
        plugins: folder of `write_plugin`.
    """
    path = os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH", ""))))
    if engine != "vllm":
        return {"PYTHONPATH": path}
    key = auth.server_keys().get("--api-key", "")
    return {**VLLM_ENVIRONMENT, "PYTHONPATH": path, **({"VLLM_API_KEY": key} if key else {})}


def write_plugin(folder: Path) -> Path:
    """Write vLLM's plugin, as an installed package, and SGLang's loader: a folder for servers' PYTHONPATH."""
    info = folder / "jaxrl_vllm-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for file, name in MODULES.items():
        shutil.copyfile(Path(vllm.__file__).parent / file, folder / f"{name}.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxrl-vllm\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\njaxrl = {PLUGIN}:register\n")
    return folder
