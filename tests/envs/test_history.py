"""Rewritten histories: the contexts of a conversation are those that transformers renders, turn by turn."""

import functools
import importlib.util
import re
from pathlib import Path

import jax
import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.envs.env import Step
from jaxrl_llm.thoughts import MARKS, as_message

CHAT = ChatConfig()


def shipped():
    """Return the names of the chat templates of the installed trl."""
    found = importlib.util.find_spec("trl")
    return sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja")) if found else []


def bytes_tokenizer(template):
    """Return a tokenizer of bytes, with the control tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = re.findall(r"<[|\uff5c][^<>{}\s']{1,40}[|\uff5c]>|<\|?\w+\|>|<(?:start|end)_of_\w+>", template)
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=sorted({*found}), **names)


def rendered(tokenizer, messages, **options):
    """Return the text of transformers, of messages in the form that the template reads."""
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for form in ([{**m, **as_message(m["content"])} if m["role"] != "user" else m for m in messages], parts):
        try:
            text = tokenizer.apply_chat_template(form, tokenize=False, **options)
        except jinja2.UndefinedError:
            continue
        if messages[-1]["content"][-5:] in text:
            return text
    raise AssertionError(messages)


REWRITING = (
    *("deepseek", "glm4moe", "lfm2_2_5", "muse_glimmer", "nemotron_3", "qwen3_5", "qwen3_6", "qwen3_8"),
    *("qwen3.jinja", "idefics3", "llava_next", "smolvlm"),
)
"""Templates that take thoughts away, or, of content in parts, white space."""


class Asks:
    """Answers every turn with another question."""

    async def reset(self, example, seed):
        return None

    async def step(self, state, turn):
        return Step(f"question {turn.number}")


def contexts_of(template, contents, history="exact"):
    """Yield (what the policy reads, its messages, tokens kept of the context before) after each turn."""
    tokenizer = bytes_tokenizer(template)
    render = functools.partial(rendered, tokenizer)
    messages = [{"role": "user", "content": "question 0"}]
    example = Example(tuple(messages), None)
    prompt = Prompt(example, encode_prompt(tokenizer, example, CHAT), 0)
    context, ids, known = prompt.ids.tolist(), [], None
    with Conversations(Asks(), EnvConfig(name="x", history=history), tokenizer, CHAT) as made:
        dialogue = made.dialogue([prompt], jax.random.key(0))
        for number, content in enumerate(contents, 1):
            before = render(messages, add_generation_prompt=True)
            closed = before.rstrip().endswith(tuple(MARKS.values()))
            content = content.split("\n\n")[-1] if closed else content
            whole = render([*messages, {"role": "assistant", "content": content}])
            if whole.startswith(before):  # as the template writes the turn while it is the last one
                written = whole[len(before) :]
                content = written[: written.rindex(content[-5:]) + 5]
            turn = tokenizer(content, add_special_tokens=False)["input_ids"]
            ids += turn
            context += turn
            reply = dialogue.reply(0, 0, known, ids, start=len(ids) - len(turn)).result(20)
            known, ids = reply.conversation, ids + reply.ids
            kept, context = len(context) - reply.keep, context[: reply.keep] + reply.ids
            asked = {"role": "user", "content": f"question {number}"}
            messages += [{"role": "assistant", "content": content}, asked]
            yield tokenizer, context, render(messages, add_generation_prompt=True), kept


@pytest.mark.skipif(not shipped(), reason="needs trl")
@pytest.mark.parametrize("file", shipped(), ids=lambda file: file.stem)
def test_every_template_of_trl(file):
    contents = [f"<think>\nhm {n}\n</think>\n\nanswer {n}" for n in range(2)] + ["plain 3"]
    dropped = []
    for tokenizer, context, text, kept in contexts_of(file.read_text(), contents):
        dropped.append(kept)
        if kept:
            assert context == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(context) == text
    assert (dropped[0] > 0) == file.name.startswith(REWRITING) or "training" in file.stem


FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{% if m.reasoning_content %}OPEN\n"
    "{{ m.reasoning_content }}\nCLOSE\n\n{% endif %}{{ m.content }}{% else %}"
    "{{ m.content.split('CLOSE')[-1].lstrip() }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("marks", MARKS.items(), ids="{0[0]}".format)
def test_thoughts_in_marks_of_any_family_are_seen_to_be_taken_away(marks):
    template = FORGETS.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
    contents = [f"{marks[0]}\nhm 0\n{marks[1]}\n\nanswer 0", "plain 1"]
    dropped = []
    for tokenizer, context, text, kept in contexts_of(template, contents):
        dropped.append(kept > 0)
        assert tokenizer.decode(context) == text
    assert dropped == [True, False]
