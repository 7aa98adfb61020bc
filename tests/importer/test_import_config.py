"""The command import-config: shell syntax, files that are refused, and what it writes."""

import json
import os
import time

import pytest

from jaxrl_import.read import read_settings
from jaxrl_import.shell import Script
from jaxrl_llm.__main__ import main
from jaxrl_llm.errors import UserError

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
        (
            """N=${X:-'["a","$b"]'}\nrun $N "${X:-'q'}" ${X:-'r'"s"$Y} ${N:+'$t'}""",
            [["run", '["a","$b"]', "'q'", "rs\x00Y\x00", "$t"]],
        ),
        ("run ${X:-$(python3 -c 'print(1)')}", [["run", "\x00(python3 -c 'print(1)')\x00"]]),
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
        (
            "run '<|end|>' \"</s>\" '>' 2 > \"a log\" 2>&1\nnext",
            [["run", "<|end|>", "</s>", ">", "2"], ["next"]],
        ),
        ("run a &>> l < /dev/null && x <<< y >&2 z", [["run", "a"], ["x", "z"]]),
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


def test_no_more_is_read_than_a_config_has(tmp_path):
    (tmp_path / "x.sh").write_bytes(b" " * (2**22 + 1))
    with pytest.raises(UserError, match="larger than 4 MiB, so no config"):
        read_settings(tmp_path / "x.sh")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_pipes_and_devices_are_refused_before_they_are_read(tmp_path):
    os.mkfifo(tmp_path / "x.sh")
    (tmp_path / "y.sh").symlink_to("/dev/zero")
    for name in ("x.sh", "y.sh"):
        with pytest.raises(UserError, match="no file with text"):
            read_settings(tmp_path / name)


DEEP = {
    "x.yaml": "actor_rollout_ref: " + "{a: " * 3000 + "1" + "}" * 3000,
    "param.sh": "X=" + "${a:-" * 3000 + "1" + "}" * 3000 + f"\n{VERL.format(8)}",
    "output.sh": "X=" + "$(" * 3000 + "pwd" + ")" * 3000 + f"\n{VERL.format(8)}",
    "x.py": "GRPOConfig(beta=" + "[" * 2000 + "]" * 2000 + ")",
    "minus.py": "GRPOConfig(beta=" + "-" * 3000 + "1)",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_is_refused_in_one_line(refusal_of, name):
    message = refusal_of(DEEP[name], name)
    assert "\n" not in message and message.endswith((" in a copy.", "Mend the file.", "Mend the line."))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.yaml", "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)), "100000 values"),
        ("x.sh", VERL.format(8).strip() + " a.b=1" * 20_000 + "\n", "10000 arguments"),
        ("y.sh", "A=(" + " x" * 200_000 + f")\n{VERL.format(8)}", "A is longer than 100,000"),
    ],
)  # fmt: skip
def test_large_files_are_refused_at_once(refusal_of, name, text, message):
    started = time.process_time()
    assert message in refusal_of(text, name)
    assert time.process_time() - started < 10


