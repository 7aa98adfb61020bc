"""The user's code (rewards, environments, tools): import, errors with file and line, processes.

Imports neither jax nor numpy, so that reward workers start quickly.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import difflib
import importlib.util
import json
import os
import pkgutil
import signal
import sys
import traceback
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import UserError

PR_SET_PDEATHSIG = 1
MAX_TEXT = 200  # characters of an error's message


def split_name(name: str) -> tuple[Path, str]:
    """Return (file, name in it or "") of "folder/file.py:name" or "folder/file.py"."""
    path, colon, attribute = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, attribute = name, ""
    return expand_home(path), attribute


def expand_home(path: str | Path) -> Path:
    """Return the path with ~ and ~user replaced; ~ of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def import_user_file(path: Path, key: str) -> ModuleType:
    """Import a file; its folder joins sys.path, so it may import its neighbours.

    Args:
        key: the field that names the file, for messages: "reward.name".

    Raises:
        UserError: the file is missing, or importing it raises; the message has file and line.
    """
    path = expand_home(path).resolve()
    if problem := missing_file(path):
        raise UserError(f"--{key}: {problem}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"jaxrl_llm_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # Cached bytecode would be stale for a file that is written twice in a second with the same size.
        exec(spec.loader.source_to_code(path.read_bytes(), path), module.__dict__)
    except BaseException as error:
        raise UserError(f"--{key}: {explain_end(error, path)}") from error
    return module


def explain_end(error: BaseException, path: Path) -> str:
    """Return `explain` of an exception that ended the user's file, and the fix if it ends programs.

    Raises:
        SystemExit: a signal ended the file; host.signals raises a subclass.
    """
    if isinstance(error, SystemExit) and type(error) is not SystemExit:
        raise error
    text = explain(error, path).rstrip(": ")
    return text if isinstance(error, Exception) else f"{text}; the file must not end the program"


def missing_file(path: Path) -> str:
    """Return the message for a missing file with the nearest name in its folder; "" if the file exists."""
    if os.path.isfile(path):  # unlike Path.is_file, also of a name that is too long
        return ""
    path = path.resolve()
    beside = [other.name for other in path.parent.glob("*.py")] if os.path.isdir(path.parent) else []
    return f"there is no file {path}.{did_you_mean(path.name, beside)}"


def get_attribute(module: ModuleType, name: str, key: str) -> Any:
    """Return a callable of the module.

    Raises:
        UserError: no callable has this name; the message lists the module's callables.
    """
    value = getattr(module, name, None)
    if callable(value):
        return value
    names = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    problem = f"has no function or class {name}; it has {', '.join(names) or 'none'}"
    raise UserError(f"--{key}: {module.__file__} {problem}.{did_you_mean(name, names)}")


def explain(error: BaseException, path: Path | None = None) -> str:
    """Return "file:line: Type: message" of an error in the user's code, with the nearest known name.

    Args:
        path: the user's file, if any; it counts as the user's code in any folder.
    """
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = error_line(error, path)
    return f"{line + ': ' if line else ''}{type(error).__name__}: {text}{_suggestion(error)}"


def describe_error(error: BaseException) -> str:
    """Return "Type: message (file:line)" of an error in the user's code, for a list of reasons."""
    line = error_line(error)
    return f"{type(error).__name__}: {str(error)[:MAX_TEXT]}" + (f" ({line})" if line else "")


def error_line(error: BaseException, path: Path | None = None) -> str:
    """Return "file:line", the innermost of the user's code, or ""."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if _is_user_code(frame.filename, path)]
    return lines[-1] if lines else str(path or "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest of the known words, or ""."""
    near = difflib.get_close_matches(word, [k for k in known if k != word], 1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


def end_with_parent(parent: int, signal_number: int) -> None:
    """Have Linux send this process a signal when the thread that started it ends, for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)


def python_command(module: str, function: str, *arguments: float) -> list[str]:
    """Return the command of a process that calls a function of ours with numbers; it imports what we can."""
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    start = f"from {module} import {function}; {function}(*map(json.loads, sys.argv[2:]))"
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {start}"
    return [sys.executable, "-P", "-c", code, path, *map(json.dumps, arguments)]


def kill_group(group: int) -> None:
    """Kill a group of processes that may be gone already (EPERM for a zombie on macOS)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process, on Linux; a lower limit that it has already stays."""
    if sys.platform == "linux":
        import resource

        now = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([num_bytes, *now]),) * 2)


def _is_user_code(filename: str, path: Path | None) -> bool:
    """Return whether a file is part of neither this package nor Python nor the installed packages."""
    folders = (Path(__file__).parent, Path(sys.prefix), Path(sys.base_prefix))
    ours = any(Path(filename).is_relative_to(folder) for folder in folders) or filename.startswith("<frozen")
    return filename == str(path) or not ours


def _suggestion(error: BaseException) -> str:
    """Return the nearest name for a misspelt variable, attribute or module."""
    name = getattr(error, "name", None)
    if not isinstance(name, str):
        return ""
    if isinstance(error, NameError):
        frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        return did_you_mean(name, {*frame.f_locals, *frame.f_globals, *dir(builtins)})
    if isinstance(error, AttributeError):
        return did_you_mean(name, dir(error.obj))
    if isinstance(error, ModuleNotFoundError):
        installed = (module.name for module in pkgutil.iter_modules())
        return did_you_mean(name, {*sys.stdlib_module_names, *installed})
    return ""
