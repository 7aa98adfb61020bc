"""Learned parts of a chat: transformers' own masks, messages left out, ends of turns, control tokens."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat import encode_prompt, encode_supervised
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.observation import encode_observation
from jaxrl_llm.data.preference import read_example
from jaxrl_llm.data.rows import RowError
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.tokenizer import load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (  # one for the thought, one for the answer, one for the end of the chat
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.thinking %}"
    "{% generation %}<think>{{ m.thinking }}</think>{% endgeneration %}{% endif %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{% generation %}{{ eos_token }}"
    "{% endgeneration %}{% endif %}"
)
GLM = (  # GLM-4.5's: the next role ends a turn
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "A number."}}}}}]  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def tool(text):
    return {"role": "tool", "content": text, "name": "add", "tool_call_id": "abcdefghi"}


CHATS = {
    "two": [user("Hi."), assistant("One"), user("And?"), assistant("Two more")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi."), assistant("One")],
    "thoughts": [
        *(user("Hi."), assistant("One", reasoning_content="It is")),
        *(user("And?"), assistant("Two", reasoning_content="Or not")),
    ],
    "tools": [user("Hi."), assistant("", tool_calls=[CALL]), tool("four"), assistant("Done so")],
}


def make(template=CHATML, special=(), **names):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special), **names})
    tokenizer.chat_template = template
    return tokenizer


def learned(row, tokenizer, **chat):
    """Return the learned text of a row, "|" between stretches that are apart."""
    ids, mask = encode_supervised(tokenizer, read(row), ChatConfig(**chat))
    shown = "".join(
        token if learned else "\0"
        for token, learned in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True)
    )
    return re.sub("\0+", "|", shown).strip("|").replace("<|im_end|>", "<E>")


def read(row):
    return read_example(row, "f:1", SourceConfig())


# Templates of TRL.


def shipped():
    found = importlib.util.find_spec("trl")
    return sorted(Path(found.origin).parent.glob("chat_templates/*.jinja")) if found else []


RECENT = {
    *("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "gemma3", "gemma4_v5", "lfm2", "lfm2_v2"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning", "phi3", "phi3_5"),
    *("glm4moe", "gptoss", "qwen3"),
}
"""Templates of families of 2025 and 2026. TRL has no training template, with masks, of Gemma 4."""


@functools.cache
def bpe():
    """Train a byte-level tokenizer whose tokens span words and line ends."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [path.read_text() for path in shipped()[:20]]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    return made.to_str()


def with_template(path):
    """Return a tokenizer with a template and the control tokens that it writes, thoughts' tags among them."""
    template = path.read_text()
    found = re.findall(r"<[|\uff5c][^<>{}\s']{1,40}[|\uff5c]>|<\|?\w+\|>|<(?:start|end)_of_\w+>", template)
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    special = sorted({*found, "<think>", "</think>"})
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe()), additional_special_tokens=special, **names
    )


