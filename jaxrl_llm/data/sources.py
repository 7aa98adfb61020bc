"""Open a `SourceConfig` as a random-access sequence of `Example`s."""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import importlib.util
import itertools
import json
import logging
import random
from array import array
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from jaxrl_llm.data import tasks
from jaxrl_llm.data.files import Rows, open_rows
from jaxrl_llm.data.judge import judgement
from jaxrl_llm.data.read import read
from jaxrl_llm.data.rows import Example, SourceConfig
from jaxrl_llm.errors import UserError

BadRows = Literal["skip", "fail"]
MAX_REPORTS = 5  # bad rows told one by one
MAX_DRAWS = 10_000  # generated problems looked at for one of the wanted split
STRIDE = 7919  # from one gym entry to the next one tried; a prime, so that all are reached
UNSTABLE_GYM = ("codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note")
log = logging.getLogger(__name__)


class Source(Protocol):
    """Random access to examples; the same index gives the same example in every process."""

    num_bad: int  # rows left out because they were bad

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def open_source(config: SourceConfig, seed: int, bad_rows: BadRows = "fail") -> Source:
    """Source of examples. `seed` chooses the problems of a generated source; files do not use it.

    Raises:
      ValueError: nothing to read, no usable row, or (bad_rows "fail") a bad row; names file, line and reason.
    """
    if not config.path:
        raise UserError("a source has no path: give --data.path FILE (or a folder, hub:, task: or gym: name)")
    if config.path.startswith("task:"):
        return TaskSource(config, seed)
    if config.path.startswith("gym:"):
        return GymSource(config, seed)
    if config.options:
        raise UserError(f"options are for task: and gym: sources, not for {config.path}")
    return FileSource(config, bad_rows)


class FileSource:
    """The good rows of one or more files."""

    def __init__(self, config: SourceConfig, bad_rows: BadRows):
        self._config = config
        self._files = open_rows(config)
        self._good = array("q")  # row numbers over all files, bad rows left out
        self._starts = [0, *itertools.accumulate(file.size for file in self._files)]
        reports = []
        for number, (file, row) in enumerate(_addresses(self._files)):
            reason = _fault(file, row, config)
            if reason is None:
                self._good.append(number)
            else:
                reports.append(reason)
        self.num_bad = len(reports)
        _report(reports, self._starts[-1], config.path, bad_rows)

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> Example:
        number = self._good[index]
        which = bisect.bisect_right(self._starts, number) - 1
        file, row = self._files[which], number - self._starts[which]
        return read(file.get(row), file.where(row), self._config)


def _addresses(files: list[Rows]) -> Iterator[tuple[Rows, int]]:
    for file in files:
        for row in range(file.size):
            yield file, row


def _fault(file: Rows, row: int, config: SourceConfig) -> str | None:
    """Why a row is bad. A row's error is data here, so this is the one place that catches it."""
    try:
        read(file.get(row), file.where(row), config)
    except ValueError as error:
        return str(error)
    return None


def _report(reports: list[str], total: int, path: str, bad_rows: BadRows) -> None:
    if total == 0:
        raise UserError(f"{path} has no rows")
    if not reports:
        return
    more = f"\n  and {len(reports) - MAX_REPORTS} more" if len(reports) > MAX_REPORTS else ""
    told = "\n  " + "\n  ".join(reports[:MAX_REPORTS]) + more
    if len(reports) == total:
        raise UserError(f"{path}: none of the {total} rows can be used:{told}")
    if bad_rows == "fail":
        raise UserError(
            f"{path}: {len(reports)} of {total} rows are bad (--data.bad_rows skip skips them):{told}"
        )
    log.warning("%s: %d of %d rows skipped:%s", path, len(reports), total, told)


class TaskSource:
    """Problems of a built-in task, made on demand; a tenth of all problems is held out of split train.

    Each is a pair too: the demonstration against the mistake, the other way round for a share `noise`.
    """

    num_bad = 0

    def __init__(self, config: SourceConfig, seed: int):
        self._name = config.path.removeprefix("task:")
        if self._name not in tasks.TASKS:
            raise UserError(f"there is no {config.path}; built-in tasks are {', '.join(tasks.TASKS)}")
        self._make, settings = tasks.TASKS[self._name]
        self._options = tasks.parse_options(settings, _options(config), config.path)
        self._config, self._seed = config, seed
        self._make(random.Random(0), self._options)  # impossible settings fail now

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for attempt in range(MAX_DRAWS):
            rng = random.Random(f"{self._name} {self._seed} {self._config.split} {index} {attempt}")
            problem = self._make(rng, self._options)
            if tasks.held_out(problem.key) != (self._config.split == "train"):
                break
        else:
            raise UserError(
                f"{self._config.path} has no problem of split {self._config.split!r}: make it larger"
            )
        wrong = rng.random() < self._options.noise
        better, worse = (problem.response, problem.mistake)[:: -1 if wrong else 1]
        other = Example(
            messages=({"role": "user", "content": problem.prompt},),
            text=None,
            response=worse,
            answer=problem.answer,
            source=self._config.name or self._config.path,
            columns={"answer": problem.answer, **problem.columns},
            where=f"{self._config.path}:{index}",
            steps=problem.steps,
            teacher=self._config.teacher,
        )
        example = dataclasses.replace(other, response=better, rejected=other)
        if problem.turns:
            example = dataclasses.replace(example, response=None, turns=problem.turns[wrong])
        return judgement(example) if self._config.judge else example


class GymSource:
    """A reasoning-gym task; its entries go whole into `columns`, for its own scorer to judge.

    Many tasks have several right answers and give none (answer None). A tenth of the questions is held
    out of split train; an index that falls on a question of another split stands for a later one.
    """

    num_bad = 0

    def __init__(self, config: SourceConfig, seed: int):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError(f"{config.path} needs reasoning-gym: pip install 'jaxrl-llm[tasks]'")
        gym = importlib.import_module("reasoning_gym")
        name, options = config.path.removeprefix("gym:"), _options(config)
        self._size = options.pop("size", 20_000)
        if name in UNSTABLE_GYM:
            log.warning(
                "%s makes other rows in another process: set PYTHONHASHSEED=0, and expect no exact resume",
                config.path,
            )
        try:
            self._tasks = gym.create_dataset(name, seed=seed, size=self._size, **options)
        except Exception as error:  # a hundred tasks, each with its own way to refuse
            raise UserError(f"{config.path}: {error}; size was {self._size}, options {options}") from error
        self._config = config

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for attempt in range(min(MAX_DRAWS, self._size)):
            entry = self._tasks[(index + attempt * STRIDE) % self._size]
            if tasks.held_out(entry["question"]) != (self._config.split == "train"):
                break
        else:
            raise UserError(
                f"{self._config.path}: no question of split {self._config.split!r}: raise option size"
            )
        answer = entry["answer"]
        return Example(
            messages=({"role": "user", "content": entry["question"]},),
            text=None,
            response=answer,
            answer=answer,
            source=self._config.name or self._config.path,
            columns=dict(entry),
            where=f"{self._config.path}:{index}",
            teacher=self._config.teacher,
        )


def _options(config: SourceConfig) -> dict[str, Any]:
    """`options` as a dict. Raises ValueError where it is not a JSON object."""
    try:
        options = json.loads(config.options or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"options of {config.path} are not JSON: {config.options!r}: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"options of {config.path} must be a JSON object, got {config.options!r}")
    return options
