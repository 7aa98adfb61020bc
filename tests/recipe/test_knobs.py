"""Every key of a run has a recipe, an example, or a sentence in the docs; few have a sentence alone."""

import ast
import functools
import inspect
import re

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.keys import add_missing, config_class, iter_fields, type_hints
from jaxrl_llm.recipe.load import config_classes, load_recipe, packaged_recipes, with_algo
from jaxrl_llm.recipe.overrides import resolve_key, split_arguments
from tests.test_docs import OPTIONAL, PAGES, PLACEHOLDER, ROOT, code_of, commands_of, recipe_of

MAX_WITHOUT_EXAMPLE = 100
BARE = (
    "TransformerConfig",
    "ConvConfig",
    "DeltaConfig",
    "GlobalHeads",
    "IndexConfig",
    "MambaConfig",
    "MoEConfig",
    "MLAConfig",
    "RopeConfig",
    "SandboxConfig",
)
"""Configs whose fields the docs name without a group, in a table or list of their group."""
Knob = tuple[str, str]
"""Name of the Config that defines a field, and the field."""


def own_fields(cls: type) -> list[str]:
    """Return the fields that a Config adds to its base class."""
    return list(inspect.get_annotations(cls))


def owner(cls: type, name: str) -> Knob:
    """Return the Config that first has the field, and the field."""
    return [base for base in cls.__mro__ if name in own_fields(base)][-1].__name__, name


def knobs() -> set[Knob]:
    """Return the fields that a user may set: those of all Configs but parts and the algorithm's name."""
    fields = [(cls, name, type_hints(cls)[name]) for cls in config_classes() for name in own_fields(cls)]
    return {owner(cls, name) for cls, name, hint in fields if name != "algorithm" and not config_class(hint)}


def set_in(source: str) -> set[Knob]:
    """Return the fields that Python code sets by name in the call of a Config."""
    classes = {cls.__name__: cls for cls in config_classes()}
    classes |= {f"{name}.Config": type(algorithm.config) for name, algorithm in algos.ALGOS.items()}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [(classes[ast.unparse(call.func)], call) for call in calls if ast.unparse(call.func) in classes]
    return {owner(cls, word.arg) for cls, call in made for word in call.keywords if word.arg}


def set_by(line: list[str]) -> set[Knob]:
    """Return the fields that a command of training, plan or doctor sets."""
    words = [word for word in line[3:] if word not in ("plan", "doctor", "train", "...")]
    if line[0] == "make" or "pytest" in line or not words or not words[0].startswith("--"):
        return set()
    given = dict(pairs := split_arguments(words))
    if not given.get("config"):
        return set()
    config = recipe_of(given["config"][0])
    if given.get("algo", [""])[0] in algos.ALGOS:
        config, _ = with_algo(config, given["algo"][0])
    for typed, _ in pairs:
        config = add_missing(config, typed.split("."))
    known = dict(iter_fields(config))
    fields = [known[key] for typed, _ in pairs if (key := resolve_key(typed, known))]
    return {owner(type(field.owner), field.name) for field in fields}


def with_example() -> set[Knob]:
    """Return the fields that a recipe, an example or a command or Python block of the docs sets."""
    files = [path.read_text() for folder in ("configs", "examples") for path in (ROOT / folder).glob("*.py")]
    sources = files + [body for page in PAGES for body in code_of(page).python]
    lines = [line for page in PAGES for line in commands_of(page)]
    return set().union(*map(set_in, sources), *map(set_by, lines))


@functools.cache
def owners() -> dict[str, set[Knob]]:
    """Return dotted key -> the fields that it names, in any recipe and any algorithm."""
    configs = [TrainConfig(), *map(load_recipe, packaged_recipes())]
    configs += [with_algo(TrainConfig(), name)[0] for name in algos.ALGOS]
    configs.append(functools.reduce(lambda c, key: add_missing(c, key.split(".")), OPTIONAL, TrainConfig()))
    found: dict[str, set[Knob]] = {}
    for config in configs:
        for key, field in iter_fields(config):
            found.setdefault(key, set()).add(owner(type(field.owner), field.name))
    return found


def named_in_docs() -> set[Knob]:
    """Return the fields that the text of the docs names: --key, .key after another one, fields of a shape."""
    found = set()
    for page in PAGES:
        for span in code_of(page).inline:
            word = span.split()[0]
            if word.startswith(".") and not PLACEHOLDER.fullmatch(word):
                found |= {knob for knob in knobs() if knob[1] == word[1:]}
            elif re.fullmatch(r"\w+", word):
                found |= {(name, word) for name in BARE}
            for flag in re.findall(r"--([\w.-]+)", span):
                found |= owners().get(resolve_key(flag.rstrip("."), owners()), set())
    return found


def test_each_key_has_a_recipe_an_example_or_a_sentence():
    missing = knobs() - with_example() - named_in_docs()
    assert not missing, f"no page of docs/ names {sorted(missing)}"


def test_few_keys_have_a_sentence_alone():
    """A key that no recipe and no command sets is hardly needed."""
    alone = knobs() - with_example()
    assert len(alone) <= MAX_WITHOUT_EXAMPLE, sorted(alone)
