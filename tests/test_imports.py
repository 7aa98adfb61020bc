"""The rules of docs/architecture.md on imports."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "jaxrl_llm": ROOT / "jaxrl_llm",
    "jaxrl_kernels": ROOT / "kernels/jaxrl_kernels",
    "jaxrl_import": ROOT / "importer/jaxrl_import",
}
FILES = [file for folder in PACKAGES.values() for file in sorted(folder.rglob("*.py"))]
KNOWN = frozenset(FILES)

ANY = None
ALLOWED: dict[str, str | None] = {
    # the nouns, and what knows no other part
    "jaxrl_kernels": "",
    "addresses": "",
    "child": "",
    "errors": "addresses",
    "extensions": "errors",
    "forks": "",
    "loop_thread": "",
    "ranges": "",
    "removed": "",
    "outcome": "",
    "thoughts": "",
    "user_file": "errors",
    "structs": "forks outcome thoughts",
    "host": "addresses errors",
    "report": "ranges addresses errors forks structs host jaxrl_kernels",
    # the parts
    "sharding": "ranges errors jaxrl_kernels structs host",
    "models": "ranges errors jaxrl_kernels structs sharding",
    "algos": "ranges errors structs user_file",
    "rewards": "ranges addresses child errors outcome thoughts user_file sharding",
    "data": "ranges child errors extensions forks structs thoughts user_file",
    "hf": "errors extensions structs user_file host sharding models",
    "checkpoint": "ranges removed addresses errors extensions structs user_file host models",
    "bridge": "ranges child errors structs models hf",
    "rollout": (
        "ranges jaxrl_kernels addresses errors forks loop_thread structs thoughts user_file sharding models "
        "bridge"
    ),
    "envs": "ranges addresses child errors forks loop_thread structs outcome thoughts user_file data rollout",
    # what joins them
    "learn": "ranges jaxrl_kernels errors structs sharding models algos data checkpoint",
    "experience": (
        "ranges errors forks structs thoughts host report sharding models algos data rewards rollout envs hf "
        "learn"
    ),
    "config": "ranges errors structs report learn sharding models algos data rewards rollout envs checkpoint",
    "recipe": (
        "ranges removed addresses errors extensions user_file algos sharding models hf bridge rollout config"
    ),
    # the top
    "builders": ANY,
    "train": ANY,
    "plan": ANY,
    "tools": ANY,
    "api": ANY,
    "__main__": ANY,
    "jaxrl_import": ANY,
}
"""Part of jaxrl_llm -> the other parts it may import. Imports go one way, from the bottom up."""

TOP = {name for name, allowed in ALLOWED.items() if allowed is ANY}


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported anywhere in it; `from a import b` counts as a.b."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@functools.cache
def names_of(file: Path) -> list[str]:
    return imports(ast.parse(file.read_text()))


def part_of(file: Path) -> str:
    for name in ("jaxrl_kernels", "jaxrl_import"):
        if file.is_relative_to(PACKAGES[name]):
            return name
    return Path(file.relative_to(PACKAGES["jaxrl_llm"]).parts[0]).stem


def imported_parts(file: Path) -> set[str]:
    names = [name.split(".") for name in names_of(file)]
    own = {name[1] for name in names if name[0] == "jaxrl_llm" and len(name) > 1}
    return own | ({name[0] for name in names} & {"jaxrl_kernels", "jaxrl_import"})


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_go_one_way(file):
    part = part_of(file)
    assert part in {*ALLOWED, "__init__"}, f"{part} is new: give it a line in ALLOWED"
    if file == PACKAGES["jaxrl_llm"] / "__init__.py":
        return  # imports `api` at its first use; the next test holds that
    allowed = ALLOWED.get(part, "")
    wrong = imported_parts(file) - {part} - (set() if allowed is ANY else set(allowed.split()))
    assert not wrong or (allowed is ANY and wrong <= ALLOWED.keys()), f"{part} may not import {sorted(wrong)}"


def test_nothing_imports_the_importer_or_names_it():
    for file in FILES:
        if part_of(file) != "jaxrl_import":
            assert "jaxrl_import" not in imported_parts(file), relative(file)
            assert "jaxrl_import" not in file.read_text(), f"{relative(file)} names it: it is an entry point"


def test_the_table_has_no_cycle():
    order = []
    remaining = {name: set((allowed or "").split()) for name, allowed in ALLOWED.items()}
    while ready := [name for name, needs in remaining.items() if needs <= set(order)]:
        order += ready
        remaining = {name: needs for name, needs in remaining.items() if name not in order}
    assert not remaining, f"these import each other: {sorted(remaining)}"
    assert not {need for allowed in ALLOWED.values() for need in (allowed or "").split()} & TOP


def imported_files(file: Path) -> set[str]:
    """Return our files that a file imports, in functions too, but not under `if TYPE_CHECKING`."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    files = set()
    for name in imports(tree):
        package, *names = name.split(".")
        paths = (
            [PACKAGES[package].joinpath(*names[:end]) for end in range(len(names), 0, -1)]
            if package in PACKAGES
            else []
        )
        found = [f for path in paths for f in (path.with_suffix(".py"), path / "__init__.py") if f in KNOWN]
        files |= {relative(f) for f in found[:1]}
    return files - {relative(file)}


def test_no_files_import_each_other():
    """A late import, in a function, closes a circle too."""
    graph = {relative(file): imported_files(file) for file in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_only_models_know_flax_and_kernels_only_jax():
    for file in FILES:
        roots = {name.split(".")[0] for name in names_of(file)}
        assert part_of(file) == "models" or "flax" not in roots, f"{relative(file)} imports flax"
        if part_of(file) == "jaxrl_kernels":
            outside = roots - sys.stdlib_module_names - {"jax", "jaxtyping", "numpy", "jaxrl_kernels"}
            assert not outside, f"{relative(file)} imports {sorted(outside)}"


def test_importing_the_package_imports_nothing_else():
    script = "import sys, jaxrl_llm; print([name for name in sys.modules if name.startswith('jax')])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "['jaxrl_llm']", out.stdout + out.stderr


def test_reward_workers_start_without_jax():
    """A worker process imports these and nothing else of ours; jax would cost it a second and memory."""
    files = [
        *sorted((PACKAGES["jaxrl_llm"] / "rewards").glob("*.py")),
        PACKAGES["jaxrl_llm"] / "data/rows.py",
    ]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    modules = [name.removesuffix(".__init__") for name in names]
    script = f"import sys, {', '.join(modules)}\nprint(sorted({{'jax', 'flax'}} & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
