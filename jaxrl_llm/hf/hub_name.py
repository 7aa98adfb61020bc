"""Names of repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from typing import NamedTuple

SUFFIX = ".gguf"
MAX_NAME = 400  # characters; the hub allows 96 for a name and 255 for a revision
_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(
    rf"(hf://)?(?P<repo>{_PART}(/{_PART})?)(@(?P<revision>[\w./-]+?))?(?P<file>(/[\w.-]+)+\.gguf)?"
)
_LINK = re.compile(
    rf"(?P<site>(https?://)?(www\.)?(huggingface\.co|hf\.co)/)?(?P<repo>{_PART}/{_PART})"
    r"(/(tree|blob|resolve)/(?P<revision>[\w.-]+)(?P<file>(/[\w.-]+)+\.gguf)?)?(:(?P<tag>[\w.-]+))?(/|\?.*)?"
)


class HubName(NamedTuple):
    """A repository of the hub, "org/model@revision/file.gguf"; an optional "hf://" before it."""

    repo: str
    revision: str | None  # branch, tag or commit; None = the default branch
    file: str | None  # GGUF file; None = the safetensors of the repository

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


def parse_hub_name(name: str) -> HubName | None:
    """Parse a hub name; None if the text is not a hub name."""
    match = _HUB_NAME.fullmatch(name) if len(name) <= MAX_NAME else None
    if match is None or match["repo"].endswith(SUFFIX):  # a missing local GGUF file
        return None
    return HubName(match["repo"], match["revision"], match["file"] and match["file"][1:])


def hub_spelling(name: str) -> str:
    """Return the hub name for a link to the hub or llama.cpp's ORG/MODEL:TAG; "" if the text is neither."""
    match = _LINK.fullmatch(name) if len(name) <= MAX_NAME else None
    if match is None or not (match["site"] or match["tag"]):
        return ""
    if match["tag"]:
        return f"{match['repo']}/FILE.gguf, by the file of {match['tag']}"
    revision = "" if match["revision"] in (None, "main") else match["revision"]
    return str(HubName(match["repo"], revision, match["file"] and match["file"][1:]))
