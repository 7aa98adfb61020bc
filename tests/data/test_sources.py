"""Every file format, folders, splits, corrupt files, and generated and gym sources."""

import gzip
import json
import re
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.errors import UserError

ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(5)]


def opened(path, bad_rows="fail", seed=0, **config):
    return open_source(SourceConfig(path=str(path), **config), seed, bad_rows)


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows=ROWS):
    path.write_text("question,answer\n" + "".join(f'"{r["question"]}",{r["answer"]}\n' for r in rows))


def write_arrow(path, kind):
    table = pa.Table.from_pylist(ROWS)
    with kind(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    "a.json.gz": lambda p: p.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.json": lambda p: p.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": write_jsonl,
    "data.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1)),
    "bom.json": lambda p: p.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
    "a.csv": write_csv,
    "a.parquet": lambda p: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), p, row_group_size=2),
    "file.arrow": lambda p: write_arrow(p, pa.ipc.new_file),
    "stream.arrow": lambda p: write_arrow(p, pa.ipc.new_stream),
    "saved": lambda p: datasets.Dataset.from_list(ROWS).save_to_disk(str(p)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_format(tmp_path, name, capsys):
    path = tmp_path / name
    WRITERS[name](path)
    source = opened(path)
    assert len(source) == 5 and source.num_bad == 0
    assert [source[i].answer for i in (4, 0, 2)] == ["5", "1", "3"]  # any order
    assert source[3].messages == ({"role": "user", "content": "3+1?"},)


CALLS = [
    {"role": "user", "content": "?"},
    *(
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": given}}]}
        for name, given in (("weather", {"city": "Rome"}), ("add", {"terms": [1, 2]}))
    ),
    {"role": "user", "content": "!"},
]
SCHEMAS = [
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    {"name": "add", "parameters": {"properties": {"terms": {"items": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "stream.arrow", "saved"])
def test_tables_add_no_nulls_to_tool_calls_and_schemas(tmp_path, name):
    """All objects of a table's column have all keys: the call of weather has terms: null there."""
    path, table = (
        tmp_path / name,
        pa.Table.from_pylist([dict(messages=CALLS, tools=SCHEMAS, info={"a": None})]),
    )
    assert table.to_pylist()[0]["tools"] != SCHEMAS
    if name == "a.jsonl":
        write_jsonl(path, [{"messages": CALLS, "tools": SCHEMAS, "info": {"a": None}}])
    elif name == "a.parquet":
        pyarrow.parquet.write_table(table, path)
    elif name == "saved":
        datasets.Dataset(table).save_to_disk(str(path))
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    example = opened(path)[0]
    assert list(example.messages) == CALLS and example.columns["tools"] == SCHEMAS
    assert example.columns["info"] == {"a": None}  # what a reward reads stays as it is


NULLED = {"function": {"name": "f", "arguments": {"x": None, "y": [1, "a"]}}}
JSON_ROWS = [
    {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [NULLED]}],
        "tools": [{"name": "f", "parameters": {"default": None}}],
        "answer": {"a": None},
    },
    {"messages": [{"role": "user", "content": "!"}], "tools": None, "answer": "five"},
]
PARTLY = {
    "messages": datasets.List(
        {
            "role": datasets.Value("string"),
            "content": datasets.Value("string"),
            "tool_calls": datasets.List(datasets.Json()),
        }
    ),
    "tools": datasets.List(datasets.Json()),
    "answer": datasets.Json(),
}


@pytest.mark.parametrize(
    "features", [dict.fromkeys(PARTLY, datasets.Json()), PARTLY], ids=["whole", "partly"]
)
@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "saved"])
def test_json_columns_of_datasets_are_read_with_their_own_nulls(tmp_path, name, features):
    """They are JSON text below; a prompt would be that text."""
    dataset = datasets.Dataset.from_list(JSON_ROWS, features=datasets.Features(features))
    path, table = tmp_path / name, dataset.data.table
    if name == "a.parquet":
        dataset.to_parquet(path)
    elif name == "saved":
        dataset.save_to_disk(str(path))
    else:
        new = pa.ipc.new_stream if name == "stream.arrow" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    source = opened(path)
    first, second = source[0], source[1]
    assert [m.get("tool_calls") for m in first.messages] == [None, [NULLED]]
    assert (first.columns["tools"], first.answer) == (JSON_ROWS[0]["tools"], {"a": None})
    assert second.messages == ({"role": "user", "content": "!"},)
    assert (second.columns["tools"], second.answer) == (None, "five")