def transformers_ids(tokenizer, messages, marked, **options):
    """Return what transformers makes of a chat, in the form of messages that the template reads."""
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}] * bool(m["content"])} for m in messages
    ]
    texts = [
        {**m, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": "two"}'}}]}
        if m.get("tool_calls")
        else m
        for m in messages
    ]
    for form in (messages, texts, parts):
        try:
            out = tokenizer.apply_chat_template(
                form, return_dict=True, return_assistant_tokens_mask=marked, **options
            )
        except Exception:
            continue
        said = [m["content"].split("</think>")[-1].strip() for m in messages]
        said += ["two" for m in messages if m.get("tool_calls")]
        if all(text in tokenizer.decode(out["input_ids"]) for text in said):
            return out["input_ids"], out.get("assistant_masks")
    return [], None


def same_mask(tokenizer, got, expected):
    """Return whether two masks are equal but for white space between an end token and text of others."""
    (ids, mask), (all_ids, theirs) = got, expected
    tokens = tokenizer.batch_decode([[i] for i in all_ids])
    mask = [*mask, *[0] * (len(all_ids) - len(ids))]
    differing = [i for i in range(len(all_ids)) if mask[i] != theirs[i]]
    special = set(tokenizer.all_special_tokens)
    ends = [i for i in differing if theirs[i] and tokens[i].isspace() and tokens[i - 1] in special]
    return differing == ends


@pytest.mark.skipif(not shipped(), reason="needs trl")
@pytest.mark.parametrize("loss", ["all", "last"])
def test_masks_are_those_of_transformers_for_every_template_of_trl(loss):
    paths = [path for path in shipped() if "{%- generation" in path.read_text().replace("{% gen", "{%- gen")]
    compared, refused = [], {}
    for path in paths:
        tokenizer = with_template(path)
        for name, messages in CHATS.items():
            row = {"messages": messages, **({"tools": TOOLS} if name == "tools" else {})}
            try:
                ids, mask = encode_supervised(tokenizer, read(row), ChatConfig(loss=loss))
            except RowError as error:
                refused[path.stem, name] = str(error)
                continue
            tools = {"tools": row["tools"]} if "tools" in row else {}
            all_ids, theirs = transformers_ids(tokenizer, messages, True, **tools)
            if not all_ids:  # transformers 5 has no null content, beside which alone it writes calls
                assert (path.stem, name) == ("deepseek_r1_distill_training", "tools")
                refused[path.stem, name] = "not supported"
                continue
            if loss == "last":
                shown = tokenizer.batch_decode([[i] for i in all_ids])
                said = next(m["content"] for m in messages[::-1] if m["role"] != "assistant")
                cut = max(i for i in range(len(shown)) if "".join(shown[i:]).count(said))
                theirs = [one if i > cut else 0 for i, one in enumerate(theirs)]
            assert ids.tolist() == all_ids[: len(ids)], (path.stem, name)
            assert same_mask(tokenizer, (ids, mask), (all_ids, theirs)), (path.stem, name)
            compared.append(path.stem)
    assert {f"{name}_training" for name in RECENT - {"gemma4_v5"}} <= {*compared}
    lost = [key for key, error in refused.items() if "leaves out" in error]
    assert len(compared) + len(refused) == 4 * len(paths) and len(compared) > 100
    assert {name for _, name in lost} <= {"thoughts", "tools"}, lost
    others = [error for error in refused.values() if "leaves out" not in error]
    others = [error for error in others if not re.search("not supported|must alternate|no element 0", error)]
    assert others == []


@pytest.mark.skipif(not shipped(), reason="needs trl")
def test_texts_are_those_of_transformers_for_every_template_of_trl():
    """The original templates, and prompts whose earlier turns have thoughts between special tokens."""
    thoughts = "<think>\nIt is\n</think>\n\nOne"
    asked = [user("Hi."), assistant(thoughts), user("And?")]
    compared = []
    for path in shipped():
        tokenizer = with_template(path)
        for name, messages in CHATS.items():
            row = {"messages": messages, **({"tools": TOOLS} if name == "tools" else {})}
            tools = {"tools": row["tools"]} if "tools" in row else {}
            try:
                ids, _ = encode_supervised(tokenizer, read(row), ChatConfig(loss="last"))
            except RowError:
                continue
            expected, _ = transformers_ids(tokenizer, messages, False, **tools)
            if not expected:  # transformers 5 has no null content, beside which alone it writes calls
                assert (path.stem.removesuffix("_training"), name) == ("deepseek_r1_distill", "tools")
                continue
            end = len(ids) - (
                ids[-1] != (expected + [0] * len(ids))[len(ids) - 1]
            )  # eos where none is written
            assert ids[:end].tolist() == expected[:end], (path.stem, name)
            compared.append(path.stem)
        ids = encode_prompt(tokenizer, read({"messages": asked}), ChatConfig())
        expected, _ = transformers_ids(tokenizer, asked, False, add_generation_prompt=True)
        assert ids.tolist() == expected, path.stem
    assert len(compared) > 215 and {*compared} >= RECENT


# Messages that are left out.


@pytest.mark.parametrize(
    ("no", "yes"),
    [({key: 0}, {key: 1}) for key in ("weight", "train", "trainable", "loss", "loss_mask", "step_loss_mask")]
    + [({"train": False}, {"train": True}), ({"weight": 0.0}, {"weight": 1.0}), ({"train": False}, {})],
)
def test_messages_that_their_author_leaves_out_are_not_learned(no, yes):
    chat = [user("q"), assistant("BAD", **no), user("q"), assistant("GOOD", **yes)]
    names = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    spoken = [{names.get(k, k): names.get(v, v) for k, v in m.items()} for m in chat]
    rows = [
        {"messages": chat},
        {"conversations": spoken},
        {"prompt": chat[:1], "completion": chat[1:]},
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [*chat[1:3], assistant("no", **yes)]},
    ]
    for row in rows:
        assert learned(row, make()) == "GOOD<E>"
        assert learned(row, make(BLOCKS)) == "GOOD<E><E>"  # its author has the end of the chat learned, too
    last = {"messages": [user("q"), assistant("GOOD", **yes), user("q"), assistant("BAD", **no)]}
    assert learned(last, make()) == "GOOD<E>"  # nothing follows what is learned


