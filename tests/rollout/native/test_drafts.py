"""Drafts of the native engine: lookup, acceptance and texts by hand; the same text with and without."""

import numpy as np
import pytest
from small_engine import KEY, LIMIT, assert_same, base, engine, params, requests

from jaxrl_llm.rollout.engine import PartialResponse, Request, SamplingConfig
from jaxrl_llm.rollout.native import drafts
from jaxrl_llm.rollout.native.drafts import DraftMemory, DraftTexts, accept_drafts, propose_drafts
from jaxrl_llm.rollout.native.slots import SlotState

DRAFTS = {"cache": "paged", "page": 8, "draft_tokens": 4}


LOOKUPS = [  # other texts, own text, draft
    ([], [5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),  # what followed 5, 6
    ([], [5, 6, 7, 8], [-1, -1, -1, -1]),  # 8 is new
    ([], [5, 6, 1, 6, 2, 6], [2, 6, 2, 6]),  # of equal matches the latest, continued with its period
    ([], [1, 5, 6, 2, 9, 6, 3, 5, 6], [2, 9, 6, 3]),  # a longer match before a later one
    ([3, 4, 5, 6, 7], [3, 4], [5, 6, 7, -1]),  # another text, to its end
    ([3, 4, -1, 9, 9], [3, 4], [-1, -1, -1, -1]),  # nothing follows at the end of another text
    ([3, 4, 5, -1, 2, 4, 6], [3, 4], [5, -1, -1, -1]),
    ([3, 4, 5, -1, 3, 4, 6], [3, 4], [6, -1, -1, -1]),
    ([9, 8, -1, 2, 9], [2, 9], [8, -1, -1, -1]),  # but after a shorter match
    ([8], [8], [-1, -1, -1, -1]),
    ([7] * 20, [7] * 20, [7, 7, 7, 7]),
    ([], [5, 0, 6, 5], [0, 6, 5, 0]),  # token 0 is a token
]


def test_lookups_by_hand():
    rows = np.full((len(LOOKUPS), 24 + 24), -1, np.int32)
    for row, (others, own, _) in zip(rows, LOOKUPS, strict=True):
        row[23 - len(others) : 23], row[24 : 24 + len(own)] = others, own
    last = np.array([len(own) - 1 for _, own, _ in LOOKUPS])
    assert propose_drafts(rows, 24, last, 4).tolist() == [draft for _, _, draft in LOOKUPS]


def test_accepted_tokens_by_hand():
    """Three draft tokens; 1 ends a response; the last slot is empty, and one may take two more tokens."""
    ints = lambda *values: np.array(values, np.int32)
    places = np.arange(4)
    state = SlotState(ints(9, 9, 9, 9, 9, 9), ints(20, 20, 20, 20, 20, 3), ints(7, 7, 7, 7, 8, 2),
                      ints(10, 50, 50, 50, 10, 9), np.arange(6) < 5, np.zeros((6, 2), np.uint32))  # fmt: skip
    proposal = np.array([[2, 3, 4], [2, 3, 4], [2, 1, 4], [-1, -1, -1], [2, 3, 4], [2, 3, 4]], np.int32)
    drawn = np.array(
        [[2, 5, 4, 6], [2, 3, 4, 6], [2, 1, 4, 6], [8, 8, 8, 8], [2, 3, 4, 6], [2, 3, 4, 6]], np.int32
    )
    read = places < np.array([3, 4, 4, 1, 2, 0])[:, None]
    state, kept = accept_drafts(state, proposal, drawn, read, stop_ids=ints(1, -1))
    assert kept.tolist() == [2, 4, 2, 1, 2, 0]
    assert state.tokens.tolist() == [5, 6, 1, 8, 3, 9]
    assert state.counts.tolist() == [9, 11, 9, 8, 10, 2]
    assert state.positions.tolist() == [22, 24, 22, 21, 22, 3]
    assert state.active.tolist() == [True, True, False, True, False, False]  # 1; the limit of 10


def response(prompt, ids):
    return PartialResponse(ids=list(ids), request=Request(np.array(prompt), 0, 1, 9))


def test_texts_are_those_of_the_prompt_by_hand(monkeypatch):
    """The last epoch, then the group as it is now; what does not fit is cut at the left."""
    memory = DraftMemory()
    DraftTexts(memory, [response([3, 4], [50, 51]), response([9], [60])], 8).finish()
    one, two, other = response([3, 4], [5, 6]), response([3, 4], [7]), response([8], [2, 2])
    texts = DraftTexts(memory, [one, two, other], max_tokens=6)
    assert texts.texts([one, None, other], 5).tolist() == [
        [-1, 50, 51, -1, 7, -1, 3, 4, 5, 6, -1],
        [-1] * 11,
        [-1, -1, -1, -1, -1, -1, 8, 2, 2, -1, -1],
    ]
    two.ids += [1, 1, 1]
    assert texts.texts([one], 4).tolist() == [[-1, 7, 1, 1, 1, -1, 3, 4, 5, 6]]
    del two.ids[2:]  # behind a stop string
    assert texts.texts([one], 4).tolist() == [[50, 51, -1, 7, 1, -1, 3, 4, 5, 6]]
    monkeypatch.setattr(drafts, "MAX_MEMORY", 6)
    texts.finish()  # two texts of two tokens for two: 5 in all; those of [8] would make 7
    assert memory.num_tokens == 5
    assert [ids.tolist() for ids in memory.recall(one)] == [[5, 6], [7, 1]] and not memory.recall(other)


def test_drafts_of_little_use_are_paused():
    """For 1, 3, 7, 8, 8 chunks; after 15 tokens in 10 forwards of a slot there is no pause."""
    texts = DraftTexts(DraftMemory(), [], 8)
    uses = []
    for _ in range(32):
        uses.append(texts.use())
        if uses[-1]:
            texts.record(14, drafted=70, accepted=4)
    assert np.flatnonzero(uses).tolist() == [0, 2, 6, 14, 23]
    while not texts.use():
        pass
    texts.record(15, drafted=70, accepted=5)
    assert texts.use()
    assert texts.finish() == {"rollout/draft_tokens": 420, "rollout/draft_accepted": 25 / 420}


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_text_is_the_same(temperature):
    """With the first drafts, from the text and its group, and with those of the call before."""
    reader, accepted = engine(**DRAFTS), []
    for _ in range(2):
        got = reader.generate(requests(), SamplingConfig(temperature=temperature), KEY)
        assert_same(got, base(temperature))
        assert 0 < reader.metrics["rollout/slot_occupancy"] <= 1
        accepted.append(reader.metrics["rollout/draft_accepted"])
    assert accepted[1] > 0.5 and (temperature or accepted[0] > 0.3)


def test_stops_inside_a_draft_end_the_response():
    """Stop tokens and a stop string that the draft holds; and the longest response."""
    texts = base()
    sampling = SamplingConfig(stop_tokens=(texts[0].response_ids[9].item(),), stop=(texts[3].text[-6:-3],))
    plain = engine(cache="paged", page=8).generate(requests(), sampling, KEY)
    engine(**DRAFTS).generate(requests(), SamplingConfig(), KEY)  # the texts behind the stops
    assert_same(engine(**DRAFTS).generate(requests(), sampling, KEY), plain)
    assert {t.finish for t in plain} == {"stop", "length"}


def test_the_planned_program_reads_a_draft_in_each_slot():
    """Two slots; 10 columns of 8 tokens, and 8 texts as long as the longest sequence."""
    arguments, sampling = (params(), LIMIT, LIMIT, 5), SamplingConfig()
    program = engine(**DRAFTS).largest_calls(*arguments, sampling=sampling, turns=False)["decode_drafts"]
    *_, state, (*_, table, texts, _) = program.args
    assert len(state.tokens) == 2 and table.shape == (2, 10) and texts.shape == (2, 8 * 80 + 80)
    assert program.static == {"num_drafts": 4, "filters": (False, 0)}
    plain = engine(cache="paged", page=8).largest_calls(*arguments, sampling=sampling, turns=False)
    assert "decode_drafts" not in plain


@pytest.mark.slow
def test_the_text_is_the_same_on_eight_devices():
    """Slots over data and fsdp, each shard with its own pages; kv heads over tensor."""
    sharded = engine((2, 2, 2), **DRAFTS, slots=4)
    for _ in range(2):
        assert_same(sharded.generate(requests(), SamplingConfig(), KEY), base())
    assert sharded.metrics["rollout/draft_accepted"] > 0.5
