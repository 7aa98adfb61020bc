"""End of a run whose updates are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxrl_llm.errors import RunError
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.structs import TrainState


class NonFiniteError(RunError):
    """NaN or Inf in loss, gradient or weights of several updates in a row."""


def stop_if_nonfinite(
    state: TrainState, experience: Experience, run_dir: str, max_nonfinite: int, done: int, end: int
) -> None:
    """End the run after too many skipped updates in a row; its checkpoints stay as they are.

    Args:
        run_dir: folder that the offending batch is written to.
        max_nonfinite: skipped updates in a row that end the run.
        done: steps done.
        end: last step of the stage; one in which every update was skipped has trained nothing.

    Raises:
        NonFiniteError: names the file that the offending batch was written to.
    """
    models = [s for s in (state, state.critic) if s]
    skipped = max(int(s.nonfinite) for s in models)
    untrained = done == end and any(int(s.nonfinite) and not int(s.version) for s in models)
    if skipped < max_nonfinite and not untrained:
        return
    path = Path(run_dir) / f"nonfinite_step_{done}.npz"
    arrays = {f"{i}.tokens": item.tokens for i, item in enumerate(experience.items)}
    arrays |= {
        f"{i}.{name}": x for i, item in enumerate(experience.items) for name, x in item.signals.items()
    }
    np.savez(path, **arrays)
    raise NonFiniteError(
        f"{skipped} updates in a row had NaN or Inf in loss, gradient or weights at step {done}; none changed"
        f" the weights. The batch is in {path}. Lower --optim.learning_rate or look at its rewards; the same "
        "command continues from the last checkpoint."
    )
