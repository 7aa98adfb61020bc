"""Partial responses: made from requests, turned into trajectories, stored in checkpoints."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.forks import Fork, TurnRecord
from jaxrl_llm.models.experts.router import unknown_route
from jaxrl_llm.rollout.engine import PartialResponse, Request, reads_thought, text_of
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.structs import Episode, Trajectory

EARLIER_RUN = "earlier-run"  # in place of a server's address: generated part of a response before a restart
PER_TOKEN = {"ids": np.int32, "logprobs": np.float32, "versions": np.int32}  # field -> type in the file


def new_responses(
    requests: Sequence[Request], key: jax.Array, partial: Sequence[PartialResponse] = ()
) -> list[PartialResponse]:
    """Return a response for each (request, response index), in order, each with a separate random key.

    Args:
        partial: responses to continue, one for each; () = start empty.
    """
    pairs = [(request, g) for request in requests for g in range(request.num_responses)]
    names = np.array([(r.prompt_index, g) for r, g in pairs], np.int32).reshape(-1, 2)
    before = [one.copy() for one in partial] or [PartialResponse() for _ in pairs]
    responses = []
    for (request, g), own, one in zip(pairs, sample_keys(key, names)[: len(pairs)], before, strict=True):
        if one.prompt_ids:
            request = request._replace(prompt_ids=np.array(one.prompt_ids, np.int32))
        servers = [EARLIER_RUN] if one.ids else []
        responses.append(dataclasses.replace(one, request=request, index=g, key=own, servers=servers))
        if not one.finish and len(one.ids) >= request.max_tokens:
            responses[-1].finish = "length"
    return responses


def trajectory_of(response: PartialResponse, tokenizer: Any, end_ids: Sequence[int] = ()) -> Trajectory:
    """Return a finished response as the trainer takes it; observations have mask 0."""
    last_turn = response.ids[response.turn_start :]
    return Trajectory(
        prompt_ids=np.asarray(response.request.prompt_ids, np.int32),
        response_ids=np.array(response.ids, np.int32),
        logprobs=np.array(response.logprobs, np.float32),
        mask=response.mask,
        versions=np.array(response.versions, np.int32),
        prompt_index=response.request.prompt_index,
        response_index=response.index,
        finish=response.finish,
        text=text_of(tokenizer, response.ids, end_ids),
        answer=text_of(tokenizer, last_turn, end_ids) if response.observed else None,
        opens_thought=reads_thought(tokenizer, response.context),
        episode=response.episode,
        server=" ".join(response.servers),
        routes=routes_of(response),
        kept=kept_of(response),
        forks=tuple(response.forks),
    )


def routes_of(response: PartialResponse) -> np.ndarray | None:
    """Return the routes of all tokens, `unknown_route` after the last known one; None without routes."""
    if not response.routes:
        return None
    known = np.stack(response.routes)
    missing = len(response.request.prompt_ids) + len(response.ids) - len(known)
    unknown = np.full((missing, *known.shape[1:]), unknown_route(known.dtype), known.dtype)
    return np.concatenate([known, unknown])


def kept_of(response: PartialResponse) -> np.ndarray | None:
    """Return the kept sets of all tokens of a response, -1 on observations; None without kept sets."""
    if not response.kept:
        return None
    kept = np.full((len(response.ids), max(map(len, response.kept))), -1, np.int32)
    for row, ids in zip(np.flatnonzero(response.mask), response.kept, strict=True):
        kept[row, : len(ids)] = ids
    return kept


def is_complete(response: PartialResponse, turns: bool) -> bool:
    """Return whether nothing of a response is missing, the environment's last reply included.

    Args:
        turns: whether an environment replies to it.
    """
    if not turns:
        return bool(response.finish)
    replies = response.episode.turns if response.episode else 0
    if response.finish == "length" and not response.request.opens:
        # The last turn was cut off, or its reply did not fit; a dialogue that opens replies to cut turns.
        return replies >= len(response.observed)
    return bool(response.finish) and replies > len(response.observed)


def pack_responses(batches: Mapping[int, Sequence[Sequence[PartialResponse]]]) -> bytes:
    """Return {batch number: lists of responses} as one .npz, for a checkpoint."""
    rows = [(n, k, one) for n, lists in batches.items() for k, each in enumerate(lists) for one in each]
    arrays = {
        "batch": np.array([n for n, _, _ in rows], np.int64),
        "list": np.array([k for _, k, _ in rows], np.int32),
        "length": np.array([len(one.ids) for _, _, one in rows], np.int32),
        "finish": np.array([one.finish for _, _, one in rows], "U8"),
    }
    # Lists of each response, one after another.
    episodes = {row: dataclasses.asdict(one.episode) for row, (_, _, one) in enumerate(rows) if one.episode}
    arrays["episodes"] = np.frombuffer(json.dumps(episodes, default=str).encode(), np.uint8)
    spans = [(row, *span) for row, (_, _, one) in enumerate(rows) for span in one.observed]
    arrays["observed"] = np.array(spans, np.int32).reshape(-1, 3)
    forks = [(row, *fork) for row, (_, _, one) in enumerate(rows) for fork in one.forks]
    arrays["forks"] = np.array(forks, np.int32).reshape(-1, 3)
    routes = [route for _, _, one in rows for route in one.routes]
    arrays["num_routes"] = np.array([len(one.routes) for _, _, one in rows], np.int32)
    arrays["routes"] = np.stack(routes) if routes else np.zeros(0, np.uint8)
    kept = [ids for _, _, one in rows for ids in one.kept]
    arrays["num_kept"] = np.array([len(one.kept) for _, _, one in rows], np.int32)
    arrays["kept"] = np.stack(kept) if kept else np.zeros(0, np.int32)
    arrays["num_prompt_ids"] = np.array([len(one.prompt_ids) for _, _, one in rows], np.int32)
    arrays["prompt_ids"] = np.array([i for _, _, one in rows for i in one.prompt_ids], np.int32)
    for name, dtype in PER_TOKEN.items():
        arrays[name] = np.array([x for _, _, one in rows for x in getattr(one, name)], dtype)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def unpack_responses(data: bytes) -> dict[int, list[list[PartialResponse]]]:
    """Return what `pack_responses` was given; lists and responses in their order."""
    # Arrays of each response; older files have fewer.
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    ends = np.cumsum(arrays["length"])[:-1]
    columns = {name: np.split(arrays[name], ends) for name in PER_TOKEN}
    observed: list[list[tuple[int, int]]] = [[] for _ in arrays["length"]]
    for row, start, end in arrays["observed"].tolist():
        observed[row].append((start, end))
    forks: list[list[Fork]] = [[] for _ in arrays["length"]]
    for row, first, keep in arrays["forks"].tolist() if "forks" in arrays else ():
        forks[row].append(Fork(first, keep))
    lists_of = {name: [()] * len(arrays["length"]) for name in ("routes", "kept", "prompt_ids")}
    for name in lists_of:
        if name in arrays:
            lists_of[name] = np.split(arrays[name], np.cumsum(arrays[f"num_{name}"])[:-1])
    episodes = json.loads(arrays["episodes"].tobytes()) if "episodes" in arrays else {}
    # The responses, by batch and list.
    batches: dict[int, list[list[PartialResponse]]] = {}
    for i, (n, k) in enumerate(zip(arrays["batch"].tolist(), arrays["list"].tolist(), strict=True)):
        lists = batches.setdefault(n, [])
        lists += [[] for _ in range(k + 1 - len(lists))]
        per_token = {name: column[i].tolist() for name, column in columns.items()}
        finish = str(arrays["finish"][i])
        per_token |= {name: list(values[i]) for name, values in lists_of.items()}
        one = PartialResponse(**per_token, finish=finish, observed=observed[i], forks=forks[i])
        lists[k].append(one)
        if saved := episodes.get(str(i)):
            records = tuple(TurnRecord(**{**r, "calls": tuple(r["calls"])}) for r in saved.get("records", ()))
            saved |= {"messages": tuple(saved["messages"]), "records": records}
            lists[k][-1].episode = Episode(**saved)
    return batches
