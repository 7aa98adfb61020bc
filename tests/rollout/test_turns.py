"""Conversations of several turns: the same on both engines, and none waits for another one's environment."""

import asyncio
import functools
import json
import os
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from distributed import run_processes
from fake_sglang import FakeServer
from servers_shared import TOKENIZER, engine_for, ids
from small_engine import KEY, MODEL, VERSION, expected_logprobs, params
from small_engine import engine as native

from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.envs.env import Step
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import DialogueError, GenerationCall, PartialResponse, Reply, Request, text_of
from jaxrl_llm.rollout.turns import read_reply
from jaxrl_llm.structs import Episode

HERE = Path(__file__).parent
PATHS = (HERE, HERE / "servers", HERE / "native", HERE.parent)  # of the helpers of these tests
TOKENS = 64  # of a conversation at most
ENDS = tuple(range(1, 128, 2))  # many tokens end a turn, so that random weights write short ones
GREEDY = SamplingConfig(temperature=0.0, stop_tokens=ENDS)
SAMPLED = SamplingConfig(stop_tokens=ENDS)
PROMPTS = [Prompt(e, encode_prompt(TOKENIZER, e, ChatConfig()), i) for i, e in enumerate(
    Example(({"role": "user", "content": text},), None, answer=text) for text in ("3+4=", "hello", "?")
)]  # fmt: skip


class Script:
    """Answers `turns` turns with "go N!"; the reward is the number of turns."""

    def __init__(self, turns=2, says="go {}!"):
        self.turns, self.says, self.heard, self.seeds = turns, says, [], set()

    async def reset(self, example, seed):
        self.seeds.add(seed)
        return example.answer

    async def step(self, state, turn):
        self.heard.append((state, turn.text))
        if turn.number > self.turns:
            return Step(reward=float(turn.number), done=True)
        return Step(self.says.format(turn.number))


@pytest.fixture(scope="module")
def server():
    return FakeServer()


@pytest.fixture(scope="module")
def sglang(server, tmp_path_factory):
    transport = DiskTransport(tmp_path_factory.mktemp("weights") / "here", "float32", TOKENIZER)
    engine = engine_for([server.url], transport, MODEL, slots=2)
    engine.publish(params(), VERSION)
    yield engine
    engine.pool.close()


@pytest.fixture(params=["native", "sglang"])
def engine(request):
    return native() if request.param == "native" else request.getfixturevalue("sglang")


@pytest.fixture
def talk():
    """talk(engine, env, sampling, ...) -> trajectories of all prompts."""
    opened = []

    def run(
        engine,
        env,
        sampling=GREEDY,
        responses=1,
        *,
        tokens=TOKENS,
        prompts=PROMPTS,
        patience=60,
        partial=(),
        **limits,
    ):
        opened.append(Conversations(env, EnvConfig(name="x", **limits), TOKENIZER, ChatConfig()))
        dialogue = opened[-1].dialogue(prompts, KEY)
        dialogue.patience = patience
        requests = [Request(p.ids, i, responses, tokens) for i, p in enumerate(prompts)]
        return engine.start(GenerationCall(requests, sampling, KEY, dialogue, partial=partial)).result()

    yield run
    for conversations in opened:
        conversations.__exit__()


