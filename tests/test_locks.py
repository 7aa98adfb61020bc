"""Locks of versions and the container file: complete, within the bounds of pyproject.toml, installable."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "launch/locks").glob("python*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = ".".join(map(str, sys.version_info[:2]))


def pins(lock):
    """Return name -> version of a lock."""
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert list(pinned) == sorted(pinned) and len(pinned) == len(lines)
    return pinned


def python_of(lock):
    return lock.stem.removeprefix("python")


def test_there_is_a_lock_for_each_supported_python():
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert [python_of(lock) for lock in LOCKS] == named


@pytest.mark.parametrize("lock", LOCKS, ids=python_of)
def test_a_lock_pins_what_the_package_needs_within_its_bounds(lock):
    pinned, environment = pins(lock), {"python_version": python_of(lock)}
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["gguf"], *extras["tasks"], *extras["data"]):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), (text, version)
    assert pinned["jaxlib"] == pinned["jax"]


def test_the_script_writes_the_lock_of_an_environment():
    spec = importlib.util.spec_from_file_location("lock_script", ROOT / "scripts/lock.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    versions = script.needed("jaxrl-llm", script.EXTRAS)
    assert versions["numpy"] and "jaxrl-llm" not in versions and list(versions) == sorted(versions)
    assert script.lock_file((3, 11)) in LOCKS
    assert versions.keys() == pins(script.lock_file()).keys()  # of this Python; versions may be newer


def instructions():
    """Return (instruction, argument) of the container file, comments and continuations removed."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "launch/Dockerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_container_installs_with_the_lock_of_its_python_and_runs_the_commands():
    steps = instructions()
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known
    (image,) = [argument for name, argument in steps if name == "FROM"]
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", image)[1]
    (install,) = [argument for name, argument in steps if name == "RUN"]
    assert f"-c launch/locks/python{version}.txt" in install
    assert (ROOT / f"launch/locks/python{version}.txt").is_file()
    entry = json.loads(dict(steps)["ENTRYPOINT"]) + json.loads(dict(steps)["CMD"])
    assert entry == ["python", "-m", "jaxrl_llm", "doctor"]


@pytest.mark.slow
def test_the_install_of_the_container_resolves_with_the_lock_of_this_python(tmp_path):
    """The engine is not needed: its RUN step, in an empty target, for this Python; nothing is installed."""
    (install,) = [argument for name, argument in instructions() if name == "RUN"]
    command = install.replace("${EXTRAS}", "gguf,tasks,data").replace("3.13.txt", f"{HERE}.txt")
    words = [sys.executable, "-m", *command.replace('"', "").split(), "--dry-run", "--ignore-installed"]
    report = tmp_path / "report.json"
    words += ["--quiet", "--report", str(report)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr or "connection" in done.stderr.lower():
        pytest.skip("no pip, or no package index")
    assert done.returncode == 0, done.stderr
    items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    chosen = {canonicalize_name(item["name"]): item["version"] for item in items}
    chosen.pop("jaxrl-llm")
    assert chosen == pins(ROOT / f"launch/locks/python{HERE}.txt")