def test_of_a_completion_of_several_messages_the_prompt_is_not_learned():
    prompt = [user("q"), assistant("before"), user("q")]
    row = {"prompt": prompt, "completion": [assistant("One"), tool("x"), assistant("Two")]}
    assert learned(row, make()) == "One<E>|Two<E>"
    assert learned(row, make(BLOCKS)) == "One<E>|Two<E><E>"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (assistant("a", weight=0.5), r"messages\[1\].weight must be 0 or 1, true or false, got 0.5"),
        (assistant("a", train="no"), r"messages\[1\].train must be 0 or 1, true or false, got 'no'"),
        (assistant("a", weight=1, train=False), r"messages\[1\]: weight, train contradict each other"),
        (
            assistant("a", train_detail=[]),
            r"messages\[1\].train_detail is unknown, .* weight 0 is left out",
        ),
        (assistant("a", masked=True), r"messages\[1\].masked is unknown"),
        (assistant("a", ignore=True), r"messages\[1\].ignore is unknown"),
        (assistant("a", exclude=True), r"messages\[1\].exclude is unknown"),
        (assistant("a", is_target=False), r"messages\[1\].is_target is unknown"),
        (
            assistant("a", weight=np.float32(0)),
            r"messages\[1\].weight must be .*number or .*, got float32",
        ),
        (assistant("a", compute_loss="False"), r"messages\[1\].compute_loss is unknown"),
        (user("a") | {"train": True}, r"messages\[1\].train is True, but text of the role user is never"),
    ],
)
def test_words_about_learning_that_cannot_be_followed_are_refused(message, reason):
    with pytest.raises(RowError, match=f"^f:1: {reason}"):
        read({"messages": [user("q"), message]})


def test_a_row_of_which_nothing_is_learned_is_refused():
    row = {"messages": [user("q"), assistant("a"), user("q"), assistant("b", weight=0)]}
    assert learned(row, make()) == "a<E>"
    with pytest.raises(RowError, match="nothing to learn: the last assistant turn has weight 0"):
        learned(row, make(), loss="last")
    with pytest.raises(RowError, match="nothing to learn: all assistant turns have weight 0"):
        learned({"messages": row["messages"][2:]}, make())


def test_alpaca_rows_learn_their_history_as_in_llama_factory():
    row = {"instruction": "and?", "input": "", "output": "B", "system": "S", "history": [["q", "A"]]}
    start = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )
    prompt = start + "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert make().decode(encode_prompt(make(), read(row), ChatConfig())) == prompt
    assert learned(row, make()) == "A<E>|B<E>"
    assert learned(row, make(), loss="last") == "B<E>"
    pair = {**row, "chosen": "B", "rejected": "C"}
    assert learned(pair, make()) == "B<E>"


# Blocks and ends.


def test_every_block_of_a_turn_is_learned():
    chat = [user("q"), assistant("Yes", thinking="why"), user("q"), assistant("No", thinking="so")]
    last = "<think>so</think>No<E><E>"
    assert learned({"messages": chat}, make(BLOCKS)) == f"<think>why</think>Yes<E>|{last}"
    assert learned({"messages": chat}, make(BLOCKS), loss="last") == last
    assert learned({"prompt": chat[:3], "completion": "No"}, make(BLOCKS)) == "No<E><E>"
    chat[1]["weight"] = 0
    assert learned({"messages": chat}, make(BLOCKS)) == last


THINKS = (  # MiniMax-M2's: the prompt begins a thought, which turns may lack
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CLOSES = (  # GLM-4.7-Flash's: such a turn ends the thought that the prompt does not begin
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}{% endif %}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
LAST = (  # Qwen3.5's: only the last turn has a thought, even an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (THINKS, ("One", "Two"), "One<E>|Two<E>"),
        (THINKS, ("<tool>1", "<thin> 2"), "<tool>1<E>|<thin> 2<E>"),
        (THINKS, ("Hi.", "And?"), "Hi.<E>|And?<E>"),  # what the user says
        (CLOSES, ("One", "Two"), "</think>One|</think>Two<E>"),
        (LAST, ("One", "Two"), "One<E>|\n</think>\n\nTwo<E>"),
        (LAST, ("One <think>", "One <think>"), "One <think><E>|\n</think>\n\nOne <think><E>"),
    ],
)
def test_turns_without_the_thought_that_a_prompt_begins_are_learned_as_rendered(template, texts, expected):
    """Qwen3's and this year's reasoning templates in chats without thoughts."""
    tokenizer = make(template, ["<think>", "</think>", "<|user|>", "<|assistant|>"])
    chat = [user("Hi."), assistant(texts[0]), user("And?"), assistant(texts[1])]
    ids, _ = encode_supervised(tokenizer, read({"messages": chat}), ChatConfig())
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert ids.tolist()[:-1] == whole[: len(ids) - 1]
    assert learned({"messages": chat}, tokenizer) == expected
    assert learned({"messages": chat}, tokenizer, loss="last") == expected.split("|", 1)[1]


