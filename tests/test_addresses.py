"""Texts without the secrets in them, and addresses of services."""

import pytest

from jaxrl_llm.addresses import host_of, mask_text, secrets_of
from jaxrl_llm.errors import RunError, UserError

LONG = "0123456789abcdef0123"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:p4ss@host/m and http://t0ken@h", "https://***@host/m and http://***@h"),
        ("https://user:p@ss@host/m@main", "https://***@host/m@main"),
        ("--tp 2 --api-key s3cret --admin-api-key=x", "--tp 2 --api-key *** --admin-api-key=***"),
        ("Start it with --api-key and set", "Start it with --api-key and set"),
        ("Write --key value, or --prompt_key question", "Write --key value, or --prompt_key question"),
        ("--max-total-tokens 9", "--max-total-tokens 9"),
        ("a@b.c //x:y", "a@b.c //x:y"),
        ("https://h/p?api_key=abc&n=5#x", "https://h/p?api_key=***&n=5#x"),
        ("https://h/p?n=5&X-Amz-Signature=abc: refused", "https://h/p?n=5&X-Amz-Signature=*** refused"),
        ("('/p?code=a%20b') and ?apikey=x", "('/p?code=***') and ?apikey=***"),
        (f"https://h/p?user={LONG}", "https://h/p?user=***"),
        ("https://h/p?key=${JUDGE_KEY}", "https://h/p?key=${JUDGE_KEY}"),
        ("a ? b : key=5; x == y", "a ? b : key=5; x == y"),
    ],
)
def test_logins_and_keys_are_masked_in_any_text(text, masked):
    assert mask_text(text) == masked
    assert (str(UserError(text)), str(RunError(text))) == (masked, masked)


def test_secrets_of_the_environment_are_masked_whole_unless_they_are_long():
    environment = {
        "A_TOKEN": "short",
        "B_KEY": "plain12345",
        "API_KEY": "s3cr.t(l",
        "DB_PASSWORD": "12345678",
    }
    secrets = secrets_of(environment | {"C_TOKEN": LONG})
    texts = ["short", "plain12345", "=s3cr.t(l;", "x12345678", "12345678", f"x{LONG}y"]
    assert [mask_text(text, secrets) for text in texts] == [
        *("short", "plain12345", "=***;", "x12345678", "***", "x***y")
    ]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://a.b:8/c?d=e", "a.b"),
        ("http://u:p@[::1]:8", "::1"),
        ("ftp://a", ""),
        ("http://u:p/w@a", ""),
        ("http://a/b c", ""),
        ("http://a/\n", ""),
        ("a:8", ""),
    ],
)
def test_the_host_of_an_address(url, host):
    assert host_of(url) == host
