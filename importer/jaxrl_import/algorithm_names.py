"""Algorithms of papers and other systems: the equivalent here, or the reason for none."""

from __future__ import annotations

ALGORITHMS = {
    "cdpo": "--algo dpo --algo.label_smoothing 0.1",
    "ipo": "--algo dpo --algo.loss ipo",
    "slic": "--algo dpo --algo.loss hinge",
    "exo": "--algo dpo --algo.loss exo --algo.label_smoothing 0.001",
    "nca": "--algo dpo --algo.loss nca",
    "bco": "--algo dpo --algo.loss bco",
    "sppo": "--algo dpo --algo.loss sppo",
    "apo": "--algo dpo --algo.loss apo_zero, or apo_down",
    "discopop": "--algo dpo --algo.loss discopop",
    "rpo": "--algo dpo --algo.nll_coef 1.0",
    "ld_dpo": "--algo dpo --algo.tail_coef 0.5",
    "wpo": "--algo dpo --algo.weighted True",
    "alphapo": "--algo simpo --algo.alpha 0.25",
    "a2po": "--algo a_star_po",
}
"""Algorithm with another name here, or an option of another one -> the words of the command line."""

NO_ALGORITHM = {
    "aot": "its loss pairs sequences by their ranks in the mini-batch, and a loss here sees a micro-batch",
    "tpo": (
        "triple preference optimization has three responses to a prompt, rows here two, where its loss is "
        "--algo cpo; target policy optimization needs all responses to a prompt in one micro-batch"
    ),
    "sdft": "its teacher has a demonstration in the prompt, and teachers here read the student's prompt",
    "sdpo": "its teacher has feedback in the prompt, and teachers here read the student's prompt",
    "gold": "its teacher has another tokenizer; with the same one it is --algo gkd",
}
"""Unsupported algorithm -> the reason; docs/algorithms.md has more."""


def translate_algorithm(name: str) -> str:
    """Return a sentence with the equivalent of an algorithm of a paper or another system; "" if unknown."""
    key = name.lower().replace("-", "_")
    if key in ALGORITHMS:
        return f"Here it is {ALGORITHMS[key]}."
    return f"There is none: {NO_ALGORITHM[key]} (docs/algorithms.md)." if key in NO_ALGORITHM else ""