def test_words_take_linear_time():
    """200,000 words of one command, of which each might stand before an assignment."""
    started = time.process_time()
    assert len(words("export " * 200_000)[0]) == 200_000
    assert time.process_time() - started < 20


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
            "/x.py: no trainer of TRL, such as GRPOTrainer(...), and no command of one in its docstring. "
            "Put the command that starts it into a .sh file.",
        ),
        (
            "GRPOConfig(learning_rate=rate())\n",
            "x.py",
            "values that only running the file would tell; it is never run:\n"
            "/x.py:1: learning_rate is $rate(): give --define learning_rate=VALUE",
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
        "grpo|async_grpo|gmpo|distillation|rloo|online_dpo|sft|dpo|kto|reward|orpo|cpo|gkd|prm|ppo."
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
    assert f"{file}: veRL, ppo; here ppo. Keys: 3 carried over, 0 not although they" in printed
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
    assert run.lost == {f"key {text}": "import-config does not know this key; see what it changes there"}


def test_no_secret_of_a_file_is_told_on(imported):
    """By the names of keys and by the forms of values; only a setting of the recipe keeps its own."""
    run = imported(
        "model_name_or_path: m\nhub_token: K1\neos_token: </s>\nfoo: sk_live_0123456789abcdef0123\n"
        "vllm_server_base_url: http://u:K2@h:8000\nbar: api_key%3DK3\nnum_generations: 8\n",
        "c.yaml",
        trainer="grpo",
    )
    texts = run.text + run.report
    assert not any(word in texts for word in ("K1", "K2", "K3", "sk_live"))
    assert "hub_token ***: " in texts and "http://***@h:8000" in texts and "eos_token </s>" in texts


def test_what_changes_the_result_comes_first(imported):
    """In the terminal and in the recipe: before notes, and before what is to set."""
    run = imported(VERL.format("8 actor_rollout_ref.actor.qat.enable=True trainer.device=npu"))
    lost = "actor_rollout_ref.actor.qat.enable True: there is no quantization-aware training"
    assert run.report.splitlines()[1] == f"NOT CARRIED OVER: {lost}"
    assert run.text.splitlines()[2:4] == [
        "Not the same run as there, since these change the result and are not carried over:",
        f"- {lost}",
    ]
    assert run.lost.keys() == {"actor_rollout_ref.actor.qat.enable"} and "trainer.device" in run.unused
    assert "trainer.device" not in run.report  # which changes no result


def test_keys_with_the_value_of_no_effect_change_nothing(imported):
    text = "8 actor_rollout_ref.actor.qat.enable=False actor_rollout_ref.rollout.do_sample=True"
    assert imported(VERL.format(text)).lost == {}


def test_define_takes_the_place_of_a_key(imported, refusal_of):
    text = VERL.format("8 actor_rollout_ref.actor.policy_loss.loss_mode=mine")
    message = refusal_of(text)
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert message == (
        f"/run.sh:1: {key} mine: there is no such loss. import-config --define {key}=vanilla takes vanilla "
        "instead."
    )
    assert imported(text, define=(f"{key}=gspo",)).config.algo.algorithm == "gspo"
    assert imported(text, define=(f"{key}=",)).config.algo.algorithm == "ppo"


BRANCHES = [
    ("D=${D:-gpu}\nif [ $D = gpu ]; then\n B=1\nelif [ $D = npu ]; then\n B=2\nelse\n B=3\nfi\n", "1"),
    ('D=npu\nif [ "$D" = gpu ]; then B=1; elif [ "$D" = npu ]; then B=2; else B=3; fi\n', "2"),
    ("D=tpu\nif [ $D = gpu ] || [ $D = npu ]; then B=1; else B=3; fi\n", "3"),
    ('if [ "${X:-1}" != 0 ] && { [ "a" = b ] || [[ -n "c" && 2 -gt 1 ]]; }; then B=1; else B=3; fi\n', "1"),
    ("if ! [ -z '' ]; then B=1; else B=3; fi\n", "3"),
    ('D=trt\ncase "$D" in\n vllm|sglang) B=1 ;;\n trt*)\n  B=2\n  ;;\n *) B=3 ;;\nesac\n', "2"),
    (
        "D=x\ncase $D in\n a) B=1 ;;\n *) B=3 ;;\nesac\nif [ 1 = 2 ]; then\n if [ 1 = 1 ]; then B=9; fi\n"
        "fi\n",
        "3",
    ),
    ("A=(x)\nif [ 1 = 2 ]; then A+=(y); B=1; else A=(z); fi\nB=${A[@]}\n", "z"),
    ('D=gpu\n[ "$D" = gpu ] && B=1 || B=2\n', "1"),
    ('D=npu\n[ "$D" = gpu ] && B=1 || B=2\n', "2"),
    ("D=npu; B=3\n[[ $D == gpu ]] &&\n  B=1\ntest -z '' || B=2\n", "3"),
    ("false && true && B=1 || { B=2; }\n", "2"),
]


@pytest.mark.parametrize(("text", "expected"), BRANCHES)
def test_branches_that_are_not_taken_are_not_read(text, expected):
    script = Script(f"{text}run $B", "x.sh", {})
    assert [word.text for word in script.commands[-1]] == ["run", expected]
    assert script.branches == {}


def test_of_branches_that_may_be_taken_the_first_counts(imported):
    """Of a variable that was empty, too; items of the others are not gathered."""
    text = "E=() B=\ncase $D in\n gpu) E+=(actor_rollout_ref.rollout.n=2); B=8 ;;\n"
    text += " *) E+=(actor_rollout_ref.rollout.n=3); B=16 ;;\nesac\n"
    run = imported(text + VERL.format("$B ${E[@]}"))
    assert (run.config.prompts_per_step, run.config.responses_per_prompt) == (8, 2)
    assert "run.sh:3: E has items of a branch that only a run would choose" in run.report
    assert "run.sh:4: B is assigned in a branch once more" in run.report
    text = "command -v nvidia-smi && B=8 || B=16\n"
    run = imported(text + VERL.format("$B"))
    assert run.config.prompts_per_step == 8 and "run.sh:1: B is assigned" in run.report


def test_commands_of_a_branch_that_is_not_taken():
    assert words("if [ a = b ]; then\n  run no\nfi\nrun yes") == [["run", "yes"]]
    assert words("if [ $U = b ]; then\n  run 1\nelse\n  run 2\nfi") == [["run", "1"], ["run", "2"]]
    assert words("if grep -q x f; then run 1; fi") == [["grep", "-q", "x", "f"], ["run", "1"]]
