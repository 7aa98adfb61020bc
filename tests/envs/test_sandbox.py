"""Programs that try to get out of the sandbox (each is contained and answered in words), and its absence."""

import asyncio
import contextlib
import ensurepip
import functools
import json
import os
import pkgutil
import shutil
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl_llm.envs.calls import ToolEnv
from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.envs.env import ToolError, Turn
from jaxrl_llm.envs.tools.sandbox import Python, Sandbox, SandboxError
from jaxrl_llm.envs.tools.syscalls import ARCHITECTURES, REFUSED, refuse_filter
from jaxrl_llm.ranges import problems


def why_not() -> str:
    """The reason why there is no sandbox here; "" = there is one."""
    try:
        Sandbox(SandboxConfig())
    except SandboxError as error:
        return str(error)
    return ""


WHY_NOT = why_not()
contained = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SMALL = SandboxConfig(seconds=60, cpu_seconds=2, memory_mb=256, disk_mb=4)


sandbox_of = functools.cache(Sandbox)  # making one runs a program, to see that it works


def run(code: str, config: SandboxConfig = SMALL) -> str:
    """Return what the model reads, also of a program that failed."""

    async def answer() -> str:
        try:
            return await sandbox_of(config).run(code)
        except ToolError as error:
            return str(error)

    return asyncio.run(answer())


