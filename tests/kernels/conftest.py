"""Fixtures of the tests of several kernels."""

import threading

import jax
import pytest


@pytest.fixture
def compile_once(monkeypatch):
    """Mosaic GPU's interpreter compiles a kernel's program for every warpgroup of every tile; here once."""
    from jax._src.pallas.mosaic.interpret import thread_map

    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                program = jax.jit(
                    lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args),
                    compiler_options={"xla_backend_optimization_level": 0},
                )
                programs[id(jaxpr)] = jaxpr, program.lower(consts, *args).compile()
        programs[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)
