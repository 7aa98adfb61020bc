"""Messages of a command name the flags that it has."""

import ast
import json
import re

import pytest
from test_style import ROOT

from jaxrl_llm.host.command import WITHOUT_DATA, own_flags, run_command
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.tools import generate, score
from jaxrl_llm.tools.config import GenerateArguments, ScoreArguments

SHARED = "data/chat data/messages data/parts data/preference data/prompt_rows data/rendering data/template"
SHARED += " rewards/builtin rewards/environment rewards/gold"
"""Modules whose messages several commands print."""
FLAG = re.compile(r"--[a-z_]+(?:\.[a-z_0-9]+)+")
ASKED = {"role": "user", "content": "q"}
ROWS = [
    {"prompt": "q", "question": "r", "response": "a"},
    {"prompt": "q", "response": "a", "completion": "b"},
    {"messages": [ASKED], "conversations": [ASKED | {"content": "r"}], "response": "a"},
    {"messages": [ASKED, {"role": "assistant", "content": "a"}], "response": "b"},
    {"prompt": [ASKED], "chosen": "a", "rejected": "b", "output": "c"},
    {"prompt": "q", "response": "a", "answer": {"style": "rule"}},
    {"prompt": "q", "response": "a", "answer": {"style": {"rule": 1}}},
]


def run(name, row, tmp_path, *argv):
    """Run a command on a file of one row."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    command, flag = (score.main, "--data") if name == "score" else (generate.main, "--prompts")
    argv = [flag, str(file), "--out", str(tmp_path / "out.jsonl"), "--reward.name", "exact", *argv]
    return run_command(command, argv, name)


@pytest.mark.parametrize("row", ROWS)
def test_refusals_of_score_name_its_flags(row, tmp_path, capsys):
    known = dict(iter_fields(ScoreArguments(data=tmp_path, out=tmp_path)))
    code, text = run("score", row, tmp_path), capsys.readouterr().err
    assert (code == 2 and "rows.jsonl:1" in text) or "answer" in text
    assert all(flag.removeprefix("--") in known for flag in FLAG.findall(text)), text


def test_refusals_of_generate_name_its_flags(tmp_path, capsys):
    known = dict(iter_fields(GenerateArguments(model="m", prompts=tmp_path, out=tmp_path)))
    assert run("generate", ROWS[0], tmp_path, "--model", "m") == 2
    text = capsys.readouterr().err.replace("--data.bad_rows skip, in training", "")
    assert "the column question" in text and all(f.removeprefix("--") in known for f in FLAG.findall(text))


@pytest.mark.parametrize("command", WITHOUT_DATA)
def test_every_message_of_shared_modules_has_its_words(command):
    run_command(lambda argv: 0, [], command)
    texts = [
        node.value
        for module in SHARED.split()
        for node in ast.walk(ast.parse((ROOT / "jaxrl_llm" / f"{module}.py").read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "(--data.bad_rows" not in node.value
    ]
    assert sum("--data." in text for text in texts) > 10
    wrong = [text for text in map(own_flags, texts) if "--data." in text and "in training" not in text]
    assert wrong == []
    run_command(lambda argv: 0, [])
    assert own_flags("--data.chat.loss last") == "--data.chat.loss last"
