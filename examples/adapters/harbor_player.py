"""Plays Harbor task folders in bubblewrap, without docker: tasks that this machine's programs suffice for.

    python examples/adapters/harbor_player.py --gateway http://127.0.0.1:8000

A row's column `task` is the folder: task.toml, instruction.md, environment/, tests/test.sh. The policy reads
the instruction, and runs commands by the tool `bash` until a turn calls none. They see /app and, read-only,
the machine's programs; no network, no tests. Then tests/test.sh writes /logs/verifier/reward.txt or .json.
"""

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path

from gateway_worker import EpisodeError, LimitError, RemoteTrajectory, parser, run_worker

MAX_SHOWN, MAX_PRINTED = 4000, 1 << 20  # bytes of a command's output that the policy reads, or that end it
LIMITS = 'ulimit -v 4194304 -f 1048576 -n 256; exec bash -c "$1"'  # 4 GB a process, 1 GB a file
BOX = """
bwrap --unshare-all --die-with-parent --new-session --clearenv --dev /dev --proc /proc --tmpfs /tmp
--tmpfs /root --setenv HOME /root --setenv PATH /usr/local/bin:/usr/bin:/bin --ro-bind /usr /usr
--ro-bind-try /bin /bin --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64 --ro-bind /etc/passwd /etc/passwd
--ro-bind-try /etc/alternatives /etc/alternatives
"""
FETCHES = re.compile(r"(?m)^\s*(if +|sudo +)*((apt|apt-get|curl|wget|uvx?|pip3?|npm|npx|git clone) .*)")
KNOWN = re.compile(r"(#.*|FROM .*|WORKDIR /app/?|COPY (\./?|\*) (\./?|/app/?))?", re.IGNORECASE)
ARGUMENTS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Runs a shell command in /app.", "parameters": ARGUMENTS}
TOOLS = [{"type": "function", "function": BASH}]


class Box:
    """The task and the folders of one trajectory, and the commands that run in them."""

    def __init__(self, folder: Path, task: Path):
        self.folder, self.task = folder, task
        self.config = tomllib.loads((task / "task.toml").read_text())
        environment = self.config.get("environment", {})
        if self.config.get("steps") or environment.get("docker_image") or environment.get("mcp_servers"):
            raise EpisodeError(f"{task}: tasks with steps, MCP servers or an image are not played here")
        if found := FETCHES.search((task / "tests/test.sh").read_text()):
            raise EpisodeError(f"{task}/tests/test.sh: no network here, so that {found[2]!r:.80} would fail")
        recipe = task / "environment/Dockerfile"
        lines = recipe.read_text().splitlines() if recipe.exists() else []
        if wrong := next((line for line in lines if not KNOWN.fullmatch(line.strip())), ""):
            raise EpisodeError(f"{recipe}: only FROM, WORKDIR /app, COPY . . work here, not {wrong!r:.80}")
        (folder / "app").mkdir()
        (folder / "logs/verifier").mkdir(parents=True)
        if any(line.upper().startswith("COPY") for line in lines):
            ignored = shutil.ignore_patterns("Dockerfile", ".dockerignore")
            shutil.copytree(task / "environment", folder / "app", dirs_exist_ok=True, ignore=ignored)

    async def run(self, command: str, seconds: float, *, tests: bool = False) -> tuple[str, int | None]:
        """Return the end of a command's output, and its exit code; None if it was stopped."""
        binds = ["--bind", f"{self.folder}/app", "/app", "--chdir", "/app"]
        if tests:
            binds += ["--ro-bind", f"{self.task}/tests", "/tests", "--bind", f"{self.folder}/logs", "/logs"]
        words = [*BOX.split(), *binds, "bash", "-c", LIMITS, "bash", command]
        process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        text, code = b"", None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while len(text) < MAX_PRINTED and (chunk := await process.stdout.read(1 << 16)):
                        text += chunk
                    code = await process.wait() if len(text) < MAX_PRINTED else None
        finally:
            if process.returncode is None:
                process.kill()  # and with it all that it has started
                await process.wait()
        return text[-MAX_SHOWN:].decode(errors="replace"), code

    async def verify(self) -> float:
        """Run the tests, and return the reward that they write."""
        seconds = self.config.get("verifier", {}).get("timeout_sec", 600.0)
        output, code = await self.run("bash /tests/test.sh", seconds, tests=True)
        results, reward = self.folder / "logs/verifier", None
        with contextlib.suppress(OSError, ValueError, TypeError):
            whole, one = results / "reward.json", results / "reward.txt"
            found = json.loads(whole.read_text()) if whole.exists() else {"reward": one.read_text()}
            reward = float(next(iter(found.values())) if len(found) == 1 else found.get("reward"))
        if reward is None or code is None:
            raise EpisodeError(f"{self.task}: the tests give no reward (exit code {code}): {output[-300:]}")
        return reward


async def play_task(trajectory: RemoteTrajectory) -> float:
    """Play a task, and return its reward."""
    task = Path(trajectory.row.get("task") or "").resolve()
    if not (task / "task.toml").is_file():
        raise EpisodeError(f"the row: no {task}/task.toml")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        box, loop = Box(Path(folder), task), asyncio.get_running_loop()
        end = loop.time() + (box.config.get("agent", {}).get("timeout_sec") or 600.0)
        messages = [{"role": "user", "content": (task / "instruction.md").read_text()}]
        with contextlib.suppress(LimitError):
            while (left := end - loop.time()) > 0:
                messages.append(await trajectory.chat(messages, tools=TOOLS))
                if not (calls := messages[-1].get("tool_calls")):
                    break
                messages += [await _answer(box, call, left) for call in calls]
        return await box.verify()


async def _answer(box: Box, call: dict, seconds: float) -> dict[str, str]:
    try:
        output, code = await box.run(json.loads(call["function"]["arguments"])["command"], seconds)
        text = f"{output}\n[exit code {code}]" if code else output if code == 0 else f"{output}\n[stopped]"
    except (ValueError, KeyError, TypeError) as error:
        text = f"error: the tool is bash, with a text `command`: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


if __name__ == "__main__":
    run_worker(play_task, parser(__doc__).parse_args())
