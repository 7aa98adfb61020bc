"""Commands say what they do while they print nothing else."""

import contextlib
import re
import time
from types import SimpleNamespace

import pytest
from random_weights import random_params

from jaxrl_llm import __main__, models, train
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf import gguf, resolve
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.host import command
from jaxrl_llm.tools import chat_session, checks, doctor, plan
from jaxrl_llm.tools.config import ChatArguments
from jaxrl_llm.tools.devices import Finding

CONFIG = models.TransformerConfig(
    vocab_size=128, hidden_size=8, mlp_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position=64,
)  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(command, "FIRST", 0.005)


def said(capsys):
    """Return the pieces of work that stderr names while they last, and with the time they took."""
    lines = capsys.readouterr().err.splitlines()
    under_way, ended = (
        [match[1] for line in lines if (match := re.fullmatch(pattern, line))]
        for pattern in (r"(.*): \d+ s so far", r"(.*): took [\d.]+ s")
    )
    assert set(ended) <= set(under_way)
    return set(ended)


def test_the_doctor(monkeypatch, capsys):
    def examine(config):
        time.sleep(0.1)
        return [Finding("disk", "ok", "")]

    monkeypatch.setattr(checks, "examine", examine)
    assert doctor.main([]) == 0
    assert said(capsys) == {"examining this machine"}


def test_a_plan(capsys):
    sizes = {"hidden_size": 8, "mlp_size": 8, "num_layers": 1}
    words = [word for name, size in sizes.items() for word in (f"--model.architecture.{name}", str(size))]
    short = ["--only", "accumulate", "--devices", "0:1"]
    assert plan.main(["--config", "grpo_tiny.py", "--topology", "cpu", *words, *short]) == 0
    assert said(capsys) == {"planning", "compiling update: accumulate"}


@pytest.mark.slow
def test_a_chat_that_loads_its_model(tmp_path, capsys, monkeypatch):
    def open_slowly(*args):
        time.sleep(0.1)
        return open_model(*args)

    open_model = chat_session.open_model
    monkeypatch.setattr(chat_session, "open_model", open_slowly)
    save_model(random_params(CONFIG), CONFIG, tmp_path / "m", make_tokenizer(), dtype="float32")
    args = ChatArguments(model=str(tmp_path / "m"), max_tokens=4, context=32)
    session = chat_session.open_session(args)
    found = said(capsys)
    assert f"loading {tmp_path}/m" in found
    assert found <= {
        f"loading {tmp_path}/m",
        f"reading the tokenizer of {tmp_path}/m",
    }  # a small one is quick
    assert session.engine.published


def test_an_answer_of_a_chat(monkeypatch, capsys):
    engine = SimpleNamespace(tokenizer=make_tokenizer(), eos_ids=())
    session = chat_session.Session(ChatArguments(model="m"), engine.tokenizer, engine, iter(()))
    stream = SimpleNamespace(update=lambda ids: None)
    with contextlib.ExitStack() as stack:
        session.before_chunk(stream, SimpleNamespace(ids=[]), stack)  # the first chunk compiles
        time.sleep(0.1)
        session.before_chunk(stream, SimpleNamespace(ids=[1, 2]), stack)
        assert said(capsys) == {"waiting for tokens; new programs are compiled once"}
        time.sleep(0.1)  # no line within an answer of a slow model
    assert said(capsys) == set()
    monkeypatch.setattr(chat_session, "PATIENCE", 0.005)
    with contextlib.ExitStack() as stack:
        session.before_chunk(stream, SimpleNamespace(ids=[1, 2]), stack)
        time.sleep(0.1)
    assert said(capsys) == {"waiting for tokens; new programs are compiled once"}


def test_a_large_tokenizer_of_a_gguf_file(monkeypatch, tmp_path, capsys):
    library = pytest.importorskip("gguf")
    monkeypatch.setattr(library, "GGUFReader", lambda file: time.sleep(0.1))
    gguf._open(tmp_path / "large.gguf")
    assert said(capsys) == {"reading large.gguf"}


def test_a_run_that_is_built_and_a_conversion(monkeypatch, tmp_path, capsys):
    def build(config, closing, reward):
        time.sleep(0.1)
        (tmp_path / "m.gguf").touch()
        resolve.resolve_model(tmp_path / "m.gguf")
        raise UserError("built")

    monkeypatch.setattr(resolve, "convert_gguf", lambda file: time.sleep(0.1))
    monkeypatch.setattr(train, "build", build)
    assert __main__.main(["train", "--config", "grpo_tiny.py", "--run_dir", str(tmp_path / "run")]) == 2
    converting = "converting m.gguf to a Hugging Face folder, once"
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "building the run: model, tokenizer, data, rewards: 0 s so far",
        *(f"{converting}: 0 s so far", f"{converting}: took 0.1 s", "error: built"),
    ]
