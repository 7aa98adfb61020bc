"""Copy functions of a training script to a separate file, which can be imported without a training run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

from jaxrl_import.python_file import FUNCTION

IMPORT = ast.Import | ast.ImportFrom
HEADER = '"""Rewards of {script}, without the rest of that file, which trains."""\n\n'


def extract_functions(text: str, script: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """Return a Python file with these functions and their dependencies, and the names that only a run would
    tell.

    Copies imports, functions, classes and assignments of the script whose names a function reads, in the
    script's order.

    Args:
        text: the script.
        script: its name, for the docstring.
    """
    tree = ast.parse(text)
    definitions = dict(_definitions(tree))
    taken: dict[int, ast.stmt] = {}
    missing: list[str] = []
    waiting = list(names)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        node = definitions.get(name)
        if node is None:
            missing.append(name)
            continue
        taken[node.lineno] = node
        used = sorted(_free_names(node) - seen) if not isinstance(node, IMPORT) else []
        seen.update(used)
        waiting += used
    nodes = [taken[line] for line in sorted(taken)]
    parts = [ast.unparse(node) for node in nodes if isinstance(node, IMPORT)]
    body = [_source(text, node) for node in nodes if not isinstance(node, IMPORT)]
    imports = "\n".join(dict.fromkeys(parts))
    code = "\n\n\n".join(filter(None, [imports, *body]))
    return f"{HEADER.format(script=script)}{code}\n", sorted(missing)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, statement that defines it): anywhere in the script, the module's own last, which win."""
    own = set(map(id, tree.body))
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in own]
    for node in [*inner, *tree.body]:
        if isinstance(node, FUNCTION | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, IMPORT):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and id(node) in own:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                yield name.id, node


def _free_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement reads and does not make itself."""
    read, made = set(), set(vars(builtins)) | {"__file__", "__name__"}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            (read if isinstance(inner.ctx, ast.Load) else made).add(inner.id)
        elif isinstance(inner, ast.arg):
            made.add(inner.arg)
        elif isinstance(inner, FUNCTION | ast.ClassDef):
            made.add(inner.name)
        elif isinstance(inner, IMPORT):
            made |= {alias.asname or alias.name.partition(".")[0] for alias in inner.names}
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            made.add(inner.name)
    return read - made


def _source(text: str, node: ast.stmt) -> str:
    """Return the text of a statement with its decorators; of one inside a function without its indent."""
    if node.col_offset:
        return ast.unparse(node)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
