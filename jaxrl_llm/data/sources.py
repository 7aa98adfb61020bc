"""Open a `SourceConfig` as a random-access sequence of `Example`s."""

from __future__ import annotations

from typing import Literal, Protocol

from jaxrl_llm.data.rows import Example, SourceConfig

BadRows = Literal["skip", "fail"]


class Source(Protocol):
    """Random access to examples; the same index gives the same example in every process."""

    num_bad: int  # rows left out because they were bad

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def open_source(config: SourceConfig, seed: int, bad_rows: BadRows = "fail") -> Source:
    """Source of examples; bad rows are skipped and counted, or refused with file:line and reason."""
    raise NotImplementedError
