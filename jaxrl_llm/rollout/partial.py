"""Unfinished responses as bytes, for a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.rollout.engine import PartialResponse

PER_TOKEN = (np.int32, np.float32, np.int32)  # types of the first fields of PartialResponse


def pack(batches: Mapping[int, Sequence[Sequence[PartialResponse]]]) -> bytes:
    """Batch number -> its lists of responses, as one .npz."""
    rows = [(n, k, one) for n, lists in batches.items() for k, each in enumerate(lists) for one in each]
    arrays = {
        "batch": np.array([n for n, _, _ in rows], np.int64),
        "list": np.array([k for _, k, _ in rows], np.int32),
        "length": np.array([len(one.ids) for _, _, one in rows], np.int32),
        "finish": np.array([one.finish for _, _, one in rows], "U8"),
    }
    spans = [(row, *span) for row, (_, _, one) in enumerate(rows) for span in one.observed]
    arrays["observed"] = np.array(spans, np.int32).reshape(-1, 3)
    for i, dtype in enumerate(PER_TOKEN):
        arrays[PartialResponse._fields[i]] = np.array([x for _, _, one in rows for x in one[i]], dtype)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def unpack(data: bytes) -> dict[int, list[list[PartialResponse]]]:
    """The inverse; lists and responses in their order."""
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    ends = np.cumsum(arrays["length"])[:-1]
    columns = [np.split(arrays[name], ends) for name in PartialResponse._fields[: len(PER_TOKEN)]]
    observed: list[list[tuple[int, int]]] = [[] for _ in arrays["length"]]
    for row, start, end in arrays["observed"].tolist():
        observed[row].append((start, end))
    batches: dict[int, list[list[PartialResponse]]] = {}
    for i, (n, k) in enumerate(zip(arrays["batch"].tolist(), arrays["list"].tolist(), strict=True)):
        lists = batches.setdefault(n, [])
        lists += [[] for _ in range(k + 1 - len(lists))]
        per_token = (tuple(column[i].tolist()) for column in columns)
        lists[k].append(PartialResponse(*per_token, str(arrays["finish"][i]), tuple(observed[i])))
    return batches
