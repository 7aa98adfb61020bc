"""Mutants: faults of one line that tests must notice. `python tests/test_mutants.py [WORD ...]` plants them.

tests/mutants.toml is the table. Each fault is planted in a copy of the package, and the test of its row runs.
A mutant that lives shows a line that no test holds: write that test.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
MAX_SECONDS = 300  # of a test: with some faults a program never ends


class Mutant(NamedTuple):
    """A row of the table."""

    file: str  # in the package
    test: str  # file and name, in tests/
    old: str
    new: str
    fault: str


MUTANTS = [Mutant(*row) for rows in TABLE.values() for row in rows]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault.replace(" ", "_"))
def test_a_mutant_has_its_place_and_its_test(mutant):
    source = (ROOT / "jaxrl_llm" / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} must be there once"
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(), mutant.test


def test_there_are_a_hundred_mutants():
    assert len(set(MUTANTS)) >= 100
    assert list(TABLE) == ["algos", "learn", "data", "rollout", "envs"]


def failed_test(package_dir: str, tests: Sequence[str], seconds: float | None = None) -> str:
    """Run tests with the package in this folder; return the node id of the first that fails, or ""."""
    places = [package_dir, str(ROOT / "kernels"), str(ROOT / "importer")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
    markers = "not slow and not compilers and not gpu"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", markers, *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - |$)", done.stdout, re.M)
    if done.returncode != (1 if failed else 0):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1] if failed else ""


def kill(package_dir: str, mutant: Mutant) -> str:
    """Plant a mutant; return the test that fails with it, or "" for a mutant that lives."""
    file = Path(package_dir, "jaxrl_llm", mutant.file)
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return failed_test(package_dir, [f"tests/{mutant.test}"], MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{mutant.fault}: no end after {MAX_SECONDS} s; plant another fault") from None
    finally:
        file.write_text(source)


def main(words: list[str]) -> int:
    """Plant the mutants whose row has one of the words, print the fate of each; return the exit code."""
    chosen = [m for m in MUTANTS if not words or any(word in " ".join(m) for word in words)]
    start, killers = time.monotonic(), []
    with tempfile.TemporaryDirectory() as package_dir:
        shutil.copytree(ROOT / "jaxrl_llm", Path(package_dir, "jaxrl_llm"))
        Path(package_dir, "configs").symlink_to(ROOT / "configs")
        for mutant in chosen:
            killers.append(kill(package_dir, mutant))
            fate = f"killed by {killers[-1]}" if killers[-1] else "ALIVE"
            print(f"{time.monotonic() - start:5.0f} s  {mutant.file}: {mutant.fault}: {fate}", flush=True)
        # A test that fails without its mutant has killed nothing.
        found = sorted({*killers} - {""})
        if found and (failing := failed_test(package_dir, found)):
            raise SystemExit(f"{failing} fails without a mutant, too")
    print(f"{len(chosen)} mutants in {time.monotonic() - start:.0f} s, alive: {killers.count('')}")
    return int("" in killers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
