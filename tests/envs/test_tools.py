"""The tools in the box, without the sandbox's escapes (test_sandbox.py)."""

import asyncio
import json
import math
import random
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.envs.calls import ToolCall, check_arguments
from jaxrl_llm.envs.config import SandboxConfig, ToolsConfig
from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.envs.tools import TOOLS
from jaxrl_llm.envs.tools.calculator import calculate

SERVER = Path(__file__).parents[2] / "examples/search_server.py"
search_server = types.ModuleType("search_server")
sys.modules["search_server"] = search_server  # for its dataclass
exec(compile(SERVER.read_text(), SERVER, "exec"), vars(search_server))
Search, BM25Index, read_corpus = search_server.Search, search_server.BM25Index, search_server.read_corpus


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (1 + 2) * 3 ", "9"),
        ("2**100", str(2**100)),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("10**400 / 10**399", "10"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**-2", "0.25"),
        ("+-+3", "-3"),
        ("sqrt(16)", "4"),
        ("sqrt(10**40)", str(10**20)),
        ("sqrt(2)", "1.4142135623730951"),
        ("abs(-3) + min(1, 2) + max(4, 5)", "9"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5) + floor(2.9) + ceil(2.1)", "7"),
        ("gcd(12, 18)", "6"),
        ("factorial(20)", "2432902008176640000"),
        ("log(8, 2) + cos(0) + sin(0) + tan(0) + exp(0)", "5.0"),
        ("pi - e", str(math.pi - math.e)),
    ],
)
def test_calculator(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9**9**9", "the power is too large"),
        ("9**9**9**9", "the power is too large"),
        ("(2**9000) * (2**9000)", "the result is too large"),
        ("10.0**400", "the result is too large"),
        ("1e308 * 10", "the result is too large"),
        ("exp(10**5)", "the result is too large"),
        ("factorial(10**9)", "factorial takes"),
        ("round(5, -10**9)", "at most 300 digits"),
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**(1/3)", "not a real number"),
        ("1e308 * 10 - 1e308 * 10", "too large"),
        ("sqrt(-1)", "square root of a negative number"),
        ("log(0)", "math domain error"),
        ("sqrt(1, 2)", "takes 1 positional argument but 2 were given"),
        ("max()", "empty"),
        ("3 +", "not an arithmetic expression: '3 +'"),
        ("", "not an arithmetic expression"),
        ("1; 2", "not an arithmetic expression"),
        ("2 ^ 3", "write ** for powers"),
        ("x + 1", "not allowed: x"),
        ("True + 1", "not allowed: True"),
        ("'a' * 9", "not allowed: 'a'"),
        ("1 < 2", "not allowed: 1 < 2"),
        ("1 << 99", "not allowed: 1 << 99"),
        ("1j * 1j", "not allowed: 1j"),
        ("__import__('os').system('true')", "not allowed"),
        ("(1).__class__", "not allowed"),
        ("[1 for x in [1]]", "not allowed"),
        ("max(*[1, 2])", "not allowed"),
        ("(" * 230 + "1" + ")" * 230, "not an arithmetic expression"),
        ("1" * 501, "longer than 500"),
    ],
)
def test_calculator_says_what_is_wrong(expression, said):
    with pytest.raises(ToolError) as error:
        calculate(expression)
    assert said in str(error.value)


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # of Python's own parser
def test_calculator_on_random_text_neither_raises_nor_hangs():
    rng = random.Random(0)
    words = ["**", "//", "9**9", "factorial(", "sqrt(", "round(", "1e308", "max(", "-" * 99]
    pieces = [*"0123456789.+-*/%()^,", *words]
    started = time.process_time()
    values = 0
    for _ in range(5000):
        try:
            values += len(calculate("".join(rng.choices(pieces, k=rng.randint(1, 12))))) > 0
        except ToolError as error:
            assert str(error)
    assert values > 100 and time.process_time() - started < 10


