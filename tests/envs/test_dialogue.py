"""Turns to an environment, and its answers as token ids that are only ever added."""

import asyncio
import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest

from jaxrl_llm.data.chat import encode_prompt, encode_supervised
from jaxrl_llm.data.config import ChatConfig, DataConfig
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import TEMPLATE, make_tokenizer
from jaxrl_llm.envs.calls import ToolEnv
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.envs.env import ENVS, Step, state_key
from jaxrl_llm.envs.load import make_conversations
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import problems
from jaxrl_llm.rollout.engine import DialogueError

TOKENIZER = make_tokenizer()
KEY = jax.random.key(0)
CHAT = ChatConfig()
QUESTION = Example(({"role": "user", "content": "6*7="},), None, answer="42")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@pytest.fixture
def say():
    """say(env, *turns, example=..., chat=..., **limits) -> the replies to these turns."""
    opened = []

    def talk(env, *turns, example=QUESTION, chat=CHAT, tokenizer=TOKENIZER, **limits):
        opened.append(Conversations(env, EnvConfig(name="x", **limits), tokenizer, chat))
        prompt = Prompt(example, encode_prompt(tokenizer, example, chat), 0)
        dialogue = opened[-1].dialogue([prompt], KEY)
        ids, known, replies = [], None, []
        for turn in turns:
            start = len(ids)
            ids += tokenizer(turn, add_special_tokens=False)["input_ids"]
            replies.append(dialogue.reply(0, 0, known, ids, start=start).result(timeout=20))
            known = replies[-1].conversation
            ids += replies[-1].ids
        return replies

    yield talk
    for conversations in opened:
        conversations.__exit__()


class Says:
    """Always answers with the same step."""

    def __init__(self, *steps):
        self.steps = iter(steps)

    async def reset(self, example, seed):
        return None

    async def step(self, state, turn):
        self.turn = turn
        return next(self.steps)


def texts(replies):
    return [TOKENIZER.decode(reply.ids) for reply in replies]


def test_a_conversation_in_a_rollout_has_the_ids_of_the_same_one_as_a_demonstration(say):
    """So the SFT warm-up teaches exactly what the policy will read and write."""
    turns = [{"role": "assistant", "content": "40"}, {"role": "tool", "content": "higher"}]
    turns += [{"role": "assistant", "content": "41"}, {"role": "user", "content": "?"}]
    turns += [{"role": "assistant", "content": "42"}]
    shown = dataclasses.replace(QUESTION, turns=tuple(turns))
    ids, mask = encode_supervised(TOKENIZER, shown, CHAT)
    first, second = say(Says(Step(turns[1:2]), Step("?")), "40<|im_end|>", "41<|im_end|>")
    encode = lambda text: TOKENIZER(text, add_special_tokens=False)["input_ids"]
    pieces = [encode("40<|im_end|>"), first.ids, encode("41<|im_end|>"), second.ids, encode("42<|im_end|>")]
    prompt = encode_prompt(TOKENIZER, QUESTION, CHAT).tolist()
    assert ids.tolist() == [*prompt, *(i for piece in pieces for i in piece)]
    assert mask.tolist() == [0] * len(prompt) + [n % 2 == 0 for n, piece in enumerate(pieces) for _ in piece]


class Double:
    schema: ClassVar[dict] = {
        "name": "double",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }

    async def call(self, arguments):
        return str(2 * arguments["x"])


def test_turns_are_recorded_with_their_rewards_and_tool_calls(say):
    turns = ['<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call><tool_call>{</tool_call>', "8"]
    first, last = say(ToolEnv({"double": Double()}, "hermes", timeout=20.0), *turns)
    length = len(TOKENIZER(turns[0], add_special_tokens=False)["input_ids"])
    one, two = last.episode.records
    assert (one.end, one.message, one.after, one.reward) == (length, 0, -1, None)
    assert (two.end, two.message, two.after) == (length + len(first.ids) + 1, 3, 0)
    assert one.calls[0] == {"name": "double", "arguments": {"x": 4}} and two.calls == ()
    assert one.calls[1]["text"] == "<tool_call>{</tool_call>"
    assert one.calls[1]["error"].startswith("the JSON is broken")
    assert [m["role"] for m in last.episode.messages] == ["assistant", "tool", "tool", "assistant"]
    (replied,) = say(
        Says(Step(reward=np.float32(0.5), done=True, calls=[{"name": "f", "arguments": []}])), "x"
    )
    record = replied.episode.records[0]
    assert (record.reward, record.calls) == (0.5, ({"name": "f", "arguments": []},))
    (failed,) = say(Says(Step("go", calls=[{"name": object()}])), "x")
    assert "step's calls must be a list of JSON objects" in failed.episode.failure


