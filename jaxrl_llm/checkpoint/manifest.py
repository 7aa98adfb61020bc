"""Manifests of checkpoints, with a checksum of every file.

Orbax alone loads a flipped bit as a wrong weight and a deleted item as nothing, both silently.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import package_versions
from jaxrl_llm.host.files import write_json

MANIFEST = "manifest.json"
META = "meta.json"
CHUNK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint and their checksums; the last of its files to be written."""

    step: int
    arrays: dict[str, str]  # path in the state -> "float32[2,8]"
    files: dict[str, tuple[int, int]]  # path in the folder -> (bytes, crc32)
    metrics: dict[str, float]
    config: str  # crc32 of the run's resolved config, hexadecimal
    versions: dict[str, str]  # library -> version


def write_manifest(folder: Path, step: int, arrays: dict[str, str], meta: dict, *, metrics: dict) -> None:
    """Write META and then MANIFEST into a folder whose other files are complete; both reach the disk."""
    write_json(folder / META, meta)
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc32, paths))
    manifest = Manifest(
        step=step,
        arrays=arrays,
        files={str(p.relative_to(folder)): (p.stat().st_size, c) for p, c in zip(paths, sums, strict=True)},
        metrics=metrics,
        config=fingerprint(meta.get("config", {})),
        versions=package_versions(),
    )
    body = dataclasses.asdict(manifest)
    write_json(folder / MANIFEST, {"crc32": fingerprint(body), **body})


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        UserError: missing, damaged, or of a version of this program that is not known; the message starts
            with the file's name.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{MANIFEST} is missing")
    try:
        body = json.loads(path.read_bytes())
        expected = body.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # not JSON, or other JSON
        raise UserError(f"{MANIFEST} is corrupt: not the JSON that was written") from None
    except OSError as error:  # such as a folder
        raise UserError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    if fingerprint(body) != expected:
        raise UserError(f"{MANIFEST} is corrupt: its own crc32 differs")
    names = {field.name for field in dataclasses.fields(Manifest)}
    if body.keys() != names:
        raise UserError(f"{MANIFEST} was written by another version of this program: {sorted(body)}")
    return Manifest(**body)


def read_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of a checkpoint; none if its manifest is damaged."""
    try:
        return read_manifest(folder).metrics
    except UserError:
        return {}


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the metadata that the trainer stored beside the arrays.

    Raises:
        UserError: damaged, which `checkpoint_problem` without checksums does not notice.
    """
    try:
        meta = json.loads((folder / META).read_bytes())
        assert isinstance(meta, dict)
        return meta
    except (ValueError, RecursionError, OSError, AssertionError) as error:
        raise UserError(f"{folder / META} is damaged: {error or 'no object'}") from error


def checkpoint_problem(folder: Path, checksums: bool = True) -> str | None:
    """Return why a checkpoint must not be used, naming the file; None = it is valid.

    Args:
        checksums: read every byte; otherwise only that the files are there with their sizes.
    """
    try:
        return _file_problem(folder, read_manifest(folder).files, checksums)
    except UserError as error:
        return str(error)
    except OSError as error:  # such as a folder of another user
        return f"it cannot be read: {error.strerror}"


def _file_problem(folder: Path, files: dict[str, tuple[int, int]], checksums: bool) -> str | None:
    """Return which file of a checkpoint is missing, unreadable or other than its manifest says; None = none.

    Args:
        checksums: see `checkpoint_problem`.
    """
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if not checksums:
        return None

    def problem(name: str) -> str | None:
        try:
            actual, expected = _crc32(folder / name), files[name][1]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return (
            None if actual == expected else f"{name} is corrupt: crc32 {actual:08x} instead of {expected:08x}"
        )

    with ThreadPoolExecutor() as pool:
        return next(filter(None, pool.map(problem, files)), None)


def flatten_state(tree: Any) -> dict[str, Any]:
    """Return {"params.layers.q": leaf}, without the `.value` in which Flax keeps each weight."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    flat = {name(path): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have one path"
    return flat


def array_type(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Return an array's type and shape: "float32[2,8]"."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def fingerprint(tree: Any) -> str:
    """Return the crc32 of a JSON-able tree, the same for any order of keys; hexadecimal."""
    return f"{zlib.crc32(json.dumps(tree, sort_keys=True).encode()):08x}"


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
