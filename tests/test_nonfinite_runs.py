"""A run whose updates are skipped for NaN or Inf shows it, and does not end as if it had trained."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.finite import NonFiniteError, stop_if_nonfinite
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.ranges import problems
from jaxrl_llm.report.progress import format_metrics


def state(nonfinite, version, critic=None):
    return SimpleNamespace(nonfinite=np.int32(nonfinite), version=np.int32(version), critic=critic)


@pytest.mark.parametrize(
    ("state", "done", "stops"),
    [
        (state(5, 7), 50, True),  # max_nonfinite in a row
        (state(4, 7), 50, False),
        (state(3, 0), 50, False),  # it may recover
        (state(3, 0), 99, True),  # the last step, and no update was applied
        (state(3, 1), 99, False),
        (state(0, 0), 99, False),  # dynamic sampling found nothing to learn from
        (state(0, 9, critic=state(3, 0)), 99, True),
        (state(0, 9, critic=state(3, 9)), 50, True),  # the critic's own limit
        (state(0, 9, critic=state(2, 9)), 50, False),
        (state(4, 9, critic=state(0, 9)), 50, False),
    ],
)
def test_a_run_ends_after_too_many_skipped_updates_or_if_none_was_applied(state, done, stops, tmp_path):
    experience, most = Experience([], {}, 0), (OptimConfig().max_nonfinite, 3)
    assert most == (5, 3)
    if not stops:
        stop_if_nonfinite(state, experience, str(tmp_path), most, done=done, end=99)
        return
    key = "critic.optim" if state.critic else "optim"
    text = f"[35] updates in a row had NaN or Inf .* at step {done}; none.* --{key}.learning_rate "
    with pytest.raises(NonFiniteError, match=text):
        stop_if_nonfinite(state, experience, str(tmp_path), most, done=done, end=99)


def test_skipped_updates_are_in_the_line_of_their_step():
    assert format_metrics({"loss": 0.5, "nonfinite": 0.0}) == "loss 0.5"
    assert format_metrics({"loss": 0.5, "nonfinite": 0.25}) == "loss 0.5  nonfinite 0.25"


def test_an_epsilon_that_is_zero_in_float32_is_refused():
    assert np.float32(1e-46) == 0
    ((field, problem),) = problems(OptimConfig(eps=1e-46))
    assert field == "eps" and problem.startswith("is 1e-46: it must be at least 1e-30 and at most 1")
