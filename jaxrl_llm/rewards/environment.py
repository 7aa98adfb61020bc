"""Environment of reward workers: secrets are withheld, unless `reward.keep_env` names them.

Values of secrets are never shown.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from jaxrl_llm.addresses import WITHHELD_NAME, mask_text, withheld_names
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.builtin import REWARDS
from jaxrl_llm.rewards.config import URL, RewardConfig
from jaxrl_llm.rewards.gold import accepts_own_answer
from jaxrl_llm.rewards.sample import RewardLoadError, RewardResult, RewardSample
from jaxrl_llm.rewards.signatures import OF_TRAINER
from jaxrl_llm.user_file import split_name

VARIABLE = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")
CHECKED_ROWS = 4  # rows that a function or service scores before a model is loaded
SPREAD_ROWS = 16  # rows of a built-in reward that takes milliseconds
ANSWERED_ROWS = 2000  # rows of a source whose own answers the other built-in rewards must accept
log = logging.getLogger(__name__)
CERTAIN = {"NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError"}
CERTAIN |= {"IndentationError", "UserError", "ServiceError", "InvalidScoreError", "SystemExit"}
OF_SAMPLE = f"'{RewardSample.__name__}' object"
"""Text of errors about the sample itself, which has the same fields whatever the response: sample.respons,
sample["response"]."""


def key_hint(text: str, environment: Mapping[str, str], keep: Sequence[str]) -> str:
    """Return the fix for a failure that names an environment variable which the worker lacks, or "".

    Args:
        text: message of the failure, such as "KeyError: 'OPENAI_API_KEY'".
    """
    words = dict.fromkeys(VARIABLE.findall(text))
    if name := next((word for word in words if word in withheld_names(environment, keep)), ""):
        return f"{name} is set but withheld from reward workers; pass it on: --reward.keep_env {name}"
    if not re.search("KeyError|environ", text):
        return ""
    if name := next((word for word in words if WITHHELD_NAME.search(word) and word not in environment), ""):
        passed = "" if name in keep else f", and pass it on: --reward.keep_env {name}"
        return f"{name} is not set in this command's environment; set it{passed}"
    return ""


def torch_hint(reason: str) -> str:
    """Return the fix if a reward written for OpenRLHF needs torch, which is not installed; else ""."""
    if "No module named 'torch'" not in reason:
        return ""
    return (
        ". Rewards of OpenRLHF return tensors: pip install torch (its CPU build is enough), or return a list"
    )


def trainer_hint(text: str) -> str:
    """Return the fix for a missing keyword argument that TRL's trainer passes, or ""."""
    name = next((name for name in OF_TRAINER if f"KeyError: '{name}'" in text), "")
    return name and f"{name} is an object of TRL's trainer, which a reward worker lacks: do without it"


def mask_kept(text: str, environment: Mapping[str, str], keep: Sequence[str]) -> str:
    """Mask keys in a worker's text, including the values of variables that were passed on to it."""
    secret = {name for name in keep if name in environment} & withheld_names(environment, ())
    return mask_text(text, [environment[name] for name in secret])


