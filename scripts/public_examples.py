"""Print the table of docs/import.md: the public examples that `python -m jaxrl_llm import-config` reads.

    git clone --depth 1 https://github.com/volcengine/verl FOLDER/verl      # and the others of CHECKOUTS
    python scripts/public_examples.py FOLDER
    python scripts/public_examples.py FOLDER --refused      # and each file that is refused, with the reason

Each recipe is loaded and checked as `train` does; what it would refuse, but for paths that are not on this
machine, is printed, and the exit code is then 1. Nothing of the examples is run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.checks import check_config
from jaxrl_llm.recipe.load import load_recipe
from jaxrl_llm.tools.import_config import ImportArguments, import_recipe


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
COLUMNS = ("", "commit", "files read", "keys with a counterpart", "keys without")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


class Tally(NamedTuple):
    """Result of the import of a checkout's examples."""

    files: int
    mapped: int
    unused: int
    refused: dict[Path, str]
    """File -> message."""
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
        read = f"{tally.files - len(tally.refused)} of {tally.files}"
        lines.append(
            f"| {checkout.label} | {commit_of(root)} | {read} | {tally.mapped:,} | {tally.unused:,} |"
        )
    print("\n".join([HEADER, *lines]))
    for tally in tallies:
        reasons = [*(tally.refused.items() if args.refused else ()), *tally.broken.items()]
        for file, reason in reasons:
            print(f"\n{file.relative_to(args.folder)}: {reason.replace(str(args.folder) + '/', '')}")
    return int(any(tally.broken for tally in tallies))


def import_examples(root: Path, patterns: tuple[str, ...]) -> Tally:
    """Import every example of a checkout."""
    refused, broken, mapped, unused = {}, {}, 0, 0
    files = sorted({file for pattern in patterns for file in root.glob(pattern) if file.name[0] != "_"})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recipe.py"
        for file in files:
            try:
                recipe = import_recipe(ImportArguments(file=file, out=out))
            except UserError as error:
                refused[file] = str(error)
                continue
            out.write_text(recipe.source, encoding="utf-8")
            if problems := "\n".join(refusals(out)):
                broken[file] = problems
            mapped, unused = mapped + recipe.mapped, unused + len(recipe.unused)
    return Tally(len(files), mapped, unused, refused, broken)


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
