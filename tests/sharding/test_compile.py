"""`ParallelCompiler`: several programs at a time, each once; nothing is left to compile for a call."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_llm.sharding.compile import (
    GATHER,
    GATHER_ON_GPU,
    SPARSECORE,
    ParallelCompiler,
    compiler_options,
    known_options,
)
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


def function(compile):
    """A fake of what `jax.jit` returns."""
    jitted = lambda: None
    jitted.lower = lambda: SimpleNamespace(compile=compile, out_info=None)
    return jitted


def compiled_names(action):
    """Names of the functions that XLA compiles, or reads from its cache, during an action."""
    names = []
    listener = lambda event, _, **about: names.append(about["fun_name"]) if "backend" in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        action()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return names


def test_two_programs_compile_at_the_same_time():
    both = threading.Barrier(2, timeout=20)
    with ParallelCompiler() as compiler:
        for _ in range(2):
            compiler.start(jitted := function(both.wait))
            compiler.start(jitted)  # once: a third would wait for a fourth
    assert not both.broken and both.n_waiting == 0


def test_a_failed_compilation_is_raised():
    def fail():
        raise MemoryError("of XLA")

    with pytest.raises(MemoryError, match="of XLA"), ParallelCompiler() as compiler:
        compiler.start(function(fail))


def test_a_call_after_the_compilation_compiles_nothing():
    @jax.jit
    def twice(x):
        return 2 * x

    @jax.jit
    def total(x, y):
        return jnp.sum(x * y["weight"])

    def ahead():
        with ParallelCompiler() as compiler:
            for length in (3, 5, 3):
                doubled = compiler.start(twice, jax.ShapeDtypeStruct((length,), jnp.float32))
                compiler.start(total, doubled, {"weight": np.zeros(length, np.float32)})

    assert sorted(compiled_names(ahead)) == ["jit(total)"] * 2 + ["jit(twice)"] * 2
    results = []
    x = {length: np.arange(length, dtype=np.float32) for length in (3, 5)}
    calls = lambda: [results.append(total(twice(x[n]), {"weight": np.ones(n, np.float32)})) for n in (3, 5)]
    assert compiled_names(calls) == [] and [float(r) for r in results] == [6.0, 20.0]


@pytest.fixture
def has_all_options(monkeypatch):
    """A compiler that knows every option."""
    monkeypatch.setattr("jaxrl_llm.sharding.compile.known_options", lambda _, options: dict(options))


def fake_mesh(kind, size=8):
    platform = {"cpu": "cpu", "NVIDIA": "gpu"}.get(kind.split()[0], "tpu")
    device = SimpleNamespace(device_kind=kind, platform=platform, process_index=0)
    devices = np.array([device] * size)
    return Mock(spec=Mesh, size=size, devices=devices)


@pytest.mark.parametrize(
    ("kind", "size", "gathers", "expected"),
    [
        ("cpu", 8, True, {}),
        ("NVIDIA H100 80GB HBM3", 8, True, GATHER_ON_GPU),
        ("NVIDIA H100 80GB HBM3", 1, True, {}),
        ("TPU v5 lite", 1, True, {}),
        ("TPU v5 lite", 8, False, {}),
        ("TPU v5 lite", 8, True, GATHER),
        ("TPU v6 lite", 8, True, GATHER | SPARSECORE),
        ("TPU v5", 8, True, GATHER | SPARSECORE),
    ],
)
def test_options_are_those_of_the_generation(kind, size, gathers, expected, *, has_all_options):
    assert (compiler_options(fake_mesh(kind, size), gathers) or {}) == expected


def test_flags_of_the_environment_win_over_options(monkeypatch, has_all_options):
    name, *others = GATHER
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--other=1 --{name}=8")
    assert set(compiler_options(fake_mesh("TPU v4"), gathers_weights=True)) == set(others)


def test_an_option_that_the_compiler_does_not_have_is_left_out_with_a_warning(caplog):
    device = make_mesh(MeshConfig()).devices.flat[0]
    known, unknown = ("xla_cpu_enable_fast_math", False), ("xla_no_such_option", True)
    assert known_options(device, (known, unknown)) == dict([known])
    assert "xla_no_such_option" in caplog.text
    assert known_options(device, (known,)) == dict([known])
