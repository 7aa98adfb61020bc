"""`python -m jaxrl_llm doctor [--config RECIPE.py]`: is this machine ready for a run, and if not, the fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.host.command import working
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools.arguments import parse_own
from jaxrl_llm.tools.config import DoctorArguments
from jaxrl_llm.tools.devices import Finding, seen_devices


def main(argv: list[str]) -> int:
    """Return the exit code: 0 = ready, 1 = something needs a fix.

    Raises:
        UserError: a recipe or flag that cannot be used.
    """
    args, rest = parse_own(DoctorArguments, argv, "doctor")
    prog, flags = "python -m jaxrl_llm doctor", list(vars(args))
    config = from_command_line(rest, prog, checks=False, flags=flags).config if rest else None
    from jaxrl_llm.tools.checks import examine  # imports jax: --help and bad flags end before

    with working("examining this machine"):
        rules = list(examine_recipe(config)) if config else []
        refused = any(finding.status == "fix" for finding in rules)
        findings = [*examine(None if refused else config), *rules]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        print_findings(findings)
    return int(any(finding.status == "fix" for finding in findings))


def examine_recipe(config: TrainConfig) -> Iterator[Finding]:
    """Yield a finding for each rule that `train` asks of a recipe, and for settings without effect."""
    from jaxrl_llm.plan.models import read_known  # these import jax
    from jaxrl_llm.recipe.checks import apply_all_rules
    from jaxrl_llm.recipe.idle import without_effect
    from jaxrl_llm.tools.host_memory import num_processes

    refused = False
    for rule, lines in apply_all_rules(config, read_known, seen_devices(num_processes())):
        keys = ", ".join(f"--{key}" for key in rule.keys.split()) or "every key: its type and range"
        yield from (Finding(f"{rule.phase} rule", "fix", line) for line in lines)
        yield from [] if lines else [Finding(f"{rule.phase} rule", "ok", keys)]
        refused |= bool(lines)
    if not refused:
        yield from (Finding("recipe", "note", note) for note in without_effect(config))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table, and a last line with the number of fixes."""
    colours = {"ok": "green", "note": "yellow", "fix": "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        colour = colours[finding.status]
        # escape: rich reads the [wandb] of "jaxrl-llm[wandb]" as a style
        table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.name, escape(finding.text))
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(table)
    fixes = sum(finding.status == "fix" for finding in findings)
    print(f"{fixes} to fix" if fixes else "ready")
