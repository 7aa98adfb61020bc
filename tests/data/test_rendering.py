"""Limits of chat templates, and messages about templates that are refused."""

import datetime
import os
import subprocess
import sys

import pytest

from jaxrl_llm.data import rendering, template
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.rendering import TemplateLimitError, TemplateProcess
from jaxrl_llm.data.rows import Example, RowError
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import RunError, UserError

CHAT = {"conversations": [[{"role": "user", "content": "hi"}]]}
EXAMPLE = Example(({"role": "user", "content": "hi"},), None, where="f.jsonl:12")
GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WRITES = LOOP.replace("{% endfor %}", "x" * 99 + "{% endfor %}", 1)


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(seconds=0.3)
    yield process
    process.close()


def render(process, text, **arguments):
    return process.render(text, [CHAT | arguments], "the chat template t.jinja", "f.jsonl:3")


@pytest.mark.parametrize(
    "text",
    [
        LOOP,
        WRITES,
        pytest.param(DOUBLED, marks=pytest.mark.slow),
        "{{ 'x' * 10**10 }}",
        pytest.param("{{ 'x'.ljust(10**11) }}", marks=pytest.mark.slow),
        pytest.param("{{ lipsum(n=10**7) }}", marks=pytest.mark.slow),
        "{{ 'abc' | slice(10**10) | list }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{% set a = 'a'.ljust(10**6, 'a') %}{{ a.replace('a', a) }}",
    ],
)
def test_time_memory_and_size_of_a_chat_are_bounded(process, text):
    with pytest.raises(TemplateLimitError, match=r"f.jsonl:3: the chat template t.jinja [tnw]") as error:
        render(process, text)
    assert any(
        word in str(error.value) for word in ("takes more than", "needs more than", "writes more than")
    )
    assert render(process, GOOD) == [("<user>hi", [])]  # the next chat is rendered


def test_the_date_is_that_of_the_run(process):
    writes = "{{ strftime_now('%d %b %Y %H') }}"
    for date in ("2026-11-27", "2020-02-29"):
        dated = process.render(writes, [CHAT], "t", "w", date=date)
        assert dated == [(f"{datetime.date.fromisoformat(date):%d %b %Y} 00", [])]
    before, today, after = datetime.date.today(), render(process, writes)[0][0], datetime.date.today()
    assert today[:-3] in {f"{day:%d %b %Y}" for day in (before, after)}  # no date is kept


def test_prompts_of_a_config_with_a_date_have_it():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + GOOD
    prompts = [encode_prompt(tokenizer, EXAMPLE, ChatConfig(date="2020-02-29")) for _ in range(2)]
    assert [tokenizer.decode(ids) for ids in prompts] == ["2020-02-29<user>hi"] * 2


