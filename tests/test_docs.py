"""The documents speak of what is there."""

import importlib
import re
from pathlib import Path

from jaxrl_llm import algos

ROOT = Path(__file__).parents[1]
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()


def test_every_algorithm_has_a_row_with_its_file():
    rows = re.findall(r"^\| (\w+) (\|.*)\]\(\.\./jaxrl_llm/algos/(\w+)\.py\)", ALGORITHMS, re.M)
    assert sorted(name for name, _, _ in rows) == sorted(algos.ALGOS)
    for name, row, file in rows:
        module = importlib.import_module(f"jaxrl_llm.algos.{file}")
        assert getattr(module, name) is algos.ALGOS[name]
        papers = lambda text: set(re.findall(r"\d{4}\.\d{5}", text))
        assert papers(row) <= papers(algos.ALGOS[name].doc), name


def test_links_lead_somewhere():
    for file in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            if "://" not in target:
                assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_the_algorithm_of_the_guide_keeps_the_contract(tmp_path):
    code = re.search(r"```python\n(.*?)```", ALGORITHMS, re.S)[1]
    (tmp_path / "my_algo.py").write_text(code)
    algorithm = algos.load_algorithm(str(tmp_path / "my_algo.py"))
    assert algorithm.input == "rollouts" and algorithm.config.aggregation == "token"
    assert algos.of(algorithm.Config(aggregation="sequence")) is algorithm


def test_the_loop_of_the_example_is_short():
    assert len((ROOT / "examples/custom_loop.py").read_text().splitlines()) <= 60
