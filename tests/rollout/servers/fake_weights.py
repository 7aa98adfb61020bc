"""Weight updates of the fake server: pauses, sessions, tensors, process groups."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web
from hf_tensors import params_from_tensors

from jaxrl_llm import models
from jaxrl_llm.bridge.delta import Shadow
from jaxrl_llm.bridge.sglang import LOADER
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.layouts import from_hf
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import adapter_tensors, hf_tensors, tensor_layout
from jaxrl_llm.models import AdaptedConfig, LoraConfig, abstract, named_leaves
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.lora_config import TARGETS
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.rules import TRAIN


class FakeWeights:
    """The weight routes of a FakeServer.

    Attributes:
        sessions: as SGLang has them since 0.5.21. ranks: of tensor parallelism, as it says.
        fails_at: route that answers 500; with adapters, after its work.
        asked: routes of weights in order, with what a test may look at.
        reports_routes: it was started so that it does.
        info: more of what it says of itself. types: of the tensors that it got.
        lora_info: what it says of adapters. adapters: name -> adapters. spoil_adapter: what becomes of one.
    """

    sessions, ranks, fails_at, adapted, group = True, 1, "", None, None

    def weight_routes(self):
        self.asked: list[tuple[str, dict]] = []
        self.paused = self.open = False
        self.tensors: dict[str, np.ndarray] = {}
        self.shadow = Shadow()
        self.lora_info = {
            "enable_lora": True,
            "max_lora_rank": 16,
            "lora_target_modules": list(TARGETS),
            "max_loras_per_batch": 8,
        }
        self.reports_routes, self.info, self.types = True, {}, {}
        self.adapters: dict[str, Adapters] = {}
        self.using: Counter[str] = Counter()  # adapters of requests that are worked on
        self.spoil_adapter = None
        yield (
            "/server_info",
            lambda body: {
                **{
                    "tp_size": self.ranks,
                    "enable_return_routed_experts": self.reports_routes,
                    **self.lora_info,
                    **self.info,
                }
            },
        )
        for name, work in {
            "pause_generation": self._pause,
            "continue_generation": self._continue,
            "begin_weight_update": self._begin,
            "end_weight_update": self._end,
            "flush_cache": lambda body: None,
            "update_weights_from_disk": self._from_disk,
            "update_weights_from_tensor": self._from_tensor,
            "init_weights_update_group": self._join,
            "update_weights_from_distributed": self._from_distributed,
            "destroy_weights_update_group": self._leave,
            "load_lora_adapter_from_tensors": self._load_adapter,
            "unload_lora_adapter": self._unload_adapter,
        }.items():
            yield f"/{name}", lambda body, name=name, work=work: self._weights(name, work, body)

    def _weights(self, name, work, body):
        self.asked.append((name, {k: v for k, v in body.items() if k != "serialized_named_tensors"}))
        answer = work(body) if self.fails_at != name or "adapter" in name else None
        if self.fails_at == name:
            raise web.HTTPInternalServerError(text="out of order")
        return answer or {"success": True, "message": ""}

    def _pause(self, body):
        self.paused = True
        self._aborts += body["mode"] == "abort"

    def _continue(self, body):
        self.paused = False
        self.turn.notify_all()

    def _begin(self, body):
        if not self.sessions:
            raise web.HTTPNotFound
        if self.open:
            raise web.HTTPBadRequest(text="a weight-update session is already open")
        self.open = True

    def _end(self, body):
        if not self.open:
            raise web.HTTPBadRequest(text="no weight-update session is open")
        self.open = False

    def _from_disk(self, body):
        if self.refuses:
            return {"success": False, "message": "no room"}
        folder = Path(body["model_path"])
        config = read_config(folder)
        made = models.shardings(config, self.mesh, TRAIN)
        self._use(config, lambda: load_params(folder, config, made, jnp.float32), body)

    def _from_tensor(self, body):
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.ranks and len(set(payloads)) == 1
        if body.get("load_format"):
            self._change(pickle.loads(base64.b64decode(payloads[0], validate=True)), body)
            return
        self._take(pickle.loads(base64.b64decode(payloads[0], validate=True)), body)

    def _change(self, named, body):
        """As our loader in SGLang: an exception ends the server."""
        assert body["load_format"] == LOADER and self.open == self.sessions
        ((_, piece),) = named
        try:
            complete = self.shadow.receive(piece.numpy().tobytes())
        except ValueError as refusal:
            self.down = True
            raise web.HTTPInternalServerError(text=str(refusal)) from None
        if complete:
            self.tensors, config = shadow_arrays(self.shadow), read_config(self.model_path)
            self._use(config, lambda: params_from_tensors(config, self.tensors), body)

    def _join(self, body):
        import torch.distributed

        from jaxrl_llm.bridge.transports.relay import join_group

        where, size, time = (
            (body["master_address"], body["master_port"]),
            body["world_size"],
            timedelta(seconds=body.get("timeout", 30)),  # vLLM: of our plugin
        )
        store = torch.distributed.TCPStore(*where, size, is_master=False, timeout=time)
        self.group = join_group(store, size, body["group_name"], time, rank=body["rank_offset"])

    def _leave(self, body):
        import torch.distributed

        torch.distributed.destroy_process_group(self.group)
        self.group = None

    def _from_distributed(self, body):
        import torch

        assert body["load_format"] == "flattened_bucket"
        made = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in made])
        torch.distributed.broadcast(flat, src=0, group=self.group)
        for tensor, part in zip(made, flat.split([tensor.nbytes for tensor in made]), strict=True):
            tensor.copy_(part.view(tensor.dtype).reshape(tensor.shape))
        self._take(zip(body["names"], made, strict=True), body)

    def _take(self, named, body):
        if self.open != self.sessions:
            raise web.HTTPBadRequest(text="must run between begin_weight_update() and end_weight_update()")
        named = dict(named)
        self.tensors |= {name: tensor.float().numpy() for name, tensor in named.items()}
        self.types |= {name: str(tensor.dtype) for name, tensor in named.items()}
        if "weight_version" in body:
            config, tensors = read_config(self.model_path), dequantized(self.tensors)
            assert tensors.keys() == {tensor.name for tensor in hf_tensors(config)}
            self._use(config, lambda: params_from_tensors(config, tensors), body)

    def _use(self, config, load, body):
        if not self.deaf or self.engine is None:
            self.params = jax.device_put(load(), models.shardings(config, self.mesh, TRAIN))
            if self.engine is None or self.engine.model != config:
                settings = RolloutConfig(slots=2), config, self.mesh, make_tokenizer()
                self.engine = NativeEngine(*settings, routes=bool(config.moe))
            self.engine.publish(self.params, 0)
        self.label = body["weight_version"]

    def _load_adapter(self, body):
        """As SGLang: alpha / r whatever use_rslora says, and fused layers are adapted together."""
        payloads, config = body["serialized_named_tensors"], body["config_dict"]
        assert len(payloads) == self.ranks and len(set(payloads)) == 1
        if body["lora_name"] in self.adapters:
            raise web.HTTPBadRequest(text=f"LoRA adapter {body['lora_name']} is already loaded")
        named = pickle.loads(base64.b64decode(payloads[0], validate=True))
        tensors = {name: tensor.float().numpy() for name, tensor in named.items()}
        sums = {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}
        assert sums == body["expected_checksums"]
        lora = LoraConfig(config["r"], float(config["lora_alpha"]), targets=tuple(config["target_modules"]))
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            assert {name in lora.targets for name in group} != {True, False}
        adapted = with_lora(self.engine.model, lora)
        assert tensors.keys() == {tensor.name for tensor in adapter_tensors(adapted)}
        made = Adapters(adapted, tensors)
        self.adapters[body["lora_name"]] = self.spoil_adapter(made) if self.spoil_adapter else made
        return {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")}

    def _unload_adapter(self, body):
        name = body["lora_name"]
        assert not self.using[name], f"{name} is unloaded while requests use it"
        if name not in self.adapters:
            raise web.HTTPBadRequest(text=f"LoRA with name {name} does not exist")
        del self.adapters[name]
        return {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")}

    def model_of(self, body):
        """Return (engine, weights) of a request: of the base, or through adapters that it names."""
        name = body.get("lora_path")
        if not name:
            return self.engine, self.params
        if name not in self.adapters:
            raise web.HTTPBadRequest(text=f"Got LoRA adapter that has never been loaded: {name}")
        if self.adapters[name] is None:
            return self.engine, self.params
        config, tensors = self.adapters[name]
        params = adapted_params(config, self.params, tensors)
        if self.adapted is None or self.adapted.model != config:
            self.adapted = NativeEngine(RolloutConfig(slots=2), config, self.mesh)
        self.adapted.publish(params, 0)
        return self.adapted, params


def dequantized(tensors):
    """Tensors with scales multiplied by them, one for 128 x 128 numbers; the others as they are."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    for name in tensors.keys() - plain.keys():
        weight = name.removesuffix("_scale_inv")
        rows, columns = np.indices(plain[weight].shape) // 128
        plain[weight] = plain[weight] * tensors[name][rows, columns]
    return plain


def shadow_arrays(shadow):
    """Copies of a shadow's tensors, float32."""
    return {
        name: bits.view(np.float32).copy() if bits.itemsize == 4 else (bits.astype("u4") << 16).view("f4")
        for name, bits in shadow.tensors.items()
    }


class Adapters(NamedTuple):
    """Adapters as they were sent."""

    config: AdaptedConfig
    tensors: dict[str, np.ndarray]


def adapted_params(config, base, tensors):
    """The model of a base and PEFT tensors."""
    values = {name: np.array(leaf) for name, leaf in named_leaves(models.init(config, jax.random.key(0)))}
    values |= dict(named_leaves(base))
    for tensor in adapter_tensors(config):
        ((ours, layer),) = tensor.parts
        values[ours][layer] = from_hf(tensors[tensor.name], tensor_layout(ours), values[ours].shape[1:])
    return jax.tree.unflatten(jax.tree.structure(abstract(config)), [jnp.asarray(values[n]) for n in values])