def test_a_template_file_that_never_ends_is_named(process, tmp_path, monkeypatch):
    monkeypatch.setattr(template, "PROCESS", process)
    file = tmp_path / "t.jinja"
    file.write_text(WRITES)
    with pytest.raises(UserError, match=f"f.jsonl:12: the chat template {file} takes more than 0.3 s"):
        encode_prompt(make_tokenizer(), EXAMPLE, ChatConfig(chat_template=str(file)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "cannot render this chat: roles must alternate"),
        ("{{ raise_exception('x' * 10**6) }}", "cannot render this chat: x{500}$"),
        ("{{ messages[0].content.nothing.more }}", "cannot render this chat: .*no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "cannot render this chat: TypeError"),
        ("{{ range(10**9) }}", "cannot render this chat: OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render this chat: RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ],
)
def test_a_template_that_refuses_a_chat_is_an_error_of_the_row(process, text, message):
    with pytest.raises(RowError, match=f"^f.jsonl:3: the chat template t.jinja .*{message}"):
        render(process, text)


@pytest.mark.parametrize("text", ["{% for %}", "{{ 1 | no_such_filter }}", "{% endfor %}"])
def test_a_template_that_is_not_jinja_is_an_error_of_the_template(process, text):
    with pytest.raises(UserError, match=r"^the chat template t.jinja is not a valid Jinja template") as error:
        render(process, text)
    assert not isinstance(error.value, RowError)


def test_arguments_that_json_cannot_hold(process):
    with pytest.raises(RowError, match=r"f.jsonl:3: the chat holds what JSON cannot: .*set"):
        render(process, GOOD, options={1})


def test_several_calls_and_generation_spans(process):
    text = "{% for m in messages %}user:{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    calls = [CHAT, CHAT | {"return_assistant_tokens_mask": True}]
    assert process.render(text, calls, "t", "w") == [("user:hi;", []), ("user:hi;", [(5, 7)])]


def test_a_process_that_was_killed_is_started_again(process, monkeypatch):
    render(process, GOOD)
    process._process.kill()
    process._process.wait()
    assert render(process, GOOD) == [("<user>hi", [])]
    process._process.kill()
    process._process.wait()
    monkeypatch.setattr(process._process, "poll", lambda: None)  # as if it dies just after this
    assert render(process, GOOD) == [("<user>hi", [])]
    dies = [sys.executable, "-c", "import sys; sys.exit('no room')"]
    monkeypatch.setattr(rendering, "python_command", lambda *_: dies)
    with pytest.raises(RunError, match=r"renders chat templates ended with code 1: no room"):
        render(TemplateProcess(), GOOD)


def test_an_interrupted_chat_leaves_no_reply_behind(process, monkeypatch):
    monkeypatch.setattr(rendering, "read_message", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        render(process, "{{ messages }}")
    monkeypatch.undo()
    assert render(process, GOOD) == [("<user>hi", [])]


def test_the_process_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen, child = {}, rendering.Child
    monkeypatch.setattr(rendering, "Child", lambda command, **k: seen.update(k) or child(command, **k))
    process = TemplateProcess()
    assert render(process, GOOD) == [("<user>hi", [])]
    process.close()
    assert "HF_TOKEN" not in seen["env"] and "JAX_PLATFORMS" not in seen["env"]


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (7, "the chat template of hub/model must be text, got int"),
        ("x" * (1 << 21), "the chat template of hub/model has 2,097,152 characters"),
        ({"tool_use": "x"}, "the chat template of hub/model is ambiguous"),
        ("{% if %}", "the chat template of hub/model is not a valid Jinja template"),
        ("{{ messages[0].content }}\ud800", "f.jsonl:12: .*lone surrogate"),
    ],
)
def test_the_template_of_a_model_folder_may_hold_anything(chat_template, message):
    tokenizer = make_tokenizer()
    tokenizer.name_or_path, tokenizer.chat_template = "hub/model", chat_template
    with pytest.raises(UserError, match=message):
        encode_prompt(tokenizer, EXAMPLE, ChatConfig())


def test_a_template_file_is_read_again_when_it_changes_and_belongs_to_no_tokenizer(tmp_path):
    file, tokenizer = tmp_path / "t.jinja", make_tokenizer()
    config = ChatConfig(chat_template=str(file))
    for i, text in enumerate(["one", "two"]):
        file.write_text(text + "{{ messages[0].content }}")
        os.utime(file, ns=(0, i))
        assert tokenizer.decode(encode_prompt(tokenizer, EXAMPLE, config)) == text + "hi"
    assert tokenizer.decode(encode_prompt(tokenizer, EXAMPLE, ChatConfig())).startswith("<|im_start|>user")
    os.truncate(file, 1 << 33)  # sparse
    with pytest.raises(UserError, match=f"the chat template {file} has 8,589,934,592 bytes"):
        encode_prompt(tokenizer, EXAMPLE, config)
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match=f"the chat template {file} cannot be read"):
        encode_prompt(tokenizer, EXAMPLE, config)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the address space")
def test_templates_are_rendered_under_a_lower_limit_of_memory():
    """`ulimit -v` sets a hard one, which no process may raise."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))\n"
        "from jaxrl_llm.data.rendering import TemplateProcess\n"
        f"print(TemplateProcess().render({GOOD!r}, [{CHAT!r}], 't.jinja', 'f.jsonl:3'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[('<user>hi', [])]\n", done.stderr
