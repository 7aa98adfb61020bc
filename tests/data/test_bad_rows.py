"""Rows and files that are wrong in every way: named with `fail`, skipped and counted with `skip`."""

import codecs
import copy
import gzip
import json
import random
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrl_llm.data import files, rows, template
from jaxrl_llm.data.chat import encode_prompt, encode_steps, encode_supervised, prompt_row
from jaxrl_llm.data.config import ChatConfig, DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import RowError
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError

TOKENIZER = make_tokenizer()
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PRIVATE_USE = "".join(map(chr, range(0xE000, 0xF900)))


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


WRONG = {
    "role is a list": ({"messages": [{"role": ["user"], "content": "q"}]}, "messages[0] has no known role"),
    "speaker is a list": ({"conversations": [{"from": ["human"], "value": "q"}]}, "[0] has no known role"),
    "role holds a NUL": ({"messages": [{"role": "a\0", "content": "q"}]}, "messages[0].role holds a NUL"),
    "nulls inside": ({"messages": [USER, None]}, "messages[1] must be an object with role and content"),
    "tool call": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "\ud800"}}]}]},
        "messages[1].tool_calls[0].function.name holds a lone surrogate",
    ),
    "tool call of bytes": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": [b"x"]}]},
        "messages[1].tool_calls[0] must be text, a Python number or another value of JSON, got bytes",
    ),
    "two texts": (
        {"conversations": [{"from": "human", "value": "a", "content": "b"}]},
        "conversations[0]: content and value are two texts",
    ),
    "not a number": ({"messages": [{**USER, "weight": float("inf")}]}, "messages[0].weight is inf"),
    "tool calls that are no list": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": {"name": "f"}}]},
        "messages[1].tool_calls must be a list of tool calls, got {'name': 'f'}",
    ),
    "tool calls in text": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": "f()"}]},
        "messages[1].tool_calls must be a list of tool calls, got 'f()'",
    ),
    "tools": ({"messages": [USER], "tools": "calculator"}, "tools must be a list of JSON schemas"),
    "tools in text": ({"messages": [USER], "tools": '{"name": "f"}'}, "tools must be a list of JSON schemas"),
    "tools with a huge number": ({"messages": [USER], "tools": f"[{'1' * 5000}]"}, "tools must be a list"),
    "nested tools": ({"messages": [USER], "tools": "[" * 500 + "]" * 500}, "nested more than 64 levels deep"),
    "deep tools": ({"messages": [USER], "tools": "[" * 100_000}, "tools must be a list of JSON schemas"),
    "options": ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    "reserved": (
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs may not set messages",
    ),
    "deep": ({"prompt": "q", "note": nested(100)}, "nested more than 64 levels deep"),
    "answer in a list": ({"prompt": "q", "answer": ["\0"]}, "answer[0] holds a NUL"),
    "worked solution": (
        {"prompt": "q", "answer": 1, "solution": "\ud800"},
        "solution holds a lone surrogate",
    ),
    "data source": ({"prompt": "q", "data_source": ["a"]}, "data_source must be text, got list"),
    "system": (
        {"conversations": [{"from": "human", "value": "q"}], "system": 1},
        "system must be text, got int",
    ),
    "first chosen": (
        {"prompt": "q", "chosen": [{"role": ["x"]}, USER], "rejected": [{"role": ["y"]}, USER]},
        "completion[0] has no known role",
    ),
    "margin": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 10**400}, "margin must be a number"),
    "labels": ({"prompt": "q", "completions": ["a"], "labels": 1}, "labels of steps must be a list, got int"),
    "label": ({"prompt": "q", "completions": ["a"], "labels": [[1]]}, "a label must be a number from 0 to 1"),
    "names": ({"prompt": "q", 7: "x"}, "the names of columns must be text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_at_any_depth_names_row_and_key(name):
    row, message = WRONG[name]
    with pytest.raises(RowError) as error:
        read_example(row, "f.jsonl:12", SourceConfig())
    assert str(error.value).startswith("f.jsonl:12: ") and message in str(error.value)


def test_a_long_text_and_a_long_line_are_bad_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_CHARACTERS", 1000)
    with pytest.raises(RowError, match="f:1: prompt has 1,001 characters, more than 1,000"):
        read_example({"prompt": "x" * 1001}, "f:1", SourceConfig())
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "{"b" * 100}"}}\n{{"prompt": "c"}}\n')
    assert [len(opened(tmp_path / "a.jsonl")), opened(tmp_path / "a.jsonl").num_bad] == [2, 1]
    with pytest.raises(UserError, match=r"a.jsonl:2: a line of 114 bytes, more than 100"):
        opened(tmp_path / "a.jsonl", "fail")


