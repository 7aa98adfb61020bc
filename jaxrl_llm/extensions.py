"""Optional installed packages: extensions of this package, and its extras."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import UserError

PACKAGES = (
    *("jaxrl-llm", "jax", "jaxlib", "flax", "optax"),
    *("orbax-checkpoint", "grain", "transformers", "numpy"),
)


def load_extensions(group: str) -> list[Any]:
    """Return the objects that installed packages list under the entry points `jaxrl_llm.GROUP`.

    Args:
        group: "commands" (tables like `jaxrl_llm.__main__.COMMANDS`), "unknown_keys" or
            "unknown_algorithms" (functions that answer a name of another system; "" = unknown).
    """
    import importlib.metadata  # slow to import: not for --help

    points = importlib.metadata.entry_points(group=f"jaxrl_llm.{group}")
    return [point.load() for point in sorted(points, key=lambda point: point.name)]


def package_version(package: str) -> str:
    """Return the version of an installed package; "" = it is not installed, or on the path alone."""
    import importlib.metadata  # slow to import: not for --help

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def package_versions() -> dict[str, str]:
    """Return the versions of the installed PACKAGES, which runs and checkpoints record."""
    return {name: version for name in PACKAGES if (version := package_version(name))}


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import a package of an extra of pyproject.toml.

    Args:
        needed_by: what cannot work without it, for the message.

    Raises:
        UserError: it is not installed; gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it is installed, and lacks something
            raise
        fix = f"pip install 'jaxrl-llm[{extra}]'"
        raise UserError(f"{needed_by} needs {package.replace('_', '-')}: {fix}") from None
