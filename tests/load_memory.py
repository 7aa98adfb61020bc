"""Peak memory of `load_params` beyond the weights, measured in a new process."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax

TESTS = Path(__file__).parent


def run_measurement(script, folder):
    """Return the number that a script prints; its first argument is the folder. It may import test files."""
    path = os.pathsep.join(map(str, (TESTS, TESTS / "hf", os.environ.get("PYTHONPATH", ""))))
    huge_pages_count_whole = {"XLA_FLAGS": "", "GLIBC_TUNABLES": ""}
    environment = {**os.environ, **huge_pages_count_whole, "PYTHONPATH": path}
    out = subprocess.run(
        [sys.executable, "-c", script, folder], env=environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return float(out.stdout)


def peak_beyond_weights(folder, config):
    """Return the bytes of the lower of two peaks, after a first load that compiles."""
    from jaxrl_llm.hf.load import load_params

    params, beyond = load_params(folder, config), []
    for _ in range(2):
        params = None
        gc.collect()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        params = load_params(folder, config)
        beyond.append(_status("VmHWM") - before - sum(x.nbytes for x in jax.tree.leaves(params)))
    return min(beyond)


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
