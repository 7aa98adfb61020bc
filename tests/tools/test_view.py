"""`view`: the data of the page, damaged files, mistakes, and that no text of a run is parsed as HTML."""

import base64
import errno
import fnmatch
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from random_weights import random_params
from view_runs import HOSTILE, agent_run, conversation, large_run, write_run

from jaxrl_llm import models, train
from jaxrl_llm.__main__ import main
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.tools import view

ROOT = Path(__file__).parents[2]
STEP = {"step": 1, "kind": "train", "loss": 0.5}


class Page(HTMLParser):
    """Elements, texts of script, style and title, and data of a page, as a browser parses it."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.texts, self.scripts, self.policy = [], {}, {}, ""
        self.current = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.current = (tag, attributes.get("id", ""))
        if "http-equiv" in attributes:
            self.policy = attributes["content"]

    def handle_data(self, data):
        self.texts[self.current] = self.texts.get(self.current, "") + data

    def handle_endtag(self, tag):
        self.current = None

    def data(self, name):
        return json.loads(gzip.decompress(base64.b64decode(self.texts["script", name])))


def view_page(*args) -> Page:
    words = list(map(str, args))
    assert main(["view", *words]) == 0
    return Page(Path(words[words.index("--out") + 1]) if "--out" in words else Path(words[0]) / "view.html")


def test_metrics_are_columns_and_configs_are_flat(tmp_path):
    rows = [
        {"step": 1, "kind": "warm_start", "loss": 1.23456789, "kl": None, "note": "text"},
        {"step": 2, "kind": "train", "loss": float("nan"), "reward/mean": 3},
    ]
    config = {
        "command": ["--steps", "2"],
        "recipe": "grpo_tiny.py",
        "versions": {"jax": "0.10.2"},
        "config": {
            "steps": 2,
            "algo": {"name": "grpo", "cap": None},
            "data": {"train": [{"path": "a"}], "n": [1]},
        },
    }
    (run,) = view_page(write_run(tmp_path / "run", rows, config=config)).data("runs")
    assert run["steps"] == [1, 2] and run["kinds"] == ["warm_start", "train"]
    assert run["metrics"] == {"loss": [1.23457, None], "reward/mean": [None, 3]}
    assert run["config"] == {
        "command": "--steps 2", "recipe": "grpo_tiny.py", "versions.jax": "0.10.2", "steps": "2",
        "algo.name": "grpo", "algo.cap": "null", "data.train.0.path": "a", "data.n": "[1]",
    }  # fmt: skip


@pytest.mark.slow
def test_the_architecture_is_that_of_the_model_that_was_trained(tmp_path):
    small = models.TransformerConfig(
        vocab_size=128, hidden_size=8, mlp_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        max_position=128,
    )  # fmt: skip
    save_model(random_params(small), small, tmp_path / "model", make_tokenizer(), dtype="float32")
    words = [
        "--config",
        "sft_tiny.py",
        "--model.path",
        str(tmp_path / "model"),
        "--run_dir",
    ]  # 2 layers of 128
    short = ["--steps", "1", "--prompts_per_step", "2", "--eval.every", "0", "--devices", "0:1"]
    quiet = ["--checkpoint.every", "0", "--log.tensorboard", "false", "--log.progress", "none"]
    assert train.main([*words, str(tmp_path / "run"), *short, *quiet]) == 0
    sizes = {"hidden_size": 8, "mlp_size": 12, "num_layers": 1, "num_heads": 2, "head_dim": 4}
    written = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]["architecture"]
    assert {name: written[name] for name in sizes} == sizes
    (run,) = view_page(tmp_path / "run").data("runs")
    assert {name: run["config"][f"model.architecture.{name}"] for name in sizes} == {
        name: str(size) for name, size in sizes.items()
    }


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_ticks_of_curves_are_whole_steps_and_differ_from_each_other():
    spans = [(0, 1), (1, 2), (1, 6), (11, 16), (3, 3), (1, 1000), (0, 123456)]
    axes = [[low, high, count, True] for low, high in spans for count in (2, 5, 9)]
    axes += [[0.5, 0.50002, 4, False], [1e-7, 3e-7, 5, False], [1000, 1000.3, 4, False]]
    page, script = Path(view.__file__).with_name("view_page"), Path(__file__).with_name("ticks.js")
    words = ["node", str(script), str(page), json.dumps(axes)]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    for (low, high, count, whole), (values, texts) in zip(axes, found, strict=True):
        assert all(low - 1e-9 <= x <= high + 1e-9 for x in values) and 1 <= len(values) <= count + 1
        assert len(set(texts)) == len(texts)
        if whole:
            assert all(re.fullmatch(r"\d+", text) for text in texts), texts
            assert low == high or len(values) >= 2 or count == 2, (low, high, count, values)


def test_samples_have_roles_and_the_values_of_their_tokens(tmp_path):
    old = {"step": 3, "eval": True, "data_source": "gsm8k", "prompt": "1+1=", "response": "2", "answer": 2}
    old["per_token"] = {"text": [1]}  # not a text
    page = view_page(write_run(tmp_path / "run", [STEP], [conversation(1, 1.0), old]))
    first, second = page.data("samples-0")
    assert first["prompt"] == [["system", "Add."], ["user", "5+7="]]
    assert [role for role, _ in first["response"]] == ["assistant", "tool", "assistant"]
    assert (first["step"], first["reward"], first["outcome"], first["tokens"]) == (1, 1.0, "correct", 4)
    assert (first["split"], second["split"], second["source"]) == ("train", "eval", "gsm8k")
    assert first["per_token"] and not second["per_token"]
    assert second["prompt"] == [["prompt", "1+1="]] and second["response"] == [["assistant", "2"]]
    assert second["reward"] is None and second["other"] == {"answer": "2"}
    assert page.data("tokens-0-0") == [conversation(1, 1.0)["per_token"], None]


def test_a_tree_that_cannot_be_read_is_the_conversation_as_it_was_written(tmp_path):
    """The turns are then the assistant's messages, one after another."""
    good, bad = agent_run(), {**agent_run(), "tree": [{"after": 0, "tokens": [0, 1], "read": []}]}
    page = view_page(write_run(tmp_path / "run", [STEP], [good, bad, conversation(1, 1.0)]))
    tree, plain, old = (sample["tree"] for sample in page.data("samples-0"))
    assert [(t["after"], t["under"]) for t in tree] == [(-1, None), (-1, 0), (0, None), (2, None), (0, 0)]
    assert tree[0]["calls"][0]["arguments"] == [["city", "Paris"], ["days", "2"]]
    assert [t["inputs"] for t in tree[1:3]] == [
        [["user", "Summarize: 12 mm"]],
        [],
    ]  # the answer is the call's
    assert [(t["after"], t["tokens"]) for t in plain] == [(i - 1, None) for i in range(5)] and old is None


