"""Files, folders and hub datasets as random-access rows that know their file and line.

Text files are indexed once and read in place; tables are in jaxrl_llm/data/tables.py. A damaged file gives
the rows before the damage (and after it, if the format marks the start of rows) and a line that names it.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import mmap
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import GENERATED, SourceConfig
from jaxrl_llm.data.rows import MAX_CHARACTERS, SURROGATE, Damage, RowError, RowFile, distinct, no_rows
from jaxrl_llm.data.tables import arrow_file, hub_rows, parquet_file, saved_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import did_you_mean, expand_home

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # files that `datasets` writes beside the data
SCHEMES = ("hub:", *GENERATED)
MAX_LINE_BYTES = 4 * MAX_CHARACTERS  # bytes of one row of text
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BLANK = b" \t\r\n" + codecs.BOM_UTF8
NOT_UTF8 = "not UTF-8"


def open_rows(config: SourceConfig) -> RowFile:
    """Return the rows of all files of a source.

    Raises:
        UserError: nothing to read; the message names the kinds of sources.
    """
    if config.path.startswith("hub:"):
        return hub_rows(config)
    try:
        path = expand_home(config.path)
        if path.is_file():
            return read_file(path)
        if not path.exists():
            raise UserError(_no_such_path(path, config.path))
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return saved_rows(path, config.split)
        return RowFile.join([read_file(file) for file in folder_files(path, config)])
    except OSError as error:  # permissions, a name that is too long
        raise UserError(f"{config.path:.300} cannot be opened: {error!s:.300}") from error


def _no_such_path(path: Path, name: str) -> str:
    """Return the message for a missing source: a misspelt file, or the name of a dataset."""
    if re.search(r"[*?\[]", path.name):
        return f"there is no file {path}: patterns are not read. Give the folder: {path.parent}"
    if _suffix(path) in READERS:
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"there is no file {path}.{did_you_mean(path.name, beside)}"
    return (
        f"there is no file or folder {path}. Other sources are {', '.join(SCHEMES)} (a Hugging Face dataset "
        f"is hub:{name})"
    )


def read_file(path: Path) -> RowFile:
    """Return the rows of one file. Raises UserError if its ending is unknown."""
    if _suffix(path) not in READERS:
        raise UserError(f"{path}: the ending {_suffix(path)!r} is unknown; read are {', '.join(READERS)}")
    try:
        return READERS[_suffix(path)](path)
    except OSError as error:
        return no_rows(path, f"{path} cannot be opened: {error.strerror}")


def folder_files(path: Path, config: SourceConfig) -> list[Path]:
    """Return the data files of a folder that belong to the split, sorted.

    A file belongs to a split if its name, or its sub-folder's, begins with it (train-00000-of-2.parquet). If
    no file names a split, all files belong to it.
    """
    root = path / config.subset if config.subset else path
    hidden = lambda file: any(part.startswith(".") for part in file.relative_to(root).parts)
    files = sorted(file for file in root.rglob("*") if _suffix(file) in READERS and file.is_file())
    files = [file for file in files if not hidden(file) and file.name not in DESCRIPTIONS]
    if not files:
        raise UserError(f"{root} holds no data file; read are {', '.join(READERS)} and saved datasets")
    labels = {file: _split_label(file.relative_to(root)) for file in files}
    if any(labels.values()):
        splits = sorted({label for label in labels.values() if label})
        files = [file for file in files if labels[file] == config.split]
        if not files:
            raise UserError(f"{root} has no split {config.split!r}; it has {', '.join(splits)}")
    folders = sorted({file.relative_to(root).parts[0] for file in files if file.parent != root})
    folders = [folder for folder in folders if not _split_label(Path(folder)) and folder != "data"]
    if len(folders) > 1:
        raise UserError(f"{root} holds several datasets; set subset to one of {', '.join(folders)}")
    seen: dict[Path, Path] = {}
    for file in files:  # the same rows in two formats
        same = seen.setdefault(file.parent / file.name.removesuffix(".gz").rpartition(".")[0], file)
        if same is not file:
            raise UserError(
                f"{same} and {file.name} have one name, so their rows would count twice: give one path"
            )
    return files


def json_lines(path: Path) -> RowFile:
    """Read one object per line; blank lines are skipped."""
    data, damage = _contents(path)
    end_of_data = data.rfind(b"\n") + 1 if damage else len(data)  # the last line was cut
    starts, ends, numbers = array("q"), array("q"), array("q")
    position = number = 0
    while position < end_of_data:
        end = data.find(b"\n", position)
        end = end_of_data if end < 0 else end
        number += 1
        if end - position > MAX_LINE_BYTES or data[position:end].strip(BLANK):
            starts.append(position)
            ends.append(end)
            numbers.append(number)
        position = end + 1

    def get(i: int) -> Any:
        size, where = ends[i] - starts[i], f"{path}:{numbers[i]}"
        if size > MAX_LINE_BYTES:
            raise RowError(f"{where}: a line of {size:,} bytes, more than {MAX_LINE_BYTES:,}")
        return _parse_json(data[starts[i] : ends[i]], where)

    return RowFile(len(starts), get, lambda i: f"{path}:{numbers[i]}", _damage(path, number + 1, damage))


def json_file(path: Path) -> RowFile:
    """Read a list of objects, an object with such a list under "data", or one object per line."""
    data, damage = _contents(path)
    data = bytes(data).removeprefix(codecs.BOM_UTF8).strip()
    first, newline, _ = data.partition(b"\n")
    if newline and first.startswith(b"{") and first.rstrip().endswith(b"}"):
        return json_lines(path)
    text, clean = _decode(data)
    try:
        value = json.loads(text, object_pairs_hook=distinct) if text else []
    except (ValueError, RecursionError) as error:
        rows, reason = _parse_list(text, error)
        value, damage = rows, damage or reason
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        return no_rows(path, f"{path} must hold a list of objects, got {type(rows).__name__}")
    where = lambda i: f"{path}:{i + 1}"
    get = lambda i: rows[i] if clean else _without_surrogates(rows[i], where(i))
    return RowFile(len(rows), get, where, _damage(path, len(rows) + 1, damage))


def csv_file(path: Path) -> RowFile:
    """Read a header, then one row per record; every value is text."""
    data, damage = _contents(path)
    text, clean = _decode(bytes(data[: data.rfind(b"\n") + 1] if damage else data))
    records = list(_csv_records(text))
    lines = [line for line, _ in records[1:]]
    header = records[0][1] if records else []
    where = lambda i: f"{path}:{lines[i]}"
    if isinstance(header, str):
        return no_rows(path, f"{path}:1: the header is damaged: {header}")
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        return no_rows(path, f"{path}:1: two columns are named {twice!r}: rename one of them")

    def get(i: int) -> dict[str, str]:
        cells = records[i + 1][1]
        if isinstance(cells, str):
            raise RowError(f"{where(i)}: not CSV: {cells}")
        if len(cells) != len(header):
            raise RowError(f"{where(i)}: not as many cells as the header has")
        row = dict(zip(header, cells, strict=True))
        return row if clean else _without_surrogates(row, where(i))

    return RowFile(len(lines), get, where, _damage(path, lines[-1] + 1 if lines else 2, damage))


READERS: dict[str, Callable[[Path], RowFile]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": csv_file,
    ".parquet": parquet_file,
    ".arrow": arrow_file,
}


def _suffix(path: Path) -> str:
    """Return ".jsonl" of "a.jsonl" and "a.jsonl.gz"."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _split_label(path: Path) -> str | None:
    """Return the split that a file's name or its folders' names begin with."""
    for part in reversed(path.parts):
        word = re.split(r"[^a-z]", part.lower(), maxsplit=1)[0]
        if word in SPLITS:
            return word
    return None


