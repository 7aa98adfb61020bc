"""Answers in columns of tables: what was written, whatever type the table stores it as."""

import pytest

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.rows import RowError
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.builtin import number_reward
from jaxrl_llm.rewards.sample import RewardSample

pa = pytest.importorskip("pyarrow")


def answers(path, values, type, suffix="parquet"):
    table = pa.table({"prompt": ["q"] * len(values), "answer": pa.array(values, type)})
    file = path / f"rows.{suffix}"
    if suffix == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    source = open_source(SourceConfig(path=str(file)), seed=0)
    return [source[i].answer for i in range(len(source))]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_numbers_of_single_precision_are_what_was_written(tmp_path, suffix):
    """pyarrow gives 0.10000000149011612 for 0.1."""
    found = answers(tmp_path, [0.1, 1234.56, 1e-7, 42.0], pa.float32(), suffix)
    assert found == [0.1, 1234.56, 1e-7, 42.0]
    assert number_reward(RewardSample("#### 1,234.56", answer=found[1]))[0] == 1.0
    assert answers(tmp_path, [[0.1], [0.2, 0.3]], pa.list_(pa.float32()), suffix) == [[0.1], [0.2, 0.3]]
    nested = pa.struct([("target", pa.float16())])
    import numpy as np

    assert answers(tmp_path, [{"target": np.float16(0.1)}], nested, suffix) == [{"target": 0.1}]


def test_binary_answers_are_text(tmp_path):
    assert answers(tmp_path, [b"42", "caf\u00e9".encode()], pa.binary()) == ["42", "caf\u00e9"]
    with pytest.raises((RowError, UserError), match=r"rows.parquet:1: answer .* bytes that are not UTF-8"):
        answers(tmp_path, [b"\xff"], pa.binary())
