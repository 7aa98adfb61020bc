"""`python -m jaxrl_llm chat`: answers, streaming, commands and Ctrl-C."""

import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.__main__ import main
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.tools import chat_session
from jaxrl_llm.tools.chat_session import TextStream, chat_mesh, conversation_engine
from jaxrl_llm.tools.config import ChatArguments, GenerateConfig
from jaxrl_llm.tools.generation import Generator
from jaxrl_llm.tools.models import open_model
from jaxrl_llm.tools.scoring import NO_SOURCE

CONFIG = models.TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=256,
)  # fmt: skip
ARGS = ChatArguments(model="m", temperature=0.0, max_tokens=6, context=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(random_params(CONFIG), CONFIG, folder, make_tokenizer(), dtype="float32")
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    model = open_model(str(folder), ARGS)
    mesh = chat_mesh(MeshConfig(fsdp=1))
    return conversation_engine(
        model, model.read_tokenizer(), mesh=mesh, dtype="float32", context=256, max_tokens=6
    )


@pytest.fixture
def talk(engine):
    """Run a session on these lines; return it."""

    def run(*lines, args=ARGS, tokenizer=None):
        session = chat_session.Session(args, tokenizer or engine.tokenizer, engine, iter(lines))
        session.run()
        return session

    return run


def contents(session):
    return [message["content"] for message in session.messages]


@pytest.mark.slow
def test_answers_are_those_of_generate_and_later_turns_compile_nothing(engine, folder, talk, capsys):
    session = talk("1 + 1", "and 2?")
    first, answer, _, second = contents(session)
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": answer}]
    rows = [turns[:1], [*turns, {"role": "user", "content": "and 2?"}]]
    config = GenerateConfig(temperature=0.0, max_tokens=6, slots=8)
    examples = [Example(tuple(row), None, where="x") for row in rows]
    expected = [
        group[0].text
        for _, groups, _ in Generator(str(folder), examples, config).windows()
        for group in groups
    ]
    assert [answer, second] == expected and first == "1 + 1"
    assert capsys.readouterr().out == f"{answer}\n{second}\n"
    compiled = engine.compile_count()
    talk("/max_tokens 2", "3 + 3", "/temperature 0", "more")
    assert engine.compile_count() == compiled


def test_the_system_prompt_is_the_first_message(talk, capsys):
    session = talk("/system Be brief", "hi", "/history", "/system", "/reset", "ho", "/history")
    text = capsys.readouterr().out
    assert "system: Be brief\nuser: hi\nassistant:" in text and text.count("system:") == 1
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    given = dataclasses.replace(ARGS, chat=ChatConfig(system_prompt="Be long"))
    assert talk("hi", args=given).conversation()[0] == {"role": "system", "content": "Be long"}


def test_commands_change_the_conversation(talk, tmp_path, capsys):
    file = tmp_path / "saved.jsonl"
    session = talk("a", "b", "/undo", f"/save {file}", "//not a command", "/undo", "/undo", "/undo", "/regen")
    assert session.messages == []
    example = read_example(json.loads(file.read_text()), "f:1", NO_SOURCE)
    assert [m["role"] for m in example.messages] == ["user", "assistant"]
    errors = capsys.readouterr().err
    assert "error: /undo: the conversation is empty" in errors
    assert "error: /regen: no question to answer yet" in errors
    assert contents(talk("//x"))[0] == "/x"


def test_regen_gives_another_answer_at_a_temperature(talk):
    args = dataclasses.replace(ARGS, temperature=1.0)
    once, again = contents(talk("a", args=args)), contents(talk("a", "/regen", args=args))
    assert once[0] == again[0] == "a" and once[1] != again[1]


def test_settings_are_checked(talk, capsys):
    session = talk(
        "/max_tokens 2", "/top_p 1.5", "/top_k x", "/seed", "/tempratur 1", "hi", "/exit", "unread"
    )
    errors = capsys.readouterr().err
    assert "max_tokens 2\n" in errors and "[cut off after 2 tokens]" in errors
    assert "error: /top_p is 1.5: it must be above 0 and at most 1" in errors
    assert "error: /top_k: expected a whole number" in errors or "error: /top_k: expected" in errors
    assert "seed 0\n" in errors and "error: /tempratur: unknown command. Did you mean temperature?" in errors
    assert len(session.messages) == 2 and session.args.max_tokens == 2


def test_a_conversation_that_is_too_long_is_an_error_and_can_be_undone(talk, capsys):
    session = talk("a" * 300, "ok")
    assert "tokens, the context 256: /undo or /reset" in capsys.readouterr().err
    assert contents(session)[0] == "ok" and len(session.messages) == 2


def test_without_a_template_the_text_is_continued(talk, capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    session = talk("Once", "upon", tokenizer=tokenizer)
    first, second = contents(session)[1::2]
    assert session.text() == f"Once{first}\nupon{second}"
    assert "no chat template: the model continues the text" in capsys.readouterr().err
    prompt = talk("Once", "/undo", tokenizer=tokenizer)
    prompt.messages.append({"role": "user", "content": "Once"})
    assert tokenizer.decode(prompt.prompt_ids()) == "Once"


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, monkeypatch, capsys):
    before = chat_session.Session.before_chunk

    def interrupted(self, stream, response, waiting):
        if self.answers == 1 and len(response.ids) >= 4:
            os.kill(os.getpid(), signal.SIGINT)
        before(self, stream, response, waiting)

    monkeypatch.setattr(chat_session.Session, "before_chunk", interrupted)
    session = talk("a", "b", args=dataclasses.replace(ARGS, ignore_eos=True))
    stopped, complete = contents(session)[1::2]
    assert len(stopped) == 4 and len(complete) == 6  # characters are tokens; four a call
    captured = capsys.readouterr()
    assert captured.out == f"{stopped}\n{complete}\n" and "[stopped]" in captured.err


def test_ctrl_c_at_the_prompt_leaves_the_line(talk, monkeypatch):
    def lines():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        yield "lost"

    monkeypatch.setattr(chat_session, "terminal_lines", lambda: iter(["kept"]))
    session = chat_session.Session(ARGS, talk().tokenizer, talk().engine, lines())
    session.run()
    assert contents(session)[0] == "kept"


@pytest.mark.parametrize("place", ["prompt_ids", "print_history", "write"])
def test_ctrl_c_beside_an_answer_ends_nothing(talk, monkeypatch, capsys, place):
    """While the question is encoded, in a command, and when the answer has just ended."""
    original = getattr(chat_session.Session, place)

    def interrupted(self, *args):
        if args in ((), ("\n",)):
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(chat_session.Session, place, interrupted)
    session = talk("a", "/history", "b")
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert capsys.readouterr().err.count("[stopped]") == 2 * (place == "prompt_ids")


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


def test_only_whole_characters_are_written():
    pieces = []
    stream = TextStream(Bytes(), pieces.append)
    data = "a\u00e9\U0001f600b\x1b[31m".encode()
    for end in range(len(data) + 1):
        stream.update(data[:end])
    assert pieces[:9] == ["", "a", "", "\u00e9", "", "", "", "\U0001f600", "b"]
    assert "".join(pieces) == "a\u00e9\U0001f600b\\x1b[31m"  # no control sequence reaches the terminal
    cut = TextStream(Bytes(), pieces.append)
    pieces.clear()
    cut.update("\u00e9".encode()[:1])
    assert pieces == [""]
    cut.update("\u00e9".encode()[:1], final=True)
    assert pieces[-1] == "\ufffd"


def test_channels_are_written_as_thought_and_answer():
    """gpt-oss: control tokens are not shown, nor the names of channels."""
    made, pieces = make_tokenizer(), []
    made.add_special_tokens(
        {"additional_special_tokens": ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>"]}
    )
    text = "<|channel|>analysis<|message|>6*7<|end|><|start|>assistant<|channel|>final<|message|>42<|im_end|>"
    ids = made(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(made, pieces.append)
    for end in range(len(ids) + 1):
        stream.update(ids[:end], final=end == len(ids))
    assert "".join(pieces) == "<think>6*7</think>\n42"


def test_messages_of_several_lines(monkeypatch):
    text = 'one\ntwo \\\nlines\n"""\na\nb\n"""\n"""c\nd"""\nlast'
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert list(chat_session.terminal_lines()) == ["one", "two \nlines", "a\nb", "c\nd", "last"]


@pytest.mark.slow
def test_a_run_talks_in_a_pipe_and_on_a_terminal(tmp_path):
    """Its newest checkpoint; Ctrl-C on the terminal stops an answer, Ctrl-D ends the program."""
    run_dir = str(tmp_path / "run")
    settings = ["--steps", "1", "--warm_start.steps", "1", "--eval.every", "0", "--run_dir", run_dir]
    assert main(["train", "--config", "grpo_tiny.py", *settings]) == 0
    command = [sys.executable, "-m", "jaxrl_llm", "chat", "--model", run_dir, "--ignore_eos", "True"]
    short = [*command, "--max_tokens", "5"]
    done = subprocess.run(short, input="1+2=\n/undo\n", capture_output=True, text=True, timeout=300)
    assert (
        done.returncode == 0
        and done.stderr.startswith("jaxrl_llm chat: starting\nstep 2 of ")
        and len(done.stdout.rstrip("\n")) <= 75
    )
    terminal, child = pty.openpty()
    long = [*command, "--max_tokens", "4000", "--context", "5000", "--temperature", "1"]
    plain = {**os.environ, "TERM": "dumb"}  # readline writes no escape sequences
    with subprocess.Popen(
        long, stdin=child, stdout=child, stderr=child, start_new_session=True, env=plain
    ) as process:
        os.close(child)
        wait_for(terminal, b"> ")
        os.write(terminal, b"1+2=\n")
        wait_for(terminal, b"1+2=\r\n")
        wait_for(terminal, b"")  # the answer begins
        process.send_signal(signal.SIGINT)
        wait_for(terminal, b"[stopped]")
        wait_for(terminal, b"> ")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    os.close(terminal)


def wait_for(terminal, text):
    """Read from a terminal until something, and the text in it, has come."""
    received, end = b"", time.monotonic() + 100
    while not received or text not in received:
        ready, _, _ = select.select([terminal], [], [], max(end - time.monotonic(), 0))
        assert ready, received
        received += os.read(terminal, 1)