ROLE = "{{ m.role }}"
FORMS = {  # how a turn begins, and its end of turn; SmolLM3 and OLMo 3 have CHATML
    "granite": (f"<|start_of_role|>{ROLE}<|end_of_role|>", "<|end_of_text|>"),
    "minimax": (f"]~b]{ROLE}\n", "[e~["),
    "seed-oss": (f"<seed:bos>{ROLE}\n", "<seed:eos>"),
    "phi-4": (f"<|im_start|>{ROLE}<|im_sep|>", "<|im_end|>"),
    "ministral": ("{{ '[INST]' if m.role == 'user' }}", "</s>"),
}


@pytest.mark.parametrize("form", FORMS)
def test_turns_of_other_families_are_rendered_as_transformers_does_and_learned(form):
    begin, end = FORMS[form]
    ends = "{{ '[/INST]' if m.role == 'user' else '</s>' }}" if form == "ministral" else end
    ask = begin.replace(ROLE, "assistant") if ROLE in begin else ""
    template = (
        f"{{% for m in messages %}}{begin}{{{{ m.content }}}}{ends}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )
    tokenizer = make(template, [*re.findall(r"<[^>]+>|]~b]|\[/?INST]", begin + ends), end])
    chat = [user("q"), assistant("A"), user("p"), assistant("B")]
    ids, _ = encode_supervised(tokenizer, read({"messages": chat}), ChatConfig())
    assert ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
    assert learned({"messages": chat}, tokenizer) == f"A{end}|B{end}".replace("<|im_end|>", "<E>")
    prompt = encode_prompt(tokenizer, read({"messages": chat[:3]}), ChatConfig())
    expected = tokenizer.apply_chat_template(chat[:3], add_generation_prompt=True)["input_ids"]
    assert prompt.tolist() == expected


def test_the_role_that_ends_a_turn_is_learned_where_it_ends_a_response(tmp_path):
    """As of GLM-4.5, whose generation_config.json names <|endoftext|>, <|user|> and <|observation|>."""
    special = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    tokenizer = make(GLM, special)
    chat = [user("q"), assistant("A"), tool("x"), assistant("B"), user("q"), assistant("C")]
    assert learned({"messages": chat}, tokenizer) == "A|B|C<E>"
    tokenizer.save_pretrained(tmp_path)
    ends = [1, *tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = load_tokenizer(tmp_path)
    assert learned({"messages": chat}, tokenizer) == "A<|observation|>|B<|user|>|C<E>"
    tokenizer.chat_template = GLM.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}",
    )
    assert learned({"messages": chat}, tokenizer) == "A<|observation|>|B<|user|>|C<E>"
    assert learned(
        {"messages": [user("q"), assistant("A"), user("q"), assistant("<|user|>")]}, tokenizer
    ) == ("A<|user|>|<|user|>")


