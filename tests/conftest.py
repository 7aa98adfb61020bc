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

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(
    ["jaxrl_kernels", "jaxrl_llm.algos", "jaxrl_llm.sharding", "jaxrl_llm.models"], "beartype.beartype"
)
