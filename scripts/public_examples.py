"""Print the table of docs/import.md: the public examples that `python -m jaxrl_llm import-config` reads.

    git clone --depth 1 https://github.com/volcengine/verl FOLDER/verl      # and the others of CHECKOUTS
    python scripts/public_examples.py FOLDER
    python scripts/public_examples.py FOLDER --refused      # and each file that is refused, with the reason

Each recipe is loaded and checked as `train` does; what it would refuse, but for paths that are not on this
machine, is printed, and the exit code is then 1. Nothing of the examples is run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxrl_import.effects import UNKNOWN_KEY
from jaxrl_import.import_config import ImportArguments, import_recipe
from jaxrl_import.values import NotHereError
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.checks import check_config
from jaxrl_llm.recipe.load import load_recipe


class Checkout(NamedTuple):
    """Examples of a system: files of its repository, without those that begin with an underscore."""

    folder: str
    label: str
    patterns: tuple[str, ...]


CHECKOUTS = (
    Checkout("verl", "veRL (examples, experimental)", ("examples/**/*.sh", "verl/experimental/**/*.sh")),
    Checkout("OpenRLHF", "OpenRLHF (examples/scripts)", ("examples/scripts/train_*.sh",)),
    Checkout("trl", "TRL (examples, scripts)", ("examples/scripts/**/*.py", "trl/scripts/*.py")),
    Checkout("RL2", "RL2 (examples)", ("examples/**/*.sh",)),
    Checkout("ChatLearn", "ChatLearn (scripts, templates)", ("scripts/*/*.sh", "template/grpo_*.yaml")),
)
PATHS = (
    "no such folder",
    "no such file",
    "there is no file",
    "is empty: set a f",
    "the rank of that adapter",
)
"""Parts of the problems that are only of paths, and of the adapter in one, on this machine."""
COLUMNS = (
    "", "commit", "files", "read", "refused by name", "keys carried over", "keys refused or warned of",
    "unknown keys", "keys without effect",
)  # fmt: skip
TRAINER = re.compile(r"\b[A-Z]\w*Trainer\(|\bverl\.|\bopenrlhf\.|\bRL2\.|\bchatlearn")
"""In a script that starts a trainer; other scripts are no examples of configs."""
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


class Tally(NamedTuple):
    """Result of the import of a checkout's examples."""

    files: int
    mapped: int
    lost: int
    """Keys that change the result, and are refused or warned of with what is here instead."""
    unknown: int
    """Keys that import-config does not know: they count as keys that change the result."""
    unused: int
    named: dict[Path, str]
    """File whose trainer or loss is not here -> message with its name."""
    refused: dict[Path, str]
    """File that cannot be read -> message."""
    broken: dict[Path, str]
    """File -> what `train` would refuse of its recipe."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"has {', '.join(c.folder for c in CHECKOUTS)}")
    parser.add_argument("--refused", action="store_true", help="list the files that are refused")
    args = parser.parse_args()
    lines, tallies = [], []
    for checkout in CHECKOUTS:
        root = args.folder / checkout.folder
        if not root.is_dir():
            print(f"{root}: absent, left out", file=sys.stderr)
            continue
        tally = import_examples(root, checkout.patterns)
        tallies.append(tally)
        read = tally.files - len(tally.refused) - len(tally.named)
        cells = [checkout.label, commit_of(root), tally.files, read, len(tally.named), tally.mapped]
        cells += [tally.lost, tally.unknown, tally.unused]
        lines.append(f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in cells)} |")
    print("\n".join([HEADER, *lines]))
    for tally in tallies:
        refused = {**tally.named, **tally.refused} if args.refused else {}
        reasons = [*refused.items(), *tally.broken.items()]
        for file, reason in reasons:
            print(f"\n{file.relative_to(args.folder)}: {reason.replace(str(args.folder) + '/', '')}")
    return int(any(tally.broken for tally in tallies))


def import_examples(root: Path, patterns: tuple[str, ...]) -> Tally:
    """Import every example of a checkout."""
    named, refused, broken, counts = {}, {}, {}, Counter()
    found = {file for pattern in patterns for file in root.glob(pattern) if file.name[0] != "_"}
    starts = lambda file: file.suffix == ".yaml" or TRAINER.search(file.read_text(encoding="utf-8"))
    files = sorted(filter(starts, found))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recipe.py"
        for file in files:
            try:
                recipe = import_recipe(ImportArguments(file=file, out=out))
            except UserError as error:
                (named if isinstance(error, NotHereError) else refused)[file] = str(error)
                continue
            out.write_text(recipe.source, encoding="utf-8")
            if problems := "\n".join(refusals(out)):
                broken[file] = problems
            unknown = sum(reason == UNKNOWN_KEY for reason in recipe.lost.values())
            counts.update(mapped=recipe.mapped, unknown=unknown, lost=len(recipe.lost) - unknown)
            counts.update(unused=len(recipe.unused))
    return Tally(len(files), *(counts[name] for name in Tally._fields[1:5]), named, refused, broken)


def refusals(recipe: Path) -> Iterator[str]:
    """Yield what `train` refuses of a recipe, without paths that are not on this machine."""
    try:
        check_config(load_recipe(recipe), writes=False)
    except ConfigError as error:
        lines = [line for line in str(error).splitlines() if "several problems" not in line]
        yield from (line for line in lines if not any(word in line for word in PATHS))


def commit_of(root: Path) -> str:
    """Return commit and day of a checkout; "" = it is none."""
    done = subprocess.run(
        ["git", "-C", str(root), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
