"""The documents name what exists: files, modules, names, recipes, flags, commands, tests, metrics, links."""

import ast
import builtins
import dataclasses
import functools
import importlib
import itertools
import re
import shlex
import tomllib
import typing
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_import import import_config
from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.config import to_hf_config
from jaxrl_llm.models.config import check_model_config
from jaxrl_llm.recipe.fields import check_fields
from jaxrl_llm.recipe.keys import add_missing, iter_fields
from jaxrl_llm.recipe.load import find_recipe, load_recipe, packaged_recipes, with_algo
from jaxrl_llm.recipe.overrides import apply_overrides, parse_words, resolve_key, split_arguments
from jaxrl_llm.tools import config as tools

ROOT = Path(__file__).parents[1]
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = (
    "jaxrl_llm",
    "kernels",
    "importer",
    "configs",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "scripts",
    "launch",
    ".ci",
)
FILES = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts]
FILES += [path for path in ROOT.iterdir() if path.is_file()]
PATHS = {"/".join(path.parts[i:]) for path in FILES for i in range(len(ROOT.parts), len(path.parts))}
PATHS |= set(FOLDERS)
"""Every file and folder by the end of its path: "bridge/push.py", "push.py"."""
COMMANDS = {
    "chat": tools.ChatArguments,
    "generate": tools.GenerateArguments,
    "score": tools.ScoreArguments,
    "export": tools.ExportArguments,
    "view": tools.ViewArguments,
    "plan": tools.PlanArguments,
    "import-config": import_config.ImportArguments,
}
EXACT = ("chat", "generate", "score", "export", "view", "import-config")  # commands without flags of training
OPTIONAL = (
    *(
        "data.eval.0.path",
        "data.eval.1.path",
        "reward.models.0.path",
        "reward.models.1.path",
        "reward.models.0.mesh.fsdp",
    ),
    *(f"{role}.mesh.fsdp" for role in ("critic", "reference", "rollout", "teacher")),
)
"""Keys of parts that recipes may lack."""
OUTPUTS = re.compile(r"(runs|checkpoints|eval|exports|(hf|adapter)(_ema)?|profile|tensorboard)/")  # of a run
PLACEHOLDER = re.compile(
    r"my_\w+\.py(:\w+)?|(file|RECIPE|FILE)\.(py|gguf)(:\w+)?|[A-Z_]+|\.\.\.|/path/.*|\[.*"
)
OTHERS = {"jax", "os", "np", "optax", "torch", "transformers"}  # first parts of names of other packages
OTHERS |= {"GRPOLearner", "GRPOTrainer"}
OTHER_PROGRAMS = {"--enable-deterministic-inference", "--tp", "--load-format", "--mem-fraction-static"}
OTHER_PROGRAMS |= {"--worker", "--batch", "--signal"}
"""Flags of SGLang, gcloud and SLURM."""
RETIRED = {
    "supervised start": "SFT warm-up",
    "writing ahead": "asynchronous rollout",
    "written ahead": "asynchronous rollout",
    "ahead of the trainer": "asynchronous rollout",
    "taking turns": "synchronous rollout",
    "half-written": "partial rollouts",
    "divided among devices": "sharded",
    "not seen": "not reproduced",
    "stand-in": "fake server",
}
"""Terms that this project no longer uses -> the standard ones."""


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=relative)
with_changelog = pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=relative)

# Code of a page


class Code(typing.NamedTuple):
    inline: list[str]
    """Spans in backticks, on one line each."""
    blocks: list[str]
    """Lines of fenced and indented blocks; a line that ends in a backslash goes on."""
    python: list[str]
    """Fenced blocks of Python."""