def _damage(path: Path, line: int, reason: str) -> tuple[Damage, ...]:
    return (Damage(f"{path}:{line}: {reason}"),) if reason else ()


def _contents(path: Path) -> tuple[bytes | mmap.mmap, str]:
    """Return (bytes of the file, mapped or unpacked from .gz; the damage after them, or "")."""
    if path.suffix == ".gz":
        data, damage = _unpack_gzip(path)
    elif path.stat().st_size == 0:
        return b"", ""
    else:
        with path.open("rb") as file:
            data, damage = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), ""
    if data[:2] in UTF16:
        return b"", "the text is UTF-16: save it as UTF-8"
    return data, damage


def _unpack_gzip(path: Path) -> tuple[bytes, str]:
    """Return (bytes that can be unpacked, the damage after them, or "")."""
    unpacked, stream = [], zlib.decompressobj(wbits=31)
    started = False
    with path.open("rb") as file:
        while packed := file.read(1 << 18):
            while packed:
                if stream.eof:  # the next of several members, after padding
                    packed = packed.lstrip(b"\0")
                    stream, started = zlib.decompressobj(wbits=31), False
                    continue
                started, before = True, stream.copy()
                try:
                    unpacked.append(stream.decompress(packed))
                except zlib.error as error:
                    unpacked += _until_damage(before, packed)
                    return b"".join(unpacked), f"the gzip data is damaged here or before: {error}"
                packed = stream.unused_data
    damage = "the gzip data ends too soon" if started and not stream.eof else ""
    return b"".join(unpacked), damage


