"""Sources of examples: the good rows of files, problems of generated tasks, entries of reasoning-gym."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

from jaxrl_llm.data import tasks
from jaxrl_llm.data.config import BadRows, DataConfig, SourceConfig, object_problem
from jaxrl_llm.data.files import open_rows
from jaxrl_llm.data.preference import judgement, read_example
from jaxrl_llm.data.rows import Damage, Example, RowError
from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra
from jaxrl_llm.ranges import LARGEST

MAX_REPORTS = 5  # kinds of bad rows that are named
PLACE = re.compile(r".*?:\d+: ")
"""Place in the reason of a bad row."""
MAX_PROBLEMS = 10_000  # generated problems tried for one of the split
STRIDE = 7919  # from one gym entry to the next one tried; a prime, so that all are reached
UNSTABLE_GYM = ("codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note")
log = logging.getLogger(__name__)


class ExampleSource(Protocol):
    """Random access to examples; the same index gives the same example in every process."""

    num_bad: int  # rows left out because they are bad
    unanswered: Sequence[int]  # indices of rows without an answer

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


OpenSource = tuple[SourceConfig, ExampleSource]


def open_sources(config: DataConfig, split: Literal["train", "eval"], seed: int) -> list[OpenSource]:
    """Return the sources of a split with their settings; generated held-out problems suit every seed.

    Raises:
      UserError: as `open_source`.
    """
    seed = seed if split == "train" else 0
    return [(own, open_source(own, seed, config.bad_rows)) for own in config.sources(split)]


def open_source(config: SourceConfig, seed: int, bad_rows: BadRows = "fail") -> ExampleSource:
    """Return a source of examples. `seed` chooses the problems of a generated source; files do not use it.

    Raises:
      UserError: nothing to read, no usable row, or (bad_rows "fail") a bad row; the message names file, line
          and reason.
    """
    if config.judge and config.path.startswith("gym:"):
        raise UserError(f"{config.path}: its answers have no label to judge: set --data.train.0.judge False")
    if config.score_key and config.is_generated:
        raise UserError(f"{config.path}: its problems have no scores: set --data.train.0.score_key ''")
    if not config.path:
        raise UserError("a source has no path: give --data.path FILE (or a folder, hub:, task: or gym: name)")
    if config.path.startswith("task:"):
        return TaskSource(config, seed)
    if config.path.startswith("gym:"):
        return GymSource(config, seed)
    return FileSource(config, bad_rows)


class FileSource:
    """The good rows of one or more files. All rows are read once at the start, to find the bad ones."""

    def __init__(self, config: SourceConfig, bad_rows: BadRows):
        self._config = config
        self._rows = open_rows(config)
        self._good = array("q")  # row numbers over all files, bad rows left out
        self.unanswered = array("q")  # indices of rows without an answer
        self.num_bad = self._scan(bad_rows)

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> Example:
        return self._read(self._good[index])

    def _read(self, row: int) -> Example:
        where = self._rows.where(row)
        try:
            value = self._rows.get(row)
        except RowError:
            raise
        except Exception as error:  # pyarrow or datasets, of a damaged row or one that it cannot decode
            raise RowError(f"{where}: cannot be read ({type(error).__name__}: {error!s:.300})") from error
        return read_example(value, where, self._config)

    def _scan(self, bad_rows: BadRows) -> int:
        """Fill `_good`, return the number of bad rows; warn of bad rows, or raise UserError if they are not
        allowed."""
        path, num_bad, more = self._config.path, 0, 0
        listed: dict[str, tuple[str, int]] = {}  # reason without its place -> with the first, further rows
        # Count the bad rows by their problem.
        for damage in self._bad_rows():
            num_bad += damage.rows
            kind = PLACE.sub("", damage.reason, count=1)
            first, further = listed.get(kind, (damage.reason, -damage.rows))
            if kind in listed or len(listed) < MAX_REPORTS:
                listed[kind] = first, further + damage.rows
            else:
                more += damage.rows
        # Report them, or refuse the source.
        total = len(self) + num_bad
        if total == 0:
            raise UserError(f"{path} has no rows")
        lines = [f"{reason} (and {n:,} rows more)" if n else reason for reason, n in listed.values()]
        lines += [f"and {more} more"] * (more > 0)
        report = "".join(f"\n  {line}" for line in lines)
        if not len(self):
            raise UserError(f"{path}: none of the {total} rows can be used:{report}")
        if num_bad and bad_rows == "fail":
            raise UserError(
                f"{path}: {num_bad} of {total} rows are bad (--data.bad_rows skip, in training, skips them):"
                f"{report}"
            )
        if num_bad:
            log.warning("%s: %d of %d rows skipped:%s", path, num_bad, total, report)
        return num_bad

    def _bad_rows(self) -> Iterator[Damage]:
        """Read every row once; yield the damage of files and bad rows, add good ones to `_good`."""
        yield from self._rows.damage
        for row in range(self._rows.size):
            try:
                example = self._read(row)
                self.unanswered.extend([len(self._good)] if _is_blank(example.answer) else [])
                self._good.append(row)
            except RowError as error:
                yield Damage(str(error))


class _GeneratedSource:
    """Problems that are made on demand; `_rows` are the numbers of those in the source."""

    num_bad, unanswered = 0, ()
    _rows: Sequence[int]
    _config: SourceConfig

    def _choose_rows(self, keys: Iterable[str], size: int) -> None:
        """Set `_rows`: with `distinct` the first row of each key, else all `size` rows."""
        seen: set[str] = set()
        first = (i for i, key in enumerate(keys) if not (key in seen or seen.add(key)))
        self._rows = array("q", first) if self._config.distinct else range(size)

    def _is_of_split(self, key: str) -> bool:
        """Return whether a problem belongs to the source's split."""
        return tasks.is_held_out(key) != (self._config.split == "train")

    def _example(self, index: int, prompt: str, **fields: Any) -> Example:
        """Return the example of a problem, whose prompt is a chat."""
        return Example(
            messages=({"role": "user", "content": prompt},),
            text=None,
            source=self._config.name or self._config.path,
            where=f"{self._config.path}:{index}",
            teacher=self._config.teacher,
            **fields,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rows[index]


class TaskSource(_GeneratedSource):
    """Problems of a built-in task, generated on demand; a tenth of all problems is held out of split train.

    Each problem is also a pair: the demonstration against the mistake, swapped for a share `noise`. With
    `distinct`, equivalent problems (1+2 and 2+1) count as the same.
    """

    def __init__(self, config: SourceConfig, seed: int):
        self._name = config.path.removeprefix("task:")
        if self._name not in tasks.TASKS:
            raise UserError(f"there is no {config.path}; built-in tasks are {', '.join(tasks.TASKS)}")
        self._draw, options = tasks.TASKS[self._name]
        self._options = tasks.parse_options(options, _options(config), config.path)
        self._config, self._seed = config, seed
        keys = (self._problem(i)[0].key for i in range(self._options.size))
        self._choose_rows(keys, self._options.size)

    def __getitem__(self, index: int) -> Example:
        problem, rng = self._problem(self._row(index))
        wrong = rng.random() < self._options.noise
        better, worse = (problem.response, problem.mistake)[:: -1 if wrong else 1]
        columns = {"answer": problem.answer, **problem.columns}
        other = self._example(
            index, problem.prompt, response=worse, answer=problem.answer, columns=columns, steps=problem.steps
        )
        example = dataclasses.replace(other, response=better, rejected=other)
        if problem.turns:
            example = dataclasses.replace(example, response=None, turns=problem.turns[wrong])
        return judgement(example) if self._config.judge else example

    def _problem(self, index: int) -> tuple[tasks.TaskProblem, random.Random]:
        """Return a problem of the split and its random stream, for further draws."""
        for attempt in range(MAX_PROBLEMS):
            rng = random.Random(f"{self._name} {self._seed} {self._config.split} {index} {attempt}")
            problem = self._draw(rng, self._options)
            if self._is_of_split(problem.key):
                return problem, rng
        raise UserError(f"{self._config.path} has no problem of split {self._config.split!r}: make it larger")


class GymSource(_GeneratedSource):
    """A reasoning-gym task; `columns` holds its unchanged entries, for the task's scorer.

    Many tasks have several right answers and give none (answer None). A tenth of the questions is held out of
    split train; an index whose question belongs to another split stands for a later question. With
    `distinct`, each question occurs once.
    """

    def __init__(self, config: SourceConfig, seed: int):
        gym = import_extra("reasoning_gym", "tasks", needed_by=config.path)
        name, options = config.path.removeprefix("gym:"), _options(config)
        self._size = options.pop("size", 20_000)
        if type(self._size) is not int or not 1 <= self._size <= LARGEST:
            raise UserError(f"{config.path}: option size is {self._size!r}: it must be at least 1")
        if name in UNSTABLE_GYM:
            log.warning(
                "%s makes other rows in another process: set PYTHONHASHSEED=0, and expect no exact resume",
                config.path,
            )
        try:
            self._tasks = gym.create_dataset(name, seed=seed, size=self._size, **options)
        except Exception as error:  # a hundred tasks have as many kinds of errors
            raise UserError(f"{config.path}: {error}; size was {self._size}, options {options}") from error
        self._config = config
        questions = (self._entry(i)["question"] for i in range(self._size))
        self._choose_rows(questions, self._size)

    def __getitem__(self, index: int) -> Example:
        entry = self._entry(self._row(index))
        answer = entry["answer"]
        return self._example(index, entry["question"], response=answer, answer=answer, columns=dict(entry))

    def _entry(self, index: int) -> dict[str, Any]:
        """Return the entry of the task for an index: its own, or the next of the split."""
        for attempt in range(min(MAX_PROBLEMS, self._size)):
            try:
                entry = self._tasks[(index + attempt * STRIDE) % self._size]
            except Exception as error:  # a hundred tasks have as many kinds of errors
                raise RowError(
                    f"{self._config.path}:{index}: cannot be generated ({type(error).__name__}: {error})"
                ) from error
            if self._is_of_split(entry["question"]):
                return entry
        raise UserError(
            f"{self._config.path}: no question of split {self._config.split!r}: raise option size"
        )


def _is_blank(answer: Any) -> bool:
    """Return whether an answer is empty."""
    if isinstance(answer, dict | list | tuple):
        return all(map(_is_blank, answer.values() if isinstance(answer, dict) else answer))
    return answer is None or not str(answer).strip()


def _options(config: SourceConfig) -> dict[str, Any]:
    """Return `options` as a dict. Raises UserError if it is not a JSON object."""
    if problem := object_problem(config.options):
        raise UserError(f"{config.path}: options {problem}")
    return json.loads(config.options or "{}")
