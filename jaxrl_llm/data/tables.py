"""Tables as random-access rows: Parquet and Arrow files, saved datasets, datasets of the Hugging Face hub.

A file is read by row groups or record batches: damaged ones are skipped, the others are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.rows import Damage, RowFile, no_rows, role_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra

EXTRA = "data"
FILLED = ("tools", "chat_template_kwargs")
SHORT_FLOATS = {"float": np.float32, "halffloat": np.float16}
"""Arrow type -> numpy type whose shortest decimal is the number as written."""


def library_of(path: str) -> str:
    """Return the package of the extra `data` that a source needs, or ""."""
    if path.startswith("hub:"):
        return "datasets"
    return "pyarrow" if path.endswith((".parquet", ".arrow")) else ""


def parquet_file(path: Path) -> RowFile:
    """Read a Parquet file by its row groups."""
    parquet = import_extra("pyarrow.parquet", EXTRA, needed_by=str(path))
    try:
        file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    except Exception as error:  # pyarrow raises half a dozen types for damaged files
        return _unreadable(path, error)
    parts: list[Any] = []
    for i, size in enumerate(sizes):
        try:
            parts.append(file.read_row_group(i))
        except Exception as error:  # as above
            parts.append(Damage(f"row group {i} of {size:,} rows is damaged: {error!s:.300}", max(size, 1)))
    return _table_rows(path, parts)


def arrow_file(path: Path) -> RowFile:
    """Read Arrow's file format, or its stream format (written by the datasets library), by batches.

    The file format is a stream between two marks, so a file without its end is read as a stream.
    """
    pyarrow = import_extra("pyarrow", EXTRA, needed_by=str(path))
    try:
        mapped = pyarrow.memory_map(str(path))
        is_file = mapped.read(8) == b"ARROW1\0\0"
        try:
            reader = pyarrow.ipc.open_file(mapped)
            return _table_rows(path, [_batch(reader, i) for i in range(reader.num_record_batches)])
        except pyarrow.ArrowInvalid:  # a stream, or a file without its end
            mapped.seek(8 if is_file else 0)
        reader = pyarrow.ipc.open_stream(mapped)
    except Exception as error:  # as in parquet_file
        return _unreadable(path, error)
    parts: list[Any] = []
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate()
            parts.append(batch)
        except StopIteration:
            parts += [Damage("the file ends too soon")] * is_file
            return _table_rows(path, parts)
        except Exception as error:  # as in parquet_file
            return _table_rows(path, [*parts, Damage(f"the file is damaged from here: {error!s:.300}")])


def _batch(reader: Any, i: int) -> Any:
    """Return batch `i` of an Arrow file, or Damage."""
    try:
        batch = reader.get_batch(i)
        batch.validate()
        return batch
    except Exception as error:  # as in parquet_file
        return Damage(f"record batch {i} is damaged: {error!s:.300}")


def _table_rows(path: Path, parts: Sequence[Any]) -> RowFile:
    """Return the rows of tables or batches, some of which may be Damage."""
    intact = [part for part in parts if not isinstance(part, Damage)]
    # Arrow keeps the last of two columns with the same name.
    names = intact[0].schema.names if intact else []
    if twice := next((name for name in names if names.count(name) > 1), None):
        return no_rows(path, f"{path}:1: two columns are named {twice!r}: rename one of them")
    files, first = [], 1  # row numbers in the file also count lost rows
    for part in parts:
        if isinstance(part, Damage):
            files.append(no_rows(path, f"{path}:{first}: {part.reason}", part.rows))
            first += part.rows
        else:
            files.append(_part_rows(path, part, first))
            first += part.num_rows
    return RowFile.join(files)


def _part_rows(path: Path, part: Any, first: int) -> RowFile:
    """Return the rows of a table or batch; `first` is the number in the file of its first row."""

    def get(i: int) -> dict[str, Any]:
        table = part.slice(i, 1)
        table.validate(full=True)  # offsets of a damaged file may point anywhere
        return _table_row(table)

    return RowFile(part.num_rows, get, lambda i: f"{path}:{first + i}")


def saved_rows(path: Path, split: str) -> RowFile:
    """Return the rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    datasets = import_extra("datasets", EXTRA, needed_by=str(path))
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises all kinds for damaged files
        return _damaged_dataset(path, split, error)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return _dataset_rows(loaded, str(path))


def _damaged_dataset(path: Path, split: str, error: Exception) -> RowFile:
    """Return the rows of the Arrow files of a saved dataset that the datasets library cannot load."""
    folder = path / split if (path / "dataset_dict.json").exists() else path
    files = [arrow_file(file) for file in sorted(folder.glob("data-*.arrow"))]
    if not files:
        raise UserError(f"{path} cannot be loaded as a saved dataset: {error!s:.300}") from error
    if not any(file.damage for file in files):
        files.append(no_rows(path, f"{path} is damaged, its Arrow files are read: {error!s:.300}"))
    return RowFile.join(files)


def hub_rows(config: SourceConfig) -> RowFile:
    """Return a dataset of the Hugging Face hub, from the local cache if possible."""
    datasets = import_extra("datasets", EXTRA, needed_by=config.path)
    name = config.path.removeprefix("hub:")
    try:
        loaded = datasets.load_dataset(name, config.subset or None, split=config.split)
    except Exception as error:  # network, cache, split and configuration errors of three libraries
        raise UserError(
            f"hub:{name} (subset {config.subset or 'none'}, split {config.split}) cannot be loaded: {error}. "
            f"Without a network: run `hf download --repo-type dataset {name} --local-dir DIR` on a machine "
            "with a network, copy DIR here and give its path"
        ) from error
    return _dataset_rows(loaded, name)


def _dataset_rows(dataset: Any, name: str) -> RowFile:
    tables = dataset.with_format("arrow")
    return RowFile(len(dataset), lambda i: _table_row(tables[i : i + 1]), lambda i: f"{name}:{i + 1}")


def _table_row(table: Any) -> dict[str, Any]:
    """Return the only row of a table, as its writer had it."""
    import pyarrow

    return as_written(table.to_pylist()[0], pyarrow.struct(list(table.schema)))


def as_written(value: Any, type: Any, filled: bool = False) -> Any:
    """Return a value of a table as its writer had it: JSON read, without the nulls that the table adds.

    In a table all objects of a column have the same keys: an argument of one tool call is null in all others,
    and a chat template would show it. Columns of the type Json (`datasets` 5) keep each object unchanged,
    including its nulls.

    Args:
        type: the value's Arrow type.
        filled: the value is part of messages or of the columns FILLED.
    """
    if value is None:
        return None
    if getattr(type, "extension_name", "") == "arrow.json":
        return json.loads(value)
    type = getattr(type, "storage_type", type)
    if isinstance(value, dict):
        types = {field.name: field.type for field in type}
        kept = {key: inner for key, inner in value.items() if not (filled and inner is None)}
        return {key: as_written(inner, types[key], filled or key in FILLED) for key, inner in kept.items()}
    if isinstance(value, list) and hasattr(type, "value_type"):  # lists, not maps
        is_chat = all(isinstance(item, dict) and role_of(item) for item in value)
        return [as_written(item, type.value_type, filled or is_chat) for item in value]
    if isinstance(value, float) and str(type) in SHORT_FLOATS:  # 0.1, not 0.10000000149011612
        return float(str(SHORT_FLOATS[str(type)](value)))
    return value


def _unreadable(path: Path, error: Exception) -> RowFile:
    return no_rows(path, f"{path} cannot be read as {path.suffix[1:]}: {error!s:.300}")
