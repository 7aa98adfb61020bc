"""Eight virtual CPU devices and one shared compilation cache.

JAXRL_CHECK_SHAPES=1 also checks annotated shapes of the arithmetic: a fifth of the time of the tests.
"""

import gc
import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
from pathlib import Path

CACHE = Path(
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxrl_llm_test_cache")
    )
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "Agg")
# Recipes start `python`, which a machine may have in the environment of the tests alone.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of hundreds of processes would compile
sys.dont_write_bytecode = False
for library in ("OMP", "OPENBLAS"):  # torch's waiting threads take the other worker's processor
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
MAPPINGS = Path("/proc/self/maps")
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",  # 40 end the process on a busy machine
]
if not os.environ.get("JAXRL_TEST_OPTIMIZED"):  # tests compile for longer than they run
    FLAGS += [
        *("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"),
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib") < "0.11":  # later ones end the process at a flag that they lack
        FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f for f in FLAGS if f.partition("=")[0] not in given)])

if not importlib.util.find_spec("jaxrl_import"):
    raise SystemExit("jaxrl_import is not installed: run `pip install --no-deps -e .` again")

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

from jaxrl_llm.host.start import write_programs_by_rename  # noqa: E402

write_programs_by_rename()  # the processes of the tests share the cache, and some are killed
if os.environ.get("JAXRL_CHECK_SHAPES"):
    install_import_hook(
        ["jaxrl_kernels", "jaxrl_llm.algos", "jaxrl_llm.sharding", "jaxrl_llm.models"], "beartype.beartype"
    )
gc.freeze()  # a collection would visit each object of the imported libraries
gc.set_threshold(10_000, 20, 10)  # or, too often, the parse trees and programs that tests keep


@pytest.fixture
def tpu():
    """`tpu(name)`: devices of a TPU slice that this machine lacks, of a shape ("v5p:4x4x8") or four chips."""
    from jaxrl_kernels.chips import CHIPS
    from jaxrl_kernels.topology import tpu_devices

    pytest.importorskip("libtpu")

    def devices(name: str) -> list:
        kind, _, shape = name.partition(":")
        shape = shape or {2: "2x2", 3: "2x2x1"}[CHIPS[kind].torus_dims]
        return tpu_devices(kind, tuple(map(int, shape.split("x"))))

    return devices


@pytest.fixture(autouse=True)
def _no_cache_for_other_machines(request):
    """Disable the compilation cache: a program for another machine cannot be read back from it."""
    if not request.node.get_closest_marker("compilers"):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def _few_mappings():
    """Drop compiled programs once they are many: Linux ends a process at 65,530 memory mappings, and each
    program has several. The persistent cache keeps them."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _log_to_the_root():
    """Undo what commands do to the package's logger, which would hide its warnings from `caplog`."""
    yield
    logger = logging.getLogger("jaxrl_llm")
    logger.handlers.clear()
    logger.propagate = True