def _until_damage(stream: Any, packed: bytes) -> Iterator[bytes]:
    """Yield the content of `packed` before the byte that cannot be unpacked."""
    for i in range(len(packed)):
        try:
            yield stream.decompress(packed[i : i + 1])
        except zlib.error:
            return


def _decode(data: bytes) -> tuple[str, bool]:
    """Return (text, whether all of it is UTF-8); other bytes become lone surrogates."""
    try:
        return data.decode("utf-8-sig"), True
    except UnicodeDecodeError:
        return data.decode("utf-8-sig", errors="surrogateescape"), False


def _without_surrogates(row: Any, where: str) -> Any:
    """Return the row; raises RowError if some bytes were not UTF-8."""
    if SURROGATE.search(json.dumps(row, ensure_ascii=False, default=str)):
        raise RowError(f"{where}: {NOT_UTF8}")
    return row


def _csv_records(text: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield (number of the first line, cells or the problem) of each record; blank lines are skipped.

    A stray quote would swallow lines up to the next quote: reading continues with the line after it.
    """
    csv.field_size_limit(MAX_CHARACTERS)
    lines = io.StringIO(text, newline="").readlines()
    start = 0
    while start < len(lines):
        reader = csv.reader((lines[i] for i in range(start, len(lines))), strict=True)
        position = start
        try:
            for cells in reader:
                if cells:
                    yield position + 1, cells
                position = start + reader.line_num
            return
        except csv.Error as error:
            yield position + 1, str(error)
            start = position + 1


def _parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise RowError(f"{where}: {NOT_UTF8} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: {_json_problem(error)}") from error


def _json_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        line = f" (line {error.lineno})" if error.lineno > 1 else ""
        return f"not JSON: {error.msg} at character {error.pos}{line}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not JSON: {error}"


def _parse_list(text: str, error: Exception) -> tuple[list[Any], str]:
    """Return (the rows of a JSON list before its damage, the problem with the rest)."""
    rows: list[Any] = []
    decoder, skip = json.JSONDecoder(object_pairs_hook=distinct), re.compile(r"[\s,]*")
    position = 1
    with contextlib.suppress(ValueError, RecursionError):
        while text.startswith("["):
            row, position = decoder.raw_decode(text, skip.match(text, position).end())
            rows.append(row)
    return rows, _json_problem(error)
