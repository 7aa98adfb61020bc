"""The pool under every fault a reward can show: one sample is lost at most, and nothing is left behind."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.environment import worker_environment
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardFailureError, RewardLoadError, RewardSample

FAULTS = """
import os, re, signal, subprocess, sys, threading, time

def reward(sample):
    r = sample.response
    if r == "raise": raise RuntimeError("no such luck")
    if r == "exit": raise SystemExit(3)
    if r == "nan": return float("nan")
    if r == "none": return None
    if r == "bool": return True
    if r == "list": return [1.0, 2.0]
    if r == "big": return 1e30
    if r == "huge": return 10 ** 5000
    if r == "endless":
        while True: pass
    if r == "backtrack": return float(bool(re.fullmatch("(a+)+b", "a" * 60)))
    if r == "power": return 10 ** 10 ** 10
    if r == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if r == "_exit": os._exit(7)
    if r == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if r == "fork": return 1.0 if os.fork() else 0.5
    if r == "memory": return float(len(bytearray(1 << 40)))
    if r == "shout": print("x" * 10_000_000); sys.stderr.write("y" * 1000)
    if r == "env": return float("MY_API_KEY" not in os.environ and os.environ.get("PLAIN") == "1")
    if r == "flood":
        while True: os.write(1, b"y" * (1 << 16))
    if r == "light": return float("jax" not in sys.modules and "numpy" not in sys.modules)
    return 1.0
