"""Files, folders and hub datasets as random-access rows that know their file and line.

Text files are indexed once and read where they lie; Parquet and Arrow are memory-mapped.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import mmap
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data.rows import SourceConfig
from jaxrl_llm.errors import UserError

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SCHEMES = ("hub:", "task:", "gym:")


@dataclass(frozen=True)
class Rows:
    """The rows of one file or dataset."""

    size: int
    get: Callable[[int], Any]  # raises ValueError where the row cannot be read
    where: Callable[[int], str]  # "file.jsonl:12"


def open_rows(config: SourceConfig) -> list[Rows]:
    """Rows of each file of a source. Raises ValueError where there is nothing to read, with the fix."""
    if config.path.startswith("hub:"):
        return [hub_rows(config)]
    path = Path(config.path).expanduser()
    if not path.exists():
        raise UserError(
            f"there is no file or folder {path}. Other sources are {', '.join(SCHEMES)} "
            f"(a Hugging Face dataset is hub:{config.path})"
        )
    if path.is_file():
        return [READERS[suffix(path)](path)] if suffix(path) in READERS else _unknown(path)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return [saved_rows(path, config.split)]
    return [READERS[suffix(file)](file) for file in folder_files(path, config)]


def suffix(path: Path) -> str:
    """ ".jsonl" of "a.jsonl" and "a.jsonl.gz"."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def folder_files(path: Path, config: SourceConfig) -> list[Path]:
    """The data files of a folder that belong to the split, sorted.

    A file belongs to a split if its name, or its sub-folder's, begins with it (train-00000-of-2.parquet).
    Where no file names a split, all belong.
    """
    root = path / config.subset if config.subset else path
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(root).parts)
    files = sorted(file for file in root.rglob("*") if suffix(file) in READERS and file.is_file())
    files = [file for file in files if not hidden(file)]
    if not files:
        raise UserError(f"{root} holds no data file; read are {', '.join(READERS)} and saved datasets")
    labels = {file: _label(file.relative_to(root)) for file in files}
    if any(labels.values()):
        found = sorted({label for label in labels.values() if label})
        files = [file for file in files if labels[file] == config.split]
        if not files:
            raise UserError(f"{root} has no split {config.split!r}; it has {', '.join(found)}")
    folders = sorted({file.relative_to(root).parts[0] for file in files if file.parent != root})
    folders = [folder for folder in folders if not _label(Path(folder)) and folder != "data"]
    if len(folders) > 1:
        raise UserError(f"{root} holds several datasets; set subset to one of {', '.join(folders)}")
    return files


def _label(path: Path) -> str | None:
    """The split that a file's name or its folders' names begin with."""
    for part in reversed(path.parts):
        word = re.split(r"[^a-z]", part.lower(), maxsplit=1)[0]
        if word in SPLITS:
            return word
    return None


def json_lines(path: Path) -> Rows:
    """One object a line; blank lines are passed over."""
    data = _bytes(path)
    starts, ends, numbers = array("q"), array("q"), array("q")
    position = number = 0
    while position < len(data):
        end = data.find(b"\n", position)
        end = len(data) if end < 0 else end
        number += 1
        if data[position:end].strip():
            starts.append(position)
            ends.append(end)
            numbers.append(number)
        position = end + 1
    get = lambda i: _json(data[starts[i] : ends[i]], f"{path}:{numbers[i]}")
    return Rows(len(starts), get, lambda i: f"{path}:{numbers[i]}")


def json_file(path: Path) -> Rows:
    """A list of objects, an object with such a list under "data", or (often found) one object a line."""
    data = bytes(_bytes(path)).removeprefix(codecs.BOM_UTF8).strip()
    first, newline, _ = data.partition(b"\n")
    if newline and first.startswith(b"{") and first.rstrip().endswith(b"}"):
        return json_lines(path)
    value = _json(data, str(path)) if data else []
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of objects, got {type(rows).__name__}")
    return Rows(len(rows), rows.__getitem__, lambda i: f"{path}:{i + 1}")


def csv_file(path: Path) -> Rows:
    """A header, then one row a record; every value is text."""
    text = bytes(_bytes(path)).decode("utf-8-sig", errors="surrogateescape")
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows, numbers = [], []
    for row in reader:
        rows.append(row)
        numbers.append(reader.line_num)

    def get(i: int) -> dict:
        if None in rows[i] or None in rows[i].values():
            raise UserError(f"{path}:{numbers[i]}: not as many cells as the header has")
        return rows[i]

    return Rows(len(rows), get, lambda i: f"{path}:{numbers[i]}")


def parquet_file(path: Path) -> Rows:
    import pyarrow.parquet

    return _table_rows(path, lambda: pyarrow.parquet.read_table(path, memory_map=True))


def arrow_file(path: Path) -> Rows:
    """Arrow's file format, or its stream format (what the datasets library writes)."""
    import pyarrow

    def read():
        mapped = pyarrow.memory_map(str(path))
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped).read_all()

    return _table_rows(path, read)


def _table_rows(path: Path, read: Callable[[], Any]) -> Rows:
    import pyarrow

    try:
        table = read()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as {suffix(path)[1:]}: {error}") from error
    get = lambda i: table.slice(i, 1).to_pylist()[0]
    return Rows(table.num_rows, get, lambda i: f"{path}:{i + 1}")


def saved_rows(path: Path, split: str) -> Rows:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return Rows(len(loaded), loaded.__getitem__, lambda i: f"{path}:{i + 1}")


def hub_rows(config: SourceConfig) -> Rows:
    """A dataset of the Hugging Face hub, from the local cache where it is there."""
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
    return Rows(len(loaded), loaded.__getitem__, lambda i: f"{name}:{i + 1}")


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": csv_file,
    ".parquet": parquet_file,
    ".arrow": arrow_file,
}


def _unknown(path: Path):
    raise UserError(f"{path}: the ending {suffix(path)!r} is unknown; read are {', '.join(READERS)}")


def _bytes(path: Path) -> bytes | mmap.mmap:
    """The file's bytes: mapped, or unpacked where it ends in .gz."""
    if path.suffix == ".gz":
        try:
            return gzip.decompress(path.read_bytes())
        except (OSError, EOFError) as error:
            raise UserError(f"{path} is not a whole gzip file: {error}") from error
    if path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        line = f" (line {error.lineno})" if error.lineno > 1 else ""
        raise UserError(f"{where}: not JSON: {error.msg} at character {error.pos}{line}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply") from error