def test_a_json_column_without_json_is_a_bad_row(tmp_path):
    broken = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{", '"x"'], pa.string()))
    pyarrow.parquet.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet:1: cannot be read \(JSONDecodeError"):
        opened(tmp_path / "a.parquet")
    source = opened(tmp_path / "a.parquet", "skip")
    assert (len(source), source[0].text) == (1, "x")


def test_tables_add_no_options_to_a_template(tmp_path):
    rows = [{"prompt": "a", "chat_template_kwargs": {key: 1}} for key in ("one", "two")]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet")[1].columns["chat_template_kwargs"] == {"two": 1}


@pytest.mark.parametrize("name, where", [("a.jsonl", 4), ("a.csv", 4), ("a.json", 3), ("a.parquet", 3)])
def test_an_example_knows_its_line(tmp_path, name, where):
    WRITERS[name](tmp_path / name)
    if name == "a.jsonl":  # a blank line counts as a line, not as a row
        (tmp_path / name).write_text("\n" + (tmp_path / name).read_text())
    assert opened(tmp_path / name)[2].where == f"{tmp_path / name}:{where}"


def test_nested_columns_of_parquet_and_csv_cells_of_several_lines(tmp_path):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    example = opened(tmp_path / "a.parquet")[0]
    assert (example.messages, example.answer, example.source) == (tuple(row["prompt"]), "2", "gsm8k")
    (tmp_path / "a.csv").write_text('prompt,answer\n"one\n\x0btwo, ""3""",007\nx,\n')
    source = opened(tmp_path / "a.csv")
    assert (source[0].text, source[0].answer) == ('one\n\x0btwo, "3"', "007")


def test_folder_takes_the_files_of_the_split(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", ROWS[2:3])
    write_csv(tmp_path / "data" / "test-00000-of-00001.csv", ROWS[3:])
    (tmp_path / "README.md").write_text("x")
    train, test = opened(tmp_path), opened(tmp_path, split="test")
    assert [train[i].answer for i in range(len(train))] == ["1", "2", "3"]
    assert [test[i].answer for i in range(len(test))] == ["4", "5"]
    with pytest.raises(ValueError, match="has no split 'validation'; it has test, train"):
        opened(tmp_path, split="validation")


def test_folder_without_splits_takes_all_files_and_several_datasets_ask_for_one(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    assert [opened(tmp_path)[i].answer for i in range(5)] == ["1", "2", "3", "4", "5"]
    for name in ("main", "socratic"):
        (tmp_path / "two" / name).mkdir(parents=True)
        write_jsonl(tmp_path / "two" / name / "train.jsonl", ROWS[: len(name) - 3])
    with pytest.raises(ValueError, match="set subset to one of main, socratic"):
        opened(tmp_path / "two")
    assert len(opened(tmp_path / "two", subset="main")) == 1


def test_saved_dataset_dict(tmp_path, capsys):
    parts = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert (len(opened(tmp_path / "d")), len(opened(tmp_path / "d", split="test"))) == (3, 2)
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, test"):
        opened(tmp_path / "d", split="dev")


CORRUPT = [
    '{"question": "a", "answer": "#### 1"}',
    '{"question": "a", "answ',
    '{"question": "b", "answer": "#### 2"}',
    '{"question": ""}',
    '{"question": "c\\ud800"}',
    "7",
    '{"question": "d", "answer": "#### 3"}',
]


def test_bad_rows_are_skipped_and_counted_with_their_lines(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(CORRUPT))
    source = opened(path, "skip")
    assert (len(source), source.num_bad) == (3, 4)
    assert [source[i].answer for i in range(3)] == ["1", "2", "3"]
    for line, reason in [
        (2, "not JSON: Unterminated string"),
        (4, "question is empty"),
        (5, "surrogate"),
        (6, "got int"),
    ]:
        assert f"{path}:{line}" in caplog.text and reason in caplog.text


def test_bad_rows_fail_with_lines_reasons_and_the_way_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(CORRUPT))
    with pytest.raises(ValueError) as error:
        opened(path)
    assert "4 of 7 rows are bad (--data.bad_rows skip" in str(error.value)
    assert f"{path}:2: not JSON" in str(error.value)


def test_rows_with_the_same_problem_are_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n' * 30 + "{\n" * 20)
    with pytest.raises(ValueError) as error:
        opened(path, answer_key="anser")
    first, *lines = str(error.value).splitlines()
    assert first == f"{path}: none of the 50 rows can be used:" and len(lines) == 2
    advice = "(--data.train.0.answer_key). Did you mean answer? The columns are answer, prompt"
    assert lines[0] == f"  {path}:1: no answer_key 'anser' {advice} (and 29 rows more)"
    assert lines[1].startswith(f"  {path}:31: not JSON") and lines[1].endswith("(and 19 rows more)")


def test_bytes_that_are_not_utf8_and_ragged_csv_are_bad_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "x"}\n')
    (tmp_path / "a.csv").write_bytes(b"prompt,answer\nx,1\ny\nz,1,2\n\xff,1\n")
    assert [opened(tmp_path / name, "skip").num_bad for name in ("a.jsonl", "a.csv")] == [1, 3]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not UTF-8 at byte 12"):
        opened(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.csv:3: not as many cells as the header has"):
        opened(tmp_path / "a.csv")


def test_columns_of_one_name_are_refused_but_those_without_one(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,prompt\nx,1,y\n")
    with pytest.raises(ValueError, match=r"a\.csv:1: two columns are named 'prompt': rename one of them"):
        opened(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("prompt,answer,,\nx,1,,\n")
    assert opened(tmp_path / "b.csv").num_bad == 0


UNREADABLE = {
    "empty.jsonl": (b"", "has no rows"),
    "empty.json": (b"", "has no rows"),
    "blank.jsonl": (b"\n \n", "has no rows"),
    "all.jsonl": (b'{"q": 1}\n{"q": 2}\n', "none of the 2 rows can be used"),
    "cut.json": (
        b'[{"prom": "x"},\n {"prom',
        "cut.json:2: not JSON: Unterminated string starting at at character 18 (line 2)",
    ),
    "number.json": (b"3", "must hold a list of objects, got int"),
    "deep.json": (b"[" * 100_000, "nested too deeply"),
    "a.parquet": (b"PAR1 this is not", "cannot be read as parquet"),
    "a.arrow": (b"ARROW1 this is not", "cannot be read as arrow"),
    "a.jsonl.gz": (b"\x1f\x8b\x08cut", "a.jsonl.gz:1: the gzip data is damaged here or before: Error -3"),
    "a.txt": (b"x", "the ending '.txt' is unknown; read are .jsonl"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_file_says_so(tmp_path, name):
    content, message = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        opened(tmp_path / name, "skip")
    assert str(tmp_path / name) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"path": ""}, "give --data.path FILE"),
        ({"path": "openai/gsm8k"}, "a Hugging Face dataset is hub:openai/gsm8k"),
        (
            {"path": "hub:no-such-owner/no-such-set"},
            "hf download --repo-type dataset no-such-owner/no-such-set",
        ),
        ({"path": "task:sums"}, "there is no task:sums; built-in tasks are arithmetic, countdown"),
        ({"path": "task:arithmetic", "options": '{"digit": 2}'}, "no option 'digit'. Did you mean digits?"),
        ({"path": "task:arithmetic", "options": '{"digits": "2"}'}, "option digits must be int, got '2'"),
        (
            {"path": "task:arithmetic", "options": '{"noise": 2}'},
            "option noise is 2: it must be at",
        ),
        ({"path": "task:arithmetic", "options": '{"operators": "^"}'}, "option operators is"),
        ({"path": "task:arithmetic", "options": "digits=2"}, "options is 'digits=2', which is not JSON"),
        ({"path": "task:arithmetic", "options": "[2]"}, "must be a JSON object"),
        ({"path": "gym:chain_sum", "judge": True}, "gym:chain_sum: its answers have no label to judge"),
        ({"path": "task:steps", "score_key": "answer"}, "task:steps: its problems have no scores"),
        ({"path": "gym:no_such_task"}, "gym:no_such_task: Dataset 'no_such_task' not registered"),
        ({"path": "gym:chain_sum", "options": '{"terms": 2}'}, "unexpected keyword argument 'terms'"),
        ({"path": "gym:word_ladder", "options": '{"size": 30000}'}, "too large .*; size was 30000"),
    ],
)
def test_wrong_source_names_the_fix(config, message, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    if config["path"].startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        open_source(SourceConfig(**config), 0)


def test_descriptions_of_a_dataset_are_no_rows(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    for name in ("dataset_info.json", "dataset_infos.json"):
        (tmp_path / name).write_text('{"splits": {"train": {"num_examples": 5}}}')
    assert len(opened(tmp_path)) == len(ROWS)


def test_rows_in_two_formats_are_not_read_twice(tmp_path):
    """Folders of the hub may hold train.csv beside train.jsonl; `datasets` reads one kind of file."""
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_csv(tmp_path / "train-2.csv", ROWS)
    assert len(opened(tmp_path)) == 2 * len(ROWS)
    write_csv(tmp_path / "train.csv", ROWS)
    with pytest.raises(ValueError, match=r"train\.csv and train\.jsonl have one name, so their rows would"):
        opened(tmp_path)


def test_a_pattern_is_answered_by_its_folder(tmp_path):
    write_jsonl(tmp_path / "ok.jsonl", ROWS)
    message = r"\*\.jsonl: patterns are not read\. Give the folder: "
    with pytest.raises(ValueError, match=message + re.escape(str(tmp_path)) + "$"):
        opened(tmp_path / "*.jsonl")


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"holds no data file; read are \.jsonl"):
        opened(tmp_path)


def test_gym_entry_goes_whole_to_the_scorer():
    gym = pytest.importorskip("reasoning_gym")
    source = opened("gym:chain_sum", options='{"max_terms": 3, "size": 100}')
    assert len(source) == 100
    example = source[7]
    scorer = gym.get_score_answer_fn(example.columns["metadata"]["source_dataset"])
    assert scorer(answer=example.answer, entry=example.columns) == 1.0
    assert example.messages[0]["content"] == example.columns["question"]
    assert example.source == "gym:chain_sum" and example.where == "gym:chain_sum:7"


def test_gym_task_with_many_answers_has_none_and_no_target():
    pytest.importorskip("reasoning_gym")
    example = opened("gym:propositional_logic", options='{"size": 10}')[0]
    assert example.answer is None and example.response is None and "metadata" in example.columns


def test_gym_held_out_questions_are_never_trained_on():
    pytest.importorskip("reasoning_gym")
    options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 300}'
    train = opened("gym:chain_sum", options=options)
    test = opened("gym:chain_sum", options=options, split="test")
    questions = lambda source: {source[i].columns["question"] for i in range(300)}
    assert len(questions(test)) > 5 and not questions(train) & questions(test)
    assert opened("gym:chain_sum", options=options, seed=1)[0] != train[0]


def test_distinct_gym_questions_come_once_and_keep_the_split():
    pytest.importorskip("reasoning_gym")
    options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 2000}'
    every, train, test = (
        opened("gym:chain_sum", options=options, **settings)
        for settings in ({}, {"distinct": True}, {"distinct": True, "split": "test"})
    )
    questions = lambda source: [source[i].columns["question"] for i in range(len(source))]
    assert len(set(questions(train))) == len(train) and len(set(questions(test))) == len(test)
    assert set(questions(train)) == set(questions(every))  # in 2,000 draws all of them come up
    assert len(train) + len(test) == 200  # 10 x 10 operands, 2 operators
    assert not set(questions(train)) & set(questions(test))
    with pytest.raises(IndexError):
        test[len(test)]


def test_distinct_problems_of_a_task_come_once_in_any_guise():
    options = '{"digits": 1, "size": 800}'
    train = opened("task:arithmetic", options=options, distinct=True)
    test = opened("task:arithmetic", options=options, distinct=True, split="test")
    operands = lambda source: [
        tuple(sorted(source[i].messages[0]["content"].rstrip("=").split("+"))) for i in range(len(source))
    ]
    both = operands(train) + operands(test)
    assert len(set(both)) == len(both) == 55  # 0+0 to 9+9, 1+2 being 2+1
    first = opened("task:arithmetic", options=options)[0]
    assert train[0] == first


def test_distinct_rows_of_a_file_are_refused():
    (problem,) = [text for key, text in SourceConfig(path="rows.jsonl", distinct=True).problems()]
    assert "only task: and gym: sources" in problem
    own_file = DataConfig(path="rows.jsonl", train=(SourceConfig(path="task:reverse", distinct=True),))
    assert not own_file.sources("train")[0].distinct


def test_gym_that_changes_between_processes_warns(caplog):
    pytest.importorskip("reasoning_gym")
    opened("gym:ransom_note", options='{"size": 10}')
    assert "set PYTHONHASHSEED=0" in caplog.text


@pytest.mark.parametrize(
    ("path", "module"),
    [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("saved", "datasets"), ("hub:org/a", "datasets")],
)
def test_missing_libraries_of_tables_name_the_extra(monkeypatch, tmp_path, path, module):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text("{}")
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).touch()
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    where = path if ":" in path else str(tmp_path / path)
    with pytest.raises(UserError) as refused:
        opened(where)
    assert str(refused.value) == f"{where} needs {module}: pip install 'jaxrl-llm[data]'"


def test_missing_reasoning_gym_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl-llm\[tasks\]'"):
        opened("gym:chain_sum")


def test_a_misspelt_file_is_told_the_nearest_name_and_a_bare_name_how_a_dataset_is_written(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match=r"there is no file .*/trian\.jsonl\. Did you mean train\.jsonl\?$"):
        opened(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match=r"no file or folder openai/gsm8k\. .* dataset is hub:openai/gsm8k\)"):
        opened("openai/gsm8k")
