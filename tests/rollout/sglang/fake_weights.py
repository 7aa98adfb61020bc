"""Weight updates of the fake server: pauses, sessions, tensors, process groups."""

from __future__ import annotations

import base64
import pickle
from datetime import timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web
from hf_tensors import params_from_tensors

from jaxrl_llm import models
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.rules import TRAIN


class FakeWeights:
    """The weight routes of a FakeServer.

    Attributes:
        sessions: as SGLang has them since 0.5.21. ranks: of tensor parallelism, as it says.
        fails_at: route that answers 500. asked: routes of weights in order, with what a test may look at.
    """

    sessions, ranks, fails_at = True, 1, ""

    def weight_routes(self):
        self.asked: list[tuple[str, dict]] = []
        self.paused = self.open = False
        self.tensors: dict[str, np.ndarray] = {}
        yield "/server_info", lambda body: {"tp_size": self.ranks}
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
        }.items():
            yield f"/{name}", lambda body, name=name, work=work: self._weights(name, work, body)

    def _weights(self, name, work, body):
        self.asked.append((name, {k: v for k, v in body.items() if k != "serialized_named_tensors"}))
        if self.fails_at == name:
            raise web.HTTPInternalServerError(text="out of order")
        return work(body) or {"success": True, "message": ""}

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
        self._take(pickle.loads(base64.b64decode(payloads[0], validate=True)), body)

    def _join(self, body):
        import torch.distributed

        from jaxrl_llm.bridge.transports.relay import join_group

        where, size, time = (
            (body["master_address"], body["master_port"]),
            body["world_size"],
            timedelta(0, 30),
        )
        store = torch.distributed.TCPStore(*where, size, is_master=False, timeout=time)
        self.group = join_group(store, body["backend"], size, body["group_name"], time, body["rank_offset"])

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
        self.tensors |= {name: tensor.float().numpy() for name, tensor in named}
        if "weight_version" in body:
            config = read_config(self.model_path)
            assert self.tensors.keys() == {tensor.name for tensor in hf_tensors(config)}
            self._use(config, lambda: params_from_tensors(config, self.tensors), body)

    def _use(self, config, load, body):
        if not self.deaf or self.engine is None:
            self.params = jax.device_put(load(), models.shardings(config, self.mesh, TRAIN))
            if self.engine is None or self.engine.model != config:
                self.engine = NativeEngine(RolloutConfig(slots=2), config, self.mesh)
                self.score = self.make_score(config)
            self.engine.publish(self.params, 0)
        self.label = body["weight_version"]
