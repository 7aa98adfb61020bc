from jaxrl_llm.rollout.native.stopping import stop_end

decode = lambda ids: "".join(chr(i) for i in ids)
ids_of = lambda text: [ord(c) for c in text]


def test_cut_right_after_the_token_that_completes_the_string():
    assert stop_end(ids_of("abc END def END"), 0, ("END",), decode) == 7


def test_a_string_across_two_chunks_is_found():
    ids = ids_of("abc END d")
    assert stop_end(ids[:5], 0, ("END",), decode) is None
    assert stop_end(ids, 5, ("END",), decode) == 7


def test_the_first_of_several_strings_wins():
    assert stop_end(ids_of("a\n\nb###"), 0, ("###", "\n\n"), decode) == 3


def test_a_token_that_overshoots_is_kept_whole():
    words = {1: "x E", 2: "ND. More", 3: " text"}
    assert stop_end([1, 2, 3], 0, ("END",), lambda ids: "".join(words[i] for i in ids)) == 2


def test_only_the_tail_is_decoded():
    seen = []
    stop_end(list(range(1000)), 990, ("ab",), lambda ids: seen.append(len(ids)) or "")
    assert max(seen) == 10 + 4 * 2 + 4
