"""`ParallelCompiler`: several programs at a time, each once; nothing is left to compile for a call."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.sharding.compile import ParallelCompiler


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
