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


PEM = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nMIIEow+/=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        # Encoded, wholly or in part, once or twice.
        ("https://h/p%3Fapi_key%3DK%26n%3D5", "https://h/p?api_key=***&n=5"),
        ("api_key%3DK", "api_key=***"),
        ("?api%5Fkey=K and ?n=%20&m=%3D", "?api%5Fkey=*** and ?n=%20&m=%3D"),
        ("next%253Dhttps%253A%252F%252Fu%253AK%2540h", "next=https://***@h"),
        ("a?n=5\\u0026token\\u003dK", "a?n=5&token=***"),
        ("100%25 of 3%2F4", "100%25 of 3%2F4"),
        # Cookies.
        ("Cookie: session=K; theme=dark\nHost: h", "Cookie: ***\nHost: h"),
        ("{'Set-Cookie': 'id=K; Path=/', 'n': 5}", "{'Set-Cookie': ***, 'n': 5}"),
        ("get(url, cookies={'session': 'K'}, n=5)", "get(url, cookies=***, n=5)"),
        ("curl -H 'Cookie: a=K' h", "curl -H 'Cookie: ***' h"),
        ("cookies: 5 boxes, cookie = sweet", "cookies: 5 boxes, cookie = sweet"),
        # Logins.
        ("u:K@h and (user:p@ss@10.0.0.1:8000)", "***@h and (***@10.0.0.1:8000)"),
        ("https://user:p/w?@h/m https://h:8000/m@main", "https://***@h/m https://h:8000/m@main"),
        ("no file https:/u:K@h/x.jsonl, C:/a@b", "no file https:/***@h/x.jsonl, C:/a@b"),
        ("curl -u user:K h --user u:K", "curl -u *** h --user ***"),
        ("image:tag@sha256:ab at 5:30 @home, git@h:o/r", "image:tag@sha256:ab at 5:30 @home, git@h:o/r"),
        # Parameters.
        ("http://h/p?k=K&n=5", "http://h/p?k=***&n=5"),
        ("?k=5&q=x", "?k=5&q=x"),
        ("?headers[auth]=K&session=K&tok=K", "?headers[auth]=***&session=***&tok=***"),
        ("?api_key=ab;cd&n=5;m=6", "?api_key=***&n=5;m=6"),
        ("?api_key='K'", "?api_key=***"),
        # Keys with a known form.
        (f"sk_live_{LONG} rk_test_{LONG}", "*** ***"),
        (f"dapi{LONG}0123456789ab-2", "***-2"),
        (f"pat_{LONG} pat0123456789abCD.{2 * LONG[:16]}", "*** ***"),
        (f"pat_of_all_the_long_names, dapiary_{LONG}", f"pat_of_all_the_long_names, dapiary_{LONG}"),
        (f"xoxb-{LONG} hvs.{LONG} npm_{LONG}", "*** *** ***"),
        (f"x {PEM} y", "x *** y"),
        (repr(PEM), "'***'"),
        (PEM[:60], "***"),
        (PEM.replace("PRIVATE", "PUBLIC"), PEM.replace("PRIVATE", "PUBLIC")),
        # Headers and files.
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("X-Auth-Token: secret", "X-Auth-Token: ***"),
        ("password: hunter2", "password: ***"),
        (
            "AWS_SESSION_TOKEN=K account_key=K refresh_token='K'",
            "AWS_SESSION_TOKEN=*** account_key=*** refresh_token=***",
        ),
        ("""{"token": "0123456789abcdef"} {"token": "hello"}""", """{"token": "***"} {"token": "hello"}"""),
    ],
)
def test_more_forms_of_secrets(text, masked):
    assert mask_text(text) == mask_text(masked) == masked


def test_secrets_of_the_environment_are_found_where_they_are_encoded():
    assert mask_text("/p?q=s3cr%2Ft%28key&n=5", ["s3cr/t(key"]) == "/p?q=***&n=5"


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        *("-", "--a", "?a", "a_", "'a", "://", "sk-", "Bearer ", "--_token", "&key_", "authorization "),
        *("%25", "%3D", "api_key%3D", "a:", "u:K@", "cookie: ", 'cookie: a="', "-u ", "?k=", ";a", "passw"),
        *(
            "-----BEGIN PRIVATE KEY-----",
            "x-key",
            "dapi",
            "pat_",
            "eyJ",
            "eyJ-",
            "credential",
            "\\u00",
            "a;b=",
        ),
    ],
)
def test_a_megabyte_is_masked_at_all(part):
    """Work that grew with the square of the text would take hours."""
    text = part * (1_000_000 // len(part))
    assert len(mask_text(text)) <= len(text)


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