def parents() -> dict[int, int]:
    """Process -> its parent, of all that run."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(") ")
            state, parent = rest.split()[:2]
            if state != "Z":
                found[int(name.split()[0])] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    above, found = parents(), {pid}
    while more := {child for child, parent in above.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_until(true, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contained
def test_a_program_is_answered_with_what_it_prints():
    assert run("import sys\nprint('out')\nprint('err', file=sys.stderr)") == "out\nerr"
    assert run("x = 1") == "[the program printed nothing]"
    failed = run("print('so far')\n1 / 0")
    assert failed.startswith("so far\nTraceback") and failed.endswith("division by zero\n[exit code 1]")
    assert "SyntaxError" in run("print(")
    assert run("print(input())").endswith("EOFError: EOF when reading a line\n[exit code 1]")
    assert "surrogates not allowed" in run("print('\\ud800')") and run("print('\ud800')") == "?"
    assert run("x" * 11, SandboxConfig(code_chars=10)) == "the program is longer than 10 characters"


@contained
def test_there_is_no_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0jaxrl-{os.getpid()}")  # an abstract name lives in the network's namespace, not on disk
        unix.listen()
        tcp.settimeout(0)
        said = run(
            "import socket\n"
            f"for place in (('127.0.0.1', {tcp.getsockname()[1]}), ('1.1.1.1', 53)):\n"
            "    try: socket.create_connection(place, 2); print('connected')\n"
            "    except OSError as error: print('no', error.errno is not None)\n"
            "try: socket.getaddrinfo('example.com', 80); print('connected')\n"
            "except OSError: print('no True')\n"
            f"try: socket.socket(socket.AF_UNIX).connect('\\0jaxrl-{os.getpid()}'); print('connected')\n"
            "except OSError: print('no True')\n"
        )
        assert said == "\n".join(["no True"] * 4)
        with pytest.raises(BlockingIOError):
            tcp.accept()


@contained
def test_there_are_no_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-host")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret-of-the-host")
    said = run(
        "import os\n"
        "print(sorted(os.environ))\n"
        f"for path in {[str(secret), f'{Path.home()}/.bashrc', '/etc/passwd', '/sys', __file__]!r}:\n"
        "    print(os.path.exists(path))\n"
        "print(os.listdir('/tmp'), os.listdir('/etc'), os.path.exists('/proc'), os.getuid())\n"
    )
    lines = said.splitlines()
    assert "secret" not in said and "HF_TOKEN" not in said
    assert lines[1:6] == ["False"] * 5
    assert lines[6] == "['main.py'] ['ld.so.cache'] False 65534"


@contained
def test_it_holds_no_file_of_ours_open():
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        said = run(
            "import os\nfor fd in range(3, 64):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass\n"
        )
    assert said == "[the program printed nothing]"


@contained
def test_only_pairs_of_sockets_exist():
    """AF_VSOCK reaches the host of a virtual machine, AF_ALG and AF_NETLINK its kernel; one that listens
    holds the buffers of thousands of connections, which are no memory of the program."""
    output = run(
        "import socket\n"
        "made = []\n"
        "for family in range(64):\n"
        "    for make in (socket.socket, socket.socketpair):\n"
        "        for kind in range(1, 6):\n"
        "            try: made.append((family, make(family, kind)))\n"
        "            except OSError as error:\n"
        "                if error.errno not in (1, 94, 97): print(family, error)\n"
        "print({(family, bool(pair[1])) for family, pair in made})"
    )
    assert output == "{(1, True)}"
    assert run("import asyncio\nasync def main(): print(6 * 7)\nasyncio.run(main())") == "42"


@contained
def test_buffers_of_pipes_and_sockets_are_bounded():
    output = run(
        "import fcntl, os, socket\n"
        "held = 0\n"
        "def fill(writer):\n"
        "    global held\n"
        "    os.set_blocking(writer, False)\n"
        "    try:\n"
        "        while True: held += os.write(writer, bytes(1 << 20))\n"
        "    except BlockingIOError: pass\n"
        "kept = []\n"
        "try:\n"
        "    while True:\n"
        "        kept.append(socket.socketpair())\n"
        "        for end in kept[-1]: fill(end.fileno())\n"
        "except OSError as error: print(error.strerror)\n"
        "print(len(kept), held)"
    )
    why, counts = output.splitlines()
    pairs, held = map(int, counts.split())
    assert why == "Too many open files" and pairs <= 32 and held < 32 << 20


@contained
def test_only_the_standard_library_can_be_imported():
    tops = [Path(top, lib) for top in ("/", "/usr", "/usr/local") for lib in ("lib", "lib64")]
    found = [str(folder) for top in tops for folder in top.glob("python*/*-packages")]
    wheels = [str(wheel) for wheel in Path(ensurepip.__file__).parent.glob("_bundled/*.whl")]  # of pip
    folders = [*site.getsitepackages([sys.base_prefix]), *found, *wheels]
    names = [module.name for module in pkgutil.iter_modules(folders)]
    output = run(
        f"import importlib.util, sys\nsys.path += {folders!r}\n"
        f"print([name for name in {names!r} if importlib.util.find_spec(name)])\n"
        "import decimal, json, sqlite3, statistics, unittest\nexit()"
    )
    assert output == "[]"


@contained
def test_a_fork_bomb_and_threads_do_not_start():
    before = len(parents())
    said = run(
        "import os, threading\n"
        "made = 0\n"
        "for start in (os.fork, threading.Thread(target=print).start) * 10_000:\n"
        "    try: start(); made += 1\n"
        "    except (OSError, RuntimeError): pass\n"
        "print(made)\n"
        "import subprocess\n"
        "subprocess.run(['true'])"
    )
    assert said.startswith("0\n") and "PermissionError" in said
    assert len(parents()) < before + 50


@contained
def test_the_kernels_other_doors_are_closed():
    column = list(ARCHITECTURES).index(os.uname().machine)
    numbers = {name: pair[column] for name, pair in REFUSED.items() if pair[column] is not None}
    said = run(
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers!r}.items():\n"
        "    print(name, libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())\n"
        "remount_writable = 32\n"
        "print('mount', libc.mount(None, b'/', None, remount_writable, None), ctypes.get_errno())\n"
    )
    assert said.splitlines() == [f"{name} -1 1" for name in (*numbers, "mount")]


@contained
def test_memory_is_bounded():
    assert run("x = bytearray(100 << 30)").endswith("MemoryError\n[exit code 1]")
    assert "MemoryError" in run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    said = run(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    )
    assert "not allowed to raise maximum limit" in said


FILL = """
import os
written, folders = 0, ["/dev/shm", "/var/tmp", "/run"]
for folder, below, _ in os.walk("/"):
    folders.append(folder)
    if folder.count("/") > 1 and not PREFIX.startswith(folder):
        below.clear()
