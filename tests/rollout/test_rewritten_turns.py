"""Rewritten histories: each turn is the text that its own context gives, on both engines and every cache."""

from concurrent.futures import Future

import numpy as np
import pytest
from fake_sglang import FakeServer
from servers_shared import TOKENIZER, engine_for
from slow_cases import with_slow
from small_engine import KEY, MODEL, VERSION, expected_logprobs, params
from small_engine import engine as native

from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.forks import Fork, contexts
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import GenerationCall, PartialResponse, Reply, Request
from jaxrl_llm.rollout.native import kept
from jaxrl_llm.rollout.partial import pack_responses, unpack_responses
from jaxrl_llm.rollout.turns import append_reply, read_reply
from jaxrl_llm.structs import Episode

PROMPTS = [np.array(ids, np.int32) for ids in ([5, 9, 8], [40, 2, 17, 31, 6, 9, 22, 4, 60], [7])]
TOKENS = 60
GREEDY = SamplingConfig(temperature=0.0, stop_tokens=tuple(range(1, 128, 2)))


class Rewrites:
    """Four turns. The first reply drops the turn, the second one all but a token of the prompt, the third one
    nothing."""

    patience = 30.0

    def __init__(self):
        self.heard = []

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future, turn = Future(), (conversation or 0) + 1
        self.heard.append((prompt_index, turn, list(ids[start:])))
        keep = {1: len(PROMPTS[prompt_index]), 2: 1}.get(turn)
        future.set_result(Reply([70 + turn, 80, 90][: turn + 1], turn == 4, Episode(turn), turn, keep))
        return future


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    transport = DiskTransport(tmp_path_factory.mktemp("weights") / "here", "float32", TOKENIZER)
    engine = engine_for([FakeServer().url], transport, MODEL, slots=2)
    engine.publish(params(), VERSION)
    yield engine
    engine.pool.close()


ENGINES = {
    "ring": {},
    "ring with kept turns": {"page": 4, "slots": 3},
    "pages": {"cache": "paged", "page": 4, "slots": 3},
    "pages and drafts": {"cache": "paged", "page": 4, "slots": 3, "draft_tokens": 3},
}


@pytest.fixture(params=with_slow([*ENGINES, "sglang"], {"ring", "pages"}))
def engine(request, monkeypatch):
    if request.param == "sglang":
        return request.getfixturevalue("sglang")
    if request.param == "ring with kept turns":
        monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", 0)
    return native(**ENGINES[request.param])


def talk(engine, partial=()):
    requests = [Request(ids, i, 1, TOKENS) for i, ids in enumerate(PROMPTS)]
    return engine.start(GenerationCall(requests, GREEDY, KEY, Rewrites(), partial=partial)).result()


def turns_of(trajectory):
    """(what the policy read, what it then wrote, the reported log-probs) of each turn."""
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    before = len(trajectory.prompt_ids)
    for read, keep in contexts(len(tokens), trajectory.forks):
        mask = np.concatenate([np.zeros(before, np.int8), trajectory.mask])[read]
        starts = np.flatnonzero(np.diff(mask, prepend=0) > 0)
        for start in starts[starts >= keep]:
            end = start + int(np.argmin(np.append(mask[start:], 0)))
            ids = tokens[read]
            yield ids[:start], ids[start:end], trajectory.logprobs[read[start:end] - before]


def test_each_turn_is_the_text_that_its_own_context_gives(engine):
    for t in talk(engine):
        turns = list(turns_of(t))
        assert len(turns) == 4 and len(t.forks) == 2 and t.finish == "stop"
        prompt, (first, second) = len(t.prompt_ids), [written.tolist() for _, written, _ in turns[:2]]
        assert turns[1][0].tolist() == [*t.prompt_ids, 71, 80]
        assert turns[2][0].tolist() == [t.prompt_ids[0], 72, 80, 90]
        assert turns[3][0].tolist() == [*turns[2][0], *turns[2][1], 73, 80, 90]
        assert t.forks[0] == Fork(prompt + len(first), prompt)
        assert t.forks[1] == Fork(prompt + len(first) + 2 + len(second), 1)
        for read, written, logprobs in turns:
            (alone,) = native().generate([Request(read, 0, 1, len(written))], GREEDY, KEY)
            assert alone.response_ids.tolist() == written.tolist()
            expected = expected_logprobs(read, written)[np.arange(len(written)), written]
            np.testing.assert_allclose(logprobs, expected, atol=3e-5)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "ring"])
def test_a_fork_prefills_what_follows_the_kept_tokens(name, monkeypatch):
    """The prompt but its last token; of the replies, 1 of 2 tokens, and 2 of 3: decoding reads the last one.
    Then the token that ended the third turn, and 2 of 3. The first page of the long prompt is shared with
    other responses to it, so the fork after its first token reads that token again.
    """
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", 0)
    engine = native(**ENGINES[name])
    talk(engine)
    again = 0 if name == "ring with kept turns" else 1
    assert engine.metrics["rollout/prefill_tokens"] == (2 + 8 + 0) + 3 * (1 + 2 + 3) + again


def test_a_reply_without_ids_reads_its_last_token_again():
    response = PartialResponse([11, 12, 13], [-1.0] * 3, [0] * 3, request=Request(PROMPTS[0], 0, 1, 9))
    assert append_reply(response, Reply([], False, Episode(1), keep=4))
    assert response.ids == [11, 12, 13, 11] and response.forks == [Fork(6, 3)]
    assert response.mask.tolist() == [1, 1, 1, 0]
    assert response.present.tolist() == response.context.tolist() == [5, 9, 8, 11]
    response.append([14], [-1.0], [0])
    assert response.present.tolist() == [5, 9, 8, 11, 14] and response.num_present == 5
    assert append_reply(response, Reply([3], False, Episode(2), keep=5)) and len(response.forks) == 1


@pytest.mark.parametrize(("keep", "ids"), [(-1, [3]), (7, [3]), (True, [3]), ("2", [3]), (0, []), (1.0, [3])])
def test_a_keep_that_is_nonsense_ends_the_conversation(keep, ids):
    response, future = PartialResponse([11, 12, 13], request=Request(PROMPTS[0], 0, 1, 9)), Future()
    future.set_result(Reply(ids, False, Episode(), keep=keep))
    failure = read_reply(future, response, 128).episode.failure
    assert failure == f"the reply's keep is {keep!r}, not {0 if ids else 1} to 6 tokens of the context"


def test_rewritten_conversations_of_an_earlier_run_go_on(sglang):
    """They come from a checkpoint, cut off in the third turn; the new environment hears two turns again."""
    whole = talk(sglang)
    started = []
    for t in whole:
        ends = np.flatnonzero(np.diff(t.mask.astype(int), prepend=1))
        spans = list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))[:2]
        cut = spans[1][1] + 1
        started.append(PartialResponse(
            t.response_ids[:cut].tolist(), t.logprobs[:cut].tolist(), [3] * cut,
            "stop" if t.mask[cut] == 0 else "", spans, forks=list(t.forks),
        ))  # fmt: skip
    ((restored,),) = unpack_responses(pack_responses({4: [started]})).values()
    assert [one.forks for one in restored] == [list(t.forks) for t in whole]
    for now, then in zip(talk(sglang, restored), whole, strict=True):
        assert now.response_ids.tolist() == then.response_ids.tolist() and now.forks == then.forks
        assert (now.versions[: len(now.versions) // 2] == 3).any()
