"""The notebooks, executed from top to bottom in a kernel of their own, with a small model and few steps."""

import ast
import contextlib
import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import with_devices

import jaxrl_llm

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETTINGS = {"PACKAGE": "", "STEPS": 2, "RUN_DIR": "runs/small"}
SMALL = {"prompts_per_step": 16, "max_prompt_tokens": 64, "max_response_tokens": 16}


def notebook_of(file: Path) -> dict:
    return json.loads(file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_source_without_outputs(file):
    """And its settings are those that the test replaces."""
    cells = notebook_of(file)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    (parameters,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    names = [node.targets[0].id for node in ast.parse("".join(parameters["source"])).body]
    assert names == ["PACKAGE", "MODEL", "STEPS", "RUN_DIR"]
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_badge_opens_the_notebook_of_the_published_repository():
    """Its address stands in pyproject.toml alone; without one the badge leads to the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = "notebooks/grpo_colab.ipynb"
    if address := project.get("urls", {}).get("Repository", ""):
        name = address.removeprefix("https://github.com/").removesuffix(".git")
        target = f"https://colab.research.google.com/github/{name}/blob/main/{target}"
    assert f"\n[colab]: {target}\n" in (ROOT / "README.md").read_text()


def install_cell() -> str:
    """The source of the cell that installs, the same in both notebooks."""
    cells = ["".join(c["source"]) for file in FILES for c in notebook_of(file)["cells"]]
    install, other = (cell for cell in cells if "def requirements" in cell)
    assert install == other
    return install


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_failed_installation_stops_the_notebook(exit_code, capsys):
    """And says what to set, where the next cell would fail to import."""
    shell = SimpleNamespace(user_ns={}, system=lambda command: shell.user_ns.update(_exit_code=exit_code))
    names = {"PACKAGE": "jaxrl-llm==0", "get_ipython": lambda: shell}
    failed = contextlib.nullcontext() if not exit_code else pytest.raises(RuntimeError, match="Set PACKAGE")
    with failed:
        exec(install_cell(), names)
    assert "pip install -q 'jaxrl-llm" in capsys.readouterr().out


def test_what_is_installed_for_each_accelerator(monkeypatch):
    """Drivers before 580 have no CUDA 13."""
    names: dict = {"PACKAGE": ""}
    exec(install_cell(), names)
    from_git = "jaxrl-llm @ git+https://example.org/x"

    def requirements(paths, driver):
        monkeypatch.setattr(names["glob"], "glob", lambda pattern: [p for p in paths if p[:8] == pattern[:8]])
        monkeypatch.setattr(names["shutil"], "which", lambda name: driver and f"/usr/bin/{name}")
        done = type("Done", (), {"stdout": f"{driver}\n"})
        monkeypatch.setattr(names["subprocess"], "run", lambda *args, **settings: done)
        return names["requirements"](from_git)

    assert requirements(["/dev/vfio/0"], "") == ["jaxrl-llm[tpu] @ git+https://example.org/x"]
    assert requirements([], "") == [from_git]
    assert requirements([], "580.95.05") == ["jaxrl-llm[cuda] @ git+https://example.org/x"]
    assert requirements([], "550.54.15") == [from_git, "jax[cuda12]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that answers sums with one or two digits, mostly wrong ones."""
    pairs = [(a, b) for a in range(21) for b in range(21)]
    ask = lambda a, b: [{"role": "user", "content": f"What is {a} + {b}? Answer with a number."}]
    rows = [{"messages": ask(a, b), "response": str(a + b)} for a, b in pairs]
    run_dir = str(tmp_path_factory.mktemp("model") / "run")
    quiet = {"log.progress": "none", "log.tensorboard": False, "checkpoint.every": 0}
    return jaxrl_llm.run("sft_tiny.py", data=rows, steps=30, run_dir=run_dir, **SMALL, **quiet).model


def execute(file: Path, folder: Path, **settings) -> list[dict]:
    """Execute a notebook in a folder; return its cells with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    environment = with_devices(1)
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [environment.get("PYTHONPATH")])]
    client.execute(env=environment | {"PYTHONPATH": os.pathsep.join(paths)})
    return notebook.cells


def texts(cells, kind: str) -> str:
    """All outputs of a MIME type; "stdout" and "stderr" are those streams."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    streams = [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == kind]
    return "\n".join(streams + [o["data"].get(kind, "") for o in outputs if "data" in o])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_runs_from_top_to_bottom(file, model, tmp_path):
    pytest.importorskip("nbclient", reason="needs the extra test")
    pytest.importorskip("ipykernel", reason="needs the extra test")
    cells = execute(file, tmp_path, **SETTINGS, MODEL=str(model))
    run = tmp_path / SETTINGS["RUN_DIR"]
    assert (run / "hf/model.safetensors").is_file() and (run / "curve.png").is_file()
    shown = texts(cells, "text/html")
    assert '<progress value="2" max="2">' in shown and "<td>reward/mean</td>" in shown  # the panel
    assert re.search(r"<th>before</th>\s*<th>after</th>", shown)  # the table
    assert len(texts(cells, "image/png")) > 10_000  # the curve
    assert "step 1/2" not in texts(cells, "stdout")  # no line a step
    if importlib.util.find_spec("torch"):
        assert " -> " in texts(cells, "stdout")  # of transformers
    assert "Traceback" not in texts(cells, "stderr")
