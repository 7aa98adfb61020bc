"""`python -m jaxrl_llm train --config RECIPE.py`, or `python -m jaxrl_llm.train`: the run is in train.py."""

from __future__ import annotations

import time

from jaxrl_llm.host.command import AGAIN, working
from jaxrl_llm.recipe.load import from_command_line


def main(argv: list[str]) -> int:
    """Return the exit code of a run without errors.

    Raises:
        UserError: input that cannot work. RunError: a run that cannot continue.
    """
    began = time.perf_counter()
    with working("reading the recipe and importing jax", first=AGAIN):
        resolved = from_command_line(argv)
        from jaxrl_llm.host.stop import EXIT_STOPPED  # these import jax: --help ends before
        from jaxrl_llm.train import execute

    return EXIT_STOPPED if execute(resolved, argv, began=began).reason else 0
