"""The character tokenizer: one id a character, control tokens, template, a folder AutoTokenizer reads."""

import pytest
from transformers import AutoTokenizer

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_ids_of_a_chat_by_hand(tokenizer):
    ids = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    start, end, newline, user, assistant = 2, 1, 9, 5, 6
    digits = {character: 10 + ord(character) - 32 for character in "1+2=3"}
    question = [digits[c] for c in "1+2="]
    turn = [start, assistant, newline, digits["3"], end, newline]
    assert ids == [start, user, newline, *question, end, newline, *turn]


def test_sizes(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 128
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_every_printable_text_comes_back(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\t\nuser\nassistant\n  two  spaces , ."
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("user\nx")["input_ids"]) == "user\nx"


def test_other_characters_are_one_unknown_each(tokenizer):
    assert tokenizer("a\u00e9b\u4e2d")["input_ids"] == [75, 3, 76, 3]


def test_control_tokens_vanish_from_plain_text(tokenizer):
    ids = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert tokenizer.decode([*ids, 127, 0], skip_special_tokens=True) == "user\n1+2=\nassistant\n3\n"


def test_saved_folder_reads_alike(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    encode = lambda t: t.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert dict(encode(loaded)) == dict(encode(tokenizer))
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id) == (128, 0, 1)
