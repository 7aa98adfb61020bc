"""The tool `search`: BM25 over a corpus on this machine.

BM25 as in Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with the
idf that is never negative: log(1 + (N - n + 0.5) / (n + 0.5)), N passages, n of them with the word.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.envs.config import SearchConfig, ToolsConfig
from jaxrl_llm.envs.env import ToolError
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import expand_home

K1, B = 1.2, 0.75
WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 200
KEY = "--env.toolbox.search.path"


@dataclass(frozen=True)
class Passage:
    """A piece of the corpus."""

    title: str
    text: str


class Search:
    """The tool `search`; the index is built once, when the tool is made.

    Raises:
        UserError: no corpus, or a bad one; names file and line.
    """

    schema: ClassVar[dict[str, Any]] = {
        "name": "search",
        "description": "Searches the documents for words and returns the passages that fit best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to look for."}},
            "required": ["query"],
        },
    }

    def __init__(self, config: ToolsConfig):
        self._results = config.search.results
        self._passages = list(read_corpus(config.search))
        self._index = BM25Index([f"{passage.title} {passage.text}" for passage in self._passages])

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the best passages, with their titles."""
        best = await asyncio.to_thread(self._index.search, arguments["query"], self._results)
        if not best:
            raise ToolError("no passage has any of these words")
        passages = [self._passages[i] for i in best]
        return "\n\n".join(f"[{n}] {p.title}\n{p.text}" for n, p in enumerate(passages, 1))


class BM25Index:
    """Inverted index: for each word, the passages that have it and what it adds to their scores."""

    def __init__(self, texts: list[str]):
        self._words: dict[str, int] = {}
        self._count = len(texts)
        split = [WORD.findall(text.lower()) for text in texts]
        lengths = np.array([len(words) for words in split])
        numbers = (self._words.setdefault(word, len(self._words)) for words in split for word in words)
        words, owners = np.fromiter(numbers, np.int64, lengths.sum()), np.repeat(range(self._count), lengths)
        pairs, counts = np.unique(words * self._count + owners, return_counts=True)
        words, self._owners = np.divmod(pairs, self._count)
        self._starts = np.searchsorted(words, np.arange(len(self._words) + 1))
        having = np.diff(self._starts)[words]
        idf = np.log1p((self._count - having + 0.5) / (having + 0.5))
        size = K1 * (1 - B + B * lengths / max(lengths.mean(), 1))
        self._scores = idf * counts * (K1 + 1) / (counts + size[self._owners])

    def search(self, query: str, results: int) -> list[int]:
        """Return the numbers of the best texts that share a word with the query, ties in their order."""
        scores = self.scores(WORD.findall(query.lower())[:MAX_QUERY_WORDS])
        best = np.argsort(-scores, kind="stable")[:results]
        return [int(i) for i in best if scores[i] > 0]

    def scores(self, words: list[str]) -> np.ndarray:
        """Return the score of each text, float64 [texts]; 0 = none of the words. A word counts once."""
        scores = np.zeros(self._count)
        for number in {self._words[word]: None for word in words if word in self._words}:
            at = slice(self._starts[number], self._starts[number + 1])
            scores[self._owners[at]] += self._scores[at]
        return scores


def read_corpus(config: SearchConfig) -> Iterator[Passage]:
    """Yield passages of a JSONL file or of a folder's .txt and .md files (titles: their paths in it).

    Raises:
        UserError: there is none, or a line that is no passage; names file and line.
    """
    path = expand_home(config.path)
    if not config.path:
        raise UserError(f"{KEY} is empty: set a JSONL file or a folder of .txt and .md files")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
        documents = ((str(file.relative_to(path)), _read(file)) for file in files)
    elif path.is_file():
        documents = _lines(path)
    else:
        raise UserError(f"{KEY}: there is no file or folder {config.path}")
    empty = True
    for title, text in documents:
        words = re.findall(r"\S+\s*", text)
        for start in range(0, len(words), config.passage_words):
            empty = False
            yield Passage(title, "".join(words[start : start + config.passage_words]).rstrip())
    if empty:
        raise UserError(f"{KEY}: no text in {config.path} (JSONL, or .txt and .md in a folder)")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f'{where}: a line is an object with "text" and "title"')
            text, title = row.get("text", row.get("contents")), row.get("title", "")
            if not isinstance(text, str) or not isinstance(title, str):
                raise UserError(f'{where}: "text" (or "contents") and "title" must be strings')
            yield title, text
