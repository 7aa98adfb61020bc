"""Platforms that JAX_PLATFORMS names and this machine lacks: one message, from every command."""

import os
import subprocess
import sys

import jax
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.devices import no_devices, open_devices

NO_GPU = (
    "JAX_PLATFORMS=cuda: jax finds no such device (no NVIDIA GPU is visible): pip install 'jaxrl-llm[cuda]', "
    "or unset JAX_PLATFORMS"
)


def test_the_message_by_platform():
    assert no_devices("cuda", "") == no_devices("cuda", "AssertionError") == NO_GPU
    unknown = (
        "Unable to initialize backend 'cpuu': Backend 'cpuu' is not in the list of known backends: ['cpu']"
    )
    reason = f"RuntimeError: {unknown}. (set JAX_PLATFORMS='' to automatically choose an available backend)"
    assert no_devices("cpuu", reason) == (
        f"JAX_PLATFORMS=cpuu: jax finds no such device ({unknown}): unset JAX_PLATFORMS"
    )
    assert "(no libtpu): pip install 'jaxrl-llm[tpu]', or unset" in no_devices("tpu,cpu", "no libtpu")


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no NVIDIA GPU is visible")])
def test_open_devices_are_those_of_jax(error, monkeypatch):
    assert open_devices() == jax.devices()

    def fail(platform):
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(UserError, match=r"JAX_PLATFORMS=cpu: .* \(no NVIDIA GPU is visible\): unset"):
        open_devices()


@pytest.mark.parametrize(
    "words",
    [
        "train --config grpo_tiny.py --run_dir run",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "generate --model m --prompts p.jsonl --out o.jsonl",
                "score --model m --data p.jsonl --out o.jsonl",
                "plan --config grpo_tiny.py --topology cpu",
            )
        ),
    ],
)
def test_a_platform_that_is_not_here_is_no_traceback(words, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}  # which no machine has
    argv = [sys.executable, "-m", "jaxrl_llm", *words.split()]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert error.startswith("error: JAX_PLATFORMS=abacus: jax finds no such device (Unable to initialize ")
    assert error.endswith("): unset JAX_PLATFORMS")