def observations(trajectory):
    """Texts between the policy's turns."""
    cuts = np.flatnonzero(np.diff(trajectory.mask, prepend=1, append=1))
    ids = trajectory.response_ids
    return [TOKENIZER.decode(ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def test_turns_are_answered_and_the_trainer_agrees_with_every_logprob(engine, talk):
    made = talk(engine, Script())
    assert len(made) == 3
    for t in made:
        said = [f"\n<|im_start|>user\ngo {n}!<|im_end|>\n<|im_start|>assistant\n" for n in (1, 2)]
        found = observations(t)
        assert [text.removeprefix("<|im_end|>") for text in found] == said
        assert t.finish == "stop" and t.episode.turns == 3 and t.episode.reward == 3.0
        expected = expected_logprobs(t.prompt_ids, t.response_ids)
        expected = expected[np.arange(len(t.response_ids)), t.response_ids]
        np.testing.assert_allclose(t.logprobs, np.where(t.mask, expected, 0.0), atol=3e-5)
        assert t.versions.tolist() == [VERSION] * len(t.response_ids)
        last = t.response_ids[np.flatnonzero(t.mask == 0)[-1] + 1 :]
        assert t.answer == text_of(TOKENIZER, last, ENDS)
        assert t.text == text_of(TOKENIZER, t.response_ids, ENDS)


def test_both_engines_write_the_same_conversation(sglang, talk):
    for mine, theirs in zip(talk(native(), Script()), talk(sglang, Script()), strict=True):
        assert mine.response_ids.tolist() == theirs.response_ids.tolist()
        assert mine.mask.tolist() == theirs.mask.tolist()


def test_the_environment_hears_each_turn_without_its_end_token(talk):
    env = Script(turns=1)
    made = talk(native(), env)
    firsts = [t.response_ids[: np.flatnonzero(t.mask == 0)[0]] for t in made]
    texts = [TOKENIZER.decode(ids).removesuffix("<|im_end|>") for ids in firsts]
    heard = {(prompt.example.answer, text) for prompt, text in zip(PROMPTS, texts, strict=True)}
    assert heard <= set(env.heard) and len(env.heard) == 6 and len(env.seeds) == 3


def test_the_budget_holds_replies_too_and_nothing_follows_the_last_turn(engine, talk):
    free = talk(engine, Script(turns=9))
    for t, whole in zip(talk(engine, Script(turns=9), tokens=30), free, strict=True):
        assert t.finish == "length" and len(t.response_ids) <= 30
        assert t.response_ids.tolist() == whole.response_ids[: len(t.response_ids)].tolist()
        assert t.mask[-1] == 1 and np.isfinite(t.logprobs).all()


def test_turns_are_limited(engine, talk):
    for t in talk(engine, Script(turns=9), max_turns=2):
        assert t.finish == "stop" and len(observations(t)) == 1 and t.episode.turns == 2


def begun(trajectory):
    """Its first turn, the answer to it, and one token more, as if an older version had written them."""
    turn, *_, end = np.flatnonzero(np.diff(trajectory.mask, prepend=1))[:2]
    kept = trajectory.response_ids[: end + 1].tolist(), trajectory.logprobs[: end + 1].tolist()
    finish = "stop" if kept[0][-1] in ENDS else ""
    return PartialResponse(*kept, [3] * (end + 1), finish, [(int(turn), int(end))])


def test_conversations_of_an_earlier_run_go_on_with_a_new_environment(server, sglang, talk):
    whole, env = talk(sglang, Script()), Script()
    written = [begun(t) for t in whole]
    del server.seen[:]
    again = talk(sglang, env, partial=written)
    assert ids(again) == ids(whole)
    turns = 3 * len(whole) - sum(bool(had.finish) for had in written)  # two, where the second is there
    assert len(server.seen) == turns - len(whole)  # no first turn is written again
    for now, then, had in zip(again, whole, written, strict=True):
        assert now.mask.tolist() == then.mask.tolist() and now.episode == then.episode
        versions = np.where(np.arange(len(now.mask)) < len(had.ids), 3, VERSION)
        assert now.versions[now.mask > 0].tolist() == versions[now.mask > 0].tolist()
    assert len(env.heard) == 3 * len(whole) and len(env.seeds) == len(whole)


def test_another_answer_than_before_takes_the_place_of_what_followed(sglang, talk):
    written, other = [begun(t) for t in talk(sglang, Script())], functools.partial(Script, says="stay {}!")
    again = talk(sglang, other(), partial=written)
    assert ids(again) == ids(talk(sglang, other()))
    assert all(t.versions[0] == 3 and t.versions[-1] == VERSION for t in again)
    for ended, had in zip(talk(sglang, Script(turns=0), partial=written), written, strict=True):
        assert ended.response_ids.tolist() == had.ids[: had.observed[0][0]] and ended.mask.all()
        assert ended.episode.turns == 1 and ended.finish == "stop"


class Waits(Script):
    """The first prompt is answered once all other conversations have ended."""

    def __init__(self, others):
        super().__init__(1)
        self.others, self.ended, self.order = others, asyncio.Event(), []

    async def step(self, state, turn):
        if state == PROMPTS[0].example.answer and turn.number == 1:
            await self.ended.wait()
        step = await super().step(state, turn)
        self.order.append(state)
        if step.done:
            self.others -= 1
            if not self.others:
                self.ended.set()
        return step


def test_a_slow_conversation_holds_up_no_other(engine, talk):
    """More of them are slow than there are slots: a slot is free while the environment thinks."""
    env = Waits(others=8)
    made = talk(engine, env, SAMPLED, responses=4)
    assert len(env.order) == 24 and PROMPTS[0].example.answer not in env.order[:16]
    assert all(t.episode.turns == 2 for t in made)


class Fails(Script):
    async def step(self, state, turn):
        if state == "hello" and turn.number == 2:
            raise OSError("the game crashed")
        if state == "?":
            return "higher"
        return await super().step(state, turn)


def test_a_failing_environment_ends_its_own_conversation(engine, talk):
    fine, crashed, wrong = talk(engine, Fails(), SAMPLED)
    assert fine.episode.reward == 3.0 and not fine.episode.failure
    assert crashed.episode.failure.startswith("OSError: the game crashed (") and crashed.episode.turns == 2
    assert wrong.episode.failure == "ValueError: step returned str, not a Step"


class Blocks(Script):
    async def step(self, state, turn):
        time.sleep(0.8)


def test_an_environment_that_blocks_everything_ends_the_call_with_a_message(engine, talk):
    with pytest.raises(DialogueError, match=r"no environment has answered for 0.3 s, and \d conv.*await"):
        talk(engine, Blocks(), prompts=PROMPTS[:1], patience=0.3)


class Hangs(Script):
    async def step(self, state, turn):
        if state == "hello":
            await asyncio.Event().wait()
        return await super().step(state, turn)


def test_a_step_that_hangs_is_cut_off(engine, talk, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.envs.dialogue.GRACE", 0.0)
    fine, hung, _ = talk(engine, Hangs(), tool_timeout=0.2)
    assert hung.episode.failure == "the environment took longer than 0.2 s" and fine.episode.reward == 3.0


def test_text_depends_neither_on_slots_nor_on_chunks(talk):
    base = ids(talk(native(), Script(), SAMPLED, responses=4))
    assert ids(talk(native(slots=3, chunk=5), Script(), SAMPLED, responses=4)) == base
    assert len({tuple(i) for i in base}) == 12


def test_the_first_turn_is_what_it_is_without_an_environment(talk):
    alone = native().generate([Request(p.ids, i, 4, TOKENS) for i, p in enumerate(PROMPTS)], SAMPLED, KEY)
    for t, first in zip(talk(native(), Script(), SAMPLED, responses=4), alone, strict=True):
        assert t.response_ids[: len(first.response_ids)].tolist() == first.response_ids.tolist()


def test_each_turn_is_drawn_with_a_seed_of_its_own(server, sglang, talk):
    del server.seen[:]
    talk(sglang, Script(), SAMPLED, responses=2)
    seeds = [body["sampling_params"]["sampling_seed"] for body in server.seen]
    assert len(seeds) == len(set(seeds)) == 18


class Nonsense:
    """Replies with three tokens to prompt 0, and with `reply` (or an error) to prompt 1."""

    patience = 10.0

    def __init__(self, reply):
        self.nonsense = reply

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future, turn = Future(), (conversation or 0) + 1
        if isinstance(self.nonsense, Exception) and prompt_index:
            future.set_exception(self.nonsense)
        else:
            future.set_result(self.nonsense if prompt_index else Reply([5, 6, 7], turn == 3, Episode(), turn))
        return future


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (Reply([5, 128], False, Episode()), "the reply's token id 128 is outside the vocabulary of 128"),
        (Reply([-1], False, Episode()), "the reply's token id -1 is outside the vocabulary of 128"),
        (Reply(["5"], False, Episode()), "the reply's ids are not a list of integers: ['5']"),
        (Reply(None, False, Episode()), "the reply's ids are not a list of integers: None"),
        (Reply([5], "no", Episode()), "the reply's done is 'no', not True or False"),
        (Reply([5], False, None), "the reply is Reply, not a Reply with an Episode"),
        (("text", False), "the reply is tuple, not a Reply with an Episode"),
        (KeyError("state"), "KeyError: 'state'"),
    ],
)
def test_a_reply_that_is_nonsense_ends_its_own_conversation(reply, failure):
    response = PartialResponse(ids=[9], episode=Episode(turns=1, reward=2.0))
    future = Nonsense(reply).reply(1, 0, None, [9], start=0)
    assert read_reply(future, response, 128) == Reply([], True, Episode(turns=2, reward=2.0, failure=failure))


def test_nonsense_is_masked_and_other_conversations_go_on(engine):
    requests = [Request(p.ids, i, 1, TOKENS) for i, p in enumerate(PROMPTS[:2])]
    dialogue = Nonsense(Reply([128], False, Episode()))
    fine, lost = engine.start(GenerationCall(requests, GREEDY, KEY, dialogue)).result()
    assert (fine.mask == 0).sum() == 6 and not fine.episode.failure
    assert lost.episode.failure == "the reply's token id 128 is outside the vocabulary of 128"
    assert lost.mask.all() and lost.finish == "stop"


def test_a_reply_beyond_the_budget_ends_the_response(engine):
    requests = [Request(p.ids, i, 1, TOKENS) for i, p in enumerate(PROMPTS[:2])]
    _, long = engine.start(
        GenerationCall(requests, GREEDY, KEY, Nonsense(Reply([5] * TOKENS, False, Episode())))
    ).result()
    assert long.finish == "length" and long.mask.all() and not long.episode.failure


TWO = """
import json, sys
import jax, numpy as np
from test_turns import MODEL, PROMPTS, SAMPLED, Script, TOKENIZER, TOKENS
from jaxrl_llm import models
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import DialogueError, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.host.processes import share

mesh = make_mesh(MeshConfig(*json.loads(sys.argv[1])))
make = jax.jit(models.init, static_argnums=0, out_shardings=models.shardings(MODEL, mesh, TRAIN))
engine = NativeEngine(RolloutConfig(slots=4, chunk=8), MODEL, mesh, TOKENIZER, share=share)
engine.publish(make(MODEL, jax.random.key(0)), 0)
requests = [Request(p.ids, i, 2, TOKENS) for i, p in enumerate(PROMPTS)]
env = Script()
with Conversations(env, EnvConfig(name="x"), TOKENIZER, ChatConfig()) as made:
    out = engine.generate(requests, SAMPLED, jax.random.key(1), made.dialogue(PROMPTS, jax.random.key(1)))
print(len(env.heard))
print(json.dumps([[t.response_ids.tolist(), t.mask.tolist(), t.episode.turns] for t in out]))
"""


@pytest.mark.slow
def test_two_processes_share_what_the_first_one_hears(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(
            [
                *map(str, (HERE, HERE / "servers", HERE / "native", HERE.parent)),
                os.environ.get("PYTHONPATH", ""),
            ]
        ),
    )
    both = run_processes(TWO, 2, ["[2, 1, 2]"], devices=2)
    alone = run_processes(TWO, 1, ["[1, 1, 1]"], devices=1)
    first, second, expected = (json.loads(out.splitlines()[-1]) for out in both + alone)
    assert first == second == expected and len(expected) == 6
    assert [int(out.splitlines()[-2]) > 0 for out in both] == [True, False]
