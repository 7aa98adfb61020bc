"""A character-level tokenizer for the runs that need no download."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>", "<unk>")
ROLES = ("system", "user", "assistant", "tool")  # one id each right after <|im_start|>, letters elsewhere
VOCAB_SIZE = 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per character: printable ASCII, tab, newline, and ChatML control tokens.

    128 ids: pad 0, eos = <|im_end|> 1. Other characters become <unk>. `save_pretrained` writes a folder that
    `AutoTokenizer.from_pretrained` reads.
    """
    from transformers import PreTrainedTokenizerFast  # a second to import

    characters = ["\t", "\n", *(chr(code) for code in range(32, 127))]
    words = [*SPECIAL, *ROLES, *characters]
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(words))]
    vocab = {word: i for i, word in enumerate([*words, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    role = Regex(r"\A(?:" + "|".join(ROLES) + r")(?=\n)|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(role, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", *reserved],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
