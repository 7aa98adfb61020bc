"""Thought and answer of responses in the marks of several families."""

import itertools
import re

import pytest

from jaxrl_llm.thoughts import as_message, opens_thought, readable, split_thought, visible_response

ANALYSIS = "<|channel|>analysis<|message|>6*7=42<|end|>"
HARMONY = ANALYSIS + "<|start|>assistant<|channel|>final<|message|>It is 42."
CALL = (
    ANALYSIS + "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("42", None, "", "42"),
        ("<think>\n\n</think>\n\n42", None, "", "42"),
        ("<think>a</think>\n\n42", None, "a", "42"),
        ("[THINK]a </think> b[/THINK]42", None, "a </think> b", "42"),
        ("<seed:think>a</seed:think>42", None, "a", "42"),
        ("a</think>42", True, "a", "42"),
        ("a</think>42", None, "a", "42"),  # the prompt must have opened it
        ("<think>a</think>42", True, "a", "42"),  # opened twice
        ("a 42", True, "a 42", ""),
        ("<think>a 42", None, "a 42", ""),
        ("<think>a</think>b<think>c</think>d", None, "a\nc", "bd"),
        ("<think>a</think>b<think>c 42", None, "a\nc 42", ""),
        ("a</think>b</think>c", None, "a\nb", "c"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", None, "a", "42"),
        ("<|START_RESPONSE|>42", None, "", "42"),
        (
            "<|begin_of_thought|>a<|end_of_thought|>\n<|begin_of_solution|>42<|end_of_solution|>",
            None,
            "a",
            "42",
        ),
        ("<think>a</think><|begin_of_box|>42<|end_of_box|>", None, "a", "42"),
        ("\u25c1think\u25b7a\u25c1/think\u25b742", None, "a", "42"),
        ("<unused94>thought\na<unused95>42", None, "a", "42"),
        (HARMONY, None, "6*7=42", "It is 42."),
        (ANALYSIS, None, "6*7=42", ""),
        ("<|channel|>analysis<|message|>6*7=4", None, "6*7=4", ""),
        ("<|channel|>final<|message|>42", None, "", "42"),
        ("6*7<|end|><|start|>assistant<|channel|>final<|message|>42", True, "6*7", "42"),
        (CALL, None, "6*7=42", ""),
    ],
)
def test_thought_and_answer(text, opened, thought, answer):
    assert split_thought(text, opened) == (thought, answer)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>assistant", False),
    ],
)
def test_a_prompt_that_opens_the_thought(prompt, opened):
    assert opens_thought(prompt) == opened


def test_channels_become_a_message_and_readable_text():
    assert as_message(HARMONY) == {"role": "assistant", "content": "It is 42.", "thinking": "6*7=42"}
    assert as_message("<think>a</think>b") == {"role": "assistant", "content": "<think>a</think>b"}
    assert visible_response(HARMONY) == "It is 42." and visible_response("<think>a</think>b").startswith(
        "<think>"
    )
    assert readable(HARMONY) == "<think>6*7=42</think>\nIt is 42."
    assert readable(CALL).endswith(
        "</think>\nassistant<|channel|>commentary to=functions.f <|constrain|>json: {}\n"
    )


def test_readable_text_only_grows_with_the_tokens():
    """`chat` writes what is new."""
    tokens = re.findall(r"<\|\w+\|>|[^<]", HARMONY)
    shown = [readable("".join(tokens[:count])) for count in range(1, len(tokens) + 1)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
