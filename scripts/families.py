"""Write docs/families.md: the largest differences from transformers, of logits and gradients, by family.

    python scripts/families.py              # measure the models of tests/family_cases.py that are missing
    python scripts/families.py CASE ...     # measure these again
    python scripts/families.py --render     # only write the page

Needs the extra `test`; about ten minutes on two CPU cores. Results are kept in docs/families.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / "docs/families.json", ROOT / "docs/families.md"
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/models")]
INTRO = """\
# Families beside transformers

Tiny random models of each family, in float32 on a CPU: a plain one, and others in which sizes are odd and
switches are on ([tests/family_cases.py](../tests/family_cases.py)). Two sequences of 37 tokens; windows and
chosen tokens are fewer. Norms and biases are not at their initial values. A difference is the largest of all
models of a row: of logits (whose standard deviation is above 0.3), and of the gradient of a weight, divided
by the gradient's largest number. `python scripts/families.py` measures them again.

Strict is the largest difference between the log-probs of rollout and update in 20 steps of GRPO with
`--strict True`, in float32 and in bfloat16, of one model of the family. A run that was killed after 10 of the
steps, and started again by the same command, should end with the same metrics and weights in every bit.
`python scripts/family_runs.py` measures both; an empty field is not measured.

[CONTRIBUTING.md](../CONTRIBUTING.md#a-model-family) has the page to add one. A coding agent that had not
read the code followed it: the tests of Seed-OSS passed after 3 minutes (a row, and the key of one bias in
`jaxrl_llm/hf/config.py`), the tests of EXAONE 4 after 4 (a row, and layers without RoPE in
`jaxrl_llm/hf/windows.py`). The page then got what it had lacked (chats, sizes of published models, which
file reads what); by it OLMo 2 took 6 minutes (a row), Hunyuan 2 (a row, names, `alpha` in
`jaxrl_llm/hf/ropes.py` and a norm after RoPE in `jaxrl_llm/models/block.py`). README and CHANGELOG are not
in these times; no person has been timed.
"""
SHOWN_BY = """
`pytest -m "slow or not slow"` with these files and words shows, the first five by family, the others by kind
of layer:

| property | tests |
|---|---|
| greedy text, with and without a cache | `tests/models/test_families.py -k greedy_text` |
| files come back byte for byte | `tests/models/test_families.py -k byte_for_byte` |
| LoRA on all layers, read by peft | `tests/models/test_families.py -k adapters` |
| packed rows and shared prompts, with gradients | `tests/models/test_families.py -k packed_row` |
| absent keys of config.json are transformers' defaults | `tests/models/test_families.py -k absent_keys` |
| a shared prompt has the gradient of copies, on every mesh | `tests/learn/test_shared_prefixes.py` |
| strict: log-probs of rollout and training are equal in every bit | `tests/models/test_strict.py` |
| a run that is killed continues with the same numbers | `tests/faults` |
| caches, pages, drafts and kept turns do not change the text | `tests/rollout/native` |
"""


def measure_family(case: str) -> dict[str, Any]:
    """Return the family of a tiny model and its largest differences from transformers."""
    import test_families
    from hf_oracle import hf_logits, our_logits

    model, tokens = test_families.oracle(case), test_families.some_tokens()
    params = test_families.ours(model)
    logits = np.abs(our_logits(params, tokens) - hf_logits(model, tokens)).max()
    gradients, theirs = test_families.gradients_of(model, params, tokens)
    scales = {name: max(np.abs(expected).max(), 1e-4) for name, expected in theirs.items()}
    differences = [np.abs(gradients[name] - x).max() / scales[name] for name, x in theirs.items()]
    return {"family": params.config.family, "logits": float(logits), "gradients": float(max(differences))}


def write_family_page(rows: dict[str, dict[str, Any]]) -> None:
    """Write the page: a row for each family, with its number of models and their largest differences."""
    import transformers
    from family_cases import CASES

    families = {}
    for row in rows.values():
        families.setdefault(row["family"], []).append(row)
    lines = [
        "",
        f"transformers {transformers.__version__}; {len(rows)} of {len(CASES)} models are measured:",
        "",
    ]
    lines += ["| family | models | logits | gradients | strict | killed |", "|---|---|---|---|---|---|"]
    for family, own in sorted(families.items()):
        worst = [max(row[kind] for row in own) for kind in ("logits", "gradients")]
        runs = [row for row in own if "strict" in row]
        strict = f"{max(row['strict'] for row in runs):g}" if runs else ""
        killed = ("equal" if all(row["continued"] for row in runs) else "differs") if runs else ""
        lines.append(f"| `{family}` | {len(own)} | {worst[0]:.1e} | {worst[1]:.1e} | {strict} | {killed} |")
    PAGE.write_text(INTRO + "\n".join(lines) + "\n" + SHOWN_BY)


def main(arguments: list[str]) -> None:
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    if "--render" not in arguments:
        from family_cases import CASES

        for case in arguments or [case for case in CASES if case not in rows]:
            rows[case] = measure_family(case)
            print(case, rows[case], flush=True)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    write_family_page(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
