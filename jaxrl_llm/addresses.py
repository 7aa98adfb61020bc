"""Addresses of services, and texts without the secrets in them. Imports nothing of ours.

Every text that leaves the program (config.json, checkpoints, errors, warnings, loggers, output files) goes
through `mask_text`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
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
_NAMED = (
    r"[\w-]*(?:(?:api|admin|auth|access|account|client|encryption|license|master|secret|service|session|signing|"
    r"ssh|private|subscription)[_-]?key|passw\w{0,9}|passphrase|secret|credentials?|"
    r"(?:access|api|auth|bearer|bot|csrf|github|gitlab|hf|hub|refresh|reward|secret|security|session|slack)"
    r"[_-]?token)"
)  # --prompt_key COLUMN and eos_token='</s>' hold no secret
_PARAMETERS = (  # not tokenizer, author, encode
    r"(?:[\w.%\[-]*(?:key|token|secret|passw\w{0,9}|pwd|credentials?|signature|session)|(?:[\w.%\[-]*[_.%\[-])?"
    r"(?:auth|authorization|sig|sas|sid|code|pass|pw|jwt|cred|otp|hmac|tok))(?:[_.-]?(?:v?\d+|id))?\]?"
)
_VALUE = r"""(?!\$\{)(?:[^\s&#;"'<>]|;(?![\w.%-]{1,40}=))"""  # of a parameter; ${NAME} is a variable
_QUOTED = r"""(?:"[^"\n]+"|'[^'\n]+')"""
_KEYS = (  # with the times that the last character comes at least
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{8,}",  # Stripe
    r"(?:sk|pk)-[\w-]{20,}",  # OpenAI, Anthropic, OpenRouter, Langfuse
    r"(?:hf|gsk|gh[oprsu]|fw|npm|r8|rpa|e2b|pcsk|ntn|whsec)_[A-Za-z0-9]{20,}",
    r"(?:pat|(?:github|dckr)_pat|(?:wandb|tgp|dop)_v1|(?:lin|api)_(?:api|org)|lsv2_[ps][tk]|shpat)_"
    r"(?=[\w-]{0,40}\d)[\w-]{16,}",
    r"(?:xai|nvapi|glpat|pplx|tvly|pypi|xapp|xox[abeoprs]|GOCSPX)-[\w-]{20,}",
    r"(?:dapi|SK)[0-9a-f]{32,}",  # Databricks, Twilio
    r"pat[A-Za-z0-9]{14}\.[0-9a-f]{32,}",  # Airtable
    r"(?:ya29|hvs|SG)\.[\w.-]{20,}",  # Google, Vault, SendGrid
    r"A(?:KI|SI)A[A-Z0-9]{16}",
    r"AIza[\w-]{35}",
    r"\d{8,10}:AA[\w-]{30,}",  # Telegram
    r"(?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{8,}\.[\w-]+",
    r"(?<=hooks\.slack\.com/services/)\S+",
)
"""Keys that well-known services hand out, anywhere in a text."""
_RULES = (
    # A private key, to its end or, cut off, to the end of the text.
    r"()-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[^-]*(?:-(?!----)[^-]*)*"
    r"(?:-----END [A-Z0-9 ]{0,50}-----)?",
    # Logins: scheme://user:password@host, or a token alone (of a path https:/user:password@host);
    # user:password@host; curl -u user:password.
    r"((?<=://))(?:[^/?#\s]+|[^/?#\s:@\[]*:(?!\d{1,5}[/?#])[^\s@]{1,200})(?=@)",
    r"((?<=[a-z0-9]:/))(?!/)[^/?#\s:@]{1,64}:[^/?#\s]{1,200}(?=@)",
    r"""((?<![^\s"'`=(,\[{<|&?]))[\w.%+~-]{1,64}:[^\s/"'<>]{1,200}(?=@(?!sha\d)[\w\[])""",
    r"((?<!\S)(?:-u|--user|--proxy-user)[ =])[^\s:]{1,64}:\S+",
    # Cookie: name=value; of Python and JSON, too.
    r"""((?<![\w-])(?:set-)?cookies?["']?\s{0,9}[:=,]\s{0,9})"""
    r"""(?:"[^"\n=]{1,99}=[^"\n]*"|'[^'\n=]{1,99}=[^'\n]*'|\{[^}\n]*\}|[\w.-]{1,99}=(?:"[^"\n]*"|[^\n"'])*)""",
    # ?api_key=VALUE, ?k=VALUE (?k=5 counts something), and whatever has a value of 20 characters.
    rf"""([?&#;](?:{_PARAMETERS}=|k=(?!\d{{1,4}}\b)|[\w.%\[\]-]+=(?={_VALUE}{{20}}))["']?){_VALUE}+""",
    # Of servers: --api-key KEY.
    rf"((?<![\w-])--(?:{_NAMED}|token)[ =]+)(?!(?:and|or|is)\b)(?:{_QUOTED}|\S+)",
    # Of shells, Python and JSON: WANDB_API_KEY=KEY, api_key='KEY', "api_key": "KEY", Bearer KEY.
    rf"""((?<![\w.-])(?:{_NAMED}=|["']{_NAMED}["']\s*:\s*(?=["'])|\bBearer\s+(?=\S{{8}})))"""
    rf"""(?!\$|["']\$)(?:{_QUOTED}|[^\s"',;&)\]}}]+)""",
    r"""(["']token["']\s{0,9}:\s{0,9}["'])(?=[^\s"']{0,99}\d)[^\s"']{16,}""",
    # Of HTTP, YAML and TOML: X-API-Key: KEY, Authorization: Basic KEY, api_key = "KEY".
    r"((?<![\w-])x-[\w-]{0,60}(?:key|token|secret|auth\w{0,20})[\"']?\s{0,9}[:=,]\s{0,9}[\"']?)(?!\$)[^\s\"',;)\]}]+",
    r"((?<![\w-])(?:proxy-)?authorization[\"']?\s{0,9}[:=,]\s{0,9}[\"']?"
    r"(?:Basic|Bearer|Digest|Negotiate|Token|ApiKey)\s{1,9})(?!\$)[^\s\"',;)\]}]+",
    rf"((?<![\w-])(?:(?:proxy-)?authorization[\"']?\s{{0,9}}[:=]\s{{0,9}}[\"']?|"
    rf"{_NAMED}[\"']?\s{{0,9}}[:=,]\s{{1,9}}[\"']?)"
    r")(?!\$)(?=[^\s\"',;]{0,99}\d)[^\s\"',;)\]}]{4,}",
)
"""Of text before a secret, which is shown, and the secret."""
_ENCODED = re.compile(r"(?:%(?:25)*|\\u00|\\x)(2[1-9a-f]|[3-6][0-9a-f]|7[0-9a-e])", re.IGNORECASE)
_WORD = re.compile(r"""[^\s"'<>]+""")


def mask_text(text: str, secrets: Collection[str] = ()) -> str:
    """Return the text with its secrets masked, in time linear in the text.

    Masked are logins (user:password@host), values of parameters (?api_key=KEY), of flags (--api-key KEY), of
    assignments (WANDB_API_KEY=KEY), of headers and cookies, private keys, keys with a known form (sk-..,
    hf_..), and `secrets`: of 16 characters everywhere, of 8 only as whole words. A word of which a part is
    encoded (api_key%3DKEY) is shown decoded if it holds a secret.
    """
    words = sorted((word for word in secrets if len(word) >= MIN_SECRET), key=len, reverse=True)
    masked = _masked(text, words)
    if not _ENCODED.search(masked):
        return masked

    def decoded(match: re.Match) -> str:
        plain = _ENCODED.sub(lambda encoded: chr(int(encoded[1], 16)), match.group())
        shown = _masked(plain, words)
        return match.group() if shown == plain else shown

    return _WORD.sub(decoded, masked)


def _masked(text: str, words: Iterable[str]) -> str:
    for pattern in _patterns():
        text = pattern.sub(rf"\1{MASKED}", text)
    for word in words:
        alone = "" if len(word) >= 2 * MIN_SECRET else "[A-Za-z0-9]"
        pattern = rf"(?<!{alone}){re.escape(word)}(?!{alone})" if alone else re.escape(word)
        text = re.sub(pattern, MASKED, text)
    return text


@functools.cache
def _patterns() -> list[re.Pattern]:
    """Compile the rules when a text is masked for the first time: `--help` has none."""
    keys = re.compile(rf"((?<![A-Za-z0-9]))(?:{'|'.join(_KEYS)})")
    return [keys, *(re.compile(rule, re.IGNORECASE) for rule in _RULES)]


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