def test_values_of_tokens_are_in_chunks_beside_the_texts(tmp_path):
    page = view_page(write_run(tmp_path / "run", [STEP], [conversation(i, i % 2) for i in range(250)]))
    assert [len(page.data(f"tokens-0-{i}")) for i in range(3)] == [100, 100, 50]
    assert page.data("tokens-0-2")[-1]["advantages"] == [0.5, None, 0.5, 0.5]


def test_no_text_of_a_run_is_parsed_as_html(tmp_path):
    run = large_run(tmp_path / "a<script>b", steps=20)
    page = view_page(run, "--out", tmp_path / "page.html")
    assert page.tags.count("script") == 1 + 2 + 2  # the page's; runs and samples; two chunks
    assert "img" not in page.tags and page.texts["title", ""].startswith("a<script>b")
    assert page.data("samples-0")[0]["response"][2] == ["assistant", HOSTILE]
    policy = dict(part.split(" ", 1) for part in page.policy.split("; "))
    sources = {"script-src": page.texts["script", ""], "style-src": page.texts["style", ""]}
    digests = {k: base64.b64encode(hashlib.sha256(v.encode()).digest()).decode() for k, v in sources.items()}
    assert policy == {
        "default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
        **{name: f"'sha256-{digest}'" for name, digest in digests.items()},
    }  # fmt: skip


def test_texts_that_utf8_cannot_have_survive(tmp_path):
    page = view_page(write_run(tmp_path / "run", [STEP], [{"step": 1, "response": "a\ud800b"}]))
    assert page.data("samples-0")[0]["response"] == [["assistant", "a\ud800b"]]


