"""Mistakes in environments and tools of the user, found in a process of their own before a model is loaded.

Training itself runs environments in its own process; this first try cannot hang or end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.python_file import ENV_KEY, TOOLS_KEY, load_env, load_tool
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import end_with_parent, explain, split_name

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrl_llm.envs.check import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
CHECKED_ROWS = 4
MAX_MESSAGE = 1 << 14  # bytes


def check_env(config: EnvConfig, examples: Sequence[Example] = (), seconds: float = 120.0) -> None:
    """Load the environment, or the tools that are files of the user, and reset it for the first rows.

    Args:
        examples: the first rows.
        seconds: that it may take.

    Raises:
        UserError: what cannot be loaded, or fails for every row, with file and line.
    """
    files = [name for name in config.tools if split_name(name)[0].suffix == ".py"]
    if not config.name and not files:
        return
    what = f"--{ENV_KEY} {config.name}" if config.name else f"--{TOOLS_KEY} {' '.join(files)}"
    reader, writer = os.pipe()
    with open(reader, "rb") as replies, tempfile.TemporaryFile() as output:
        process = _start(writer, output)
        try:
            process.communicate(pickle.dumps((config.name, files, list(examples[:CHECKED_ROWS]))), seconds)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{what}: loading it, and reset for the first rows, took over {seconds:g} s"
            ) from None
        finally:
            _kill(process)
        message = replies.read(MAX_MESSAGE).decode(errors="replace")
        output.seek(-min(output.tell(), 200), os.SEEK_END)
        printed = " ".join(output.read().decode(errors="replace").split())
    if message != "ok":
        raise UserError(message or f"{what}: its process ended with code {process.returncode}: {printed}")


def _start(writer: int, output: BinaryIO) -> subprocess.Popen:
    """Start the process; it alone keeps `writer` open."""
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    command = [sys.executable, "-P", "-c", BOOT, path, str(writer), str(os.getpid())]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,  # no pipe: what the user's code starts may hold it open
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            env={**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    finally:
        os.close(writer)


def _kill(process: subprocess.Popen) -> None:
    """Kill what is left of the process and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(fd: int, parent: int) -> None:
    """Load what the trainer named on standard input, and write "ok" or what is wrong to `fd`."""
    end_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(fd, False)
    name, tools, examples = pickle.load(sys.stdin.buffer)
    try:
        for tool in tools:
            load_tool(tool)
        if name:
            _reset(name, load_env(name), examples)
    except UserError as error:
        os.write(fd, str(error).encode(errors="replace")[:MAX_MESSAGE])
    else:
        os.write(fd, b"ok")
    sys.stdout.flush()
    os._exit(0)  # threads of the user's may run


def _reset(name: str, env: Any, examples: Sequence[Example]) -> None:
    """Start a conversation about each row; refuse an environment that fails for all of them."""
    problems = []
    for example in examples:
        try:
            asyncio.run(env.reset(example, 0))
            return
        except (Exception, SystemExit) as error:
            path = split_name(name)[0].resolve()
            problems.append(str(error) if isinstance(error, UserError) else explain(error, path))
    if problems:
        tried = f"reset fails for every row that was tried ({len(problems)})"
        raise UserError(f"--{ENV_KEY} {name}: {tried}: {problems[0]}")