@functools.cache
def code_of(page: Path) -> Code:
    text = page.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    indented = "\n".join(re.findall(r"^ {4}.*$", text, re.M))
    shell = "\n".join([indented, *(body for language, body in fenced if language != "python")])
    prose = re.sub(r"^ {4}.*$", "", text, flags=re.M)
    return Code(
        [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)],
        [line.strip() for line in shell.replace("\\\n", " ").splitlines()],
        [body for language, body in fenced if language == "python"],
    )


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each command, from its program on."""
    code = code_of(page)
    found = []
    for line in [*code.inline, *code.blocks]:
        if match := re.search(r"(?:^|\s)((?:python -m (?:jaxrl_llm|pytest)|pytest|make)\b.*)", line):
            words = shlex.split(match[1].replace("'jaxrl", "jaxrl"), comments=True)
            found.append(words[: words.index(";")] if ";" in words else words)
    return found


# Names of the project


@functools.cache
def members() -> dict[str, set[str]]:
    """Return the name of a package, module or class -> the names defined in it."""
    found: dict[str, set[str]] = {}
    for package in map(
        ROOT.joinpath, ("jaxrl_llm", "kernels/jaxrl_kernels", "importer/jaxrl_import", "configs")
    ):
        for file in package.rglob("*.py"):
            name = file.parent.name if file.stem == "__init__" else file.stem
            if file.stem != "__init__":
                found.setdefault(file.parent.name, set()).add(name)
            elif file.parent != package:
                found.setdefault(file.parent.parent.name, set()).add(name)
            for owner, node in definitions(ast.parse(file.read_text()), name):
                found.setdefault(owner, set()).add(node)
    found["jaxrl_llm"] |= {*jaxrl_llm.__all__, "configs"}
    found["configs"] |= {"grpo_tiny"}
    return found


def definitions(tree: ast.AST, owner: str) -> list[tuple[str, str]]:
    """Return (owner, name) of everything that a module or class defines, classes opened."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append((owner, node.name))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [(owner, target.id) for target in targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.ImportFrom):
            found += [(owner, alias.name) for alias in node.names]
        if isinstance(node, ast.ClassDef):
            found += definitions(node, node.name)
    return found


@functools.cache
def words() -> set[str]:
    """Return every word of the code."""
    sources = [path for path in FILES if path.suffix in (".py", ".sh", ".toml") or path.name == "Makefile"]
    sources = [path for path in sources if path != Path(__file__)]
    return {word for path in sources for word in re.findall(r"\w+", path.read_text())}


@functools.cache
def literals() -> list[re.Pattern]:
    """Return patterns of the texts with a slash in the code: names of metrics."""
    sources = [path.read_text() for path in (ROOT / "jaxrl_llm").rglob("*.py")]
    texts = {text for source in sources for text in re.findall(r"\"(\w+/[\w@/{}.]+)\"", source)}
    return [re.compile(re.sub(r"\\\{.*?\\\}", r"[\\w/]+", re.escape(text))) for text in texts]


@functools.cache
def known_keys() -> dict[str, typing.Any]:
    """Return dotted key -> type, of all recipes, all algorithms and the parts of OPTIONAL."""
    configs = [TrainConfig(), *map(load_recipe, packaged_recipes())]
    configs += [dataclasses.replace(TrainConfig(), algo=a.config) for a in algos.ALGOS.values()]
    add = lambda config, key: add_missing(config, key.split("."))
    configs.append(functools.reduce(add, OPTIONAL, TrainConfig()))
    return {key: field.hint for config in configs for key, field in iter_fields(config)}


def flags_of(config: type, prefix: str = "") -> set[str]:
    """Return the flags of a command's arguments."""
    flags: set[str] = set()
    for name, hint in typing.get_type_hints(config).items():
        nested = dataclasses.is_dataclass(hint)
        flags |= flags_of(hint, f"{prefix}{name}.") if nested else {f"{prefix}{name}"}
    return flags


# The tests


