"""The format of tool calls of a chat template: a call is rendered and read back."""

import importlib.util
from pathlib import Path

import pytest

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.load import detect_format, make_conversations
from jaxrl_llm.errors import UserError

TEMPLATE = (
    "PROMPT{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = "{{ f.arguments | tojson }}"
HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": ARGUMENTS}\n</tool_call>'
XML = (
    "<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments | items %}\n<parameter={{ k }}>\n"
    "{{ VALUE }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
)
WRITTEN = {
    "hermes": ("hermes", HERMES),  # Qwen 2.5
    "llama": ("llama", '{"name": "{{ f.name }}", "parameters": ARGUMENTS}'),  # Llama 3.1
    "xml": ("xml", XML.replace("VALUE", "v if v is string else v | tojson")),  # Qwen3-Coder
    "xml with Python's lists": ("xml", XML.replace("VALUE", "v")),  # Seed-OSS
    "pythonic": (
        "pythonic",
        "[{{ f.name }}({% for k, v in f.arguments|items %}{{ k }}={{ v | tojson if v is string else v }}"
        "{{ ', ' if not loop.last }}{% endfor %})]",
    ),
}
UNKNOWN = {  # taken for hermes by the tag alone
    "Apriel": '<tool_calls>[{"name": "{{ f.name }}", "arguments": ARGUMENTS}]</tool_calls><tool_call>',
    "MiniMax-M3": "<tool_call>\n<invoke name='{{ f.name }}'>ARGUMENTS</invoke></tool_call>",
    "GLM-4.5": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}{% endfor %}",
    "Mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]ARGUMENTS",
}


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def template(call, prompt=""):
    return TEMPLATE.replace("CALL", call).replace("PROMPT", prompt).replace("ARGUMENTS", ARGUMENTS)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_is_the_one_that_reads_the_call(tokenizer, name):
    tokenizer.chat_template = template(WRITTEN[name][1])
    format, call = detect_format(tokenizer, ChatConfig(system_prompt="Be brief."))
    assert format == WRITTEN[name][0] and "weather" in call and "Oslo" in call and "<|im_" not in call


def test_the_call_is_shown_as_the_template_writes_it(tokenizer):
    tokenizer.chat_template = template(HERMES)
    arguments = '{"city": "Oslo", "days": 3, "units": ["mm", "C"], "detail": {"hourly": true}}'
    written = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    assert detect_format(tokenizer, ChatConfig()) == ("hermes", written)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_call_that_no_format_reads_is_refused(tokenizer, name):
    tokenizer.chat_template = template(UNKNOWN[name])
    with pytest.raises(UserError, match=r"it writes '.*weather.*one of xml, hermes, pythonic, llama"):
        detect_format(tokenizer, ChatConfig())


def test_a_template_that_writes_no_calls_is_refused_unless_its_prompt_asks_for_a_format(tokenizer):
    tokenizer.chat_template = template("")
    with pytest.raises(UserError, match=r"of the tool weather it writes none\. Name the format"):
        detect_format(tokenizer, ChatConfig())
    asks = "You MUST put it in the format of [func_name1(params_name1=params_value1), ...]"
    tokenizer.chat_template = template("{{ f.name }}(city=Oslo)", asks)  # Llama 4
    format, call = detect_format(tokenizer, ChatConfig())
    assert format == "pythonic" and call.startswith("[weather(city='Oslo', days=3")


READ_BY = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507_training", "qwen3_vl"), "hermes"),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "nemotron_3_nano"), "xml"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama"),
}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize("name", READ_BY)
def test_templates_of_trl(tokenizer, name):
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    assert detect_format(tokenizer, ChatConfig())[0] == READ_BY[name]


def test_a_run_says_which_format_it_reads(tokenizer):
    def line(call, prompt="{{ tools }}", **settings):
        tokenizer.chat_template = template(call, prompt)
        config = EnvConfig(tools=("calculator",), **settings)
        with make_conversations(config, tokenizer, ChatConfig()) as made:
            return made.line

    hermes = 'tool calls are read as hermes, such as \'<tool_call>\\n{"name": "weather", '
    assert line(HERMES).startswith(hermes) and line(HERMES).endswith("</tool_call>'")
    unlike = line(HERMES, format="xml")
    assert unlike.startswith("tool calls are read as xml, such as '<tool_call>\\n<function=weather>")
    assert unlike.endswith("; the chat template writes them as hermes")
    assert line("", "", format="hermes").endswith("; the prompts do not show the tools to the policy")
