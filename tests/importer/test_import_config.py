"""The command import-config: shell syntax, files that are refused, and what it writes."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.importer.read import read_settings
from jaxrl_llm.importer.shell import Script

VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size={} "
VERL += "trainer.total_training_steps=1 data.train_files=x\n"


def words(text, **variables):
    return [[word.text for word in command] for command in Script(text, "x.sh", variables).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b=c # d", [["a", "b=c"]]),
        ("X=1\nY=${X}2\nrun $X $Y '$X' \"$X y\"", [["run", "1", "12", "$X", "1 y"]]),
        ("run ${X:-a}${Y-b} ${X:+c}", [["run", "ab"]]),
        ("N=3; run $((N * 2 + 1)) $(( (N+1)/2 ))", [["run", "7", "2"]]),
        (
            "A=(a 'b c' # no\n d)\nA+=(e)\nrun ${A[@]} x\"${A[@]}\"",
            [["run", *["a", "b c", "d", "e", "xa", "b c", "d", "e"]]],
        ),
        ("run a \\\n  b\nnext | then", [["run", "a", "b"], ["next"]]),
        ("export A=1 B=2\nrun $A$B", [["export"], ["run", "12"]]),
        ("L='a b'\nrun $L \"$L\"", [["run", "a", "b", "a b"]]),
        ("read -r -d '' T <<EOF\nx \\\n y\nEOF\nrun $T", [["run", "x", "y"]]),
        ("cat > f <<'EOF'\nrun no\nEOF\nrun yes", [["run", "yes"]]),
        ('D=$(cd "$(dirname "$0")/.." && pwd)\nrun $D/x', [["run", "../x"]]),
        ("run $HOME/x {a,b} $@", [["run", "~/x", "{a,b}"]]),
        (
            "P=a/b/Qwen3-0.6B.tar.gz\nrun ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P,,} ${P/b/c} ${P:4:5}",
            [
                [
                    "run",
                    "Qwen3-0.6B.tar.gz",
                    "a/b/Qwen3-0.6B.tar",
                    "a/b/Qwen3-0",
                    "b/Qwen3-0.6B.tar.gz",
                    "a/b/qwen3-0.6b.tar.gz",
                    "a/c/Qwen3-0.6B.tar.gz",
                    "Qwen3",
                ]
            ],
        ),
        ('run a=$\'x\\ty\\\'z\' b="1 $" $"c" 5$ end', [["run", "a=x\ty'z", "b=1 $", "c", "5$", "end"]]),
    ],
)
def test_shell(text, expected):
    assert words(text) == expected


def test_shell_marks_what_only_a_run_would_tell():
    assert words("run $U $(date +%s)_x $1 `ls`") == [
        ["run", "\0U\0", "\0(date +%s)\0_x", "\x001\0", "\0`ls`\0"]
    ]
    assert words("run $U", U="v") == [["run", "v"]]


def test_a_definition_reaches_what_edits_the_variable():
    assert words("run ${U##*/}") == [["run", "\0U\0"]]
    assert words("run ${U##*/}", U="a/b") == [["run", "b"]]


def test_files_of_some_editors_begin_with_a_mark(tmp_path):
    for name, text in (("a.sh", f"B=8\n{VERL.format('$B')}"), ("a.py", "GRPOConfig(learning_rate=0.5)\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    settings = read_settings(tmp_path / "a.sh").settings
    assert settings["data.train_batch_size"].value == 8
    assert read_settings(tmp_path / "a.py").settings["learning_rate"].value == 0.5


@pytest.mark.parametrize("name", ["x.sh", "x.py", "x.yaml"])
@pytest.mark.parametrize("data", [b"GRPOConfig()\0", bytes(range(256)), "a=1".encode("utf-16")])
def test_binary_files_are_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: not UTF-8 text. Give the path of a script or config"):
        read_settings(tmp_path / name)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_no_more_is_read_than_a_config_has(tmp_path):
    (tmp_path / "x.sh").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="larger than 4 MiB, so no config"):
        read_settings(tmp_path / "x.sh")


@pytest.mark.parametrize("cut", ["\\\n  # a note \\\n  ", "\\ \n  ", "\\\n\n  "])
def test_settings_behind_the_end_of_the_command_are_named(imported, cut):
    run = imported(
        f"{VERL.format(8).strip()} {cut}trainer.save_freq=5 \\\n  trainer.test_freq=5\necho done\n"
    )
    assert ": trainer.save_freq=5 and what follows is not read: the command ends before it, at" in run.report
    assert "is not read" not in imported(f"{VERL.format(8)}echo done\n./next.sh a.b=1\n").report


def test_nothing_is_executed(imported, tmp_path):
    canary = tmp_path / "canary"
    imported(f"touch {canary}\nX=$(touch {canary})\n`touch {canary}`\n{VERL.format(8)}")
    imported(
        f"import os\nos.system('touch {canary}')\nfrom trl import SFTConfig\n"
        f"SFTConfig(run_name=os.system('touch {canary}'), learning_rate=1e-5)\n",
        "train.py",
    )
    assert not canary.exists()


def test_the_first_value_of_a_branch_counts_and_is_named(imported):
    text = "B=8\nif [ $1 = big ]; then\n  B=64\nfi\n" + VERL.format("$B")
    run = imported(text)
    assert run.config.prompts_per_step == 8
    assert "run.sh:3: B is assigned in a branch once more; its first value is used. --define B=" in run.report
    assert imported(text, define=("B=16",)).config.prompts_per_step == 16


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (
            VERL.format("$BATCH"),
            "run.sh",
            "values that only running the file would tell; it is never run:\n"
            "/run.sh:1: data.train_batch_size is $BATCH: give --define BATCH=VALUE",
        ),
        (
            VERL.format("many"),
            "run.sh",
            "/run.sh:1: data.train_batch_size is 'many': it must be a number. Set it right in a copy of the "
            "file.",
        ),
        (
            VERL.format("8 data.max_prompt_length=0"),
            "run.sh",
            "/run.sh:1: data.max_prompt_length is '0': it must be a whole number of at least 1. Set it right "
            "in a copy of the file.",
        ),
        (
            "X=aaaaaaaa\n" + "X=$X$X\n" * 20,
            "run.sh",
            "/run.sh:15: X is longer than 100,000. Shorten it.",
        ),
        (VERL.format("8 'x"), "run.sh", "/run.sh:1: the quote ' is never closed. Close it."),
        ("A=(a\nb", "run.sh", "/run.sh:1: A=( is never closed. Close it with )."),
        ("cat <<EOF\nx\n", "run.sh", "/run.sh:2: <<EOF has no line EOF. End it with one."),
        ("run ${X\n", "run.sh", "/run.sh:1: ${ is never closed. Close it with }."),
        ("a: [1\nb: 2\n", "x.yaml", "/x.yaml:2: not YAML: expected ',' or ']', but got ':'. Mend the line."),
        ("- 1\n", "x.yaml", "/x.yaml:1: YAML, but no mapping of keys to values. Give the config itself."),
        (
            "lr: 1\n",
            "x.yaml",
            "/x.yaml: of no system that is known by its keys. Set --system verl|openrlhf|trl|rl2|chatlearn.",
        ),
        (
            "make train\n",
            "x.sh",
            "/x.sh: no command of a trainer that is known. Set --system verl|openrlhf|trl|rl2|chatlearn and "
            "--trainer NAME.",
        ),
        ("GRPOConfig(\n", "x.py", "/x.py:1: not Python: '(' was never closed. Mend the line."),
        (
            "print(1)\n",
            "x.py",
            "/x.py: no call of a Config of TRL, such as GRPOConfig(...), and no command in its docstring. "
            "Put the command that starts it into a .sh file.",
        ),
        (
            "GRPOConfig(learning_rate=rate())\n",
            "x.py",
            "values that only running the file would tell; it is never run:\n"
            "/x.py:1: learning_rate is $rate(): write its value in a copy of the file",
        ),
        (
            "{}",
            "x.toml",
            "/x.toml: .toml: read are shell scripts (.sh), YAML (.yaml) and Python (.py). Rename the "
            "file, or put the command into a .sh file.",
        ),
    ],
)
def test_refused(refusal_of, text, name, message):
    assert refusal_of(text, name) == message


def test_refused_options(refusal_of):
    assert refusal_of("a: 1\n", "x.yaml", system="trl") == (
        "/x.yaml: the trainer is not in the file. TRL has --trainer "
        "grpo|rloo|online_dpo|sft|dpo|kto|reward|orpo|cpo|gkd."
    )
    assert refusal_of("a: 1\n", "x.yaml", system="rl2", trainer="x").startswith(
        "--trainer x: unknown. RL2 has"
    )
    assert refusal_of("a", define=("x",)) == "--define x: it must be NAME=VALUE."


def test_the_command_writes_a_recipe_once(tmp_path, capsys):
    file, out = tmp_path / "run.sh", tmp_path / "new" / "recipe.py"
    file.write_text(VERL.format(8) + "python3 -m verl.trainer.main_ppo a=b\n")
    assert main(["import-config", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{file}: veRL, ppo; here ppo. 3 of 3 keys have a counterpart." in printed
    assert "a second command in line 2 is not" in printed
    assert f"next: python -m jaxrl_llm.train --config {out} --help" in printed
    assert main(["import-config", str(file), "--out", str(out)]) == 2
    assert f"--out {out}: exists. Set another --out, or --overwrite True." in capsys.readouterr().err
    assert main(["import-config", str(file), "--out", str(out), "--overwrite", "True"]) == 0
    assert main(["import-config", str(tmp_path / "no.sh")]) == 2
    assert "no.sh: No such file or directory. Give the path" in capsys.readouterr().err
    assert main(["import-config", str(file), "--out", "x.sh"]) == 2
    assert "a recipe is a Python file. Set --out x.py." in capsys.readouterr().err


def test_text_of_a_file_stays_text_in_the_recipe(imported):
    text = 'x\'"""\\\n)\nimport os  # '
    run = imported(
        json.dumps({"model_name_or_path": text, f"key {text}": text, "num_generations": 8}), "c.yaml"
    )
    assert run.config.model.path == text and "\nimport os" not in run.text
    assert list(run.unused) == [f"key {text}"]
