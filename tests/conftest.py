"""Eight virtual CPU devices, one shared compilation cache, shape checks on the arithmetic."""

import os
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
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(
    ["jaxrl_kernels", "jaxrl_llm.algos", "jaxrl_llm.sharding", "jaxrl_llm.models"], "beartype.beartype"
)

SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@pytest.fixture
def tpu(monkeypatch):
    """`tpu(slice)`: the devices of a TPU slice that is not here, by topology or generation."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

    def devices(name: str) -> list:
        megacore = {"chip_config_name": "megacore"} if name.startswith(("v4", "v5p")) else {}
        found = topologies.get_topology_desc(platform="tpu", topology_name=SLICES.get(name, name), **megacore)
        return found.devices

    return devices


@pytest.fixture(autouse=True)
def _nothing_stored_for_other_machines(request):
    """A program for a chip that is not here cannot be read back from the cache."""
    if not request.node.get_closest_marker("compilers"):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