for folder in folders:
    for i in range(20):
        try:
            with open(f"{folder}/fill{i}", "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            if error.errno not in (27, 28):
                break
print(PREFIX in folders, written)
for remove in (os.__file__, HOST):
    try: os.remove(remove); print("removed")
    except OSError as error: print(error.strerror)
"""


@contained
def test_writing_is_bounded_and_only_in_its_own_folder(tmp_path):
    (host := tmp_path / "host.txt").write_text("untouched")
    prefix = str(Path(sys.base_prefix).resolve() / "lib")
    said = run(f"PREFIX, HOST = {prefix!r}, {str(host)!r}\n{FILL}").splitlines()
    walked, written = said[0].split()
    assert walked == "True" and 3 << 20 < int(written) <= SMALL.disk_mb << 20
    assert said[1:] == ["Read-only file system", "No such file or directory"]
    assert host.read_text() == "untouched" and os.listdir(tmp_path) == ["host.txt"]
    assert Path(os.__file__).exists()


@contained
def test_files_are_bounded_and_the_privilege_for_it_is_gone():
    if not sandbox_of(SMALL).limits_files:
        pytest.skip("this kernel lets no sandbox limit them")
    output = run(
        "import ctypes, os\n"
        "made = 0\n"
        "try:\n"
        "    while True:\n"
        "        os.mkdir(f'/tmp/{made}') if made % 2 else open(f'/tmp/{made}', 'x').close()\n"
        "        made += 1\n"
        "except OSError as error: print(made, error.strerror)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 38, b'nr_inodes=0,size=1g'), ctypes.get_errno())\n"
        "print(*[libc.prctl(47, 1, cap, 0, 0) for cap in range(41)])\n"  # PR_CAP_AMBIENT_IS_SET
        "words = (ctypes.c_uint32 * 6)()\n"
        "print(libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), words), *words)\n",
        replace(SMALL, max_files=100),
    )
    assert output.splitlines() == [
        "100 No space left on device",
        "-1 1",
        " ".join(["0"] * 41),
        "0 0 0 0 0 0 0",
    ]


@contained
@pytest.mark.parametrize("code", [3, 127, 130, 137, 152, 193, 255])
def test_an_exit_code_is_told_as_it_is(code):
    assert run(f"import sys; sys.exit({code})") == f"[exit code {code}]"
    assert run(f"import os; os._exit({code})") == f"[exit code {code}]"


@contained
def test_a_signal_is_told_as_a_signal():
    assert run("import os; os.kill(os.getpid(), 11)") == "[killed by signal 11]"
    assert run("import os; os.kill(os.getppid(), 9)") == "[killed by signal 9]"


@contained
def test_an_endless_loop_ends():
    config = SandboxConfig(seconds=100, cpu_seconds=1)
    assert run("print('on')\nwhile True: pass", config) == "on\n[stopped after 1 s of processor time]"
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(ignoring, config) == "[killed by signal 9]"


@contained
def test_a_sleeper_that_ignores_signals_ends():
    code = (
        "import os, signal, time\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "for process in (-1, 0, os.getppid(), os.getpid()):\n"
        "    try: os.kill(process, signal.SIGTERM)\n"
        "    except OSError: pass\n"
        "print('still here')\n"
        "time.sleep(1000)"
    )
    before = set(descendants(os.getpid()))  # of other tests in this process
    assert run(code, SandboxConfig(seconds=2.5)) == "still here\n[stopped after 2.5 s]"
    assert wait_until(lambda: set(descendants(os.getpid())) <= before)


@contained
def test_of_much_output_the_two_ends_are_kept():
    said = run("print('a' * 5_000_000 + 'z' * 5_000_000, end='')", SandboxConfig(output_bytes=1000))
    assert said == "a" * 500 + "\n[9999000 bytes left out]\n" + "z" * 500
    flood = run("while True: print('x' * 100_000)", SandboxConfig(output_bytes=1000))
    assert (
        flood.startswith("x" * 500) and flood.endswith("[stopped after printing 16 MB]") and len(flood) < 1200
    )


PARENT = """
import asyncio
from jaxrl_llm.envs.config import SandboxConfig
from jaxrl_llm.envs.tools.sandbox import Sandbox
sandbox = Sandbox(SandboxConfig(seconds=100, cpu_seconds=100))
print("ready", flush=True)
asyncio.run(sandbox.run("import signal\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nwhile True: pass"))
"""


@contained
def test_it_does_not_outlive_its_parent():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout.readline() == b"ready\n"
        assert wait_until(lambda: len(descendants(parent.pid)) >= 3)  # bwrap, its init, the program
        family = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until(lambda: not family & parents().keys())


@contained
def test_a_cancelled_call_leaves_nothing_behind():
    before = set(descendants(os.getpid()))  # of other tests in this process

    async def cancel() -> None:
        call = asyncio.create_task(Sandbox(SMALL).run("while True: pass"))
        while len(set(descendants(os.getpid())) - before) < 3:
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(asyncio.wait_for(cancel(), 20))
    assert wait_until(lambda: set(descendants(os.getpid())) <= before)


@contained
def test_calls_run_side_by_side_up_to_the_limit(monkeypatch):
    running, most = set(), 0
    run = Sandbox.run

    async def counted(sandbox, code):
        nonlocal most
        running.add(asyncio.current_task())
        most = max(most, len(running))
        try:
            return await run(sandbox, code)
        finally:
            running.remove(asyncio.current_task())

    monkeypatch.setattr(Sandbox, "run", counted)
    env = ToolEnv({"python": Python(ToolsConfig(SandboxConfig(concurrent=2)))}, "hermes", 30.0)
    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    turn = Turn(f"<tool_call>{call}</tool_call>" * 4, [], 1, False, read=str)
    step = asyncio.run(env.step(None, turn))
    assert [message["content"] for message in step.observation] == ["42"] * 4 and most == 2


@contained
def test_a_loop_in_another_thread_works():
    answers, sleep = [], "import time; time.sleep(99)"
    thread = threading.Thread(
        target=lambda: answers.extend([run("print(1)"), run(sleep, SandboxConfig(seconds=0.5))])
    )
    thread.start()
    thread.join(60)
    assert answers == ["1", "[stopped after 0.5 s]"]


def test_without_bubblewrap_it_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = r"not on the PATH\. Install .* set --env\.toolbox\.python\.allow_unsandboxed"
    with pytest.raises(SandboxError, match=said):
        Sandbox(SandboxConfig())


def test_a_bubblewrap_that_may_not_work_is_refused_in_its_own_words(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bwrap: No permissions to create a new namespace\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"does not start: bwrap: No permissions .*\. Install"):
        Sandbox(SandboxConfig())


@contained
def test_where_files_cannot_be_limited_the_rest_still_is(monkeypatch, tmp_path, capsys):
    """A kernel may give the sandbox no privilege at all, not even in its own namespace."""
    fake = tmp_path / "bwrap"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *--cap-add*) exit 1;; esac\nexec {shutil.which("bwrap")} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = Sandbox(SMALL)
    assert sandbox.contained and not sandbox.limits_files
    assert "the number of files in /tmp is not limited here" in capsys.readouterr().err
    assert asyncio.run(sandbox.run("import os; print(os.listdir('/tmp'))")) == "['main.py']"


def test_unsandboxed_only_where_it_is_allowed_and_still_limited(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-host")
    config = SandboxConfig(allow_unsandboxed=True, seconds=60, cpu_seconds=1, memory_mb=256)
    assert not Sandbox(config).contained
    folder, variables = run("import os; print(os.getcwd()); print(list(os.environ))", config).splitlines()
    assert not Path(folder).exists() and "HF_TOKEN" not in variables
    assert run("while True: pass", config) == "[stopped after 1 s of processor time]"
    if sys.platform == "linux":
        assert "MemoryError" in run("x = bytearray(100 << 30)", config)
    child = "import subprocess, time\nprint(subprocess.Popen(['/bin/sleep', '1000']).pid)\ntime.sleep(1000)"
    pid, why = run(child, replace(config, seconds=2.5)).splitlines()
    assert why == "[stopped after 2.5 s]" and wait_until(lambda: int(pid) not in parents())


def test_a_processor_without_a_list_of_calls_is_refused():
    with pytest.raises(ValueError, match="no list of system calls for sparc64, only for x86_64, aarch64"):
        refuse_filter("sparc64")


@pytest.mark.parametrize("name", ["seconds", "cpu_seconds", "memory_mb", "max_files", "output_bytes"])
def test_a_limit_of_nothing_is_refused(name):
    ((field, text),) = problems(SandboxConfig(**{name: 0}))
    assert field == name and "it must be at least" in text
    assert list(problems(SandboxConfig())) == []
