"""Weights to a real SGLang server whose processes divide the model. Beside others it would starve."""

import contextlib

import pytest
from real_sglang import FLAGS, NEEDED, started
from test_bridge_real import TRANSPORTS, check_two_pushes, engine_by

pytestmark = NEEDED


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """One server of two processes that hold half of each weight; SGLang needs a core for each."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with started(tmp_path_factory.mktemp("divided"), 1, f"{FLAGS} --tp 2") as launched:
            yield launched


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_servers_that_divide_a_model_get_their_parts(divided, tmp_path, transport):
    with contextlib.ExitStack() as closing:
        check_two_pushes(engine_by(transport, divided.urls, tmp_path, closing), usable=1)
