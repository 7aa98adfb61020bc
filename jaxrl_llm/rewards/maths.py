"""Mathematical equality by the math-verify package: LaTeX, fractions, sets, intervals, equations."""

from __future__ import annotations

import functools
import logging
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.exact import answers, judge
from jaxrl_llm.rewards.sample import Sample


def reward(sample: Sample) -> tuple[float, Outcome]:
    """1.0 if the response's answer equals an accepted one as mathematics.

    math-verify stops itself by signal.alarm: this must run in the main thread of its process.
    Raises ValueError if no accepted answer can be read.
    """
    from math_verify import parse, verify  # heavy: only in the workers that need it

    accepted = [gold for text in answers(sample.answer) if (gold := _gold(text))]
    if not accepted:
        raise UserError(f"math-verify cannot read the row's answer {str(sample.answer)[:80]!r}")
    given = parse(sample.response)
    if not given:
        return 0.0, Outcome.UNPARSED
    return judge(any(verify(list(gold), given) for gold in accepted))


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> tuple[Any, ...]:
    """The accepted answer parsed once for its whole group; it is read as LaTeX unless it marks itself."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    final = text.rpartition("####")[2].strip()
    return tuple(parse(text if marked else f"${final}$"))
