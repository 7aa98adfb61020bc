"""Loading and saving tokenizers of Hugging Face folders, in files that transformers 4 and 5 read the same
way."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.host.command import working
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.models import TransformerConfig

GENERATION = "generation_config.json"
_SHOWN = 3  # tokens of a difference
_NONE = 2**31  # after every id
_COMPLETE = ("tokenizer.json", "tokenizer.model")  # files that have the rules of the tokenizer, too
_FILES = (*_COMPLETE, "vocab.json", "vocab.txt")
_SAMPLES = (
    *(
        " Hi",
        "  Two  spaces, 1234 + 56\n\n1",
        "don't WE'LL",
        "if x == 3: # y",
        "Gr\u00fc\u00dfe \u4f60\u597d \U0001f642",
    ),
    *("e\u0301", "HTTPServer \u043f\u0440\u0438\u0412\u0435\u0442", "\u0939\u093f\u0928\u094d\u0926\u0940"),
)
_MARKS = 8  # control tokens in a sample text


def load_tokenizer(folder: Path | str, config: TransformerConfig | None = None) -> Any:
    """Load the tokenizer of a folder, a transformers `PreTrainedTokenizerBase`, without running its code.

    Token ids come from tokenizer.json, or else from the SentencePiece model. For most tokenizer classes,
    transformers 5 builds a pipeline itself and ignores the pipeline in the file. A line is printed if this
    gives other ids, since servers and other programs may use them.

    The attribute `end_ids` of the tokenizer has the folder's `generation_end_ids`, so that training data can
    end turns.

    Args:
        config: of the model to use it with; None = not known yet.

    Raises:
        UserError: the folder has no tokenizer; transformers cannot read it, or it needs custom code; it has
            no end-of-sequence token, or ids outside the model's vocabulary.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import

    folder = Path(folder)
    if not has_tokenizer(folder):
        raise _no_tokenizer(folder)
    # A tokenizer that needs custom code is refused, unless tokenizer.json is there.
    settings = folder / "tokenizer_config.json"
    raw = read_json(settings) if settings.is_file() else {}
    own_code = bool(raw.get("auto_map"))
    if own_code and not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{settings}: auto_map asks for the folder's own code, which is never run. Put a tokenizer.json "
            "here (save the tokenizer as a fast one with transformers): it needs no code. Or, for Baichuan's "
            "tokenizer.model, remove auto_map."
        )
    # Any exception means a damaged tokenizer: the library raises all kinds.
    is_complete = any((folder / name).is_file() for name in _COMPLETE)
    tokenizer_class = PreTrainedTokenizerFast if is_complete else AutoTokenizer
    try:
        with working(f"reading the tokenizer of {folder}"):
            tokenizer = tokenizer_class.from_pretrained(str(folder), trust_remote_code=False)
            _check_template(tokenizer.chat_template)
            if is_complete and not own_code:
                _compare_with_class(folder, tokenizer)
            eos, vocabulary = tokenizer.eos_token_id, vocabulary_of(tokenizer)
            tokenizer.encode("a")
    except BaseException as error:  # damaged files raise all kinds; Rust panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {str(error)[:500]})"
        ) from error
    # It must end responses, and fit the model.
    if eos is None:
        raise UserError(
            f"{settings}: no eos_token; without one a response never ends. Name the end token there."
        )
    largest = max(vocabulary.values())
    if config is not None and largest >= config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {largest}, but the model's vocab_size is "
            f"{config.vocab_size}; it is the tokenizer of another model."
        )
    tokenizer.end_ids = generation_end_ids(folder)
    return tokenizer


def _no_tokenizer(folder: Path) -> UserError:
    """Return the error for a folder without a tokenizer, or with one that only its own code reads."""
    if ranks := next(folder.glob("*.tiktoken"), None):
        return UserError(
            f"{ranks}: only the folder's own code, which is never run, reads this tokenizer. Convert it to "
            "tokenizer.json (docs/recipes.md, Qwen 1 and Baichuan)."
        )
    return UserError(
        f"{folder}: no tokenizer; looked for {', '.join(_FILES)}. Copy the base model's files here, or "
        "name another tokenizer."
    )