@pytest.mark.parametrize(
    ("end", "observed"),
    [
        ("<|observation|>", "\nx<|assistant|>\n"),  # the token that the reply begins with
        ("<|user|>", "<|observation|>\nx<|assistant|>\n"),
        ("", "<|observation|>\nx<|assistant|>\n"),
    ],
)
def test_the_role_of_a_reply_is_read_unless_the_policy_wrote_it(end, observed):
    tokenizer = make(GLM, ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"])
    messages = [user("q"), assistant("A"), tool("x")]
    example = read({"messages": messages[:1]})
    ids = encode_observation(tokenizer, example, messages, 1, config=ChatConfig(), end=end)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == observed


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
def test_the_token_that_closes_a_turn_is_read_unless_the_turn_has_ended(end):
    tokenizer = make(CHATML, ["<|endoftext|>"])
    messages = [user("q"), assistant("A"), user("x")]
    ids = encode_observation(
        tokenizer, read({"messages": messages[:1]}), messages, 1, config=ChatConfig(), end=end
    )
    reply = "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == ("" if end else "<|im_end|>") + reply


def test_a_control_token_that_a_turn_says_last_is_not_its_end():
    tokenizer = make(GLM, ["<|user|>", "<|assistant|>", "<act>"])
    assert learned({"messages": [user("q"), assistant("go<act>")]}, tokenizer) == "go<act><E>"


def test_a_chat_that_ends_with_the_end_token_has_turns_without_it():
    """As of Phi-3, whose template writes it after the last turn alone."""
    template = CHATML.replace("<|im_end|>", "<|end|>").replace(
        "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{{ eos_token }}{% else %}"
    )
    chat = [user("q"), assistant("A"), user("q"), assistant("B")]
    assert learned({"messages": chat}, make(template, ["<|end|>"])) == "A<|end|>|B<|end|>\n<E>"


# Control tokens.


def test_control_tokens_are_tokens_in_what_is_learned_and_text_in_what_others_say():
    tokenizer = make(special=["<think>", "<act>"])
    think, act, start = tokenizer.convert_tokens_to_ids(["<think>", "<act>", "<|im_start|>"])
    count = lambda row, id, **chat: (
        encode_supervised(tokenizer, read(row), ChatConfig(**chat))[0].tolist().count(id)
    )
    said = {"role": "assistant", "content": "<think>go<act>"}
    pair = {"prompt": "q<act>", "chosen": "<act>", "rejected": "<think>"}
    for row in ({"messages": [user("say <act>"), said]}, {"prompt": [user("<act>")], "completion": [said]}):
        assert count(row, act) == 1 and count(row, think) == 1
    assert count({"prompt": "<act>", "completion": "<act>"}, act) == 1
    assert count({"prompt": "<act>", "completion": "<act>"}, act, parse_control_tokens=True) == 2
    assert count(pair, act) == 1
    assert encode_supervised(tokenizer, read(pair).rejected, ChatConfig())[0].tolist().count(think) == 1
    tokenizer.chat_template = "{{ tools[0].name if tools }}" + CHATML
    asked = {
        "messages": [user("<|im_start|>"), said, tool("<|im_start|>"), said],
        "tools": [{"name": "<act>"}],
    }
    assert count(asked, start) == 4 and count(asked, act) == 2


def test_a_rendered_chat_in_the_column_text_has_the_ids_of_transformers():
    tokenizer = make()
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
    for text, more in ((rendered, []), (rendered + "\n", [1]), ("plain", [1])):
        ids, mask = encode_supervised(tokenizer, read({"text": text}), ChatConfig())
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"] + more and mask.all()


def test_the_common_beginning_of_two_rendered_chats_keeps_its_control_tokens():
    chat = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = make()
    pair = read({"chosen": chat + "A<|im_end|>", "rejected": chat + "B<|im_end|>"})
    for example, end in ((pair, "A<|im_end|>"), (pair.rejected, "B<|im_end|>")):
        ids, mask = encode_supervised(tokenizer, example, ChatConfig())
        whole = tokenizer(chat + end, add_special_tokens=False)["input_ids"]
        assert ids.tolist() == whole and tokenizer.decode(ids[mask == 1]) == end
    said = read({"prompt": chat, "chosen": "A", "rejected": "B"})  # the prompt is what others say
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in encode_prompt(tokenizer, said, ChatConfig())


def test_a_control_token_takes_the_white_space_after_it_between_turns_too():
    """As of Phi-3, whose tokens of roles and ends have rstrip."""
    from transformers import AddedToken

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True)]})
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|end|>")
    chat = [user("q"), assistant("A"), user("q"), assistant("B")]
    ids, _ = encode_supervised(tokenizer, read({"messages": chat}), ChatConfig())
    assert ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece as normalizer"])
@pytest.mark.parametrize("rstrip", [False, True])
def test_a_space_in_front_of_every_text_is_where_transformers_has_it(kind, rstrip):
    """Phi-3's has it after each control token, which takes the line end; add_prefix_space of others, too."""
    from tokenizers import AddedToken, normalizers

    made = Tokenizer(models.BPE())
    if kind == "byte-level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "sentencepiece":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        space = normalizers.Replace(" ", "\u2581")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    texts = ["user assistant Hello there. And so on.", "Yes no"]
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\u2581", "\n"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    special = [AddedToken(f"<|{name}|>", rstrip=rstrip) for name in ("user", "assistant", "end")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", additional_special_tokens=special
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    chat = [user("Hello there."), assistant("Yes"), user("no"), assistant("And so\n on"), user("Yes")]
    for messages in (chat[:2], chat[:4]):
        ids, mask = encode_supervised(tokenizer, read({"messages": messages}), ChatConfig())
        assert ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"][: len(ids)]
        assert mask.sum() < len(ids)
