"""Write launch/locks/pythonX.Y.txt: the versions of this environment that the package and its extras need.

Command:   .venv/bin/python scripts/lock.py
           python3.13 -m pip install --dry-run --ignore-installed --report report.json '.[gguf,tasks,data]'
           .venv/bin/python scripts/lock.py report.json    (for another Python: what pip chose)

The file is one of pip's constraints: pip install -c launch/locks/python3.11.txt '.[gguf,tasks,data]'
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).parents[1] / "launch" / "locks"
EXTRAS = ("gguf", "tasks", "data")


def needed(package: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Return name -> installed version of all that a package with these extras needs, itself left out."""
    versions: dict[str, str] = {}
    seen, queue = set(), [(package, extras)]
    while queue:
        name, chosen = queue.pop()
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            marks = [{**default_environment(), "extra": extra} for extra in ("", *chosen)]
            key = (canonicalize_name(requirement.name), tuple(sorted(requirement.extras)))
            applies = requirement.marker is None or any(map(requirement.marker.evaluate, marks))
            if applies and key not in seen:
                seen.add(key)
                queue.append(key)
                versions[key[0]] = importlib.metadata.version(key[0]).partition("+")[0]
    versions.pop(canonicalize_name(package), None)
    return dict(sorted(versions.items()))


def of_report(path: Path) -> tuple[dict[str, str], str]:
    """Return (name -> version, Python) of a report of pip's resolver."""
    report = json.loads(path.read_text())
    items = [item["metadata"] for item in report["install"]]
    versions = {canonicalize_name(item["name"]): item["version"].partition("+")[0] for item in items}
    versions.pop("jaxrl-llm", None)
    return dict(sorted(versions.items())), report["environment"]["python_version"]


def lock_file(version: tuple[int, ...] = sys.version_info[:2]) -> Path:
    """Return the lock of a Python."""
    return LOCKS / f"python{version[0]}.{version[1]}.txt"


def main() -> None:
    """Write the lock of this environment, or of a report."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    versions, source = needed("jaxrl-llm", EXTRAS), "installed where the tests ran"
    if sys.argv[1:]:
        (versions, python), source = of_report(Path(sys.argv[1])), "chosen by pip's resolver"
    path = lock_file(tuple(map(int, python.split("."))))
    path.parent.mkdir(exist_ok=True)
    head = f"# Python {python}, extras {', '.join(EXTRAS)}: versions {source} (scripts/lock.py)"
    path.write_text("\n".join([head, *(f"{name}=={version}" for name, version in versions.items())]) + "\n")
    print(path)


if __name__ == "__main__":
    main()
