"""`python -m jaxrl_llm plan --config RECIPE.py --topology v5e-16`: memory and roofline, ahead of time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

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
    if args.records:
        return _print_records(args, rest)
    topology = parse_topology(args.topology)
    if args.json:
        check_output_path(args.json, flag="--json")
    config = from_command_line(
        rest, "python -m jaxrl_llm plan", writes=False, flags=[f.name for f in fields(PlanArguments)]
    ).config
    from jaxrl_llm.plan.compiled import open_target  # these import jax: --help and bad flags end before
    from jaxrl_llm.plan.plan import make_plan
    from jaxrl_llm.plan.report import advise, print_plan

    log = lambda line: print(line, file=sys.stderr, flush=True)
    with working("planning"):
        plan = advise(make_plan(config, open_target(topology), args.only, log), config)
    print_plan(plan, Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 160))))
    if args.json:
        args.json.write_text(json.dumps(plan.to_json(), indent=1) + "\n")
    return 0 if plan.fits else 1


def _print_records(args: PlanArguments, rest: Sequence[str]) -> int:
    """Print the records of the devices, and write them to --json.

    Raises:
        UserError: an unknown device, or flags of a recipe.
    """
    if rest or args.only:
        raise UserError(
            f"--records True has recipes of its own: {' '.join(rest) or f'--only {args.only}'} is not read. "
            "Leave it out, and add it to the command of a record."
        )
    if args.json:
        check_output_path(args.json, flag="--json")
    from jaxrl_llm.plan.compiled import open_target
    from jaxrl_llm.plan.records import DEVICES, RecordSearch, record_lines  # import jax

    log = lambda line: print(line, file=sys.stderr, flush=True)
    names = args.topology.split(",") if args.topology else DEVICES
    topologies, found = [parse_topology(name.strip()) for name in names], []
    search = RecordSearch(log)
    for topology in topologies:
        target = open_target(topology)
        with working("estimating"):
            records = list(search.records(target))
        print("\n".join(record_lines(target, records)))
        found += records
    if args.json:
        args.json.write_text(json.dumps([record.to_json() for record in found], indent=1) + "\n")
    return 0
