"""A fake vLLM server: its JSON and its traps around the model of a FakeServer."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import numpy as np
from aiohttp import web
from fake_sglang import FakeServer
from fake_weights import Adapters, shadow_arrays
from hf_tensors import params_from_tensors
from safetensors.numpy import load, load_file

from jaxrl_llm.bridge.delta import Shadow
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.models.lora import with_lora

HEAD = "lm_head.weight"
PREFIX = "generate-tokens-"
KNOWN = {
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "logprobs", "logprob_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "skip_special_tokens", "include_stop_str_in_output",
}  # fmt: skip


class FakeVLLM:
    """One server in a thread of its own, which computes with an untied head, as vLLM does.

    Attributes:
        plugin: it has our plugin. held: the checkpoint's tensors. shadow: the plugin's.
        dead: its engine has ended.
        max_model_len: a request beyond it is cut without a word. ignored: sampling keys it did not know.
        breaks_update: the next update fails. calls: (route, query, body) of everything but generation.
        drops: end of the names of tensors that a load leaves out. seen: bodies of generation.
        key: that its /v1 and /inference routes demand; "" = none.
        refused: connections of requests that failed, which are closed afterwards.
        held_back: tokens after which a response waits for an abort; 0 = never.
    """

    def __init__(self, config, plugin=True):
        self.config = dataclasses.replace(config, tie_embeddings=False)
        self.model, self.plugin, self.max_model_len = FakeServer(), plugin, 10**6
        self.behave()
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self._serve, args=(started,), daemon=True).start()
        started.wait()
        self.url = f"http://127.0.0.1:{self.port}"

    def behave(self):
        """As after a start."""
        self.model.behave()
        self.model.restart()
        if self.model.group:
            self.model._leave({})
        self.held, self.label, self.collected, self.shadow = {}, "default", {}, Shadow()
        self.active = self.dead = self.paused = self.breaks_update = False
        self.aborts, self.held_back, self.waiting, self.drops = 0, 0, 0, None
        self.logprobs_mode, self.key = "processed_logprobs", ""
        self.calls, self.seen, self.ignored = [], [], set()
        self.refused: list[asyncio.Transport] = []

    def _serve(self, started):
        async def start():
            app = web.Application(client_max_size=1 << 30, middlewares=[self._check_key])
            app.router.add_post("/inference/v1/generate", self._generate)
            for route, work in {
                "/server_info": self._info,
                "/weight_info": lambda body, query: {"weight_version": self.label},
                "/pause": self._pause,
                "/resume": self._resume,
                "/abort_requests": self._abort,
                "/init_weight_transfer_engine": self._join,
                "/shutdown_weight_transfer_engine": lambda body, query: self.model._leave(body),
                "/start_weight_update": self._start,
                "/update_weights": self._update,
                "/finish_weight_update": self._finish,
                "/collective_rpc": self._reload,
                "/update_weight_version": self._rename,
                "/reset_prefix_cache": lambda body, query: {"success": True},
                "/v1/load_lora_adapter": self._load_adapter,
                "/v1/unload_lora_adapter": self._unload_adapter,
                "/v1/models": self._models,
            }.items():
                app.router.add_route("*", route, self._answer(work))
            app.router.add_get("/health", self._health)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            started.set()

        self._loop.create_task(start())
        self._loop.run_forever()

    def _answer(self, work):
        async def handle(request):
            body = await request.json() if request.body_exists else {}
            if request.transport in self.refused:
                request.transport.close()
            self.calls.append((request.path, dict(request.query), body))
            if self.dead:
                return error("EngineCore encountered an issue", 500)
            try:
                said = await asyncio.to_thread(work, body, request.query)
            except ServerFault as fault:
                self.refused.append(request.transport)
                return error(f"Worker failed with error '{fault}'", 500)
            return said if isinstance(said, web.Response) else web.json_response(said)

        return handle

    @web.middleware
    async def _check_key(self, request, handler):
        """All other routes answer without a key."""
        given = request.headers.get("Authorization")
        if self.key and request.path.startswith(("/v1", "/inference")) and given != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request):
        return web.Response(status=503 if self.dead else 200)

    # -- generation

    async def _generate(self, request):
        body = await request.json()
        self.seen.append(body)
        if self.dead:
            return error("EngineCore encountered an issue", 500)
        while self.paused:  # without an error, and /health is well
            await asyncio.sleep(0.01)
        name = body.get("model")
        if name and name not in self.model.adapters:
            return error(f"The model `{name}` does not exist.", 404)
        aborts, wanted = self.aborts, body["sampling_params"]
        self.ignored |= wanted.keys() - KNOWN
        made = await asyncio.to_thread(self._compute, body, wanted)
        if (count := self.held_back) and wanted.get("seed") is not None:
            self.waiting += 1
            while self.aborts == aborts:
                await asyncio.sleep(0.01)
            self.waiting -= 1
            cut(made, count)
        return web.json_response(made)

    def _compute(self, body, wanted):
        ids = body["token_ids"]
        if asked := wanted.get("logprob_token_ids"):
            return self._score(ids, asked[0], body)
        asked = {
            "input_ids": ids,
            "rid": PREFIX + body.get("request_id", "x"),
            "lora_path": body.get("model"),
            "sampling_params": {
                "max_new_tokens": min(wanted["max_tokens"], self.max_model_len - len(ids)),
                "temperature": wanted["temperature"],
                "stop": wanted.get("stop", []),
                "stop_token_ids": wanted.get("stop_token_ids", []),
                "sampling_seed": wanted.get("seed") or 0,
            },
        }
        with self.model.turn:
            said = self.model._generate(asked)
        meta = said["meta_info"]
        content = [{"token_id": i, "logprob": x, "rank": 1} for x, i, _ in meta["output_token_logprobs"]]
        return self._reply(
            meta["id"], ids, said["output_ids"], content=content, finish=meta["finish_reason"]["type"]
        )

    def _score(self, ids, token, body):
        """The sampled token is always this one; its log-prob is right."""
        with self.model.turn:
            params = self.model.model_of({"lora_path": body.get("model")})[1]
            score = float(self.model.score(params, np.array([*ids, token], np.int32))[-1])
        row = {"token_id": token, "logprob": score}
        return self._reply("x", ids, [token], content=[row | {"top_logprobs": [row]}], finish="length")

    def _reply(self, name, ids, tokens, *, content, finish):
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": tokens,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return {"request_id": name, "usage": usage, "prompt_logprobs": None, "choices": [choice]}

    def _pause(self, body, query):
        mode = query.get("mode", "abort")
        self.paused, self.aborts = True, self.aborts + (mode == "abort")

    def _resume(self, body, query):
        self.paused = False

    def _abort(self, body, query):
        """Ids are the server's own; the count is of the ids that were sent."""
        if not body.get("request_ids"):
            self.aborts += 1
        return {"aborted": len(body.get("request_ids", []))}

    def _info(self, body, query):
        if query.get("config_format") != "json":
            return {"vllm_config": "VllmConfig(...)"}
        backend = {"backend": "jaxrl"} if self.plugin else None
        lora = {"max_lora_rank": 16, "max_loras": 8, "max_cpu_loras": 9}
        return {
            "vllm_config": {
                "parallel_config": {"world_size": 1},
                "weight_transfer_config": backend,
                "model_config": {"logprobs_mode": self.logprobs_mode},
                "lora_config": lora,
            }
        }

    # -- weights

    def _start(self, body, query):
        if self.active:
            raise ServerFault("start_weight_update called while a weight update is already active.")
        self.active, self.collected = True, {}

    def _update(self, body, query):
        """As the plugin: all of it, or nothing."""
        info, broken, self.breaks_update = body["update_info"], self.breaks_update, False
        if not self.active:
            raise ServerFault("start_weight_update must be called before update_weights.")
        if broken or not self.plugin:
            self.active = False
            raise ServerFault("out of order")
        if "update" in info:
            self._change(self._content(info["update"], info))
            return
        if "folder" in info:
            tensors = read_folder(info["folder"])
        else:
            tensors = read_tensors(self._content(info["tensors"], info), info["hashes"])
        self.collected |= tensors
        if info.get("last", True):
            assert self.collected.keys() >= {tensor.name for tensor in hf_tensors(self.config)} - {HEAD}
            self._load(self.collected)

    def _join(self, body, query):
        """As the plugin: a group that was left open is left first."""
        if self.model.group:
            self.model._leave(body)
        self.model._join(body["init_info"])

    def _content(self, text, info):
        """Base64, or a broadcast; an error ends the session."""
        if text != "group":
            return base64.b64decode(text, validate=True)
        import torch

        data = torch.empty(info["size"], dtype=torch.uint8)
        try:
            torch.distributed.broadcast(data, src=0, group=self.model.group)
        except (RuntimeError, ValueError) as fault:
            self.active = False
            raise ServerFault(fault) from None
        return data.numpy().tobytes()

    def _change(self, piece):
        """Take a piece of an update; an error ends the session."""
        try:
            complete = self.shadow.receive(piece)
        except ValueError as refusal:
            self.active = False
            raise ServerFault(refusal) from None
        if complete:
            self._load(shadow_arrays(self.shadow))

    def _finish(self, body, query):
        if not self.active:
            raise ServerFault("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.label = body.get("weight_version") or self.label

    def _reload(self, body, query):
        """As vLLM: any exception ends the engine."""
        folder = Path(body["kwargs"]["weights_path"])
        if not folder.is_dir() or self.breaks_update:
            self.dead = True
            raise ServerFault(f"{folder}")
        self._load(read_folder(folder))

    def _rename(self, body, query):
        self.label = body["new_version"]

    def _load(self, tensors):
        """Keep tensors that are not sent: a part of a fused layer, or the head of a tied model."""
        lost = {name for name in tensors if self.drops and name.endswith(self.drops)}
        self.held |= {name: tensor for name, tensor in tensors.items() if name not in lost}
        if HEAD not in self.held:  # of a start without weights
            self.held[HEAD] = self.held["model.embed_tokens.weight"][::-1].copy()
        names = {tensor.name for tensor in hf_tensors(self.config)}
        held = {name: self.held[name] for name in names}
        body = {"weight_version": self.label}
        with self.model.turn:
            self.model._use(self.config, lambda: params_from_tensors(self.config, held), body)

    # -- adapters

    def _load_adapter(self, body, query):
        folder = Path(body["lora_path"])
        if body["lora_name"] in self.model.adapters:
            return error("The lora adapter has already been loaded.", 400)
        if not folder.is_dir():
            return error(f"No adapter found for {folder}", 404)
        adapted = with_lora(self.config, read_adapter_config(folder, self.config))
        tensors = load_file(folder / "adapter_model.safetensors")
        self.model.adapters[body["lora_name"]] = Adapters(adapted, tensors)
        return web.Response(text="Success: LoRA adapter added successfully.")

    def _unload_adapter(self, body, query):
        del self.model.adapters[body["lora_name"]]
        return web.Response(text="Success: LoRA adapter removed successfully.")

    def _models(self, body, query):
        return {"data": [{"id": name} for name in ("m", *self.model.adapters)]}


class ServerFault(Exception):
    """An exception inside the server: status 500."""


def error(message, status):
    body = {"error": {"message": message, "type": "x", "param": None, "code": status}}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")


def cut(reply, count):
    """Break a response off."""
    (choice,) = reply["choices"]
    choice["token_ids"] = choice["token_ids"][:count]
    choice["logprobs"]["content"] = choice["logprobs"]["content"][:count]
    choice["weight_versions"][0]["end"] = len(choice["token_ids"])
    choice["finish_reason"] = "abort"
    reply["usage"]["completion_tokens"] = len(choice["token_ids"])


def read_tensors(content, hashes):
    tensors = load(content)
    assert {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in tensors.items()} == hashes
    return tensors


def read_folder(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
