"""What makes a checkpoint trustworthy: a manifest with a checksum of every file, and readable complaints.

Orbax alone loads a flipped bit as a wrong weight and a deleted item as nothing, both silently.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.errors import UserError

MANIFEST = "manifest.json"
META = "meta.json"
LIBRARIES = ("jaxrl-llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
CHUNK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class Manifest:
    """The last file of a checkpoint to be written: what it holds and how to know that it still does."""

    step: int
    arrays: dict[str, str]  # path in the state -> "float32[2,8]"
    files: dict[str, tuple[int, int]]  # path in the folder -> (bytes, crc32)
    metrics: dict[str, float]
    config: str  # crc32 of the run's resolved config, hexadecimal
    versions: dict[str, str]  # library -> version


def write_manifest(folder: Path, step: int, arrays: dict[str, str], meta: dict, metrics: dict) -> None:
    """Write META and then MANIFEST into a folder whose other files are complete; both reach the disk."""
    _write_json(folder / META, meta)
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc32, paths))
    manifest = Manifest(
        step=step,
        arrays=arrays,
        files={str(p.relative_to(folder)): (p.stat().st_size, c) for p, c in zip(paths, sums, strict=True)},
        metrics=metrics,
        config=fingerprint(meta.get("config", {})),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
    )
    body = dataclasses.asdict(manifest)
    _write_json(folder / MANIFEST, {"crc32": fingerprint(body), **body})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: missing or damaged; the message starts with the file's name.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{MANIFEST} is missing")
    try:
        body = json.loads(path.read_bytes())
        expected = body.pop("crc32")
    except (ValueError, KeyError, AttributeError):  # not JSON, or other JSON
        raise UserError(f"{MANIFEST} is corrupt: not the JSON that was written") from None
    if fingerprint(body) != expected:
        raise UserError(f"{MANIFEST} is corrupt: its own crc32 differs")
    return Manifest(**body)


def read_metrics(folder: Path) -> dict[str, float]:
    """The metrics a checkpoint recorded; none if its manifest is damaged."""
    try:
        return read_manifest(folder).metrics
    except ValueError:
        return {}


def read_meta(folder: Path) -> dict:
    """What the trainer stored beside the arrays."""
    return json.loads((folder / META).read_text())


def fault(folder: Path, checksums: bool = True) -> str | None:
    """Why a checkpoint must not be used, naming the file, or None if it is whole.

    Args:
        checksums: read every byte; otherwise only that the files are there with their sizes.
    """
    try:
        files = read_manifest(folder).files
    except ValueError as error:
        return str(error)
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if not checksums:
        return None
    with ThreadPoolExecutor() as pool:
        sums = pool.map(_crc32, [folder / name for name in files])
        for (name, (_, expected)), found in zip(files.items(), sums, strict=True):
            if found != expected:
                return f"{name} is corrupt: crc32 {found:08x} instead of {expected:08x}"
    return None


def flatten(tree: Any) -> dict[str, Any]:
    """{"params.layers.q": leaf}, without the `.value` in which Flax keeps each weight."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    flat = {name(path): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have one path"
    return flat


def describe(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """float32[2,8]"""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def fingerprint(tree: Any) -> str:
    """crc32 of a JSON-able tree, the same for any order of keys; hexadecimal."""
    return f"{zlib.crc32(json.dumps(tree, sort_keys=True).encode()):08x}"


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _write_json(path: Path, tree: Any) -> None:
    with path.open("w") as file:
        json.dump(tree, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
