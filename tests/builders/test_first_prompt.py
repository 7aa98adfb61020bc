"""The line on the first prompt: chat or plain text, and what the model reads."""

import json
from types import SimpleNamespace

import pytest

from jaxrl_llm.builders.describe import first_prompt_line
from jaxrl_llm.config import ChatConfig, DataConfig, SourceConfig, TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer

CHAT = r"<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"


def line_of(tmp_path, row, chat=ChatConfig(), longest=64):  # noqa: B008  frozen
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    data, tokenizer = DataConfig(train=(SourceConfig(path=str(file)),), chat=chat), make_tokenizer()
    loader = Loader(data, tokenizer, 0, longest, split="train", max_tokens=2 * longest)
    run = SimpleNamespace(config=TrainConfig(data=data), loaders={"train": loader}, tokenizer=tokenizer)
    return [line.replace(str(file), "FILE") for line in first_prompt_line(run)]


@pytest.mark.parametrize(
    ("row", "chat", "expected"),
    [
        ({"prompt": "3+4="}, ChatConfig(), "plain text (--data.chat.render auto), 4 tokens: '3+4='"),
        ({"question": "3+4="}, ChatConfig(), f"chat template (--data.chat.render auto), 12 tokens: '{CHAT}'"),
        (
            {"prompt": "3+4="},
            ChatConfig(render="chat"),
            f"chat template (--data.chat.render chat), 12 tokens: '{CHAT}'",
        ),
        ({"question": "3+4="}, ChatConfig(render="plain"), "plain text (--data.chat.render plain), 4 tokens"),
    ],
)
def test_chat_or_plain_text_is_said_with_the_rendered_prompt(tmp_path, row, chat, expected):
    (line,) = line_of(tmp_path, row, chat)
    assert line.startswith(f"first prompt (FILE:1): {expected}")


def test_of_a_long_prompt_both_ends_are_shown(tmp_path):
    (line,) = line_of(tmp_path, {"prompt": "1" + "+2" * 200}, longest=1000)
    assert line.endswith("401 tokens: '1" + "+2" * 49 + "+' ... '" + "+2" * 50 + "'")


def test_rows_without_a_prompt_have_no_line(tmp_path):
    assert line_of(tmp_path, {"prompt": "1" * 100}) == []
