"""Texts without the secrets in them, and addresses of services."""

import time

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
        ("?pass=x&accessToken=y&key_id=z", "?pass=***&accessToken=***&key_id=***"),
        ("?keyword=a&author=b&tokenizer=c&design=d", "?keyword=a&author=b&tokenizer=c&design=d"),
        ("--eos_token </s> --pad-token=<pad>", "--eos_token </s> --pad-token=<pad>"),
        ("--API-KEY 'a b' --hf_token c", "--API-KEY *** --hf_token ***"),
        ("export WANDB_API_KEY=ab-c; HF_TOKEN='d' x", "export WANDB_API_KEY=***; HF_TOKEN=*** x"),
        ("""OpenAI(api_key="a") {'api_key': 'b'}""", "OpenAI(api_key=***) {'api_key': ***}"),
        ("{'Authorization': 'Bearer abcdefgh'}", "{'Authorization': 'Bearer ***'}"),
        ("A_API_KEY=$KEY, a bearer of news", "A_API_KEY=$KEY, a bearer of news"),
        ("""eos_token='</s>' {"answer_key": "a"}""", """eos_token='</s>' {"answer_key": "a"}"""),
        (f"http://h/sk-proj-{LONG}/score hf_{2 * LONG}", "http://h/***/score ***"),
        (f"sk-learn, desk-{LONG}", f"sk-learn, desk-{LONG}"),
        (
            "X-API-Key: abcdefg1, Ocp-Apim-Subscription-Key: abcdefg1",
            "X-API-Key: ***, Ocp-Apim-Subscription-Key: ***",
        ),
        ("Authorization: Basic YWJjZGVmZ2g1", "Authorization: Basic ***"),
        ("""api_key = "abcdefg1" ('HF_TOKEN', 'abcdefg1')""", """api_key = "***" ('HF_TOKEN', '***')"""),
        ("api_key: must be text; authorization is needed", "api_key: must be text; authorization is needed"),
        (
            "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.a-b",
            "***",
        ),
        (f"https://hooks.slack.com/services/{LONG}", "https://hooks.slack.com/services/***"),
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
    "part",
    ["-", "--a", "?a", "a_", "'a", "://", "sk-", "Bearer ", "--_token", "&key_", "authorization "],
)
def test_long_texts_are_masked_in_linear_time(part):
    start = time.perf_counter()
    mask_text(part * 20_000)
    assert time.perf_counter() - start < 5


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
