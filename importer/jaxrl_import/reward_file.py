"""Copy functions of a training script to a separate file, which can be imported without a training run."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator

from jaxrl_import.python_file import FUNCTION
from jaxrl_import.python_values import root_of

IMPORT = ast.Import | ast.ImportFrom
STARTS = re.compile(r"Trainer$|\.train$|parse_(known_)?args|\bmain$")
"""Calls of a script that start its run."""
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
    definitions = _definitions(ast.parse(text))
    taken: dict[tuple[int, int], ast.stmt] = {}
    missing: list[str] = []
    waiting = list(names)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        nodes = definitions.get(name, [])
        if not nodes or any(isinstance(node, ast.ImportFrom) and node.level for node in nodes):
            missing.append(name)  # a relative import has no package beside the recipe
        taken |= {(node.lineno, node.col_offset): node for node in nodes}
        used = {name for node in nodes if not isinstance(node, IMPORT) for name in _free_names(node)}
        waiting += sorted(used - seen)
        seen |= used
    nodes = [taken[place] for place in sorted(taken)]
    parts = [ast.unparse(node) for node in nodes if isinstance(node, IMPORT)]
    body = [_source(text, node) for node in nodes if not isinstance(node, IMPORT)]
    imports = "\n".join(dict.fromkeys(parts))
    code = "\n\n\n".join(filter(None, [imports, *body]))
    return f"{HEADER.format(script=script)}{code}\n", sorted(missing)


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Return name -> the module's statements that make or change it, else one inside another statement."""
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in sorted(set(_made(node))):
            found.setdefault(name, []).append(node)
    imported = {name for name, nodes in found.items() if any(isinstance(node, IMPORT) for node in nodes)}
    for node in tree.body:  # such as TABLE.update(...), and not wandb.init()
        base = _base(node.value) if isinstance(node, ast.Expr) and not _starts_a_run(node) else ""
        if base in found.keys() - imported:
            found[base].append(node)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION | ast.ClassDef | IMPORT):
            for name in _made(node):
                found.setdefault(name, [node])
    return found


def _made(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement makes or changes, unless it starts a run."""
    if isinstance(node, FUNCTION | ast.ClassDef):
        yield node.name
    elif isinstance(node, IMPORT):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif _starts_a_run(node):
        return
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for inner in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
        yield from filter(None, map(_base, targets))
    else:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.stmt | ast.ExceptHandler):
                yield from _made(inner)


def _base(node: ast.expr) -> str:
    """Return the name at the root of a.b, a[b] or a.b(...); "" = of another expression."""
    root = root_of(node)
    return root.id if isinstance(root, ast.Name) and root is not node else ""


def _starts_a_run(node: ast.stmt) -> bool:
    """Return whether a statement is the script's main part, parses its command line, or trains."""
    words = [ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    return is_main or any(STARTS.search(word) for word in words)


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
    decorators = getattr(node, "decorator_list", ())
    if not decorators:
        return ast.get_source_segment(text, node) or ast.unparse(node)
    return "\n".join(text.splitlines()[min(d.lineno for d in decorators) - 1 : node.end_lineno])
