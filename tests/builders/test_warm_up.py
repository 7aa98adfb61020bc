"""`--rollout.warm_up True`: no large program is compiled once the run is built."""

import jax
import pytest

from jaxrl_llm import train

LARGE = {
    f"jit({name})" for name in ("accumulate", "apply", "model_outputs", "_prefill", "_decode", "_insert")
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", " --devices 0:2 --mesh.fsdp 1 --mesh.sequence 2"])
def test_rollout_scoring_and_update_compile_before_the_first_step(mesh, tmp_path, monkeypatch):
    """With a reference, and two updates a step, so that old log-probs are recomputed; rows of two lengths."""
    names, restore = [], train.restore

    def built(*args):
        assert set(names) >= LARGE
        names.clear()
        return restore(*args)

    def listener(event, _, **about):
        if "backend_compile" in event:
            names.append(about["fun_name"])

    monkeypatch.setattr(train, "restore", built)
    jax.monitoring.register_event_duration_secs_listener(listener)
    argv = "--config grpo_tiny.py --rollout.warm_up True --steps 2 --warm_start.steps 1 --algo.kl_coef 0.1"
    argv += (
        f" --ppo_epochs 2 --prompts_per_step 8 --eval.prompts 8 --log.tensorboard False --run_dir {tmp_path}"
    ) + mesh
    try:
        assert train.main(argv.split()) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert names and not LARGE.intersection(names)
