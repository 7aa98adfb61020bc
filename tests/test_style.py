"""The rules of style that a parser can check: sizes, names, docstrings and words."""

import ast
import collections
import functools
import io
import itertools
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxrl_llm", "kernels", "importer", "configs", "examples", "benchmarks", "scripts", "tests")
each_folder = pytest.mark.parametrize("folder", FOLDERS)

MAX_LINES = {"jaxrl_llm": 400, "importer": 400, "configs": 400, "examples": 400, "scripts": 400}
"""Lines of a file, without comment lines."""
MAX_TEST_LINES = 600  # of kernels, benchmarks and tests
MAX_FUNCTION_LINES = 50  # without the docstring and comment lines
MAX_UNDIVIDED_LINES = 25  # of code between comment lines, which head its phases
WITH_PHASES = ("kernels", "jaxrl_llm", "importer")

RIDDLES = {"What", "Who", "Whose", "Where", "How", "Which", "Whether", "Why"}
NO_VERBS = RIDDLES | {
    *("A", "An", "The", "This", "These", "That", "It", "Its", "They", "There", "One", "Each", "Every", "All"),
    *("Any", "Both", "No", "Not", "Nothing", "Only", "As", "At", "By", "For", "From", "If", "In", "Of", "On"),
    *("To", "When", "While", "With", "Without", "Returns", "Computes", "Yields", "Writes", "Reads", "Checks"),
    *("Runs", "Makes", "Sends", "Sets", "Adds", "Gives", "Takes", "Starts", "Stops", "Prints", "Called"),
}
"""First words that a docstring of a function must not have, in place of an imperative: "Return ..."."""
DIALECT = {
    r"nobody|everybody|somebody|anybody|whoever|whom": "name the part that acts",
    r"believes?|wants?|wanted|wishes|speaks?|spoken|told|heard": "needs, validates, sends, received",
    r"tak(?:es?|ing|en) turns": "synchronous, alternate, interleave",
    r"(?:writing|written|writes) ahead|ahead of the trainer": "asynchronous rollout",
    r"supervised start": "SFT warm-up",
    r"half-written": "partial",
    r"stand-ins?": "fake",
    r"begun": "started",
}
"""Words of comments and docstrings -> what the field says instead."""
UNCLEAR = {
    "ask", "asked", "begun", "found", "heard", "here", "lay", "lie", "made", "mine", "most",
    "room", "said", "say", "seat", "speak", "theirs", "there", "told", "wanted",
    "wants", "ways", "whole", "written",
}  # fmt: skip
"""Names that functions, parameters and fields must not have: the field has words for them."""
CONTRACTS = {
    "main": "the entry point of a program",
    "get_config": "a recipe",
    "forward": "of each implementation of an operation (docs/kernels.md)",
    "backward": "of each implementation of an operation",
    "d_logits": "of each implementation of linear_logprob",
    "unsupported": "of each implementation that takes some shapes only",
    "decode_attention": "of each implementation, and the operation itself",
    "write_token": "of each implementation, and the operation itself",
    "grouped_matmul": "the operation, and each implementation of it",
    "gated_delta": "the operation, and each implementation of it",
    "linear_logprob": "the operation, and its batch-invariant form of the same signature",
    "check_vmem": "of each TPU kernel's shapes.py",
    "vmem_bytes": "of each TPU kernel's shapes.py",
    **dict.fromkeys(
        (
            *(
                "add_weights",
                "empty_state",
                "project_inputs",
                "split_channels",
                "make_rows_fn",
                "make_step_fn",
            ),
            *("finish_mixed", "mixer_weights", "state_flops"),
        ),
        "of each kind of recurrent layers (models/recurrent.py), or of all layers of a model",
    ),
}
"""Public names that several modules define, since code calls any of them -> why."""
SEPARATE = ("tests/", "benchmarks/peers/", "scripts/sglang_cpu/")
"""Folders whose files are programs of their own: the uniqueness of names ends there."""
REEXPORTS = {
    "jaxrl_llm/__init__.py": "the Python API",
    "jaxrl_llm/algos/__init__.py": "the algorithms, for recipes",
    "jaxrl_llm/config.py": "all that a recipe needs besides its algorithm",
    "jaxrl_llm/models/__init__.py": "the decoder's interface",
    "kernels/jaxrl_kernels/linear_logprob/chunked.py": "d_logits is that of the reference",
}
"""Modules with __all__ -> why."""


class Definition(NamedTuple):
    """A class or function."""

    file: Path
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    is_public: bool

    @property
    def place(self) -> str:
        return f"{name_of(self.file)}:{self.node.lineno}: {self.node.name}"


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