def test_a_long_chat_is_a_bad_row(monkeypatch):
    monkeypatch.setattr(template, "MAX_CHARACTERS", 50)
    example = read_example({"messages": [{"role": "user", "content": "x" * 30}] * 2}, "f:1", SourceConfig())
    with pytest.raises(RowError, match=r"f:1: the chat has \d+ characters, more than 50"):
        encode_prompt(TOKENIZER, example, ChatConfig())


def test_a_target_without_tokens_is_a_bad_row(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% generation %}{% endgeneration %}{% endfor %}x"
    )
    chat = ChatConfig(chat_template=str(tmp_path / "t.jinja"))
    path = write(tmp_path / "a.jsonl", [{"messages": [USER, ASSISTANT]}])
    with pytest.raises(UserError, match=r"a.jsonl:1: the chat template's .* marks nothing in this chat"):
        loader(path, chat=chat, bad_rows="fail").supervised_batch(0, 1)


def test_missing_numbers_of_a_table_are_missing():
    example = read_example({"prompt": "q", "label": float("nan"), "solution": None}, "f:1", SourceConfig())
    assert example.answer is None and example.response is None


# Rendering and tokenization.


def loader(path, **config):
    config = {"shuffle": False, "bad_rows": "skip", **config}
    return Loader(DataConfig(path=str(path), **config), TOKENIZER, 0, 64, max_tokens=128)


def write(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def raise_unknown(*_, **__):
    raise Exception("[UNK]")  # as tokenizers does


def test_rows_that_the_template_or_the_tokenizer_refuses_are_skipped_and_counted(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'ghost' %}{{ raise_exception('no ghosts') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    ghost = {"messages": [{"role": "ghost", "content": "boo"}]}
    hidden = {"messages": [{"role": "user", "content": PRIVATE_USE + "<|im_end|>"}]}
    good = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    path = write(tmp_path / "a.jsonl", [ghost, good[0], hidden, good[1]])
    skipping = Loader(DataConfig(path=str(path), shuffle=False, bad_rows="skip"), tokenizer, 0, 64)
    texts = [p.example.messages[0]["content"] for p in skipping.batch(0, 4)]
    assert texts == ["one", "one", "two", "two"]
    assert skipping.stats() == {"rows": 4, "bad_rows": 2, "overlong": 0}
    held_out = Loader(DataConfig(eval_path=str(path), bad_rows="skip"), tokenizer, 0, 64, split="eval")
    assert [p.example.messages[0]["content"] for p in held_out.eval_set(4)] == ["one", "two"]
    failing = Loader(DataConfig(path=str(path), shuffle=False), tokenizer, 0, 64)
    with pytest.raises(UserError, match=r"a.jsonl:1: the tokenizer's chat template cannot .*: no ghosts"):
        failing.batch(0, 1)
    with pytest.raises(UserError, match=r"a.jsonl:3: holds control tokens, and all private-use characters"):
        failing.batch(2, 1)
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda *_, **__: (_ for _ in ()).throw(Exception("[UNK]"))
    )
    with pytest.raises(UserError, match=r"a.jsonl:2: the tokenizer cannot read the text: \[UNK\]"):
        failing.batch(1, 1)


def test_rows_of_another_kind_are_skipped(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "q", "chosen": "b", "rejected": "c"}])
    drawn = loader(path)
    assert len(drawn.pair_batch(0, 3)) == 3 and drawn.stats()["bad_rows"] == 1
    with pytest.raises(UserError, match=r"0 of 2 rows can be used; the last: .*a.jsonl:2: no steps"):
        drawn.step_batch(0, 1)


