"""`python -m jaxrl_llm doctor [--config RECIPE.py]`: is this machine ready for a run, and if not, the fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxrl_llm.host.waiting import working
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools.arguments import parse_own
from jaxrl_llm.tools.devices import Finding


@dataclass(frozen=True)
class DoctorArguments:
    """Check devices, drivers, versions, memory, disk, sandbox, servers, cache, clock and ports of this
    machine, each with "ok" or the fix.

    With --config RECIPE.py, and any flags of training, what that recipe needs is checked, too: disk space for
    its checkpoints, the extras of this package, its servers, its sandbox.
    """

    json: bool = False
    """Print the findings as JSON."""


def main(argv: list[str]) -> int:
    """Return the exit code: 0 = ready, 1 = something needs a fix.

    Raises:
        UserError: a recipe or flag that cannot be used.
    """
    args, rest = parse_own(DoctorArguments, argv, "doctor")
    config = (
        from_command_line(
            rest, "python -m jaxrl_llm doctor", writes=False, flags=[f.name for f in fields(DoctorArguments)]
        ).config
        if rest
        else None
    )
    from jaxrl_llm.tools.checks import examine  # imports jax: --help and bad flags end before

    with working("examining this machine"):
        findings = list(examine(config))
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        print_findings(findings)
    return int(any(finding.status == "fix" for finding in findings))


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