def test_every_algorithm_has_a_row_with_its_file():
    rows = re.findall(r"^\| (\w+) (\|.*)\]\(\.\./jaxrl_llm/algos/(\w+)\.py\)", ALGORITHMS, re.M)
    assert sorted(name for name, _, _ in rows) == sorted(algos.ALGOS)
    for name, row, file in rows:
        module = importlib.import_module(f"jaxrl_llm.algos.{file}")
        assert getattr(module, name) is algos.ALGOS[name]
        papers = lambda text: set(re.findall(r"\d{4}\.\d{5}", text))
        assert papers(row) <= papers(algos.ALGOS[name].doc), name


@with_changelog
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@with_changelog
def test_standard_terms_are_used(page):
    text = " ".join(page.read_text().split()).lower()
    assert not {old: new for old, new in RETIRED.items() if old in text}


@each_page
def test_every_path_exists(page):
    code = code_of(page)
    for span in [*code.inline, *code.blocks]:
        for word in re.findall(r"[\w./@:-]+", span):
            path = word.strip(".:").partition(":")[0].removeprefix("./").rstrip("/")
            if PLACEHOLDER.fullmatch(word) or PLACEHOLDER.fullmatch(path) or OUTPUTS.match(word):
                continue
            is_path = path.endswith((".py", ".sh")) or path.startswith(tuple(f"{f}/" for f in FOLDERS))
            if is_path or re.fullmatch(r"[a-z_]+/", word):
                assert path in PATHS, span


@each_page
def test_every_name_exists(page):
    for span in code_of(page).inline:
        name = re.sub(r"\(.*\)$", "", span)
        if PLACEHOLDER.fullmatch(name) or name in PATHS or hasattr(builtins, name) or OUTPUTS.match(name):
            continue
        if re.fullmatch(r"[a-z_]+(/[\w@]+)+", name):
            assert any(pattern.fullmatch(name) for pattern in literals()), f"no metric or path: {span}"
        elif re.fullmatch(r"[A-Za-z_]\w*", name):
            assert name in words(), f"nowhere in the code: {span}"
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) and name.split(".")[0] not in OTHERS:
            parts = name.split(".")
            is_key = any(key == name or key.startswith(f"{name}.") for key in known_keys())
            chain = all(b in members().get(a, ()) for a, b in itertools.pairwise(parts))
            is_file = parts[-1] in ("json", "jsonl", "npz", "log", "txt", "png", "toml", "yml")
            assert is_key or chain or is_file, f"no such name or key: {span}"


@each_page
def test_every_flag_exists(page):
    known, of_commands = known_keys(), {flag for args in COMMANDS.values() for flag in flags_of(args)}
    for span in code_of(page).inline:
        for flag, *values in re.findall(r"(--[\w.-]+)((?: (?!--)\S+)*)", span):
            name, given = flag[2:], values[0].split()
            if name.endswith("."):
                assert any(key.startswith(name) for key in known), span
            elif name == "algo" and given and not PLACEHOLDER.fullmatch(given[0]):
                assert given[0] in algos.ALGOS, span
            elif key := resolve_key(name, known):
                if given and not any(map(PLACEHOLDER.fullmatch, given)) and "/" not in given:
                    parse_words(key, known[key], given)
            elif "." in name:
                assert name in of_commands, f"no such key: {span}"
            elif name not in of_commands and flag not in OTHER_PROGRAMS:
                assert name.replace("-", "_").split("_")[0] in words(), f"no such flag: {span}"


@each_page
def test_every_command_is_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAXRL_SERVER_API_KEY", "key")  # servers over plain http are refused without one
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in commands_of(page):
        if line[0] == "make":
            assert {word for word in line[1:] if "=" not in word} <= targets, line
        elif "pytest" in line[:3]:
            check_pytest(line[line.index("pytest") + 1 :])
        elif line[2] == "jaxrl_llm" and len(line) > 3 and line[3] in EXACT:
            given = {word[2:] for word in line if word.startswith("--")}
            of_rewards = {flag for flag in given if flag.startswith("reward.")}
            assert of_rewards <= known_keys().keys() and (not of_rewards or line[3] in ("generate", "score"))
            assert given - of_rewards <= flags_of(COMMANDS[line[3]]) | {"help"}, line
        else:
            check_training(line[3:])