# Fuzz.

SEEDS = [
    {"prompt": "2+2?", "answer": "4", "extra_info": {"answer": "4"}},
    {
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"k": True},
    },
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {"data_source": "gsm8k", "prompt": [USER], "reward_model": {"ground_truth": "4"}},
    {"question": "q", "answer": "x #### 4"},
    {"instruction": "q", "input": "i", "output": "o"},
    {"text": "abc"},
    {"prompt": "q", "completion": "c", "label": True},
    {"prompt": "q", "chosen": "c", "rejected": "d", "margin": 1.0},
    {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "b"}]},
    {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0.5]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "response": "r"},
]
ODD = [
    None, 0, -1, 1.5, float("nan"), float("inf"), 10**400, True, "", "\0", "\ud800", "x" * 200, "<|im_end|>",
    "####", [], {}, [[]], [None], [1], ["a"], {"role": "user"}, {"a": {"b": []}}, nested(100), "\ue000",
    [{"role": ["user"], "content": "x"}], [{"role": "user", "content": 7}], PRIVATE_USE + "<|im_end|>",
]  # fmt: skip
KEYS = ["role", "content", "messages", "labels", "label", "margin", "tools", "chosen", "from",
        "completions", "answer", "data_source", "chat_template_kwargs", "solution", "system", "\ud800",
        "prompt"]  # fmt: skip


def mutated(rng):
    """A row of a known shape with up to two values at any depth replaced, removed or added."""
    row = copy.deepcopy(rng.choice(SEEDS))
    for _ in range(rng.choice([0, 1, 1, 2])):
        places = [(row, key) for key in row]
        for parent, key in places:
            value = parent[key]
            inner = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            places += [(value, k) for k in inner]
        parent, key = rng.choice(places or [(row, "prompt")])
        if rng.random() < 0.2:
            parent.pop(key, None) if isinstance(parent, dict) else parent.pop(key)
        else:
            key = rng.choice(KEYS) if isinstance(parent, dict) and rng.random() < 0.3 else key
            parent[key] = copy.copy(rng.choice(ODD))
    return row


def test_mutated_rows_end_as_row_errors_or_as_tokens():
    rng, counts = random.Random(0), Counter()
    configs = [SourceConfig()] * 8 + [SourceConfig(judge=True), SourceConfig(score_key="margin")]
    encoders = [
        encode_prompt,
        encode_supervised,
        encode_steps,
        lambda _, *both: json.dumps(prompt_row(*both)),
    ]
    for i in range(3000):
        chat = ChatConfig(render=rng.choice(["auto", "chat", "plain"]), loss=rng.choice(["all", "last"]))
        try:
            example = read_example(mutated(rng), f"f:{i}", rng.choice(configs))
            rng.choice(encoders)(TOKENIZER, example.rejected or example, chat)
            counts["good"] += 1
        except RowError as error:
            assert str(error).startswith(f"f:{i}: ")
            counts["bad"] += 1
    assert min(counts.values()) > 700


def test_mutated_rows_of_a_file_are_skipped_by_every_kind_of_batch(tmp_path):
    rng = random.Random(1)
    lines = [json.dumps(mutated(rng), ensure_ascii=rng.random() < 0.9) for _ in range(400)]
    lines = [line[: rng.randrange(1, len(line))] if rng.random() < 0.1 else line for line in lines]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    drawn = loader(path)
    rows = drawn.stats()["rows"]
    assert 100 < rows < 300 and drawn.stats()["bad_rows"] == 400 - rows
    drawn.batch(0, rows)
    for read in (drawn.supervised_batch, drawn.pair_batch, drawn.label_batch, drawn.step_batch):
        assert len(read(0, rows)) >= rows
    with pytest.raises(UserError, match=rf"{path}: {400 - rows} of 400 rows are bad"):
        loader(path, bad_rows="fail")