def _compare_with_class(folder: Path, tokenizer: Any) -> None:
    """Add the special tokens that the class has by default, and print whether the class gives other ids."""
    from transformers import AutoTokenizer, __version__, logging

    # Encode sample texts with both; skip the comparison if the class cannot be loaded.
    texts = sample_texts(tokenizer)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings concern a class that is not used here
    try:
        other = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        theirs = [other.encode(text) for text in texts]
    except Exception:  # the class may need files that this folder lacks
        return
    finally:
        logging.set_verbosity(verbosity)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = getattr(other, name)
        if getattr(tokenizer, name) is None and token in vocabulary_of(tokenizer):
            setattr(tokenizer, name, token)
    for text, ids in zip(texts, theirs, strict=True):
        if (own := tokenizer.encode(text)) != ids:
            here, there = tokenizer.convert_ids_to_tokens(own), other.convert_ids_to_tokens(ids)
            _print_once(
                f"note: {folder}: {text[:40]!r} is {here} by its tokenizer.json (or .model), as here, "
                f"but {there} by AutoTokenizer of transformers {__version__} ({type(other).__name__}), which "
                "servers and other programs may use"
            )
            return


def sample_texts(tokenizer: Any) -> list[str]:
    """Return texts whose ids show how a tokenizer splits text, with some of its control tokens."""
    marks = [str(token) for token in tokenizer.added_tokens_decoder.values()][:_MARKS]
    return [*_SAMPLES, "user\n Hi".join(marks)]


@functools.cache
def _print_once(message: str) -> None:
    """Print a line once, even if a command reads the folder several times."""
    print_on_first(message)


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder holds a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in _FILES)


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the id of every token, including control tokens."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return tokenizer.get_vocab() | added


def vocabulary_difference(first: Any, second: Any) -> str:
    """Return how the tokens of two tokenizers differ; "" = both have the same tokens with the same ids.

    Only then do token ids of one mean the same in the other. Extra rows of a model's embedding and the
    choices of end-of-sequence and padding tokens do not matter.
    """
    ours, theirs = vocabulary_of(first), vocabulary_of(second)
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not different:
        return ""
    different.sort(key=lambda token: (min(ours.get(token, _NONE), theirs.get(token, _NONE)), token))
    show = lambda token: f"{token!r:.40} has id {ours.get(token, 'none')} and {theirs.get(token, 'none')}"
    return f"{len(different):,} tokens differ: {', '.join(map(show, different[:_SHOWN]))}"


def _check_template(template: Any) -> None:
    """Refuse a chat template that is neither a text nor a dict of texts by name."""
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"chat_template must be text, not {type(template).__name__}")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer and its chat template in files that transformers 4 and 5 can read.

    Version 5 would write a class name, a list of special tokens and a template file that 4 cannot read; both
    read the older spellings.
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
    """Return the bos, eos and pad ids that a tokenizer has, by their keys in config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name, None) is not None}


def classifier_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
    """Return the tokenizer for a classifier's folder, whose padding token is not an end token.

    transformers scores the last token that is not padding (`ForSequenceClassification`), so with the end
    token as padding it would score the token before the end.

    Args:
        vocab_size: rows of the model's embedding; if no token is free, a line is printed.
    """
    ends = text_ends(tokenizer)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer
    other = copy.deepcopy(tokenizer)
    special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i not in ends}
    named = [token for part in ("pad", "reserved", "unused") for token in special if part in token.lower()]
    known = [token for token in (tokenizer.unk_token, tokenizer.bos_token) if token in special]
    other.add_special_tokens({"pad_token": [*named, *known, "<|pad|>"][0]})
    if other.pad_token_id < vocab_size:
        return other
    print_on_first(
        f"the vocabulary of {vocab_size} has no token for padding but the end of texts: transformers scores "
        "the token before it"
    )
    return tokenizer


def text_ends(tokenizer: Any) -> set[int]:
    """Return the ids that end a text of the tokenizer's folder."""
    folder = tokenizer.name_or_path
    return {tokenizer.eos_token_id, *(generation_end_ids(Path(folder)) if folder else ())}


def generation_config(tokenizer: Any) -> dict[str, Any]:
    """Return the generation_config.json of the tokenizer's folder, or else its special ids.

    A folder without that file may have several end-of-sequence ids in its config.json.
    """
    folder, ids = Path(tokenizer.name_or_path or ""), special_ids(tokenizer)
    if tokenizer.name_or_path and (folder / GENERATION).is_file():
        return read_json(folder / GENERATION)
    ends = generation_end_ids(folder) if tokenizer.name_or_path else ()
    ends = sorted({*ends, ids["eos_token_id"]}) if "eos_token_id" in ids else ()
    return ids | ({"eos_token_id": ends} if len(ends) > 1 else {})


def generation_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response, from generation_config.json or else config.json; a chat model has
    several.

    Raises:
        UserError: the values are not token ids.
    """
    files = (folder / name for name in (GENERATION, "config.json"))
    file = next((file for file in files if file.is_file()), None)
    ids = read_json(file).get("eos_token_id") if file else None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 2**31 for one in ids):
        raise UserError(f"{file}: eos_token_id={ids!r:.80} must be a token id or a list of them")
    return tuple(ids)
