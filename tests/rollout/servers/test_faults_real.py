"""Real SGLang servers on a CPU: what they answer at the end of their context, and with other weights."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest
from proxy import Proxy
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import KEY, TOKENIZER
from test_sglang_train import ARGS, rows

from jaxrl_llm import models
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.errors import RefusedError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.train import main

pytestmark = NEEDED
PATIENCE = 300.0  # seconds that a server may take to start on a busy machine


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    with started(tmp_path_factory.mktemp("sglang"), patience=PATIENCE) as launched:
        yield launched


def test_a_response_up_to_the_last_position_is_whole_or_refused(launched, tmp_path):
    """SGLang takes a request for all positions and ends the response two tokens early, for length."""
    disk = DiskTransport(tmp_path, "float32", TOKENIZER)
    engine = engine_on(launched.urls, disk, patience=PATIENCE)
    engine.publish(models.init(MODEL, jax.random.key(0)), 1)
    ask = lambda tokens: [Request(np.arange(5, 11, dtype=np.int32), 0, 1, tokens)]
    greedy = SamplingConfig(temperature=0.0, ignore_eos=True)
    (made,) = engine.generate(ask(MODEL.max_position - 6 - 2), greedy, KEY)
    assert len(made.response_ids) == MODEL.max_position - 8
    for missing in (0, 1):
        with pytest.raises(RefusedError, match=r"after 248 of 2[45][09] tokens, with 6 before them"):
            engine.generate(ask(MODEL.max_position - 6 - missing), greedy, KEY)
    engine.pool.close()


class Meddler(Proxy):
    """Gives the server behind it other weights, under the same label, after each push and probe: its replies
    agree with themselves."""

    def __init__(self, target, folder):
        self.folder, self.label, self.lock, self.times = str(folder), "", None, 0
        super().__init__(target)

    async def _pass_on(self, request):
        body = await request.read()
        if request.path == "/update_weights_from_disk":
            self.label = json.loads(body)["weight_version"]
        if request.path == "/generate" and b'"sampling_seed"' in body and self.label:
            label, self.label, self.times = self.label, "", self.times + 1
            self.lock = self.lock or asyncio.Lock()
            async with self.lock:
                other = {"model_path": self.folder, "weight_version": label, "flush_cache": True}
                async with self._session.post(f"{self.target}/update_weights_from_disk", json=other) as said:
                    assert (await said.json())["success"]
        elif self.lock:
            async with self.lock:
                pass
        return await super()._pass_on(request)


def test_a_server_with_other_weights_is_left_out_within_two_steps_of_a_run(tmp_path, capsys):
    run_dir, args = tmp_path / "run", [*ARGS, "--eval.every", "0", "--steps", "3"]
    unused = ["--rollout.servers", "http://127.0.0.1:1", "--run_dir", str(run_dir)]
    model = from_command_line([*args, *unused]).config.model.architecture
    model = dataclasses.replace(model, vocab_size=len(TOKENIZER))
    other = models.init(dataclasses.replace(model, initializer_range=0.3), jax.random.key(9))
    save_model(other, model, tmp_path / "other", TOKENIZER, dtype="float32")
    with started(tmp_path / "servers", model=model, patience=PATIENCE) as launched:
        meddler = Meddler(launched.urls[1], tmp_path / "other")
        servers = ["--rollout.servers", launched.urls[0], meddler.url, "--servers.patience", str(PATIENCE)]
        assert main([*args, *servers, "--run_dir", str(run_dir)]) == 0
        meddler.close()
    said = capsys.readouterr().err
    assert f"a server is left out: {meddler.url}: log-probs of its responses differ" in said
    steps = [row for row in rows(run_dir) if row["kind"] == "train"]
    assert 1 <= meddler.times <= 2 and len(steps) == 3
    assert any(row["servers/mismatch_mean_abs"] > 0.01 for row in steps[:2])
    assert steps[2]["servers/mismatch_mean_abs"] < 1e-4
    assert all(row["mismatch/max_abs"] < 1e-4 for row in steps)  # of what was trained on