# Damaged files.

ROWS = [
    {"question": f"{i}+1?", "answer": f"#### {i + 1}", "pad": f"{i * 919 % 1000}" * 50} for i in range(200)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
QUESTIONS = [row["question"] for row in ROWS]


def opened(path, bad_rows="skip"):
    return open_source(SourceConfig(path=str(path)), 0, bad_rows)


def questions(path):
    source = opened(path)
    return [source[i].messages[0]["content"] for i in range(len(source))]


def damaged(data, kind):
    if kind == "cut":
        return data[: len(data) * 3 // 4]
    at = len(data) * 3 // 4
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 4]) + data[at + 4 :]


@pytest.mark.parametrize("kind", ["cut", "flipped"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_damaged_gzip_gives_the_rows_before_the_damage(tmp_path, name, kind):
    csv = "question,answer\n" + "".join(f"{row['question']},{row['pad']}\n" for row in ROWS)
    text = {"a.jsonl.gz": LINES, "a.json.gz": json.dumps(ROWS).encode(), "a.csv.gz": csv.encode()}[name]
    path = tmp_path / name
    path.write_bytes(damaged(gzip.compress(text), kind))
    read = questions(path)
    assert len(read) > 100 and read[:100] == QUESTIONS[:100]  # what follows flipped bits may be anything
    assert kind == "flipped" or read == QUESTIONS[: len(read)]
    with pytest.raises(
        UserError, match=rf"{path}:\d+: the gzip data (ends too soon|is damaged here or before)"
    ):
        opened(path, "fail")


def test_gzip_of_several_members_with_padding(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES) + gzip.compress(LINES) + b"\0" * 100)
    assert questions(tmp_path / "a.jsonl.gz") == QUESTIONS * 2
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES) + b"garbage")
    assert questions(tmp_path / "a.jsonl.gz") == QUESTIONS and opened(tmp_path / "a.jsonl.gz").num_bad == 1


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_that_was_cut_gives_the_batches_before(tmp_path, writer):
    path, table = tmp_path / "a.arrow", pa.Table.from_pylist(ROWS)
    with writer(str(path), table.schema) as sink:
        sink.write_table(table, max_chunksize=10)
    path.write_bytes(damaged(path.read_bytes(), "cut"))
    read = questions(path)
    assert 100 <= len(read) < 160 and len(read) % 10 == 0 and read == QUESTIONS[: len(read)]
    assert opened(path).num_bad == 1
    with pytest.raises(UserError, match=rf"{path}:{len(read) + 1}: the file (is damaged|ends too soon)"):
        opened(path, "fail")


def test_a_damaged_row_group_of_parquet_is_lost_alone(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, path, row_group_size=50, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"120+1?")
    data[at : at + 3] = b"\xff\xff\xff"
    path.write_bytes(data)
    assert questions(path) == QUESTIONS[:100] + QUESTIONS[150:]
    source = opened(path)
    assert source.num_bad == 50 and source[100].where == f"{path}:151"
    with pytest.raises(UserError, match=rf"50 of 200 rows .*\n  {path}:101: row group 2 of 50 rows is dam"):
        opened(path, "fail")


def test_a_file_that_is_lost_leaves_the_others_of_its_folder(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "b.parquet")
    (tmp_path / "b.parquet").write_bytes(damaged((tmp_path / "b.parquet").read_bytes(), "cut"))
    (tmp_path / "c.json").write_text("3")
    (tmp_path / "d.jsonl").write_bytes(LINES)
    assert questions(tmp_path) == QUESTIONS * 2 and opened(tmp_path).num_bad == 2
    with pytest.raises(UserError, match=r"b.parquet cannot be read as parquet") as error:
        opened(tmp_path, "fail")
    assert "c.json must hold a list of objects" in str(error.value)


