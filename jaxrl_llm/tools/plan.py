"""`python -m jaxrl_llm plan --config RECIPE.py --topology v5e-16`: memory and roofline, ahead of time."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.command import working
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools.arguments import check_output_path, parse_own
from jaxrl_llm.tools.config import PlanArguments


def main(argv: list[str]) -> int:
    """Return the exit code: 0 = it fits, 1 = it does not.

    Raises:
        UserError: a recipe, flag or topology that cannot be used, with the fix (exit code 2).
    """
    args, rest = parse_own(PlanArguments, argv, "plan")
    if args.json:
        check_output_path(args.json, flag="--json")
    results, fits = (_print_records(args, rest), True) if args.records else _print_plan(args, rest)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if fits else 1


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_plan(args: PlanArguments, rest: list[str]) -> tuple[dict[str, Any], bool]:
    """Compile a recipe's step for the devices, and print its tables; return (JSON object, whether it fits).

    Raises:
        UserError: a recipe or topology that cannot be used.
    """
    topology = parse_topology(args.topology)
    prog, flags = "python -m jaxrl_llm plan", list(vars(args))
    config = from_command_line(rest, prog, writes=False, flags=flags).config
    from jaxrl_llm.plan.compiled import open_target  # these import jax: --help and bad flags end before
    from jaxrl_llm.plan.plan import make_plan
    from jaxrl_llm.plan.report import advise, print_plan

    with working("planning"):
        plan = advise(make_plan(config, open_target(topology), args.only, _log), config)
    print_plan(plan, Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160))))
    return plan.to_json(), plan.fits


def _print_records(args: PlanArguments, rest: list[str]) -> list[dict[str, Any]]:
    """Print the records of the devices; return them as JSON objects.

    Raises:
        UserError: an unknown device, or flags of a recipe.
    """
    if rest or args.only:
        raise UserError(
            f"--records True has recipes of its own: {' '.join(rest) or f'--only {args.only}'} is not read. "
            "Leave it out, and add it to the command of a record."
        )
    from jaxrl_llm.plan.compiled import open_target
    from jaxrl_llm.plan.records import DEVICES, RecordSearch, record_lines  # import jax

    names = args.topology.split(",") if args.topology else DEVICES
    topologies, found = [parse_topology(name.strip()) for name in names], []
    search = RecordSearch(_log)
    for topology in topologies:
        target = open_target(topology)
        with working("estimating"):
            records = list(search.records(target))
        print("\n".join(record_lines(target, records)))
        found += records
    return [record.to_json() for record in found]
