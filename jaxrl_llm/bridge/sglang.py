"""The requests of SGLang servers. The pool's form of a request to generate, and of its reply, is SGLang's."""

from __future__ import annotations

import base64
import contextlib
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.bridge.buckets import Bucket
from jaxrl_llm.bridge.servers import (
    SHORT_TIMEOUT,
    Announced,
    Json,
    PauseMode,
    PoolLike,
    Receiver,
    ServerLike,
    parsing_reply,
)
from jaxrl_llm.bridge.transports.http_weights import pickle_bucket, request_pieces
from jaxrl_llm.errors import NoRouteError, RefusedError, ServerError
from jaxrl_llm.hf.names import HFTensor

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrl_llm.bridge.adapters import Adapter

LOADER = "jaxrl_sglang_loader.load"
LOADER_FLAGS = ("--custom-weight-loader", LOADER)


class SGLang:
    """SGLang, checked with 0.5.21 and 0.5.23 (docs/servers.md)."""

    name = "SGLang"
    up_route = "/model_info"
    generate_route = "/generate"
    sends_tied_head = False
    update_options: Json = {"load_format": LOADER}  # noqa: RUF012, never changed
    drops_cache_alone = False

    def request_of(self, body: Json) -> Json:
        return body

    def reply_of(self, reply: Json, body: Json) -> Json:
        return reply

    async def info(self, pool: PoolLike, server: ServerLike, timeout: float) -> Json:
        return await pool.request(server, "/server_info", timeout=timeout)

    async def score(self, receiver: Receiver, ids: list[int], adapter: str) -> tuple[str, list[float]]:
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter:
            body["lora_path"] = adapter
        reply = await receiver.request(self.generate_route, body)
        with parsing_reply(receiver.server.url):
            meta = reply["meta_info"]
            return str(meta["weight_version"])[:100], [
                score for score, *_ in meta["input_token_logprobs"][1:]
            ]

    def problem(self, info: Json) -> str:
        return ""

    async def abort_all(self, pool: PoolLike, server: ServerLike, timeout: float) -> None:
        await pool.request(server, "/abort_request", {"rid": "", "abort_all": True}, timeout)

    async def pause(self, receiver: Receiver, mode: PauseMode) -> None:
        await receiver.request("/pause_generation", {"mode": mode})

    async def resume(self, receiver: Receiver, timeout: float = 0.0) -> None:
        await receiver.request("/continue_generation", {}, timeout)

    async def begin(self, receiver: Receiver, session: bool) -> bool:
        """Open the session that SGLang demands since 0.5.21, after ending one that a killed trainer left."""
        if not session:
            return False
        try:
            await receiver.update("/begin_weight_update", {})
        except NoRouteError:
            return False
        except RefusedError as refusal:
            if "already open" not in str(refusal):
                raise
            await receiver.update("/end_weight_update", {})
            await receiver.update("/begin_weight_update", {})
        return True

    async def end(self, receiver: Receiver, label: str, timeout: float = 0.0) -> None:
        await receiver.update("/end_weight_update", {}, timeout)

    async def send_folder(self, receiver: Receiver, folder: Path, options: Json) -> None:
        body = {"model_path": str(folder), "load_format": "auto", **options}
        await receiver.update("/update_weights_from_disk", body)

    def pack(self, bucket: Bucket) -> bytes:
        return base64.b64encode(pickle_bucket(bucket))

    def pack_update(self, piece: bytes) -> bytes:
        """Return the pickle of [(name, bytes of the piece)], for our loader."""
        array = np.frombuffer(piece, np.uint8)
        tensor = HFTensor("update", array.shape, (), ())
        return base64.b64encode(pickle_bucket(Bucket([tensor], [array], "uint8")))

    async def held_label(self, receiver: Receiver) -> str:
        reply = await receiver.request("/model_info", None, SHORT_TIMEOUT)
        with parsing_reply(receiver.server.url):
            return str(reply["weight_version"])

    async def send_bucket(self, receiver: Receiver, payload: bytes, *, last: bool, options: Json) -> None:
        body = request_pieces(payload, receiver.ranks, options)
        await receiver.update("/update_weights_from_tensor", body)

    async def join_group(self, receiver: Receiver, group: Json) -> None:
        await receiver.update("/init_weights_update_group", group | {"backend": "gloo"})

    async def leave_group(self, receiver: Receiver, name: str, timeout: float) -> None:
        await receiver.request("/destroy_weights_update_group", {"group_name": name}, timeout)

    def announce(self, bucket: Bucket) -> Announced:
        fields: Json = {
            "names": [tensor.name for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "dtypes": [bucket.dtype] * len(bucket.tensors),
            "load_format": "flattened_bucket",
        }
        return fields, bucket.bytes()

    async def receive_broadcast(
        self, receiver: Receiver, fields: Json, *, last: bool, options: Json, name: str
    ) -> None:
        body = {**fields, "group_name": name, **options}
        await receiver.update("/update_weights_from_distributed", body)

    async def drop_cache(self, receiver: Receiver) -> None:
        """Drop cached keys; refused while responses in flight read them. The answer is plain text."""
        with contextlib.suppress(ServerError):
            await receiver.request("/flush_cache", {})

    async def load_adapter(self, receiver: Receiver, adapter: Adapter) -> list[str]:
        body = request_pieces(adapter.payload, receiver.ranks, adapter.options)
        reply = await receiver.update("/load_lora_adapter_from_tensors", body)
        return [str(name) for name in reply.get("loaded_adapters") or ()]

    async def unload_adapter(self, receiver: Receiver, name: str) -> None:
        """Unload an adapter; SGLang waits for the requests that use it."""
        await receiver.update("/unload_lora_adapter", {"lora_name": name}, SHORT_TIMEOUT)


def loader_problem(info: Json) -> str:
    """Return why a server cannot take changes of weights, with the flag to add; "" = it can."""
    if LOADER in (info.get("custom_weight_loader") or ()):
        return ""
    flags = " ".join(LOADER_FLAGS)
    return f"has not our weight loader (--servers.push delta). Start it with {flags} (docs/servers.md)"