def test_a_saved_dataset_that_was_cut(tmp_path, capsys):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "d"), num_shards=2)
    last = tmp_path / "d" / "data-00001-of-00002.arrow"
    last.write_bytes(damaged(last.read_bytes(), "cut"))
    assert questions(tmp_path / "d") == QUESTIONS[:100]
    with pytest.raises(UserError, match=rf"{last}:1: the file is damaged from here"):
        opened(tmp_path / "d", "fail")
    (tmp_path / "d" / "state.json").write_text("{")
    assert len(opened(tmp_path / "d")) == 100


def test_a_list_that_was_cut_gives_the_rows_before(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(ROWS, indent=1).encode()[:-5000])
    read = questions(path)
    assert 150 < len(read) < 200 and read == QUESTIONS[: len(read)] and opened(path).num_bad == 1
    with pytest.raises(UserError, match=rf"{path}:{len(read) + 1}: not JSON: Expecting .*line \d+"):
        opened(path, "fail")


def test_a_stray_quote_in_csv_costs_its_own_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\na,1\nb,"2\nc,3\n"d",4\ne,"5\nf,6\n')
    source = opened(path)
    assert [source[i].text for i in range(len(source))] == ["a", "c", "d", "f"]
    with pytest.raises(UserError, match=r"2 of 6 rows") as error:
        opened(path, "fail")
    assert f"{path}:3: not CSV: ',' expected after '\"'" in str(error.value)
    assert f"{path}:6: not CSV: unexpected end of data" in str(error.value)


def test_a_key_or_a_column_that_is_there_twice_is_refused(tmp_path):
    """Readers of JSON and of tables keep the last one without a word."""
    twice = '{"prompt": "a", "answer": "1", "answer": "2"}'
    nested = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    for name, content, key in (
        ("a.jsonl", f"{twice}\n", "answer"),
        ("b.jsonl", f"{nested}\n", "content"),
        ("a.json", f"[{twice}]", "answer"),
        ("b.json", f"[{nested}]", "content"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}:1: not JSON: an object has the key '{key}' twice"):
            opened(tmp_path / name)
    columns = [pa.array([value]) for value in ("a", "1", "2")]
    table = pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(UserError, match=f"{name}:1: two columns are named 'answer': rename one of them"):
            opened(tmp_path / name)


def in_json(text, encoding="utf-8"):
    return json.dumps({"prompt": text}, ensure_ascii=False).encode(encoding) + b"\n"


def test_byte_order_marks_and_mixed_encodings(tmp_path):
    bom, path = codecs.BOM_UTF8, tmp_path / "a.jsonl"
    latin = in_json("\u00e4", "latin-1")
    path.write_bytes(bom + in_json("\u00e4") + bom + in_json("b") + latin + bom + b"\n" + in_json("c"))
    source = opened(path)
    assert [source[i].text for i in range(len(source))] == ["\u00e4", "b", "c"] and source.num_bad == 1
    (tmp_path / "a.csv").write_bytes(bom + "prompt,note\na,\u00e4\n".encode() + b"b,\xe4\n")
    source = opened(tmp_path / "a.csv")
    assert [source[0].text, len(source), source.num_bad] == ["a", 1, 1]
    (tmp_path / "a.json").write_bytes(b'[{"prompt": "a"}, {"prompt": "b", "note": "\xff"}]')
    assert [len(opened(tmp_path / "a.json")), opened(tmp_path / "a.json").num_bad] == [1, 1]
    for name in ("b.jsonl", "b.json", "b.csv"):
        (tmp_path / name).write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
        with pytest.raises(UserError, match=rf"{name}:\d: the text is UTF-16: save it as UTF-8"):
            opened(tmp_path / name)


def test_paths_that_cannot_be_opened():
    for path in ("x" * 5000, "~nobody-here/a.jsonl", "a\0b.jsonl"):
        with pytest.raises(UserError, match=r"cannot be opened|there is no file"):
            opened(path)
