"""The requests of vLLM servers, with the plugin `vllm_plugin.py` or, for weights on a disk, without it."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING

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
from jaxrl_llm.errors import NoRouteError, ServerError, UnreachableError
from jaxrl_llm.hf.export import safetensors_head
from jaxrl_llm.hf.names import HFTensor

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrl_llm.bridge.adapters import Adapter
    from jaxrl_llm.bridge.buckets import Bucket

BACKEND = "jaxrl"  # of the plugin
IN_GROUP = "group"  # in place of base64: a broadcast has the content
LOGPROBS = "processed_logprobs"
EMBEDDING, HEAD = "embed", "lm_head.weight"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank
ID = "generate-tokens-"  # before the ids of requests
MODES = {"abort": "abort", "retract": "keep"}
"""Our words -> vLLM's. It computes the kept responses' keys again, as SGLang's "retract" does."""
NO_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class VLLM:
    """vLLM, checked with 0.32.0 on a CPU (docs/servers.md)."""

    name = "vLLM"
    up_route = "/health"
    generate_route = "/inference/v1/generate"
    sends_tied_head = True
    update_options: Json = {}  # noqa: RUF012, never changed
    drops_cache_alone = True

    def request_of(self, body: Json) -> Json:
        """Return a request of `/inference/v1/generate`.

        Every setting is given, since vLLM takes absent ones from the model's generation_config.json, and
        ignores those that it does not know.
        """
        ours: Json = body["sampling_params"]
        sampling = {
            "max_tokens": ours["max_new_tokens"],
            "temperature": ours["temperature"],
            "top_k": max(ours.get("top_k", -1), 0),
            "top_p": ours.get("top_p", 1.0),
            "min_p": ours.get("min_p", 0.0),
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": ours.get("stop", []),
            "stop_token_ids": ours.get("stop_token_ids", []),
            "include_stop_str_in_output": True,
            "ignore_eos": ours.get("ignore_eos", False),
            "skip_special_tokens": False,
            "seed": ours.get("sampling_seed"),
            "logprobs": 0,  # of the sampled token alone
        }
        request: Json = {"token_ids": body["input_ids"], "sampling_params": sampling}
        for ours_name, name in (("rid", "request_id"), ("extra_key", "cache_salt"), ("lora_path", "model")):
            if body.get(ours_name):
                request[name] = body[ours_name]
        return request

    def reply_of(self, reply: Json, body: Json) -> Json:
        """Return a reply in the pool's form.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it has another form.
        """
        (choice,) = reply["choices"]
        tokens = choice["logprobs"]["content"] if choice["token_ids"] else []
        meta = {
            "id": reply["request_id"].removeprefix(ID),
            "prompt_tokens": reply["usage"]["prompt_tokens"],
            "completion_tokens": reply["usage"]["completion_tokens"],
            "finish_reason": {"type": choice["finish_reason"]},
            "output_token_logprobs": [[token["logprob"], token["token_id"]] for token in tokens],
            "weight_versions": choice["weight_versions"],
        }
        if "rid" not in body:
            del meta["id"]
        return {"output_ids": choice["token_ids"], "meta_info": meta}

    async def info(self, pool: PoolLike, server: ServerLike, timeout: float) -> Json:
        """Return what a server says of itself, under SGLang's names where it has them."""
        # This route needs the key, and the next one does not.
        await pool.request(server, "/v1/models", timeout=timeout)
        try:
            reply = await pool.request(server, "/server_info?config_format=json", timeout=timeout)
        except NoRouteError as error:
            fix = "start it with VLLM_SERVER_DEV_MODE=1 in its environment (docs/servers.md)"
            raise ServerError(f"{error}: {fix}") from None
        with parsing_reply(server.url):
            config = reply["vllm_config"]
            lora = config.get("lora_config") or {}
            return {
                "tp_size": config["parallel_config"]["world_size"],
                "weight_backend": (config.get("weight_transfer_config") or {}).get("backend", ""),
                "logprobs_mode": config["model_config"]["logprobs_mode"],
                **{name: lora.get(name, 0) for name in ("max_lora_rank", "max_loras", "max_cpu_loras")},
            }

    async def score(self, receiver: Receiver, ids: list[int], adapter: str) -> tuple[str, list[float]]:
        """Ask for each token by itself, after the tokens before it.

        One request with `prompt_logprobs` would do, but beside other requests it ends a server of 0.32.0 that
        was started with --enable-lora.
        """
        import asyncio  # slow to import: not for --help

        model = {"model": adapter} if adapter else {}
        settings = {"max_tokens": 1, "temperature": 1.0, **NO_FILTERS, "logprobs": 2}
        bodies = [
            {
                "token_ids": ids[:i],
                "sampling_params": settings | {"logprob_token_ids": pair_of(ids[i])},
                **model,
            }
            for i in range(1, len(ids))
        ]
        asked = (receiver.request(self.generate_route, body) for body in bodies)
        replies, scores, versions = await asyncio.gather(*asked), [], set()
        with parsing_reply(receiver.server.url):
            for token, reply in zip(ids[1:], replies, strict=True):
                (choice,) = reply["choices"]
                (position,) = choice["logprobs"]["content"]
                found = {row["token_id"]: row["logprob"] for row in position["top_logprobs"]}
                scores.append(float(found[token]))
                versions |= {str(span["version"])[:100] for span in choice["weight_versions"]}
        return ", ".join(sorted(versions)), scores

    def problem(self, info: Json) -> str:
        """Return why a server cannot be used, with the flag to add; "" = it can."""
        if info["logprobs_mode"] != LOGPROBS:
            return f"reports {info['logprobs_mode']}. Start it with --logprobs-mode {LOGPROBS}"
        return ""

    async def abort_all(self, pool: PoolLike, server: ServerLike, timeout: float) -> None:
        """Abort all requests: a reply to single ids counts the ids sent, not the requests found."""
        await pool.request(server, "/abort_requests", {}, timeout)

    async def pause(self, receiver: Receiver, mode: PauseMode) -> None:
        await receiver.request(f"/pause?mode={MODES[mode]}", {})

    async def resume(self, receiver: Receiver, timeout: float = 0.0) -> None:
        await receiver.request("/resume", {}, timeout)

    async def begin(self, receiver: Receiver, session: bool) -> bool:
        """Open a session of the plugin, after ending one that a killed trainer left."""
        if receiver.info["weight_backend"] != BACKEND:
            return False
        try:
            await receiver.request("/start_weight_update", {})
        except UnreachableError as error:
            if "already" not in str(error):
                raise
            await receiver.request("/finish_weight_update", {})
            await receiver.request("/start_weight_update", {})
        return True

    async def end(self, receiver: Receiver, label: str, timeout: float = 0.0) -> None:
        await receiver.request("/finish_weight_update", {"weight_version": label} if label else {}, timeout)

    async def send_folder(self, receiver: Receiver, folder: Path, options: Json) -> None:
        """Have the server read a folder: by the plugin, or by vLLM's own reload.

        An exception in that reload ends the server; the probe judges what it leaves behind.
        """
        if receiver.info["weight_backend"] == BACKEND:
            await receiver.request("/update_weights", {"update_info": {"folder": str(folder)}})
            return
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await receiver.request("/collective_rpc", call | {"timeout": receiver.pool.timeout})
        await receiver.request("/update_weight_version", {"new_version": options["weight_version"]})

    def pack(self, bucket: Bucket) -> bytes:
        """Return the fields of an update as JSON: a safetensors file in base64, and hashes."""
        file, hashes = safetensors_of(bucket)
        encoded = base64.b64encode(b"".join(file))
        return b'"tensors": "%s", "hashes": %s' % (encoded, json.dumps(hashes).encode())

    def pack_update(self, piece: bytes) -> bytes:
        return b'"update": "%s"' % base64.b64encode(piece)

    async def held_label(self, receiver: Receiver) -> str:
        reply = await receiver.request("/weight_info", None, SHORT_TIMEOUT)
        with parsing_reply(receiver.server.url):
            return str(reply["weight_version"])

    async def send_bucket(self, receiver: Receiver, payload: bytes, *, last: bool, options: Json) -> None:
        check_plugin(receiver)

        async def pieces():
            yield b'{"update_info": {"last": %s, ' % json.dumps(last).encode()
            yield payload
            yield b"}}"

        await receiver.request("/update_weights", pieces())

    async def join_group(self, receiver: Receiver, group: Json) -> None:
        check_plugin(receiver)
        body = {"init_info": group | {"timeout": receiver.pool.timeout}}
        await receiver.request("/init_weight_transfer_engine", body)

    async def leave_group(self, receiver: Receiver, name: str, timeout: float) -> None:
        await receiver.request("/shutdown_weight_transfer_engine", {}, timeout)

    def announce(self, bucket: Bucket) -> Announced:
        file, hashes = safetensors_of(bucket)
        return {"tensors": IN_GROUP, "size": sum(map(len, file)), "hashes": hashes}, file

    async def receive_broadcast(
        self, receiver: Receiver, fields: Json, *, last: bool, options: Json, name: str
    ) -> None:
        await receiver.request("/update_weights", {"update_info": {"last": last, **fields}})

    async def drop_cache(self, receiver: Receiver) -> None:
        await receiver.request("/reset_prefix_cache", {})

    async def load_adapter(self, receiver: Receiver, adapter: Adapter) -> list[str]:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        await receiver.pool.request_bytes(receiver.server, "/v1/load_lora_adapter", body)
        reply = await receiver.request("/v1/models", None, SHORT_TIMEOUT)
        with parsing_reply(receiver.server.url):
            return [str(model["id"]) for model in reply["data"]]

    async def unload_adapter(self, receiver: Receiver, name: str) -> None:
        """Unload an adapter that no request uses."""
        server, body = receiver.server, {"lora_name": name}
        await receiver.pool.request_bytes(server, "/v1/unload_lora_adapter", body, SHORT_TIMEOUT)