def test_calculator_agrees_with_python():
    rng = random.Random(1)
    for _ in range(500):
        signs = rng.choices(["+", "-", "*", "//", "%"], k=5)
        text = "".join(f"{rng.randint(1, 99)}{sign}" for sign in signs) + "7"
        try:
            expected = str(eval(text))
        except ZeroDivisionError:
            continue
        assert calculate(text) == expected


def test_every_tool_has_a_schema_that_its_calls_are_checked_by():
    config = ToolsConfig(SandboxConfig(allow_unsandboxed=True))
    for name, make in TOOLS.items():
        schema = make(config).schema
        assert schema["name"] == name and len(schema["description"]) > 20
        (argument,) = schema["parameters"]["required"]
        good = ToolCall(name, {argument: "x"})
        assert check_arguments(good, schema) == good
        assert f"must have {argument}" in check_arguments(ToolCall(name, {}), schema).problem


def test_python_runs_a_program():
    tool = TOOLS["python"](ToolsConfig(SandboxConfig(allow_unsandboxed=True)))
    assert asyncio.run(tool.call({"code": "print(6 * 7)"})) == "42"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        asyncio.run(tool.call({"code": "1 / 0"}))


TEXTS = ["the cat sat on the mat", "the dog sat", "a cat and a dog and a cat", ""]


def test_bm25_by_hand():
    index = BM25Index(TEXTS)
    found, scores = index.search("cat", 4), index.scores(["cat"])
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    mean = (6 + 3 + 8 + 0) / 4
    weight = lambda count, length: idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / mean))
    np.testing.assert_allclose(scores, [weight(1, 6), 0, weight(2, 8), 0], rtol=1e-12)
    assert found == [2, 0]


def test_search_order_and_ties():
    index = BM25Index(["x y", "x y", "y", "x x y"])
    assert index.search("x", 2) == [3, 0] and index.search("X!", 9) == [3, 0, 1]
    assert index.search("nothing of it", 3) == index.search("", 3) == []
    assert index.search("y y y", 1) == index.search("y", 1) == [2]


def test_search_a_jsonl_file(tmp_path):
    rows = [{"title": "Paris", "text": "Capital of France."}, {"contents": "Berlin is in Germany."}]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tool = Search(str(file))
    both = "[1] Paris\nCapital of France.\n\n[2] \nBerlin is in Germany."
    assert tool.search("Is Paris the capital?") == both
    assert tool.search("FRANCE") == "[1] Paris\nCapital of France."
    with pytest.raises(ValueError, match="no passage has any of these words"):
        tool.search("Rome")


def test_search_a_folder_cuts_long_texts(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "long.md").write_text("one two\nthree four five")
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    passages = list(read_corpus(str(tmp_path), passage_words=2))
    assert [(p.title, p.text) for p in passages] == [
        ("a.txt", "short"), ("b/long.md", "one two"), ("b/long.md", "three four"), ("b/long.md", "five"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"text": ', r"corpus\.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n[1]\n', r"corpus\.jsonl:3: a line is an object"),
        (b'{"title": "a"}\n', r'corpus\.jsonl:1: "text" \(or "contents"\) and "title" must be strings'),
        (b'{"text": "a", "title": 3}\n', r"corpus\.jsonl:1: .* must be strings"),
        (b'{"text": "\xff"}\n', r"corpus\.jsonl:1: not JSON"),
        (b"\n", "no text in"),
    ],
)
def test_a_bad_corpus_is_an_error_with_its_place(tmp_path, content, said):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        Search(str(file))


def test_no_corpus_is_an_error_that_names_the_key(tmp_path):
    for path, said in (
        ("", "is empty"),
        (str(tmp_path / "x"), "no file or folder"),
        (str(tmp_path), "no text"),
    ):
        with pytest.raises(ValueError, match=said):
            Search(path)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 0"):
        Search(str(tmp_path))


def test_ten_thousand_passages_are_indexed_and_searched_quickly():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in rng.zipf(1.3, 60) % 20_000) for _ in range(10_000)]
    texts[7] += " needle"
    started = time.process_time()
    index = BM25Index(texts)
    assert time.process_time() - started < 20
    started = time.process_time()
    assert index.search("w1 w2 w3 needle", 1) == [7]
    assert time.process_time() - started < 1
