"""Rollout engine of a run, made from its config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.bridge import adapters, fp8, sglang, vllm
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.probe import tolerance_of
from jaxrl_llm.bridge.push import Problem, Publisher, WeightTransport
from jaxrl_llm.bridge.servers import ServerKind
from jaxrl_llm.bridge.transports.cuda_ipc import IpcTransport
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.bridge.transports.disk import DiskTransport, weight_folder
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import export_config, save_description
from jaxrl_llm.hf.folder import read_headers
from jaxrl_llm.hf.names import Encode
from jaxrl_llm.host.processes import on_first, print_on_first, share
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.attention import original_length
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.servers.commands import ROUTES_FLAG
from jaxrl_llm.rollout.servers.engine import ServerEngine
from jaxrl_llm.rollout.servers.health import ServerList, run_health_checks
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import ServerProcesses, routes_problem
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.sharding.config import POLICY, ROLLOUT_ENGINE
from jaxrl_llm.structs import Params


def make_engine(
    config: TrainConfig,
    model: TransformerConfig,
    meshes: Mapping[str, Mesh],
    tokenizer: Any,
    *,
    eos_ids: Sequence[int],
    closing: contextlib.ExitStack,
    folder: Path | None = None,
    resident: int = 0,
) -> Engine:
    """Return the native engine, in a thread for asynchronous rollout, or the engine on servers.

    Servers to be launched are started.

    Args:
        closing: collects the resources to close at the end.
        folder: of the pretrained model; None = random weights.
        meshes: `make_meshes`.
        resident: bytes of the trainer's arrays on each device of the rollout.
    """
    if config.rollout.engine != "native":
        return _servers(
            config, model, meshes[POLICY], tokenizer, eos_ids=eos_ids, closing=closing, stored=folder
        )
    # The native engine; on a separate thread if responses may be older than a step.
    mesh, strict, routes = meshes[ROLLOUT_ENGINE], config.strict, config.routing.replay == "rollout"
    engine = NativeEngine(
        config.rollout,
        model,
        mesh,
        tokenizer,
        eos_ids=eos_ids,
        share=share,
        strict=strict,
        resident=resident,
        routes=routes,
    )
    longest_prompt, longest_response = config.max_prompt_tokens, config.max_response_tokens
    engine.set_lengths(longest_prompt, longest_response, turns=config.env.active)
    if config.rollout.max_staleness:
        engine = AsynchronousEngine(engine)
        closing.callback(engine.close)
    if config.rollout.warm_up:
        samplings = [config.rollout.sampling, config.eval.sampling]
        engine.warm_up(longest_prompt, longest_response, samplings, turns=config.env.active)
    return engine


def _servers(config: TrainConfig, model, mesh, tokenizer, *, eos_ids, closing, stored) -> ServerEngine:
    model = dataclasses.replace(model, value_head=False)  # servers do not use it
    base = lora.base_config(model)
    rollout, servers, run_dir = config.rollout, config.servers, Path(config.run_dir)
    if stored is not None:
        _check_names(WeightSource(base, rollout.dtype, servers.bucket_bytes), base, stored)
    # The tensors to send, and the way to the servers.
    eight_bits, kind = servers.quantization == "fp8", KINDS[rollout.engine]
    encode, served_params = _encoding(kind, base, rollout.dtype, eight_bits)
    source = WeightSource(base, rollout.dtype, servers.bucket_bytes, encode)
    local = rollout.launch > 0
    folder = closing.enter_context(weight_folder(run_dir, servers.folder, local, source.num_bytes))
    transport = _transport(servers, source, kind, DiskTransport(folder, rollout.dtype, tokenizer, encode))
    # Process 0 starts the servers, or connects to running ones.
    pool, wait_until_ready, routes = None, lambda: None, config.routing.replay == "rollout"
    flags, problem = _requirements(model, rollout, routes, eight_bits, changes=servers.push == "delta")
    if jax.process_index() == 0:
        processes = None
        if rollout.launch:
            shell = save_description(_with_room(base), folder / "shell", tokenizer, rollout.dtype)
            processes = ServerProcesses(rollout, servers, shell, run_dir, flags=flags)
            closing.callback(processes.close)
            wait_until_ready = processes.wait
        pool = _pool(rollout, servers, processes, closing, problem=problem)
        if isinstance(transport, GroupTransport):
            closing.callback(transport.close)
    # With adapters the base is pushed once, and then adapters alone.
    publisher = Publisher(
        pool,
        transport,
        servers.pause,
        model,
        tolerance=tolerance_of("fp8" if eight_bits else rollout.dtype, servers.probe_tolerance),
        score=sequence_scorer(rollout.dtype, mesh),
        on_first=on_first,
        wait_for_servers=wait_until_ready,
        problem=problem,
        served_params=served_params,
    )
    if model.lora:
        own = folder / "adapters" if rollout.engine == "vllm" else None
        publisher = adapters.AdapterPublisher(publisher, rollout.dtype, own)
    # The engine, which publishes through it.
    return ServerEngine(
        rollout,
        servers,
        model,
        pool,
        publisher=publisher,
        on_first=on_first,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        routes=routes,
    )


def _encoding(
    kind: ServerKind, base: TransformerConfig, dtype: str, eight_bits: bool
) -> tuple[Encode | None, Callable[[Params], Params]]:
    """Return the form in which tensors are sent, and the weights that servers compute with."""
    if eight_bits:
        return fp8.quantized_tensors, partial(fp8.rounded_params, dtype=dtype)
    tied = kind.sends_tied_head and base.tie_embeddings
    return vllm.with_tied_head if tied else None, lambda params: params


def _with_room(model: TransformerConfig) -> TransformerConfig:
    """Return the architecture that servers read, with two more positions.

    SGLang ends a response two tokens before its context does, though it takes requests for all of it. With
    longrope the positions decide a factor, so they stay.
    """
    if model.rope.scaling == "longrope":
        return model
    rope = dataclasses.replace(model.rope, original_max_position=original_length(model))
    return dataclasses.replace(model, rope=rope, max_position=model.max_position + 2)


def _requirements(
    model: TransformerConfig, rollout: RolloutConfig, routes: bool, eight_bits: bool, *, changes: bool
) -> tuple[list[str], Problem]:
    """Return the flags that servers need, and the check that they have them.

    They are needed for adapters, routes of experts, fp8, and (`changes`) `--servers.push delta`.
    """
    flags: list[str] = []
    problems: list[Problem] = []
    versions = max_adapter_versions(rollout)
    if model.lora and rollout.engine == "vllm":
        rank = model.lora.rank
        flags += vllm.vllm_lora_flags(rank=rank, max_versions=versions)
        problems.append(partial(vllm.adapter_problem, rank=rank, max_versions=versions))
    elif model.lora:
        flags += adapters.lora_flags(model.lora, versions)
        problems.append(partial(adapters.server_problem, lora=model.lora, max_versions=versions))
    if routes:
        flags.append(ROUTES_FLAG)
        problems.append(routes_problem)
    if eight_bits:
        flags += fp8.FLAGS
        problems.append(fp8.quantization_problem)
    if changes and rollout.engine == "sglang":
        flags += sglang.LOADER_FLAGS
        problems.append(sglang.loader_problem)
    return flags, lambda info: next(filter(None, (problem(info) for problem in problems)), "")


def max_adapter_versions(rollout: RolloutConfig) -> int:
    """Return how many versions of adapters a server has at once: of responses in flight, and a new one."""
    return rollout.max_staleness + 2


def _pool(
    rollout: RolloutConfig,
    servers: ServersConfig,
    processes: ServerProcesses | None,
    closing: contextlib.ExitStack,
    *,
    problem: Problem,
) -> ServerPool:
    """Return the pool of running or starting servers, with its health checks; see `check_reachable`."""
    # Addresses: of started servers, of the recipe, or of a file.
    members = None
    urls: Sequence[str] = processes.urls if processes else rollout.servers
    if urls[0].startswith("@"):
        members = ServerList(Path(urls[0][1:]), rollout.engine)
        urls = members()
    pool = ServerPool(
        urls,
        servers.timeout,
        servers.retries,
        rollout.slots,
        patience=servers.patience,
        router=servers.router,
        kind=KINDS[rollout.engine],
    )
    closing.callback(pool.close)
    if not processes and not members:
        pool.check_reachable(problem)
    pool.start(run_health_checks(pool, members, processes and processes.restart))
    return pool


def _transport(
    servers: ServersConfig, source: WeightSource, kind: ServerKind, disk: DiskTransport
) -> WeightTransport:
    """Return the transport that the config names."""
    if servers.transport == "disk":
        return disk
    if servers.transport == "group":
        delta = servers.push == "delta"
        return GroupTransport(
            source,
            kind,
            python=servers.python,
            timeout=servers.timeout,
            delta=DeltaTransport(source, kind, pack=vllm.announce_piece) if delta else None,
        )
    in_requests = DeltaTransport if servers.push == "delta" else HttpTransport
    if kind.name == "vLLM":
        return in_requests(source, kind)
    print_on_first(
        f"--servers.transport {servers.transport}: weights are sent to the servers as pickles. A pickle can "
        "run code, and anyone who can reach a server can send one: keep it on a private network."
    )
    if servers.transport == "http":
        return in_requests(source, kind)
    return IpcTransport(source, servers.devices)


def _check_names(source: WeightSource, model: TransformerConfig, folder: Path) -> None:
    """Compare the tensors to send with the tensors of the pretrained model's files.

    Raises:
        UserError: names or shapes differ.
    """
    stored = read_config(folder)
    with_rope = dataclasses.replace(export_config(stored), rope=model.rope, max_position=model.max_position)
    if with_rope != model:  # sent under other names than in the folder
        return
    tensors = read_headers(folder, stored)
    source.check_names({name: tensor.shape for name, tensor in tensors.items()}, str(folder))