def check_plugin(receiver: Receiver) -> None:
    """Raise ServerError if a server has not our plugin."""
    if receiver.info["weight_backend"] != BACKEND:
        raise ServerError(
            f"{receiver.server.url} takes no weights in requests: start it with the plugin "
            "(docs/servers.md), or use --servers.transport disk"
        )


def safetensors_of(bucket: Bucket) -> tuple[list[bytes | memoryview], dict[str, str]]:
    """Return a safetensors file in parts, and the SHA-256 of each tensor by its name."""
    contents = bucket.bytes()
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    names = [tensor.name for tensor in bucket.tensors]
    head = safetensors_head(bucket.tensors, bucket.dtype)
    return [head, *contents], dict(zip(names, hashes, strict=True))


def announce_piece(piece: bytes) -> Announced:
    """Return a piece of an update (`bridge/delta.py`) for a broadcast."""
    return {"update": IN_GROUP, "size": len(piece)}, [piece]


def pair_of(token: int) -> list[int]:
    """Return a token and another token: if a reply has the sampled token, too, it leaves out the last."""
    return [token, int(token == 0)]


def with_tied_head(tensors: list[HFTensor]) -> list[HFTensor]:
    """Return the tensors of a model with tied embeddings, and the embedding once more as its output head.

    vLLM keeps a copy of the head that a push of the checkpoint's tensors does not refresh.
    """
    (embedding,) = (tensor for tensor in tensors if tensor.parts[0][0] == EMBEDDING)
    return [*tensors, embedding._replace(name=HEAD)]


def vllm_lora_flags(rank: int, max_versions: int) -> list[str]:
    """Return the flags that a server needs to take adapters of this rank.

    Args:
        max_versions: of adapters in one batch of requests.
    """
    size = next(size for size in RANKS if size >= rank)
    names = {"--max-lora-rank": size, "--max-loras": max_versions, "--max-cpu-loras": max_versions + 1}
    return ["--enable-lora", *(str(word) for pair in names.items() for word in pair)]


def adapter_problem(info: Json, rank: int, max_versions: int) -> str:
    """Return why a server cannot take these adapters, with the flags to add; "" = it can."""
    if info["max_lora_rank"] >= rank and info["max_loras"] >= max_versions < info["max_cpu_loras"]:
        return ""
    flags = " ".join(vllm_lora_flags(rank, max_versions))
    start = f"Start it with {flags}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
    return f"cannot take adapters of --lora.rank {rank}. {start}"