def test_scripts_set_texts_as_texts():
    assets = list((ROOT / "jaxrl_llm/tools/view_page").iterdir())
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    (pattern,) = package_data["jaxrl_llm.tools"]
    assert all(fnmatch.fnmatch(f"view_page/{file.name}", pattern) for file in assets)
    assert {file.name for file in assets} == {"page.html", "page.css", *(f"{x}.js" for x in view.SCRIPTS)}
    forbidden = r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function|https?://(?!www\.w3)"
    for file in assets:
        text = file.read_text(encoding="ascii")
        assert len(text.splitlines()) <= 400 and not re.search(forbidden, text), file
        assert file.suffix == ".html" or "</" not in text, file


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["x/run", "y/run", "z"], ["x/run", "y/run", "z"]),
        (["p/x/run", "q/x/run"], ["p/x/run", "q/x/run"]),
    ],
)
def test_runs_have_the_shortest_names_that_differ(names, labels):
    assert view.run_names([Path("/runs") / name for name in names]) == labels


@pytest.mark.parametrize("config, depth", [("{", 101), ('{"x":' * 150 + "1" + "}" * 150, 20_000)])
def test_damaged_lines_are_left_out_and_named(tmp_path, capsys, config, depth):
    run = write_run(tmp_path / "run", [STEP, {"step": 2, "loss": 0.25}], [conversation(1, 1.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"loss": 1}\n{"step": 3, "lo\n')
        file.write('{"step": 3, "x": ' + "[" * depth + "]" * depth + "}\n")
        file.write('{"step": 2, "loss": 1' + "0" * 400 + "}\n")
    (run / "config.json").write_text(config)
    page = view_page(run)
    (data,) = page.data("runs")
    assert data["steps"] == [1, 2, 2] and data["metrics"]["loss"][1:] == [0.25, None]
    assert data["notes"] == [
        "metrics.jsonl: 4 damaged lines are left out: 3, 4, 5, 6",
        "config.json is damaged: the page shows no settings of this run",
    ]
    assert f"warning: {run}: metrics.jsonl: 4 damaged lines" in capsys.readouterr().err


def test_what_is_too_much_is_thinned_evenly_and_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "MAX_POINTS", 11)
    rows = [{"step": s, "loss": s / 10} | ({"eval/pass@1": 0.5} if s == 7 else {}) for s in range(101)]
    run = write_run(tmp_path / "run", rows, [conversation(s, 1.0) for s in range(1000)], {})
    page = view_page(run, "--max_samples", 4)
    (data,) = page.data("runs")
    assert data["steps"] == [0, 7, *range(10, 101, 10)]
    assert [s["step"] for s in page.data("samples-0")] == [0, 333, 666, 999]
    assert data["notes"] == [
        "101 steps; the curves show 12, and every evaluation", "1,000 samples; the page has 4 (--max_samples)"
    ]  # fmt: skip


def test_mistakes_are_one_line_with_the_fix(tmp_path, capsys):
    run = write_run(tmp_path / "runs/a b", [STEP])
    started = tmp_path / "started"
    started.mkdir()
    (started / "config.json").write_text("{}")
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    write_run(empty, [])
    write_run(damaged, [])
    (damaged / "metrics.jsonl").write_text("{\n")
    cases = [
        ([], "no run is given. Give run directories: python -m jaxrl_llm view runs/"),
        ([tmp_path / "none"], "is not a run directory: the folder does not exist. Give the --run_dir of"),
        ([tmp_path / "runs"], f"is not a run directory: has no metrics.jsonl. Runs in it: '{run}'"),
        ([run / "metrics.jsonl"], "is not a run directory: it is a file. Give the --run_dir of"),
        ([started], "has no step yet, only config.json; view the run after a step"),
        ([empty], "metrics.jsonl has no step: the file is empty; view the run after a step"),
        ([damaged], "metrics.jsonl has no step: all of its lines are damaged"),
        ([run, run / ""], "the same run twice; give each run once"),
        ([run, "--out", tmp_path / "page.txt"], "a page needs a name that ends in .html, such as"),
        ([run, "--out", tmp_path / "no/page.html"], "does not exist; make it first"),
        ([run, "--max_samples", 0], "--max_samples is 0: it must be at least 1"),
    ]
    for words, message in cases:
        assert main(["view", *map(str, words)]) == 2, words
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1, error
    assert main(["view", str(run), "--output", "x"]) == 2 and "--output" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_page(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", [STEP])
    (run / "view.html").write_text("the old page")

    def replace(temporary, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert main(["view", str(run)]) == 2
    message = "view.html: cannot be written (No space left on device). Free some space, or set another"
    assert message in capsys.readouterr().err
    assert sorted(file.name for file in run.iterdir()) == ["metrics.jsonl", "view.html"]
    assert (run / "view.html").read_text() == "the old page"