"""
ONCE = dict(max_failed_fraction=1.0, retries=0)


UNDER_A_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[2])))
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardSample
with RewardPool(RewardConfig(name=sys.argv[3], workers=1)) as pool:
    print(pool.score([RewardSample("x")])[0].score)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the address space")
@pytest.mark.parametrize(("soft", "hard", "expected"), [(2, 2, 2), (2, -1, 2), (16, 16, 8), (-1, -1, 8)])
def test_the_lower_limit_of_memory_holds(write, soft, hard, expected):
    """`ulimit -v` sets a hard one, which no worker may raise; reward.memory_gb is 8."""
    gib = lambda number: number << 30 if number > 0 else number
    path = write("""
        import resource
        reward = lambda sample: float(resource.getrlimit(resource.RLIMIT_AS)[0] >> 30)
    """)
    command = [sys.executable, "-c", UNDER_A_LIMIT, str(gib(soft)), str(gib(hard)), f"{path}:reward"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{expected:.1f}\n", done.stderr


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="rewards.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return to_file


def samples(*responses):
    return [RewardSample(response=response, answer="1") for response in responses]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "RuntimeError: no such luck"),
        ("exit", "SystemExit: 3"),
        ("nan", "returned nan"),
        ("none", "returned NoneType"),
        ("bool", "returned a bool"),
        ("list", "returned list"),
        ("big", "beyond"),
        ("huge", "a huge integer"),
        ("memory", "MemoryError"),
        ("_exit", "exited with code 7"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_a_fault_costs_its_own_sample_only(write, fault, reason):
    with RewardPool(RewardConfig(name=write(FAULTS), timeout=60.0, **ONCE)) as pool:
        results = pool.score(samples("a", fault, "b", "c", "d"))
        assert [r.score for r in results if r.valid] == [1.0] * 4
        assert not results[1].valid and results[1].outcome is Outcome.FAILED
        assert reason in results[1].reason
        assert pool.metrics["reward/failed_fraction"] == 0.2
        assert pool.metrics["reward/correct_fraction"] == 0.8
        assert pool.metrics["reward/timeouts"] == 0.0
        assert all(r.score == 1.0 for r in pool.score(samples("a", "b", "c")))


def test_what_takes_too_long_costs_its_own_sample_only(write):
    """An endless loop, a regular expression, one long instruction, ignored signals, endless printing."""
    endless = ("endless", "backtrack", "power", "stubborn", "flood")
    with RewardPool(RewardConfig(name=write(FAULTS), timeout=1.0, workers=6, **ONCE)) as pool:
        results = pool.score(samples("a", *endless, "b"))
        assert [r.valid for r in results] == [True, *[False] * 5, True]
        assert all("took longer than 1 s" in r.reason for r in results[1:-1])
        assert pool.metrics["reward/timeouts"] == 5.0
        assert all(r.score == 1.0 for r in pool.score(samples("a", "b", "c")))


def test_printing_forking_and_secrets(write, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", "sk-1")
    monkeypatch.setenv("PLAIN", "1")
    log = tmp_path / "rewards.log"
    with RewardPool(RewardConfig(name=write(FAULTS), timeout=20), log) as pool:
        results = pool.score(samples("shout", "fork", "env", "light", "plain"))
    assert [(r.score, r.reason) for r in results] == [(1.0, "")] * 5
    assert log.stat().st_size == 1 << 20


def test_the_environment_of_a_worker():
    given = {
        "PATH": "/bin",
        "HF_TOKEN": "x",
        "AWS_ACCESS_KEY_ID": "x",
        "DB_PASSWORD": "x",
        "MY_SECRET_THING": "x",
        "KEYBOARD": "us",
        "TOKENIZERS_PARALLELISM": "false",
        "PROXY": "http://me:pw@host",
        "JUDGE_API_KEY": "kept",
    }
    kept = worker_environment(given, keep=("JUDGE_API_KEY",))
    assert set(given) & set(kept) == {"PATH", "KEYBOARD", "TOKENIZERS_PARALLELISM", "JUDGE_API_KEY"}
    assert kept["JAX_PLATFORMS"] == "cpu" and kept["CUDA_VISIBLE_DEVICES"] == ""


def test_a_failure_is_tried_again(write, tmp_path):
    flaky = f"""
        from pathlib import Path
        def reward(sample):
            mark = Path({str(tmp_path)!r}) / sample.response
            if not mark.exists():
                mark.touch()
                raise OSError("not yet")
            return 1.0
    """
    with RewardPool(RewardConfig(name=write(flaky), retries=1)) as pool:
        assert [r.score for r in pool.score(samples("a", "b"))] == [1.0, 1.0]
        assert pool.metrics["reward/retries"] == 2.0 and pool.metrics["reward/failed_fraction"] == 0.0


def test_failed_zero_scores_zero(write):
    with RewardPool(RewardConfig(name=write(FAULTS), failed="zero", **ONCE)) as pool:
        (result,) = pool.score(samples("raise"))
    assert (result.score, result.outcome, result.valid) == (0.0, Outcome.FAILED, True)
    assert result.components == (0.0,) and "no such luck" in result.reason


def test_failures_are_warned_of_at_the_first_and_when_they_have_doubled(write, caplog):
    parse = "def reward(sample):\n    return float(sample.response)\n"
    samples = [RewardSample(text) for text in ("1", "2", "three")]
    with RewardPool(RewardConfig(name=write(parse), workers=1, retries=0)) as pool:
        for _ in range(5):
            pool.score(samples)
    first, second, fourth = [record.getMessage() for record in caplog.records]
    reason = "the commonest reason: ValueError: could not convert string to float: 'three'"
    assert first.startswith("the reward failed for 1 of 3 samples, which do not count") and reason in first
    assert second.startswith("the reward failed for 1 of 3 samples, 2 so far, which do not count")
    assert "4 so far" in fourth


def test_too_many_failures_stop_the_run_with_the_reasons(write):
    config = RewardConfig(name=write(FAULTS), retries=0, max_failed_fraction=0.5)
    with RewardPool(config) as pool:
        pool.score(samples("raise", "raise", "ok", "ok"))
        with pytest.raises(
            RewardFailureError, match=r"(?s)3 of 4 samples.*2 x RuntimeError.*1 x InvalidScoreError"
        ):
            pool.score(samples("raise", "raise", "nan", "ok"))
        assert pool.metrics["reward/failed_fraction"] == 0.75
        assert pool.score(samples("ok"))[0].score == 1.0


BATCHED = """
    import time, os
    def f(prompts, completions, completion_ids, **kwargs):
        if "hang" in completions: time.sleep(99)
        if "short" in completions: return [1.0]*(len(completions) + 1)
        if "raise" in completions: raise RuntimeError("bad batch")
        return [None if c == "abstain" else float("nan") if c == "nan" else 1.0 for c in completions]
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "bad batch"),
        ("short", "returned 2 scores for 1 samples"),
        ("nan", "nan"),
        pytest.param("hang", "longer than 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_list_that_fails_is_taken_apart(write, fault, reason):
    timeout = 1.0 if fault == "hang" else 60.0
    with RewardPool(RewardConfig(name=write(BATCHED) + ":f", workers=1, timeout=timeout, **ONCE)) as pool:
        results = pool.score(samples("a", "b", fault, "c"))
        assert [r.score for r in results if r.valid] == [1.0] * 3
        assert reason in results[2].reason


def test_lists_of_the_wrong_length_are_warned_of_once(caplog):
    """The first of four scores is taken for each of them alone: a reward that is right by luck, or wrong."""

    def mean_only(completions, **columns):
        return [float(len(completions))]

    with RewardPool(RewardConfig(workers=1), function=mean_only) as pool:
        for _ in range(2):
            assert [r.score for r in pool.score(samples("a", "b", "c", "d"))] == [1.0] * 4
    (warning,) = caplog.messages
    assert "function mean_only returned 1 scores for 4 samples" in warning and "one by one" in warning


def test_what_a_reward_changes_in_its_row_no_other_sample_or_reward_sees(write):
    """Responses to one prompt come with one row; a counter in it would give 1, 2, 3."""
    count = write(
        """
        def each(sample):
            sample.columns["seen"] = sample.columns.get("seen", 0) + 1
            return float(sample.columns["seen"])
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            ground_truth.append("x")
            return float(len(ground_truth))
        def lists(prompts, completions, **columns):
            for prompt in prompts: prompt[0]["content"] += "!"
            return [float(len(prompt[0]["content"])) for prompt in prompts]
        async def at_once(sample):
            return each(sample)
        """
    )
    message = {"role": "user", "content": "?"}
    same = [RewardSample("a", answer=["4"], messages=(message,), columns={"answer": ["4"]})] * 3
    for name, score in (("each", 1.0), ("compute_score", 2.0), ("lists", 2.0), ("at_once", 1.0)):
        config = RewardConfig(name=f"{count}:{name}", workers=1, shaping=((f"{count}:each", 10.0),))
        with RewardPool(config) as pool:
            assert [result.score for result in pool.score(same)] == [score + 10.0] * 3, name


def test_an_abstention_is_masked_but_no_failure(write):
    with RewardPool(RewardConfig(name=write(BATCHED) + ":f", max_failed_fraction=0.0)) as pool:
        results = pool.score(samples("a", "abstain"))
        assert [r.valid for r in results] == [True, False] and results[1].abstained
        assert pool.metrics["reward/abstained_fraction"] == 0.5
        assert pool.metrics["reward/failed_fraction"] == pool.metrics["reward/retries"] == 0.0


def test_shaping_adds_and_does_not_judge():
    config = RewardConfig(
        name="exact", shaping=(("format", 0.5), ("overlong", 2.0)), overlong_from=2, overlong_to=4
    )
    good = "<think>.</think><answer>1</answer>"
    batch = [
        RewardSample(response=good, answer="1", response_ids=(0,)),
        RewardSample(response=good, answer="2", response_ids=(0, 1, 2)),
        RewardSample(response="1", answer="1", response_ids=(0,) * 9),
    ]
    with RewardPool(config) as pool:
        results = pool.score(batch)
    assert [r.score for r in results] == [1.5, 0.5 - 1.0, 1.0 - 2.0]
    assert [r.outcome for r in results] == [Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]


def test_order_is_kept_over_chunks_and_sources():
    batch = [
        RewardSample(
            response=str(i), answer=str(i if i % 3 else -1), source=("gsm8k", "task:arithmetic")[i % 2]
        )
        for i in range(200)
    ]
    with RewardPool(RewardConfig()) as pool:
        assert [r.score for r in pool.score(batch)] == [float(i % 3 > 0) for i in range(200)]
        assert pool.score([]) == []


def test_math_runs_in_the_pool():
    pytest.importorskip("math_verify")
    with RewardPool(RewardConfig(name="math", workers=1)) as pool:
        (result,) = pool.score([RewardSample(response=r"\boxed{\frac{2}{4}}", answer="1/2")])
    assert result.score == 1.0, result.reason


def test_workers_are_recycled(write):
    whoami = "import os\ndef reward(sample): return float(os.getpid() % 1000000)"
    with RewardPool(RewardConfig(name=write(whoami), workers=1, recycle=3)) as pool:
        pids = [[r.score for r in pool.score(samples("a", "b", "c"))] for _ in range(3)]
    assert [len(set(group)) for group in pids] == [1, 1, 1] and len({group[0] for group in pids}) == 3


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("import nothing_like_this", "", "No module named 'nothing_like_this'"),
        ("def reward(:", "", "SyntaxError"),
        ("def f(sample): pass", ":g", "has no function or class g; it has f"),
        ("def f(sample): pass", "", "no function named reward, compute_score"),
        ("def reward(foo, bar): pass", "", "no convention has parameters"),
        ("import os; os._exit(9)", "", "exited with code 9"),
        ("import time; time.sleep(99)", "", "reward.start_timeout"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_the_users_error(write, text, function, message):
    start_timeout = 0.5 if "sleep" in text else 60.0
    config = RewardConfig(name=write(text) + function, start_timeout=start_timeout)
    with RewardPool(config) as pool, pytest.raises(RewardLoadError, match=message):
        pool.score(samples("a", "b"))


def test_a_file_may_import_its_neighbour(write):
    write("VALUE = 0.5", "neighbour_of_reward.py")
    path = write("from neighbour_of_reward import VALUE\ndef reward_fn(messages, answer): return VALUE")
    with RewardPool(RewardConfig(name=path)) as pool:
        assert pool.score(samples("a"))[0].score == 0.5


def test_an_idle_worker_that_died_is_replaced_unnoticed():
    with RewardPool(RewardConfig(name="exact", retries=0, workers=1)) as pool:
        pool.score(samples("1"))
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        pool._workers[0].process.wait()
        assert pool.score(samples("1"))[0].score == 1.0


def test_idle_workers_that_die_just_before_the_request_cost_nothing():
    """All at once, as when memory is short: more of them than starts that may fail."""
    with RewardPool(RewardConfig(name="exact", retries=0, workers=4)) as pool:
        pool.score(samples(*"1111"))
        assert len(pool._workers) == 4
        for worker in pool._workers:
            process, poll, answers = worker.process, worker.process.poll, [None]
            process.kill()
            process.wait()
            process.poll = lambda poll=poll, answers=answers: answers.pop() if answers else poll()
        assert [r.score for r in pool.score(samples(*"1111"))] == [1.0] * 4


def test_an_interrupted_call_leaves_no_stale_answers(write, monkeypatch):
    with RewardPool(RewardConfig(name=write(FAULTS), **ONCE)) as pool:
        pool.score(samples("a"))
        monkeypatch.setattr(pool, "_wait", lambda round_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.score(samples("raise", "raise"))
        monkeypatch.undo()
        assert [r.score for r in pool.score(samples("a", "b"))] == [1.0, 1.0]


def test_close_leaves_no_process_and_no_zombie(write):
    sleeper = """
        import subprocess
        def reward(sample):
            return float(subprocess.Popen(["sleep", "300"]).pid)
    """
    with RewardPool(RewardConfig(name=write(sleeper), workers=2)) as pool:
        children = [int(r.score) for r in pool.score(samples("a", "b"))]
        pids = [worker.process.pid for worker in pool._workers]
        assert len(pids) == 2 and all(alive(pid) for pid in pids + children)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert gone(children)


def pids_in(folder, count):
    """The processes that wrote their number, once all have."""
    found = lambda: [int(word) for file in folder.glob("pid*") for word in file.read_text().split()]
    wait_until(lambda: len(found()) == count)
    return found()


SLEEP = f"{300 + os.getpid() / 1e6:.6f}"  # seconds; marks the processes of this run of the tests
ESCAPE = """
import os, time
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
open({file!r}, "w").write(str(os.getpid()))
time.sleep(300)
"""


def escaping(folder, then):
    """A reward that leaves a daemon and a child in a session of its own behind, and then does `then`."""
    return f"""
        import os, subprocess, sys, time
        def reward(sample):
            file = {str(folder)!r} + "/pid" + sample.response
            subprocess.run([sys.executable, "-c", {ESCAPE!r}.format(file=file)], start_new_session=True)
            while not os.path.exists(file) or not os.path.getsize(file): time.sleep(0.01)
            subprocess.Popen(["sleep", "{SLEEP}"], start_new_session=True)
            {then}
    """


@pytest.mark.parametrize("then", ["return 1.0", "os._exit(3)", "while True: pass"])
def test_processes_in_a_session_of_their_own_end_with_the_pool(write, tmp_path, then):
    """Also those that were started twice removed, and whose worker crashed or hangs."""
    timeout = 1.0 if "while" in then else 60.0
    name = write(escaping(tmp_path, then))
    with RewardPool(RewardConfig(name=name, workers=1, timeout=timeout, **ONCE)) as pool:
        pool.score(samples("a"))
        pids = pids_in(tmp_path, 1)
        if then.startswith("return"):
            assert alive(pids[0])
    assert gone(pids) and not sleepers()


def sleepers():
    """Number of processes `sleep SLEEP` that run."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(file.read_bytes())
    return commands.count(f"sleep\0{SLEEP}\0".encode())


@pytest.mark.parametrize("detach", [False, True])
def test_workers_die_with_a_killed_parent(write, tmp_path, detach):
    busy = f"""
        import os
        def reward(sample):
            open({str(tmp_path)!r} + "/pid" + sample.response, "w").write(str(os.getpid()))
            while True: pass
    """
    busy = escaping(tmp_path, "while True: pass") if detach else busy
    script = f"""
        from jaxrl_llm.rewards.config import RewardConfig
        from jaxrl_llm.rewards.sample import RewardSample
        from jaxrl_llm.rewards.pool import RewardPool
        pool = RewardPool(RewardConfig(name={write(busy)!r}, timeout=300))
        pool.score([RewardSample(response="0"), RewardSample(response="1")])
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    pids = pids_in(tmp_path, 2)
    parent.kill()
    parent.wait()
    assert gone(pids) and wait_until(lambda: not sleepers())


NONSENSE = """
    import os, socket, time
    for fd in range(3, 1024):
        try: LINE = socket.socket(fileno=os.dup(fd))
        except OSError: continue
        break
    def reward(sample):
        if sample.response != "ok":
            LINE.sendall(eval(sample.response))
            time.sleep(0.2)
        return 1.0
"""


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"\xff\xfe\n",
        b'{"id": 1, "kind": "scored", "results": [[NaN, 0, "", "", 0, [1]]]}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (3 << 20),
    ],
    ids=lambda line: line[:20].decode(errors="replace"),
)
def test_a_worker_that_sends_nonsense_is_lost_and_the_run_goes_on(write, line):
    text = repr(line) if len(line) < 1000 else f"{line[:1]!r} * {len(line) - 1} + {line[-1:]!r}"
    with RewardPool(RewardConfig(name=write(NONSENSE), workers=1, **ONCE)) as pool:
        results = pool.score(samples("ok", text, "ok"))
        assert [r.valid for r in results] == [True, False, True]
        assert "the worker sent a reply" in results[1].reason
        assert pool.metrics["reward/invalid_replies"] == 1.0
        assert pool.score(samples("ok"))[0].score == 1.0


def test_a_forged_reply_to_another_request_is_no_score(write):
    forged = b'{"id": 99, "kind": "scored", "results": [[1, 0, "", "", 0, [1]]]}\n'
    with RewardPool(RewardConfig(name=write(NONSENSE), workers=1, **ONCE)) as pool:
        (result,) = pool.score(samples(repr(forged)))
    assert not result.valid and "another request" in result.reason


def test_an_error_leaves_the_pool_as_it_was(write):
    """Process 0 raises it everywhere; the next call finds no replies of this one."""
    with RewardPool(RewardConfig(retries=0, max_failed_fraction=0.0)) as pool:
        with pytest.raises(RewardLoadError, match="data source"):
            pool.score([RewardSample("1", answer="1", source="poems")])
        with pytest.raises(RewardFailureError):
            pool.score([RewardSample("1", answer=None, source="gsm8k")])
        assert pool.score([RewardSample("1", answer="1", source="gsm8k")])[0].score == 1.0


def test_nothing_heavy_is_imported():
    modules = "sys, json, jaxrl_llm.rewards.worker, jaxrl_llm.rewards.pool"
    code = f"import {modules}; print(json.dumps([*sys.modules]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"jax", "numpy", "transformers", "math_verify", "reasoning_gym", "torch"} & set(loaded)


def test_masked_scores_are_nan(write):
    with RewardPool(RewardConfig(name=write(FAULTS), **ONCE)) as pool:
        assert math.isnan(pool.score(samples("raise"))[0].score)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends while it is read
        return False
    return state != "Z"


def gone(pids):
    return wait_until(lambda: not any(alive(pid) for pid in pids))


def wait_until(condition, seconds=60.0):
    """Polls, generously: on a busy machine a signal takes its time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.01)
    return True
