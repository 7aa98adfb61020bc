"""Mistakes in a reward, found before a model is loaded: with file, line and the nearest name."""

import dataclasses
import re
import textwrap
import threading
import types

import pytest

from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.load import MAX_PICKLE, choose_reward, pickle_function
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample

ROWS = [RewardSample("", answer=str(i), source="mine", columns={"level": i}) for i in range(6)]


def check_reward(config, rows=(), function=None):
    with RewardPool(dataclasses.replace(config, workers=1), function=function) as pool:
        pool.check(rows)


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="rewards.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return to_file


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("\ndef reward(sample)\n    return 1.0", "", r"rewards.py:2: SyntaxError: expected ':'"),
        ("import jsn\ndef reward(s): ...", "", r"rewards.py:1: ModuleNotFoundError.*Did you mean json\?"),
        ("import re\nre.compil('a')", "", r"rewards.py:2: AttributeError.*Did you mean compile\?"),
        ("import sys\nsys.exit('no')", "", r"rewards.py:2: SystemExit: no"),
        ("def reward(s): return 1.0", ":rewrd", r"no function or class rewrd; it has reward. Did you mean"),
        ("x = 1\ndef mine(s): ...", "", r"it has mine. Name the one to use: .*rewards.py:mine"),
        ("reward = 3", "", "has no function or class reward; it has none"),
        ("def reward(completion, prompts): ...", "", r"\(completion, prompts\). Did you mean completions\?"),
        ("def reward(response): ...", "", "reads sample.response"),
        ("def reward(sample, *, key): ...", "", "no convention has parameters"),
        ("\ndef reward(s):\n    return lenn(s.response)", "", r"tried .4.*NameError.*rewards.py:3\)"),
        ("def reward(s): return s.respons", "", r"tried .4.*'respons'.*: sample.response, sample"),
        ("def reward(s): return s['answer']", "", r"tried .4.*not subscriptable.*Fields of a sample"),
        ("def reward(s):\n    import nothing_here", "", r"tried .4.*No module named 'nothing_here'"),
        ("def f(completions, levels): ...", ":f", r"levels, but the row has only.*Did you mean level\?"),
        ("def reward(s): return s.response == s.answer", "", "returned a bool"),
        ("def reward(s): pass", "", "returned NoneType"),
        ("def reward(s): return float('nan')", "", "tried .4.*InvalidScoreError: returned nan"),
        ("def reward(s): return 2e6", "", r"tried .4.*returned 2e\+06, beyond \+-1e\+06"),
        ("def reward(s): return 0.5, {'acc': 1}", "", r"tried .4.*returned {'acc': 1} for an Outcome"),
        ("def reward(s): return {'score': 1.0, 'acc': 'yes'}", "", "tried .4.*returned str instead"),
        ("import sys\ndef reward(s): sys.exit(3)", "", r"tried .4.*SystemExit: 3 \(.*rewards.py:2\)"),
        ("import os\ndef reward(s): os._exit(3)", "", "exited with code 3"),
        pytest.param(
            *("def reward(s):\n    while True: pass", "", r"took longer than 0.5 s \(reward.timeout\)"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_reward_file_is_named(write, text, name, message):
    timeout = 0.5 if "while" in text else 30.0
    with pytest.raises(RewardLoadError, match=f"(?s){message}"):
        check_reward(RewardConfig(name=write(text) + name, timeout=timeout), ROWS)


@pytest.mark.parametrize(
    "text",
    [
        "def reward(s): return float(s.response == s.answer)",
        "import re\ndef reward(s): return float(re.search('<a>(.*)</a>', s.response).group(1) == '1')",
        "def reward(s): return float('nan') if s.answer != '3' else 0.0",  # one row is scored
        "def reward(s): return 0.0, 3",  # Outcome.FAILED: the reward says so
        "def reward(s): return 1.0 if s.answer == '3' else oops",  # one row is scored
    ],
)
def test_what_another_response_could_avoid_is_no_mistake(write, text):
    check_reward(RewardConfig(name=write(text)), ROWS)


def test_a_reward_that_failed_for_now_is_warned_of_before_a_model_is_loaded(write, caplog):
    """A judge that refuses the key, or is not there yet: the run may still work."""
    check_reward(RewardConfig(name=write("def reward(s): raise OSError('HTTP Error 401')")), ROWS)
    assert re.search(r"the reward .* failed on every row that was tried \(.*HTTP Error 401", caplog.text)
    caplog.clear()
    check_reward(RewardConfig(name=write("def reward(s): return 1.0")), ROWS)
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
        "def reward_func(queries, prompts, labels):\n"
        "    raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
    ],
)
def test_a_reward_of_openrlhf_without_torch_says_what_to_install(write, text):
    with pytest.raises(
        RewardLoadError, match=r"pip install torch .its CPU build is enough., or return a list"
    ):
        check_reward(RewardConfig(name=write(text)), ROWS)


@pytest.mark.parametrize("begin", ["", "async "])
def test_a_reward_of_trl_that_reads_its_trainer_is_told_so(write, begin):
    text = "def f(completions, **kwargs):\n    step = kwargs['trainer_state'].global_step"
    with pytest.raises(RewardLoadError, match=r"KeyError: 'trainer_state' .*py:2.*of TRL's trainer"):
        check_reward(RewardConfig(name=write(begin + text) + ":f"), ROWS)


