"""Rates of phrases that have to be read twice, in docstrings, comments and documents.

As a program it prints the sentences with such phrases, and the files with most of them first:

    python tests/test_prose.py jaxrl_llm/algos README.md
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_style import ROOT, comments, docstrings

CHECKED = ("kernels", "jaxrl_llm", "docs", "importer", "benchmarks", "configs", "examples")
CHECKED += ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Folders and documents whose rates are within the limits."""


class Phrase(NamedTuple):
    """A phrase that makes the reader look back."""

    pattern: str
    limit: float  # occurrences in 1,000 words
    better: str


CLAUSE = "is|are|was|were|has|have|had|can|may|must|does|do|did|will|would|comes?|follows?|remains?|counts?"
NOUN = "it|its|they|this|that|these|such|there|each|one|you|the|an|a|no"
CONDITION = "not|none|nothing|only|all|both|some|any|several|possible|needed|given|known|their|else"
PHRASES = {
    "those": Phrase(r"those|that of", 0.6, "name the thing again"),
    "what": Phrase(rf"what (?:{CLAUSE}|{NOUN}|needs?|holds?|belongs?)", 0.3, "name the thing"),
    "where": Phrase(
        rf"where (?:{NOUN}|{CONDITION})(?<!where the)|"
        r"where [a-z_`' -]{1,40} (?:is|are|has|have) (?:no|not|none|off|on|given|set|known|missing|one|a|an)",
        0.4,
        "if, when; or name the place",
    ),
    "there is": Phrase(r"there (?:is|are|was|were)", 0.6, "make the thing the subject"),
    "of its own": Phrase(r"of (?:its|their|your|our) own", 0.1, "separate; or nothing"),
    "is no": Phrase(r"(?:is|are) no(?! (?:longer|more|less|fewer|greater|larger|smaller))", 0.3, "is not a"),
    "anew": Phrase(r"anew|behind|likewise", 0.2, "again, after, also"),
}
PATTERNS = {name: re.compile(rf"\b(?:{x.pattern})\b", re.IGNORECASE) for name, x in PHRASES.items()}


def passages(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a module's docstrings and comments, or a document's paragraphs without code."""
    if file.suffix == ".py":
        yield from docstrings(file)
        yield from comments(file)
        return
    blank = lambda code: "\n" * code[0].count("\n")
    text = re.sub(r"(?ms)^```.*?^```$|^    .*?$|`[^`\n]*`", blank, file.read_text())
    for paragraph in re.finditer(r"(?:.+\n?)+", text):
        yield text[: paragraph.start()].count("\n") + 1, paragraph[0]


def files_under(paths: Iterable[str]) -> list[Path]:
    """Return the modules and documents at these paths, relative to the repository."""
    found = []
    for path in (ROOT / path for path in paths):
        found += [x for x in path.rglob("*") if x.suffix in (".py", ".md")] if path.is_dir() else [path]
    return sorted(found)


def count_phrases(files: Iterable[Path]) -> tuple[int, dict[str, int]]:
    """Return the number of words, and the number of occurrences of each of PHRASES."""
    words, counts = 0, dict.fromkeys(PHRASES, 0)
    for file in files:
        for text in (" ".join(text.split()) for _, text in passages(file)):
            words += len(text.split())
            for name, pattern in PATTERNS.items():
                counts[name] += len(pattern.findall(text))
    return words, counts


@pytest.mark.parametrize("path", CHECKED)
def test_sentences_name_their_things(path):
    words, counts = count_phrases(files_under([path]))
    rates = {name: 1000 * count / words for name, count in counts.items()}
    wrong = {
        f"{name!r} {rate:.2f} in 1,000 words, at most {PHRASES[name].limit}: {PHRASES[name].better}"
        for name, rate in rates.items()
        if rate > PHRASES[name].limit
    }
    assert not wrong, f"{path}: {wrong}; `python tests/test_prose.py {path}` lists the sentences"


def test_phrases_are_found_and_plain_sentences_are_not():
    def found(sentence):
        return {name for name, pattern in PATTERNS.items() if pattern.search(sentence)}

    assert found("Return those of `block` keys each.") == {"those"}
    assert found("Return what is left of the text, where there is any.") == {"what", "where", "there is"}
    assert found("A key where the mask is 1, of its own.") == {"of its own"}
    assert found("It is no number, where a limit is given.") == {"is no", "where"}
    assert found("It is no longer than T; return what blocks it.") == set()


def main(paths: list[str]) -> None:
    """Print the files under the paths with their sentences, the file with most phrases last."""
    files = sorted(files_under(paths), key=lambda file: sum(count_phrases([file])[1].values()))
    for file in files:
        for line, text in passages(file):
            flat = " ".join(text.split())
            if names := [name for name, pattern in PATTERNS.items() if pattern.search(flat)]:
                print(f"{file.relative_to(ROOT)}:{line}: {', '.join(names)}: {flat}")
    words, counts = count_phrases(files)
    for name, count in counts.items():
        rate = 1000 * count / max(words, 1)
        print(f"{name:12}{rate:6.2f} in 1,000 words, at most {PHRASES[name].limit}")


if __name__ == "__main__":
    main(sys.argv[1:])
