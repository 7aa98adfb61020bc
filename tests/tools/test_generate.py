import json

import jax
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.rollout.engine import text_of
from jaxrl_llm.tools import generate, score

ARGS = ["--max_tokens", "6", "--seed", "3", "--slots", "8", "--mesh.data", "1", "--mesh.fsdp", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = models.TransformerConfig(
        vocab_size=128, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        initializer_range=0.3, max_position=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(models.init(config, jax.random.key(0)), config, folder, make_tokenizer(), dtype="float32")
    return str(folder)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_responses_and_their_scores(model, tmp_path, capsys):
    """The log-probs that generate reports are those of score."""
    chat = [{"role": "user", "content": "2 + 2"}]
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "1 + 1 ="}, {"messages": chat}])
    out = tmp_path / "o.jsonl"
    assert generate.main(["--model", model, "--prompts", prompts, "--out", str(out), "--n", "2", *ARGS]) == 0
    assert "2/2 prompts" in capsys.readouterr().err
    rows = read(out)
    assert [row["prompt"] for row in rows] == ["1 + 1 =", chat]
    tokenizer = make_tokenizer()
    prefix = tokenizer("1 + 1 =")["input_ids"]
    for response in rows[0]["responses"]:
        assert set(response) == {"text", "tokens", "logprobs", "finish"}
        assert response["text"] == text_of(tokenizer, response["tokens"])
        assert len(response["tokens"]) == 6 or response["finish"] == "stop"
    given = write(tmp_path / "t.jsonl", [{"tokens": prefix + r["tokens"]} for r in rows[0]["responses"]])
    scored = tmp_path / "s.jsonl"
    assert score.main(["--model", model, "--data", given, "--out", str(scored)]) == 0
    for row, response in zip(read(scored), rows[0]["responses"], strict=True):
        assert len(row["logprobs"]) == len(row["tokens"]) - 1
        found = row["logprobs"][len(prefix) - 1 :]
        np.testing.assert_allclose(found, response["logprobs"], atol=1e-4)


@pytest.mark.slow
def test_rows_do_not_depend_on_their_neighbours(model, tmp_path):
    prompts = [{"prompt": "a"}, {"prompt": "bcd"}, {"prompt": "ef"}]
    texts = []
    for rows in (prompts, prompts[:2]):
        file, out = write(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl"
        generate.main(["--model", model, "--prompts", file, "--out", str(out), *ARGS])
        texts.append([r["responses"][0]["tokens"] for r in read(out)])
    assert texts[0][:2] == texts[1]


@pytest.mark.parametrize(
    "line, arguments, message",
    [
        ('{"text_": "a"}', [], r"p.jsonl:2: no prompt"),
        ("{", [], r"p.jsonl:2: not JSON"),
        (
            json.dumps({"prompt": "a" * 300}),
            [],
            r"p.jsonl:2: a prompt of 300 tokens leaves no position",
        ),
        ('{"prompt": "b"}', ["--n", "0"], r"--n is 0: it must be at least 1"),
        ('{"prompt": "b"}', ["--out", "/no/such/folder/o.jsonl"], r"/no/such/folder does not exist"),
        ('{"prompt": "b"}', ["--out", "{prompts}"], r"p.jsonl: the file that is read; it would be overwr"),
        ('{"prompt": "b"}', ["--model", "/no/model"], r"/no/model"),
        ('{"prompt": "b"}', ["--prompts", "/no/p.jsonl"], r"there is no file /no/p.jsonl"),
        ('{"prompt": "b"}', ["--temperature", "-1"], r"--temperature is -1.0: it must be at least 0"),
    ],
)
def test_bad_input_is_named(model, tmp_path, line, arguments, *, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    arguments = [argument.replace("{prompts}", str(file)) for argument in arguments]
    argv = ["--model", model, "--prompts", str(file), "--out", str(tmp_path / "o.jsonl"), *ARGS, *arguments]
    with pytest.raises(ValueError, match=message):
        generate.main(argv)
