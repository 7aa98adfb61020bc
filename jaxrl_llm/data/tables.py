"""Tables as random-access rows: Parquet and Arrow files, saved datasets, datasets of the Hugging Face hub."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.rows import RowError, RowFile, no_rows
from jaxrl_llm.errors import UserError


def parquet_file(path: Path) -> RowFile:
    """Read a Parquet file by its row groups; the rows of a damaged one are damaged, the others are used."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    except Exception as error:  # pyarrow raises half a dozen types for damaged files
        return _unreadable(path, error)
    groups: list[Any] = []
    for i in range(len(sizes)):
        try:
            groups.append(file.read_row_group(i))
        except Exception as error:  # as above
            groups.append(f"row group {i} is damaged: {error!s:.300}")
    return _table_rows(path, groups, sizes)


def arrow_file(path: Path) -> RowFile:
    """Read Arrow's file format, or its stream format (what the datasets library writes), by its batches.

    The file format is a stream between two marks, so one that lacks its end is read as a stream.
    """
    import pyarrow

    batches: list[Any] = []
    try:
        mapped = pyarrow.memory_map(str(path))
        is_file = mapped.read(8) == b"ARROW1\0\0"
        try:
            reader = pyarrow.ipc.open_file(mapped)
            batches = [_batch(reader, i) for i in range(reader.num_record_batches)]
            return _table_rows(path, batches, [0 if isinstance(b, str) else b.num_rows for b in batches])
        except pyarrow.ArrowInvalid:  # a stream, or a file without its end
            mapped.seek(8 if is_file else 0)
        reader = pyarrow.ipc.open_stream(mapped)
    except Exception as error:  # as in parquet_file
        return _unreadable(path, error)
    damage = "the file ends too soon" if is_file else ""
    while True:
        try:
            batches.append(reader.read_next_batch())
        except StopIteration:
            break
        except Exception as error:  # as in parquet_file
            damage = f"the file is damaged from here: {error!s:.300}"
            break
    return _table_rows(path, batches, [batch.num_rows for batch in batches], damage)


def _batch(reader: Any, i: int) -> Any:
    """Return batch `i` of an Arrow file, or why it cannot be read."""
    try:
        return reader.get_batch(i)
    except Exception as error:  # as in parquet_file
        return f"record batch {i} is damaged: {error!s:.300}"


def _table_rows(path: Path, parts: Sequence[Any], sizes: Sequence[int], damage: str = "") -> RowFile:
    """Return the rows of tables or batches of these sizes; a text in the place of one says why it is lost."""
    starts = [0, *itertools.accumulate(sizes)]
    where = lambda i: f"{path}:{i + 1}"

    def get(i: int) -> dict[str, Any]:
        part = bisect.bisect_right(starts, i) - 1
        if isinstance(parts[part], str):
            raise RowError(f"{where(i)}: {parts[part]}")
        row = parts[part].slice(i - starts[part], 1)
        row.validate(full=True)  # offsets of a damaged file may point anywhere
        return row.to_pylist()[0]

    empty = [part for part, size in zip(parts, sizes, strict=True) if isinstance(part, str) and not size]
    damage = "; ".join([*empty, *([damage] if damage else [])])
    return RowFile(starts[-1], get, where, damage and f"{where(starts[-1])}: {damage}")


def saved_rows(path: Path, split: str) -> list[RowFile]:
    """Return the rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises all kinds for damaged files
        return _damaged_dataset(path, split, error)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return [RowFile(len(loaded), loaded.__getitem__, lambda i: f"{path}:{i + 1}")]


def _damaged_dataset(path: Path, split: str, error: Exception) -> list[RowFile]:
    """Return the rows of the Arrow files of a saved dataset that the datasets library cannot load."""
    folder = path / split if (path / "dataset_dict.json").exists() else path
    files = sorted(folder.glob("data-*.arrow"))
    if not files:
        raise UserError(f"{path} is no saved dataset that can be loaded: {error!s:.300}") from error
    parts = [arrow_file(file) for file in files]
    if not any(part.damage for part in parts):
        parts.append(no_rows(path, f"{path} cannot be loaded, its Arrow files are read: {error!s:.300}"))
    return parts


def hub_rows(config: SourceConfig) -> RowFile:
    """Return a dataset of the Hugging Face hub, from the local cache where it is there."""
    import datasets

    name = config.path.removeprefix("hub:")
    try:
        loaded = datasets.load_dataset(name, config.subset or None, split=config.split)
    except Exception as error:  # network, cache, split and configuration errors of three libraries
        raise UserError(
            f"hub:{name} (subset {config.subset or 'none'}, split {config.split}) cannot be loaded: {error}. "
            f"Without a network: run `hf download --repo-type dataset {name} --local-dir DIR` where there is "
            "one, copy DIR here and give its path"
        ) from error
    return RowFile(len(loaded), loaded.__getitem__, lambda i: f"{name}:{i + 1}")


def _unreadable(path: Path, error: Exception) -> RowFile:
    return no_rows(path, f"{path} cannot be read as {path.suffix[1:]}: {error!s:.300}")
