"""Addresses of services, and texts without the secrets in them. Imports nothing of ours.

Every text that leaves the program (config.json, checkpoints, errors, warnings, loggers, output files) goes
through `mask_text`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

MASKED = "***"
"""Stands in place of a secret."""
SECRET_NAME = re.compile(
    r"(^|_)(api_?key|(access|secret|private|auth)_?key|token|secret|password|credential)$", re.I
)
WITHHELD_NAME = re.compile(
    r"(^|_)(KEYS?|TOKENS?|PAT|AUTH|CREDENTIALS?)(_|$)|APIKEY|PASSW(OR)?D|PASSPHRASE|SECRET", re.I
)
"""Of environment variables that programs and reward workers do not get."""
_LOGIN_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")  # a URL with a password in it
MIN_SECRET = 8  # characters; a shorter text may be an ordinary word
_LOGIN = re.compile(r"(?<=://)[^/?#\s]+(?=@)")  # user:password, or a token alone
_VALUE = r"""(?!\$\{)[^\s&#;"'<>]"""  # a character of a parameter; ${NAME} is a variable
_SECRETS = (  # names of parameters; not tokenizer, author, encode
    r"(?:[\w.%-]*(?:key|token|secret|passw\w*|pwd|credential\w*|signature)|"
    r"(?:[\w.%-]*[_.%-])?(?:auth|authorization|sig|sas|code|pass|pw|jwt|cred))(?:[_.-]?(?:v?\d+|id))?"
)
_PARAMETER = re.compile(rf"([?&#;](?:{_SECRETS}=|[\w.%-]+=(?={_VALUE}{{20}}))){_VALUE}+", re.I)
"""?api_key=VALUE, and whatever has a value of 20 characters."""
_NAMED = (
    r"[\w-]*(?:(?:api|admin|auth|access|secret|private|subscription)[_-]?key|password|secret|"
    r"(?:auth|api|access|hf|hub|bearer|reward|github)[_-]?token)"
)  # --prompt_key COLUMN and eos_token='</s>' hold no secret
_QUOTED = r"""(?:"[^"\n]+"|'[^'\n]+')"""
_FLAG = re.compile(rf"((?<![\w-])--(?:{_NAMED}|token)[ =]+)(?!(?:and|or|is)\b)(?:{_QUOTED}|\S+)", re.I)
"""Of servers: --api-key KEY."""
_ASSIGNED = re.compile(
    rf"""((?<![\w.-])(?:{_NAMED}=|["']{_NAMED}["']\s*:\s*(?=["'])|\bBearer\s+(?=\S{{8}})))"""
    rf"""(?!\$|["']\$)(?:{_QUOTED}|[^\s"',;&)\]}}]+)""",
    re.I,
)
"""Of shells, Python and JSON: WANDB_API_KEY=KEY, api_key='KEY', "api_key": "KEY", Bearer KEY."""
_HEADER = re.compile(
    rf"((?<![\w-])(?:(?:proxy-)?authorization[\"']?\s{{0,9}}[:=]\s{{0,9}}[\"']?(?:[A-Za-z]+\s{{1,9}})?|"
    rf"{_NAMED}[\"']?\s{{0,9}}[:=,]\s{{1,9}}[\"']?)"
    r")(?!\$)(?=[^\s\"',;]{0,99}\d)[^\s\"',;)\]}]{8,}",
    re.I,
)
"""Of HTTP, YAML and TOML: X-API-Key: KEY, Authorization: Basic KEY, api_key = "KEY"; KEY has a digit."""
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w-]{20,}|(?:hf|gsk|gh[opsu])_[A-Za-z0-9]{30,}|(?:xai|nvapi|glpat)-[\w-]{20,}|"
    r"github_pat_\w{30,}|eyJ[\w-]{10,}\.eyJ[\w-]{8,}\.[\w-]+|r8_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}|AIza[\w-]{35}|xox[abp]-[\w-]{20,}|(?<=hooks\.slack\.com/services/)\S+)"
)
"""Keys that well-known services hand out, anywhere."""


def mask_text(text: str, secrets: Collection[str] = ()) -> str:
    """Return the text with its secrets masked.

    Masked are logins in `scheme://user:password@host`, values of parameters such as `?api_key=KEY`, of flags
    such as `--api-key KEY`, of assignments such as `WANDB_API_KEY=KEY`, keys with a known form (sk-..,
    hf_..), and `secrets`: of 16 characters everywhere, of 8 only as whole words.
    """
    text = _KEY.sub(MASKED, _LOGIN.sub(MASKED, text))
    for pattern in (_PARAMETER, _FLAG, _ASSIGNED, _HEADER):
        text = pattern.sub(rf"\1{MASKED}", text)
    for word in sorted((word for word in secrets if len(word) >= MIN_SECRET), key=len, reverse=True):
        alone = "" if len(word) >= 2 * MIN_SECRET else "[A-Za-z0-9]"
        text = re.sub(
            rf"(?<!{alone}){re.escape(word)}(?!{alone})" if alone else re.escape(word), MASKED, text
        )
    return text


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names look secret."""
    return [value for name, value in environment.items() if SECRET_NAME.search(name)]


def withheld_names(environment: Mapping[str, str], keep: Collection[str] = ()) -> set[str]:
    """Return the names of variables that other processes do not get: name or value looks secret, and the
    name is not in `keep`."""
    is_secret = lambda name: WITHHELD_NAME.search(name) or _LOGIN_VALUE.search(environment[name])
    return {name for name in environment if name not in keep and is_secret(name)}


def host_of(url: str) -> str:
    """Return the host of an http address; "" for other text."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError:
        return ""
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return (parts.hostname or "") if is_plain and parts.scheme in ("http", "https") else ""


def holds_login(url: str) -> bool:
    """Return whether an address has a user or password, which no client of this package sends."""
    return "@" in urlsplit(url).netloc


def is_loopback(host: str) -> bool:
    """Return whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
