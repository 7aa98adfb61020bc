"""The base dependencies: who imports each is in docs/architecture.md, and nothing else is imported."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = {"jaxrl_llm": "", "importer/jaxrl_import": "jaxrl_import", "kernels/jaxrl_kernels": "jaxrl_kernels"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"orbax-checkpoint": "orbax", "reasoning-gym": "reasoning_gym", "math-verify": "math_verify"}
MODULES |= {"mlflow-skinny": "mlflow", "pyyaml": "yaml"}
BROUGHT = {"numpy", "huggingface_hub", "tokenizers", "sympy"}  # by jax, transformers and math-verify
UNUSED = {"ml_dtypes"}  # jax's; the base leaves out a version
ELSEWHERE = {
    "IPython",
    "torch",
    "vllm",
    "jaxrl_delta",
    "jaxrl_relay",
}  # of a notebook; of user's rewards and servers
MANY = "more than five parts"


def modules(requirements):
    names = {Requirement(text).name for text in requirements}
    return {MODULES.get(name, name) for name in names}


@functools.cache
def importers():
    """Module of another project -> the parts that import it."""
    found = {}
    for folder, whole in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            part = whole or file.relative_to(ROOT / folder).parts[0].removesuffix(".py")
            for name in imported(ast.parse(file.read_text())):
                found.setdefault(name.partition(".")[0], set()).add(part)
    ours = sys.stdlib_module_names | {"jaxrl_llm", "jaxrl_import", "jaxrl_kernels"}
    return {name: parts for name, parts in found.items() if name not in ours}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_extra":
            yield node.args[0].value


def test_the_table_names_each_base_dependency_and_who_imports_it():
    section = (
        (ROOT / "docs/architecture.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| ([\w-]+) \| ([^|]+) \| ", section, re.M)[1:]
    table = {MODULES.get(name, name): parts for name, parts in rows}
    assert table.keys() == modules(PROJECT["dependencies"]) - UNUSED
    found = importers()
    named = {name: MANY if len(parts) > 5 else ", ".join(sorted(parts)) for name, parts in found.items()}
    assert table == {name: named[name] for name in table}


def test_what_is_imported_is_a_dependency_or_of_an_extra():
    extras = {name: texts for name, texts in PROJECT["optional-dependencies"].items() if name != "test"}
    known = modules([*PROJECT["dependencies"], *(text for texts in extras.values() for text in texts)])
    assert importers().keys() <= known | BROUGHT | ELSEWHERE


def test_training_imports_no_package_of_an_extra_and_no_importer():
    extras = (
        {*importers()} - modules(PROJECT["dependencies"]) - BROUGHT - ELSEWHERE - {"yaml"}
    )  # transformers' own
    assert {"datasets", "pyarrow", "gguf", "mcp", "wandb"} <= extras
    idle = {"jaxrl_import", "aiohttp"}  # the second serves servers and programs alone: a twentieth of a start
    script = f"import sys, jaxrl_llm.train; print(sorted({extras | idle} & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
