"""Text of responses with its marks, and what rewards read of it."""

import numpy as np
import pytest

from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.rollout.engine import PartialResponse, Request, text_of
from jaxrl_llm.rollout.partial import trajectory_of

HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>")
ANSWER = "<|channel|>analysis<|message|>6*7<|end|><|start|>assistant<|channel|>final<|message|>42"


def tokenizer(*special, eos=None):
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(special)})
    made.eos_token = eos or made.eos_token
    return made


def ids_of(made, text):
    return made(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("special", "written", "text"),
    [
        (("<think>", "</think>"), "<think>a</think>42<|im_end|>", "<think>a</think>42"),
        (("<|act|>",), "<|act|>look<|im_end|>", "<|act|>look"),  # an action token of one's own
        (("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]f[ARGS]{}<|im_end|>", "[TOOL_CALLS]f[ARGS]{}"),
        ((), "42<|im_end|><pad><pad>", "42"),
        ((), "42<unk>", "42"),
        ((), "", ""),
    ],
)
def test_marks_are_kept_and_ends_are_not(special, written, text):
    made = tokenizer(*special)
    assert text_of(made, ids_of(made, written)) == text


def test_a_further_end_token_is_left_out_at_the_end_alone():
    """gpt-oss ends a call with <|call|>, by its generation_config.json."""
    made = tokenizer(*HARMONY, eos="<|return|>")
    call, newline = made.convert_tokens_to_ids("<|call|>"), ids_of(made, "\n")[0]
    written = [*ids_of(made, "a<|call|>b"), call]
    assert text_of(made, written) == "a<|call|>b<|call|>"
    assert text_of(made, written, (call,)) == "a<|call|>b"
    assert text_of(made, ids_of(made, "a\n"), (newline,)) == "a\n"  # text, as it was
    assert text_of(None, [1, 2]) == ""


def sample_of(made, prompt, written, answer="42"):
    request = Request(np.array(ids_of(made, prompt)), 0, 1, 99)
    ids = ids_of(made, written)
    response = PartialResponse(ids, [0.0] * len(ids), [0] * len(ids), "stop", request=request)
    example = Example(None, "q", answer=answer, where="file:1")
    return reward_sample(example, trajectory_of(response, made))


def test_rewards_get_response_thought_and_text():
    made = tokenizer(*HARMONY, eos="<|return|>")
    sample = sample_of(made, "<|start|>assistant", ANSWER + "<|return|>")
    assert (sample.response, sample.thought, sample.final, sample.text) == ("42", "6*7", "42", ANSWER)
    assert sample.opens_thought is False and sample.where == "file:1"
    made = tokenizer("<think>", "</think>")
    sample = sample_of(made, "<|im_start|>assistant\n", "<think>a</think>42<|im_end|>")
    assert (sample.response, sample.thought, sample.final) == ("<think>a</think>42", "a", "42")


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_a_thought_that_the_prompt_opens(special):
    made = tokenizer(*special)
    sample = sample_of(made, "<|im_start|>assistant\n<think>\n", "6*7</think>\n\n42<|im_end|>")
    assert (sample.response, sample.thought, sample.final) == ("6*7</think>\n\n42", "6*7", "42")
    cut = sample_of(made, "<|im_start|>assistant\n<think>\n", "6*7 is 42")
    assert (cut.thought, cut.final, cut.opens_thought) == ("6*7 is 42", "", True)
    closed = sample_of(made, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "42")
    assert (closed.thought, closed.final) == ("", "42")


def test_the_last_turn_of_a_conversation_may_open_a_thought():
    made = make_tokenizer()
    prompt, reply = ids_of(made, "user"), ids_of(made, "tool\n<think>")
    ids = [*ids_of(made, "call"), *reply, *ids_of(made, "6*7 is 42")]
    one = PartialResponse(ids, [0.0] * len(ids), [0] * len(ids), "length", observed=[(4, 4 + len(reply))])
    one.request = Request(np.array(prompt), 0, 1, 99)
    sample = reward_sample(Example(None, "q", answer="42"), trajectory_of(one, made))
    assert sample.response == "6*7 is 42" and sample.final == ""