def worker_environment(environment: dict[str, str], keep: Sequence[str]) -> dict[str, str]:
    """Return the environment without secrets and accelerators, with a fixed hash seed (tasks need it)."""
    withheld = withheld_names(environment, keep)
    clean = {name: value for name, value in environment.items() if name not in withheld}
    return clean | {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def explain_failure(reason: str, keep: Sequence[str]) -> str:
    """Return the reason of a failure without secrets. Adds the fix if a key was not passed on, or the fields
    of a sample if the reward reads an unknown one."""
    reason = mask_kept(reason, os.environ, keep)
    hint = key_hint(reason, os.environ, keep) or torch_hint(reason).removeprefix(". ")
    hint = hint or trainer_hint(reason)
    if OF_SAMPLE in reason:
        names = [*(field.name for field in fields(RewardSample)), "thought", "final"]
        hint = f"Fields of a sample: {', '.join(f'sample.{name}' for name in names)}"
    return f"{reason}. {hint}" if hint and hint not in reason else reason


def is_certain_failure(result: RewardResult, keep_env: Sequence[str]) -> bool:
    """Return whether a sample that failed did so independently of its response."""
    unavoidable = result.error in CERTAIN or not result.error  # no exception: it crashed or took too long
    hint = key_hint(result.reason, os.environ, keep_env) or trainer_hint(result.reason)
    return unavoidable or OF_SAMPLE in result.reason or bool(hint)


def check_own_answers(
    name: str, samples: Sequence[RewardSample], results: Sequence[RewardResult], skips: bool
) -> None:
    """Refuse a row whose answer its built-in reward does not accept: no response could be right.

    Args:
        skips: if other rows are good, only warn with the number of such rows (--data.bad_rows skip).

    Raises:
        RewardLoadError: names the row and the reason.
    """
    judged = [(s, r) for s, r in zip(samples, results, strict=True) if accepts_own_answer(s, name)]
    refused = [(s, r) for s, r in judged if r.outcome is not Outcome.CORRECT]
    if not refused:
        return
    sample, result = refused[0]
    reason = result.reason or f"it scores the row's own answer {sample.answer!r:.80} {result.score:g}, not 1"
    problem = (
        f"{sample.where or 'a row'}: no response to it could earn the reward {name}: {reason}, as in "
        f"{len(refused)} of the {len(judged)} rows tried. Another column may hold the answer "
        "(--data.train.0.answer_key COLUMN), or another reward read it (--reward.name)"
    )
    if not skips or len(refused) == len(judged):
        few = "; --data.bad_rows skip trains if only a few rows are like this" * (len(refused) < len(judged))
        raise RewardLoadError(problem + few)
    log.warning("%s; nothing is learnt from such a row", problem)


def rows_to_try(name: str, samples: list[RewardSample]) -> list[RewardSample]:
    """Return the rows that a reward is tried on, of up to ANSWERED_ROWS of each source."""
    if name in ("math", "gym"):
        return samples[:: max(len(samples) // SPREAD_ROWS, 1)]
    return samples if name in REWARDS else samples[:CHECKED_ROWS]


def check_trial(
    name: str,
    samples: Sequence[RewardSample],
    results: Sequence[RewardResult],
    keep_env: Sequence[str],
    *,
    skips: bool = False,
) -> None:
    """Refuse a reward that failed on all tried rows, independently of the responses. Other failures, such as
    a judge that cannot be reached, cause a warning.

    Args:
        skips: of `check_own_answers`.

    Raises:
        RewardLoadError: with the reason; or by `check_own_answers`.
    """
    check_own_answers(name, samples, results, skips)
    if not results or not all(result.failed for result in results):
        return
    tried = f"every row that was tried ({len(results)}, with the row's answer as response)"
    reason = results[0].reason
    if all(is_certain_failure(result, keep_env) for result in results):
        raise RewardLoadError(f"the reward {name} fails on {tried}: {reason}")
    log.warning("the reward %s failed on %s: %s", mask_text(name), tried, reason)


def warn_of_keys(config: RewardConfig, function: bytes) -> None:
    """Warn of keys in addresses of services, and of withheld variables that the source of a reward names.

    Args:
        function: of `load.pickle_function`, which also contains the names; b"" = none.
    """
    sources = {"the reward function": function}
    for name in config.used:
        if (shown := mask_text(name)) != name and name.startswith(URL):
            fix = (
                "write the parameter as ?api_key=${NAME}, in quotes, set NAME, and add --reward.keep_env NAME"
            )
            log.warning(
                "%s: the address holds a key, which lists of processes and shells show; %s", shown, fix
            )
        path, _ = split_name(name)
        if path.suffix == ".py" and path.is_file():
            sources[str(path)] = path.read_bytes()
    withheld = withheld_names(os.environ, config.keep_env)
    for source, text in sources.items():
        words = set(re.findall(rb"\w+", text))
        if named := sorted(name for name in withheld if name.encode() in words):
            fix = f"to pass it on: --reward.keep_env {' '.join(named)}"
            log.warning("%s names %s, which reward workers do not see; %s", source, ", ".join(named), fix)