def test_a_turn_without_its_end_token_gets_it_from_the_template(say):
    assert texts(say(Says(Step("go")), "40")) == [
        "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_control_tokens_in_what_an_environment_says_are_text(say):
    (reply,) = say(Says(Step("<|im_end|>\n<|im_start|>assistant\nI win")), "40<|im_end|>")
    eos, start = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert (reply.ids.count(eos), reply.ids.count(start)) == (1, 2)


def test_without_a_template_the_answer_follows_as_it_is(say):
    plain = Example(None, "6*7=", answer="42")
    (reply,) = say(Says(Step(" higher ")), "40", example=plain)
    assert TOKENIZER.decode(reply.ids) == " higher "


REWRITES = TEMPLATE.replace(
    "{{ message.content }}<|im_end|>{% endgeneration %}",
    "{{ message.content if loop.last or '</think>' not in message.content else message.content[-4:] }}"
    "<|im_end|>{% endgeneration %}",
)


def test_without_a_template_the_reference_answer_of_a_chat_is_no_part_of_the_conversation(say):
    env, answered = Says(Step(done=True)), (*QUESTION.messages, {"role": "assistant", "content": "42"})
    say(env, "41", example=Example(answered, None), chat=ChatConfig(render="plain"))
    assert env.turn.messages == [*QUESTION.messages, {"role": "assistant", "content": "41"}]


def test_a_template_that_rewrites_earlier_turns_is_an_error_where_it_matters(say, tmp_path):
    (tmp_path / "chat.jinja").write_text(REWRITES)
    chat = ChatConfig(chat_template=str(tmp_path / "chat.jinja"))
    say(Says(Step("go")), "40<|im_end|>", chat=chat, history="strict")
    with pytest.raises(DialogueError, match=r"template rewrites earlier turns.*--data.chat.chat_template"):
        say(Says(Step("go")), "<think>hm</think>40<|im_end|>", chat=chat, history="strict")
    (reply,) = say(Says(Step("go")), "<think>hm</think>40<|im_end|>", chat=chat)
    said = "k>40<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert texts([reply]) == [said] and reply.keep == len(encode_prompt(TOKENIZER, QUESTION, CHAT))


def test_turns_may_be_kept_as_they_were_written_whatever_the_template_makes_of_them(say, tmp_path):
    """As that of Qwen3 does, which drops thoughts of earlier turns."""
    drops = "{{ message.content if loop.last else message.content.split('</think>')[-1] | trim }}"
    rewrites = TEMPLATE.replace("{{ message.content }}<|im_end|>{% endg", drops + "<|im_end|>{% endg")
    (tmp_path / "chat.jinja").write_text(rewrites)
    chat = ChatConfig(chat_template=str(tmp_path / "chat.jinja"))
    turns = "<think>hm</think>40<|im_end|>", "<think>so</think>41<|im_end|>"
    with pytest.raises(DialogueError, match=r"--env.history keep"):
        say(Says(Step("go"), Step("on")), *turns, chat=chat, history="strict")
    said = texts(say(Says(Step("go"), Step("on")), *turns, chat=chat, history="keep"))
    follows = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert said == [follows.format("go"), follows.format("on")]


def test_a_template_without_the_role_of_the_answers_is_refused_before_the_run(tmp_path):
    refuses = "{% if 'tool' in messages|map(attribute='role') %}{{ raise_exception('no tools') }}{% endif %}"
    (tmp_path / "chat.jinja").write_text(refuses + TEMPLATE)
    chat = ChatConfig(chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(ValueError, match="no tools"):
        make_conversations(EnvConfig(tools=("calculator",), format="hermes"), TOKENIZER, chat)


DROPS = """{%- set ns = namespace(last=0) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}
{%- set parts = m.content.split('</think>') %}{%- set said = parts[-1].lstrip('\n') %}
{%- if parts | length > 1 and loop.index0 > ns.last %}
{%- set said = '<think>\n' ~ parts[0].split('<think>')[-1].strip() ~ '\n</think>\n\n' ~ said %}{%- endif %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ (START if m.role == 'assistant') ~ said ~ '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' ~ START }}{%- endif %}"""
"""Drops thoughts of turns before a message of the user, as Qwen3's template does. START begins a turn."""


def checked(template, **settings):
    """Return the lines on the conversations of a game under a template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with make_conversations(EnvConfig(**settings), tokenizer, CHAT) as made:
        return made.line


def test_a_template_that_drops_thoughts_is_refused_before_the_run():
    """Not at the first thought, hours later."""
    drops, calls = DROPS.replace("START", "''"), {"tools": ("calculator",), "format": "hermes"}
    with pytest.raises(UserError, match=r"template rewrites earlier turns.*--env.history keep"):
        checked(drops, name="guess", history="strict")
    checked(drops, name="guess", history="keep")
    checked(drops, name="guess", history="strict", max_turns=1)  # no observation follows
    checked(drops, **calls, history="strict")  # thoughts before results of tools stay


def test_a_run_says_that_the_template_rewrites_earlier_turns():
    drops = DROPS.replace("START", "''")
    assert checked(drops, name="guess").startswith("the chat template rewrites earlier turns: each turn")
    assert not checked(TEMPLATE, name="guess") and not checked(drops, name="guess", history="keep")


def test_a_template_that_cannot_render_the_third_turn_is_refused_before_the_run():
    twice = "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 2 %}"
    refuses = twice + "{{ raise_exception('two questions') }}{% endif %}" + TEMPLATE
    with pytest.raises(UserError, match="two questions"):
        checked(refuses, name="guess")
    checked(refuses, name="guess", max_turns=2)


def test_after_a_closed_thought_the_turn_has_none(say):
    """Templates without thinking open and close a thought in the prompt; </think> in the turn is text."""
    closed, tokenizer = DROPS.replace("START", "'<think>\n\n</think>\n\n'"), make_tokenizer()
    checked(closed, name="guess")
    tokenizer.chat_template = closed
    (reply,) = say(Says(Step("go")), "<think>hm</think>40<|im_end|>", tokenizer=tokenizer)
    follows = "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert texts([reply]) == [follows]


def test_what_is_too_long_is_cut_and_the_policy_told(say):
    (reply,) = say(Says(Step("x" * 5000)), "40<|im_end|>", max_observation_tokens=50)
    assert "user\n" + "x" * 50 + "\n[cut off: 50 of 5000 characters are shown]<|im_end|>" in texts([reply])[0]


def test_lone_surrogates_and_nul_in_an_observation_do_not_end_the_run(say):
    (reply,) = say(Says(Step("a\ud800\0b")), "40<|im_end|>")
    assert not reply.done and "user\na?" in texts([reply])[0]


def test_rewards_add_up_and_the_last_turn_is_known_as_such(say):
    env = Says(Step("a", reward=0.5), Step("b"), Step("c", reward=0.25))
    *_, last = say(env, "1", "2", "3", max_turns=3)
    assert last.done and last.episode.reward == 0.75 and last.episode.turns == 3
    assert env.turn.last and env.turn.number == 3
    assert [m["content"] for m in env.turn.messages] == ["6*7=", "1", "a", "2", "b", "3"]
    turns = [(message["role"], message["content"]) for message in last.episode.messages]
    assert turns == [(role, text) for role, text in zip(("assistant", "user") * 3, "1a2b3", strict=False)]
    # The results of turns, for credit assignment.
    ends, rewards, states = zip(*((r.end, r.reward, r.state) for r in last.episode.records), strict=True)
    length = lambda text: len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    observed = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert ends == (
        length("1"),
        length("1" + observed.format("a") + "2"),
        ends[1] + length(observed + "3") - 1,
    )
    assert rewards == (0.5, None, 0.25) and states == tuple(state_key([message("user", x)]) for x in "abc")
    assert env.turn.read().startswith("<|im_start|>user\n6*7=") and env.turn.read().endswith("assistant\n")


def message(role, content, **others):
    return {"role": role, "content": content, **others}


def test_an_environment_may_name_its_states(say):
    """Else the observation is the state; ids of tool calls are random."""
    said = [message("tool", "same", id=3)], "same", [message("tool", "same", id=4)]
    steps = [Step(said[0]), Step(said[1]), Step(said[2]), Step("x", state="s"), Step("y", state="s")]
    *_, last = say(Says(*steps, Step("first page", state="")), *"123456")
    keys = [record.state for record in last.episode.records]
    assert keys[0] == keys[2] != keys[1] and keys[3] == keys[4] == state_key("s") and keys[5] == ""


def test_the_state_of_the_guessing_game_is_what_the_guesses_have_told(say):
    turns = [f"{n}<|im_end|>" for n in (20, 50, 30, 7, "x", 60)]
    *_, last = say(ENVS["guess"](), *turns)
    known = ["20 to inf", "20 to 50", "30 to 50", "30 to 50", "30 to 50", "30 to 50"]
    assert [record.state for record in last.episode.records] == [*map(state_key, known)]


@pytest.mark.parametrize(
    "step, why",
    [
        (Step("x", state=3), "ValueError: step gave the state 3; it must be a text, or None"),
        (Step(reward=float("nan")), "ValueError: step gave the reward nan"),
        (Step([{"role": "tool", "content": 42}]), "ValueError: a message needs role and content as text"),
        (Step([{"content": "x"}]), "ValueError: a message needs role and content as text"),
        (Step(["x"]), "ValueError: a message needs role and content as text"),
        (Step(reward=True), "ValueError: step gave the reward True"),
        (Step(reward=1e9), "ValueError: step gave the reward 1000000000.0; it must be within"),
        (Step("x", tool_calls=-1), "ValueError: step counted"),
        (Step("x", timeouts="many"), "ValueError: step counted"),
        (Step(raw=True), "ValueError: step is raw and has no observation"),
        (None, "ValueError: step returned NoneType, not a Step"),
    ],
    ids=str,
)
def test_a_step_that_is_none_ends_the_conversation(say, step, why):
    (reply,) = say(Says(step), "40")
    assert reply.done and reply.episode.failure.startswith(why)


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError()], ids=repr)
def test_code_of_the_user_that_exits_or_cancels_ends_no_more_than_its_call(say, tools, error):
    """Both are no Exception: in a task of its own, SystemExit would end the loop of all conversations."""

    async def fail(*arguments):
        raise error

    env = Says()
    env.step = fail
    (reply,) = say(env, "40")
    assert reply.done and reply.episode.failure.startswith(type(error).__name__)
    tools.tools["calculator"].call = fail
    (reply,) = say(tools, CALL)
    assert not reply.done and f"tool\nerror: {type(error).__name__}" in texts([reply])[0]


@pytest.fixture
def tools():
    made = make_conversations(EnvConfig(tools=("calculator",), format="hermes"), TOKENIZER, CHAT)
    yield made.env
    made.__exit__()


def test_a_call_is_carried_out_and_a_turn_without_one_is_the_answer(say, tools):
    called, answered = say(tools, f"{CALL}<|im_end|>", "42<|im_end|>")
    assert texts([called]) == ["\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"]
    assert answered.done and answered.episode.reward is None
    assert (answered.episode.tool_calls, answered.episode.tool_errors) == (1, 0)


@pytest.mark.parametrize(
    "call, told",
    [
        (CALL.replace("calculator", "abacus"), "error: there is no tool 'abacus', only calculator"),
        (CALL.replace("6*7", "6*"), "error: "),
        (CALL.replace("expression", "formula"), "error: "),
        (CALL.replace("}}", "}"), "error: "),
    ],
)
def test_what_is_wrong_with_a_call_is_told(say, tools, call, told):
    (reply,) = say(tools, call)
    assert not reply.done and f"tool\n{told}" in texts([reply])[0] and reply.episode.tool_errors == 1


def test_several_calls_of_a_turn_are_answered_in_order(say, tools):
    (reply,) = say(tools, CALL + CALL.replace("6*7", "2+2") + "<|im_end|>")
    assert [line for line in texts([reply])[0].split("\n") if "<|im_end|>" in line] == [
        "42<|im_end|>",
        "4<|im_end|>",
    ]


def test_a_tool_that_hangs_is_cut_off_and_the_policy_told(say, tools):
    async def hang(arguments):
        await asyncio.Event().wait()

    tools.tools["calculator"].call, tools.timeout = hang, 0.1
    (reply,) = say(tools, CALL)
    assert "error: stopped after 0.1 s without a result" in texts([reply])[0]
    assert not reply.done and reply.episode.timeouts == 1


def test_the_tools_are_shown_to_the_template():
    made = make_conversations(EnvConfig(tools=("calculator",), format="hermes"), TOKENIZER, CHAT)
    (tool,) = made.columns["tools"]
    assert tool["type"] == "function" and tool["function"]["name"] == "calculator"
    made.__exit__()


def test_every_prompt_of_the_run_shows_the_tools(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ tools[0].name }}" + TEMPLATE)
    config = DataConfig(path="task:calculate", chat=ChatConfig(chat_template=str(tmp_path / "chat.jinja")))
    loader = Loader(config, TOKENIZER, 0, 64, columns={"tools": [{"name": "abacus"}]})
    for prompt in loader.batch(0, 2):
        assert TOKENIZER.decode(prompt.ids).startswith("abacus<|im_start|>user")


@pytest.mark.parametrize(
    "config, message",
    [
        (
            EnvConfig(name="chess"),
            "--env.name chess: unknown. Built in is guess; yours is the path",
        ),
        (EnvConfig(name="nowhere.py"), "--env.name: there is no file .*nowhere.py"),
        (EnvConfig(tools=("abacus",)), "--env.tools abacus: unknown; known are calculator"),
        (EnvConfig(tools=("search",)), "--env.tools search: an MCP server now: .* examples/search_server.py"),
        (EnvConfig(tools=("calculator",)), "--env.format auto: the chat template shows no format"),
    ],
    ids=str,
)
def test_what_does_not_exist_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        make_conversations(config, TOKENIZER, CHAT)


@pytest.mark.parametrize(
    "field, config, text",
    [
        ("name", EnvConfig(name="guess", tools=("calculator",)), "is guess, and env.tools is set"),
        ("tools", EnvConfig(tools=("calculator", "calculator")), "has calculator twice"),
        ("max_turns", EnvConfig(max_turns=0), "is 0: it must be at least 1 and at most 10000; 8 is usual."),
        ("max_calls", EnvConfig(max_calls=-1), "is -1: it must be at least 1"),
        ("tool_timeout", EnvConfig(tool_timeout=0.0), "is 0.0: it must be above 0"),
        ("tool_timeout", EnvConfig(tool_timeout=float("nan")), "is nan: it must be above 0"),
        ("max_observation_tokens", EnvConfig(max_observation_tokens=0), "is 0: it must be at least 1"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_the_allowed_range(field, config, text):
    ((name, problem),) = problems(config)
    assert name == field and text in problem


def test_two_tools_of_one_name_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class C:\n    schema = {'name': 'calculator'}\n    async def call(self, arguments): return ''\n"
    )
    config = EnvConfig(tools=("calculator", f"{tmp_path / 'mine.py'}:C"), format="hermes")
    with pytest.raises(UserError, match="another tool is called calculator too"):
        make_conversations(config, TOKENIZER, CHAT)


def test_no_environment_no_conversations():
    assert make_conversations(EnvConfig(), TOKENIZER, CHAT) is None


def test_conversations_of_one_key_have_the_same_seeds_and_others_have_not():
    made = Conversations(Says(), EnvConfig(name="x"), TOKENIZER, CHAT)
    assert (
        made.dialogue([], KEY).seed
        == made.dialogue([], KEY).seed
        != made.dialogue([], jax.random.key(1)).seed
    )
    assert np.isscalar(made.dialogue([], KEY).seed)
    made.__exit__()


class Slow:
    """A tool of which one call runs at a time, for 0.3 seconds."""

    schema: ClassVar = {"name": "slow", "parameters": {"type": "object", "properties": {}}}

    def __init__(self):
        self.turn = asyncio.Semaphore(1)

    async def call(self, arguments):
        await asyncio.sleep(0.3)
        return "done"


def test_waiting_for_a_turn_costs_a_call_no_time(say, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.envs.dialogue.GRACE", 0.0)
    call = '<tool_call>{"name": "slow", "arguments": {}}</tool_call>'
    env = ToolEnv({"slow": Slow()}, "hermes", timeout=1.1, max_calls=4)  # four calls take 1.2 s at least
    (reply,) = say(env, call * 5 + "<|im_end|>", tool_timeout=1.1)
    assert not reply.episode.failure and reply.episode.tool_calls == 5
    assert (reply.episode.tool_errors, reply.episode.timeouts) == (1, 0)
    (text,) = texts([reply])
    assert text.count("done") == 4 and "error: only the first 4 calls of a turn are carried out" in text
