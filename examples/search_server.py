"""A tool as an MCP server: `search`, BM25 over a corpus on this machine.

Command:   python -m jaxrl_llm.train --config my_recipe.py \\
               --env.tools "mcp:python examples/search_server.py corpus.jsonl --results 3"
Needs:     pip install 'jaxrl-llm[mcp]'

The corpus is JSONL with "text" (or "contents") and "title" in each line, or a folder of .txt and .md files.
BM25 as in Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with the
idf that is never negative: log(1 + (N - n + 0.5) / (n + 0.5)), N passages, n of them with the word.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

K1, B = 1.2, 0.75
WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 200


@dataclass(frozen=True)
class Passage:
    """A piece of the corpus."""

    title: str
    text: str


class Search:
    """The tool; the index is built once, when the server starts.

    Raises:
        ValueError: no corpus, or a bad one; names file and line.
    """

    def __init__(self, path: str, results: int = 3, passage_words: int = 200):
        self._results = results
        self._passages = list(read_corpus(path, passage_words))
        self._index = BM25Index([f"{passage.title} {passage.text}" for passage in self._passages])

    def search(self, query: str) -> str:
        """Searches the documents for words and returns the passages that fit best."""
        best = self._index.search(query, self._results)
        if not best:
            raise ValueError("no passage has any of these words")
        passages = [self._passages[i] for i in best]
        return "\n\n".join(f"[{n}] {p.title}\n{p.text}" for n, p in enumerate(passages, 1))


class BM25Index:
    """Inverted index: for each word, the passages that have it and its share of their scores."""

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


def read_corpus(name: str, passage_words: int = 200) -> Iterator[Passage]:
    """Yield passages of a JSONL file or of a folder's .txt and .md files (titles: their paths in it).

    Args:
        passage_words: words of a passage; longer texts are cut into several.

    Raises:
        ValueError: nothing was found, or a line is not a passage; names file and line.
    """
    if not name:
        raise ValueError("the path is empty: give a JSONL file or a folder of .txt and .md files")
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
        documents = ((str(file.relative_to(path)), _read(file)) for file in files)
    elif path.is_file():
        documents = _lines(path)
    else:
        raise ValueError(f"there is no file or folder {name}")
    empty = True
    for title, text in documents:
        words = re.findall(r"\S+\s*", text)
        for start in range(0, len(words), passage_words):
            empty = False
            yield Passage(title, "".join(words[start : start + passage_words]).rstrip())
    if empty:
        raise ValueError(f"no text in {name} (JSONL, or .txt and .md in a folder)")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f'{where}: a line is an object with "text" and "title"')
            text, title = row.get("text", row.get("contents")), row.get("title", "")
            if not isinstance(text, str) or not isinstance(title, str):
                raise ValueError(f'{where}: "text" (or "contents") and "title" must be strings')
            yield title, text


def serve(tool: Search) -> None:
    """Answer calls on the standard input and output."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def search(query: str) -> str:
        try:
            return tool.search(query)
        except ValueError as error:
            raise ToolError(str(error)) from None  # the SDK keeps the texts of other errors from the model

    server = MCPServer("search")
    server.tool(description=Search.search.__doc__)(search)
    server.run("stdio")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="JSONL file, or a folder of .txt and .md files")
    parser.add_argument("--results", type=int, default=3, help="passages in a result")
    parser.add_argument("--passage_words", type=int, default=200, help="words of a passage")
    args = parser.parse_args()
    if args.results < 1 or args.passage_words < 1:
        parser.error("--results and --passage_words must be at least 1")
    try:
        tool = Search(args.path, args.results, args.passage_words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    serve(tool)


if __name__ == "__main__":
    main()