def check_pytest(line: list[str]) -> None:
    """Check paths, markers (-m) and parts of names (-k); "..." stands for any of them."""
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    named = {marker.partition(":")[0] for marker in markers}
    options = {line[i]: line[i + 1] for i in range(len(line) - 1) if line[i] in ("-m", "-k")}
    given = [word for word in line if word not in ("...", *options.values())]
    paths = [word for word in given if not word.startswith("-")]
    files = []
    for path, _, test in (path.partition("::") for path in paths):
        assert (ROOT / path).exists(), line
        assert not test or f"def {test}(" in (ROOT / path).read_text(), line
        files += (ROOT / path).rglob("*.py") if (ROOT / path).is_dir() else [ROOT / path]
    assert set(re.findall(r"\w+", options.get("-m", ""))) <= {*named, "or", "and", "not"}, line
    text = "\n".join(f"{file.stem} {file.read_text()}" for file in files)
    for word in set(re.findall(r"\w+", options.get("-k", ""))) - {"or", "and", "not"}:
        assert word in text, line


def check_training(argv: list[str]) -> None:
    """Check that the recipe exists, and every key and value of a command of train, plan or doctor."""
    pairs = [
        pair for pair in split_arguments([w for w in argv if w not in ("plan", "doctor", "train", "...")])
    ]
    given = dict(pairs)
    if "list" in given or "help" in given or given.get("config") in ([], None):
        return
    config = recipe_of(given["config"][0])
    if "algo" in given and not PLACEHOLDER.fullmatch(given["algo"][0]):
        config, _ = with_algo(config, given["algo"][0])
    others = flags_of(COMMANDS["plan"]) if "topology" in given else set()
    keys = [pair for pair in pairs if pair[0] not in {"config", "algo", *others}]
    try:
        check_fields(apply_overrides(config, keys)[0])
    except ConfigError as error:
        missing = "there is no file" in str(error)  # of a user's own
        assert missing and any(PLACEHOLDER.fullmatch(word) for _, words in keys for word in words), argv


@functools.cache
def recipe_of(name: str) -> TrainConfig:
    return load_recipe(find_recipe(name))


@each_page
def test_python_blocks_import_what_exists(page):
    for body in code_of(page).python:
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxrl"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxrl_llm":
                assert node.attr in jaxrl_llm.__all__, ast.unparse(node)


def test_the_algorithm_of_the_guide_keeps_the_contract(tmp_path):
    code = re.search(r"```python\n(.*?)```", ALGORITHMS, re.S)[1]
    (tmp_path / "my_algo.py").write_text(code)
    algorithm = algos.load_algorithm(str(tmp_path / "my_algo.py"))
    assert algorithm.input == "rollouts" and algorithm.config.aggregation == "token"
    assert algos.of(algorithm.Config(aggregation="sequence")) is algorithm


def test_the_shapes_of_the_guide_have_a_config_json():
    page = (ROOT / "docs/recipes.md").read_text()
    names: dict[str, typing.Any] = {}
    exec(re.search(r"```python\n(from jaxrl_llm.config import ConvConfig.*?)```", page, re.S)[1], names)
    for shape in (names["latent"], names["sinks"], names["convolutions"], names["states"], names["halves"]):
        check_model_config(shape, "docs/recipes.md")
        assert to_hf_config(shape)["model_type"] == shape.family


def test_the_reading_path_names_what_its_files_define():
    page = (ROOT / "docs/architecture.md").read_text()
    for file, text in re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", page, re.M):
        known = {f"{a}.{b}" for a, b in definitions(ast.parse((ROOT / file).read_text()), Path(file).stem)}
        for name in re.findall(r"`([\w.]+)`", text):
            assert any(f".{other}".endswith(f".{name}") for other in known), f"{file}: no {name}"


def test_the_loop_of_the_example_is_short():
    assert len((ROOT / "examples/custom_loop.py").read_text().splitlines()) <= 60