def definitions(folder: str) -> Iterator[Definition]:
    """Yield the classes and functions at the top of each module, and the methods."""
    for file in files_of(folder):
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Definition(file, node, is_public=not node.name.startswith("_"))
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield Definition(file, inner, is_public=not {node.name[0], inner.name[0]} & {"_"})


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of modules, classes, functions and attributes."""
    for node in nodes_of(file):
        for inner in node.body if isinstance(getattr(node, "body", None), list) else []:
            value = getattr(inner, "value", None)
            if (
                isinstance(inner, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield inner.lineno, value.value


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@functools.cache
def own_comments(file: Path) -> set[int]:
    """Return the lines that hold a comment alone."""
    found = {i for i, line in enumerate(file.read_text().splitlines(), 1) if line.lstrip().startswith("#")}
    texts = (node for node in nodes_of(file) if isinstance(node, ast.Constant | ast.JoinedStr))
    inside = {i for node in texts for i in range(node.lineno + 1, node.end_lineno + 1)}
    # Few files have such lines in texts, and tokenizing all takes seconds.
    return found & {line for line, _ in comments(file)} if found & inside else found


def first_word(text: str) -> str:
    match = re.match(r"[A-Za-z]+", text.strip())
    return match[0] if match else ""


def is_property(node: ast.AST) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


@each_folder
def test_files_are_small_plain_and_well_named(folder):
    limit = MAX_LINES.get(folder, MAX_TEST_LINES)
    for file in files_of(folder):
        text = file.read_text()
        assert text.isascii(), f"{name_of(file)}: {next(x for x in text.splitlines() if not x.isascii())}"
        lines = len(text.splitlines()) - len(own_comments(file))
        assert lines <= limit, f"{name_of(file)} has {lines} lines, more than {limit}"
        hides = file.stem in sys.stdlib_module_names
        assert not hides, f"{name_of(file)} hides a module of the standard library"


@each_folder
def test_functions_are_short(folder):
    for file in files_of(folder):
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                lines -= len(own_comments(file) & set(range(node.lineno, node.end_lineno + 1)))
                if ast.get_docstring(node) is not None:
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{name_of(file)}: {node.name} has {lines} lines"


@pytest.mark.parametrize("folder", WITH_PHASES)
def test_comments_head_the_phases_of_long_functions(folder):
    wrong = []
    for file in files_of(folder):
        text, own = file.read_text().splitlines(), own_comments(file)
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = set(range(node.lineno, node.end_lineno + 1))
                code = {line for line in lines - own if text[line - 1].strip()}
                if ast.get_docstring(node) is not None:
                    code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
                body = node.body[ast.get_docstring(node) is not None :] or node.body
                inside = sorted(line for line in code | lines & own if line >= body[0].lineno)
                parts = itertools.groupby(inside, key=own.__contains__)
                longest = max((len([*part]) for _, part in parts), default=0)
                longest = longest if lines & own else len(code)
                if longest > MAX_UNDIVIDED_LINES:
                    wrong.append(f"{name_of(file)}:{node.lineno}: {node.name} has {longest} lines")
    assert not wrong, "\n".join(wrong)


@each_folder
def test_no_comment_line_stands_twice_in_a_row(folder):
    wrong = []
    for file in files_of(folder):
        text, own = file.read_text().splitlines(), own_comments(file)
        again = [line for line in sorted(own) if line + 1 in own and text[line - 1] == text[line]]
        wrong += [f"{name_of(file)}:{line + 1}: {text[line].strip()}" for line in again]
    assert not wrong, "\n".join(wrong)


@each_folder
def test_docstrings_are_no_riddles(folder):
    wrong = [
        f"{name_of(file)}:{line}: {text.strip().splitlines()[0]}"
        for file in files_of(folder)
        for line, text in docstrings(file)
        if first_word(text) in RIDDLES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_docstrings_of_functions_open_with_a_verb(folder):
    wrong = []
    for definition in definitions(folder):
        text = ast.get_docstring(definition.node)
        if text is None or isinstance(definition.node, ast.ClassDef) or is_property(definition.node):
            continue
        word = first_word(text)
        if (
            word in NO_VERBS
            or not word[:1].isupper()
            or (word.endswith("ed") and word not in ("Feed", "Need"))
        ):
            wrong.append(f"{definition.place}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@each_folder
def test_comments_and_docstrings_have_the_words_of_the_field(folder):
    patterns = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): better for words, better in DIALECT.items()}
    any_of_them = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b", re.IGNORECASE)
    wrong = []
    for file in files_of(folder):
        if not any_of_them.search(file.read_text()):
            continue  # most files: tokenizing takes longer than the search
        for line, text in (*docstrings(file), *comments(file)):
            for pattern, better in patterns.items():
                if match := pattern.search(text):
                    wrong.append(f"{name_of(file)}:{line}: {match[0]!r}: {better}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_names_are_clear(folder):
    """Of public functions, their parameters, and fields of classes."""
    wrong = []
    for place, node, is_public in definitions(folder):
        names = {node.name.lower()} if is_public else set()
        if isinstance(node, ast.ClassDef):
            names |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
        else:
            arguments = node.args
            names |= {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        wrong += [f"{name_of(place)}:{node.lineno}: {name}" for name in sorted(names & UNCLEAR)]
    assert not wrong, "\n".join(wrong)


def test_public_names_have_one_meaning():
    places = collections.defaultdict(set)
    for folder in FOLDERS:
        for file in files_of(folder):
            if not name_of(file).startswith(SEPARATE):
                for node in tree_of(file).body:
                    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                        places[node.name].add(name_of(file))
    shared = {name: files for name, files in places.items() if len(files) > 1 and name[0] != "_"}
    again = {name: sorted(files) for name, files in shared.items() if name not in CONTRACTS}
    assert not again, f"defined more than once: {again}"
    assert CONTRACTS.keys() <= shared.keys(), f"not shared any more: {CONTRACTS.keys() - shared.keys()}"


def test_no_module_exports_the_names_of_another():
    modules = {
        name_of(file)
        for folder in FOLDERS
        for file in files_of(folder)
        for node in tree_of(file).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    assert modules == REEXPORTS.keys()


def test_imports_are_absolute():
    for folder in FOLDERS:
        for file in files_of(folder):
            for node in nodes_of(file):
                relative = isinstance(node, ast.ImportFrom) and node.level > 0
                assert not relative, f"{name_of(file)}:{node.lineno}: a relative import"


def test_no_pattern_repeats_a_group_possessively():
    """Python before 3.11.5 matches such a group wrongly if something in it backtracks (Debian 12 has 3.11.2).

    (?=((?:...)*))\\1 does the same in every version."""
    of_set, repeated = re.compile(r"\[(?:\\.|[^\]\\])*\]"), re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+")
    for folder in WITH_PHASES:
        for file in files_of(folder):
            texts = [node for node in nodes_of(file) if isinstance(node, ast.Constant)]
            for node in (node for node in texts if isinstance(node.value, str)):
                where = f"{name_of(file)}:{node.lineno}"
                assert not repeated.search(of_set.sub("x", node.value)), where


def test_no_class_inherits_from_a_concrete_one():
    """A base is abstract: no call makes an instance of it. Exceptions and frozen dataclasses may extend each
    other."""
    nodes = [node for folder in FOLDERS[:3] for file in files_of(folder) for node in nodes_of(file)]
    frozen = lambda node: any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef) and not frozen(node)}
    chosen = (ast.Name, ast.IfExp, ast.BoolOp)  # as in (A if condition else B)(...)
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, chosen)]
    called = {name.id for call in calls for name in ast.walk(call) if isinstance(name, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & classes & called
            concrete = {base for base in bases if not base.endswith("Error")}
            assert not concrete, f"{node.name} inherits from {concrete}; give it one as an attribute instead"


@pytest.mark.parametrize("folder", ["jaxrl_llm", "kernels"])
def test_nothing_is_packed_for_one_call(folder):
    """`settings = {"a": a}` above `f(**settings)` hides the arguments of f, `sizes = a, b` their names."""
    wrong = []
    for file in files_of(folder):
        functions = [x for x in nodes_of(file) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        for nodes in map(list, map(ast.walk, functions)):
            names = [node for node in nodes if isinstance(node, ast.Name)]
            packed = {
                node.targets[0].id
                for node in nodes
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and (isinstance(node.value, ast.Tuple) or None not in getattr(node.value, "keys", [None]))
            }
            once = {name for name, n in collections.Counter(x.id for x in names).items() if n == 2} & packed
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            splats = [x.value for call in calls for x in call.args if isinstance(x, ast.Starred)]
            splats += [x.value for call in calls for x in call.keywords if x.arg is None]
            found = [x for x in splats if isinstance(x, ast.Name) and x.id in once]
            wrong += [f"{name_of(file)}:{x.lineno}: {x.id}" for x in found]
    assert not wrong, "\n".join(sorted({*wrong}))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_no_symbolic_link_is_tracked():
    """A tracked link leads to a path of the machine that made it."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def test_no_two_test_files_have_one_name():
    """Tests import each other by the name of their file, so the second of two would be the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
