"""Tokenizers of Hugging Face folders, in and out, in files that transformers 4 and 5 read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_json
from jaxrl_llm.models import TransformerConfig

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(folder: Path | str, config: TransformerConfig | None = None) -> Any:
    """The tokenizer of a folder, a transformers `PreTrainedTokenizerBase`; no code of the folder is run.

    Args:
        config: of the model it is to be used with; None = not known yet.

    Raises:
        ValueError: no tokenizer there, one that transformers cannot read or that wants its own code run,
            one without an end-of-sequence token, or with ids that the model's vocabulary lacks.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import

    folder = Path(folder)
    if not any((folder / name).is_file() for name in _FILES):
        raise UserError(
            f"{folder}: no tokenizer; looked for {', '.join(_FILES)}. Copy the base model's files here."
        )
    settings = folder / "tokenizer_config.json"
    own_code = bool(settings.is_file() and read_json(settings).get("auto_map"))
    if own_code and not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{settings}: auto_map asks for the folder's own code, which is never run. Put a tokenizer.json "
            "here (save the tokenizer as a fast one with transformers): it needs no code."
        )
    tokenizer_class = PreTrainedTokenizerFast if own_code else AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise all kinds for damaged files
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {error})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{settings}: no eos_token; without one a response never ends. Name the end token there."
        )
    largest = max(tokenizer.get_vocab().values())
    if config is not None and largest >= config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {largest}, but the model's vocab_size is "
            f"{config.vocab_size}; it is the tokenizer of another model."
        )
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer and its chat template, for readers of transformers 4 and 5 alike.

    5 writes a class name, a list of special tokens and a template file that 4 does not know; both understand
    the older spellings.
    """
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if isinstance(tokenizer.chat_template, str):
        settings["chat_template"] = tokenizer.chat_template
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def special_ids(tokenizer: Any) -> dict[str, int]:
    """bos, eos and pad of a tokenizer as config.json names them; those it has."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name, None) is not None}


def generation_config(tokenizer: Any) -> dict[str, Any]:
    """generation_config.json: that of the folder the tokenizer came from, else its special ids."""
    origin = tokenizer.name_or_path and Path(tokenizer.name_or_path) / "generation_config.json"
    return read_json(origin) if origin and origin.is_file() else special_ids(tokenizer)


def end_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a response by generation_config.json: a chat model has more than its tokenizer's one."""
    file = folder / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)