def test_without_rows_it_is_loaded_only(write):
    path = write("def reward(s): raise NameError")
    check_reward(RewardConfig(name=path))
    check_reward(RewardConfig(name="none"), ROWS)
    with pytest.raises(RewardLoadError, match="no convention"):
        check_reward(RewardConfig(name=write("def reward(a, b): ...")))


def test_each_data_source_is_tried_with_its_own_reward():
    good = RewardSample("", answer="7", source="gsm8k")
    bad = RewardSample("", answer="many", source="task:arithmetic")
    check_reward(RewardConfig(), [good] * 9)
    with pytest.raises(RewardLoadError, match=r"earn the reward arithmetic: .* not a number"):
        check_reward(RewardConfig(), [*[good] * 9, bad])
    with pytest.raises(RewardLoadError, match='data source "poems"'):
        check_reward(RewardConfig(), [good, dataclasses.replace(good, source="poems")])


def test_none_is_chosen_only_where_no_verifier_is_required():
    poems = [RewardSample("", source="poems")]
    assert choose_reward(RewardConfig(), poems, required=False).name == "none"
    assert choose_reward(RewardConfig(), [RewardSample("", source="gsm8k")], required=False).name == "auto"
    assert choose_reward(RewardConfig(name="exact"), poems, required=False).name == "exact"
    with pytest.raises(RewardLoadError, match="or to none if"):
        choose_reward(RewardConfig(), poems, required=True)


def test_none_scores_zero_and_says_nothing_of_correctness():
    with RewardPool(RewardConfig(name="none")) as pool:
        results = pool.score(ROWS)
        assert not pool._workers
    assert [(r.score, r.components, r.outcome.name) for r in results] == [(0.0, (0.0,), "FAILED")] * 6


def notebook(text, name="f"):
    """A function as a notebook's cell defines it."""
    cell = types.ModuleType("__main__")
    exec(textwrap.dedent(text), vars(cell))
    return vars(cell)[name]


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("FACTOR = 0.5\ndef f(sample): return FACTOR * len(sample.response)", [0.5, 1.0]),
        ("def f(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]", [1, 0]),
        ("def f(data_source, solution_str, ground_truth): return solution_str == ground_truth", [1, 0]),
        ("def f(queries, prompts, labels): return [float(q == 'p1') for q in queries]", [1, 0]),
        ("async def f(messages, answer): return messages[-1]['content'] == answer", [1, 0]),
        ("import functools\ndef g(k, sample): return float(k)\nf = functools.partial(g, 0.25)", [0.25, 0.25]),
        ("class C:\n    def __call__(self, sample): return 1.0\nf = C()", [1, 1]),
        ("f = lambda sample: float(sample.answer)", [1, 2]),
    ],
)  # fmt: skip
def test_a_function_of_a_notebook_scores_in_the_workers(text, scores):
    batch = [RewardSample("1", answer="1", prompt="p"), RewardSample("11", answer="2", prompt="p")]
    with RewardPool(RewardConfig(name="none"), function=notebook(text)) as pool:
        pool.check(batch)
        results = pool.score(batch)
    assert [r.score for r in results] == scores, results[0].reason


def test_a_recycled_worker_gets_the_function_again():
    f = notebook("import os\ndef f(sample): return float(os.getpid() % 1000)")
    with RewardPool(RewardConfig(workers=1, recycle=1), function=f) as pool:
        assert len({pool.score(ROWS[:1])[0].score for _ in range(2)}) == 2


def test_a_function_that_cannot_be_sent_is_refused_with_the_fix():
    lock = threading.Lock()
    fix = "cannot be sent to reward workers: .*lock.*inside the function.*file.py:function"
    with pytest.raises(RewardLoadError, match=fix):
        RewardPool(RewardConfig(), function=lambda sample: float(lock.locked()))
    big = bytes(MAX_PICKLE + 1)
    with pytest.raises(RewardLoadError, match="carries 64 MiB with it"):
        pickle_function(lambda sample: float(len(big)))
    with pytest.raises(RewardLoadError, match="must be a function, not int"):
        RewardPool(RewardConfig(), function=3)
    with pytest.raises(RewardLoadError, match=re.escape("no convention has parameters (a, b)")):
        check_reward(RewardConfig(), function=lambda a, b: 1.0)


def test_a_function_that_fails_is_named_with_its_file_and_line(tmp_path):
    """Two cells of a notebook, each a file of its own: the helper's line 3 raises."""
    main = types.ModuleType("__main__")
    for name, text in (("a", "\n\ndef helper(s): return s.respons"), ("b", "def mine(s): return helper(s)")):
        exec(compile(text, tmp_path / f"{name}.py", "exec"), vars(main))
    with pytest.raises(RewardLoadError, match=r"(?s)reward function mine fails .*'respons' .*/a\.py:3\)"):
        check_reward(RewardConfig(), ROWS, main.mine)
    with pytest.raises(RewardLoadError, match=r"reward function <lambda> fails .*test_check\.py:\d+\)"):
        check_reward(RewardConfig(), ROWS, lambda sample: sample.respons)
