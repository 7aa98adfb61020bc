"""Tests of benchmarks: tables of cpu_peers.py and its page of ratios by commit, what start.py reads."""

import json
import os
import re
import runpy
import sys
import time
from pathlib import Path

import pytest
from distributed import with_devices

from jaxrl_llm.report.goodput import startup_line

MACHINE = "2 cores of AMD EPYC 7B13, 64-Core, Linux; load average at the start 0.1, at the end 1.0, 0.5, 0.2."
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run_script(name):
    """Return the globals of a benchmark's module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / name))
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def peers():
    return run_script("cpu_peers.py")


def report(peers, ours, floor, machine=MACHINE):
    """Return a report of one case with two repetitions each, (wall, cpu) seconds."""
    timings = {
        name: [{"wall": wall, "cpu": cpu, "peak_mb": 100.0} for wall, cpu in runs]
        for name, runs in (("ours", ours), ("floor", floor))
    }
    median, ratios = peers["median"], peers["ratios"]
    result = {
        "median": {name: median(runs) for name, runs in timings.items()},
        "ratio": {"floor": ratios(timings["floor"], timings["ours"])},
        "peak_mb": {"ours": 100.0, "floor": 50.0},
    }
    versions = {"ours": {"jax": "1"}, "floor": {"jax": "1"}}
    same = {"command": "python x", "commit": "abc1234", "machine": machine, "versions": versions}
    return {**same, "cases": {"train_step": result}}


def test_history_page_has_the_ratios_of_every_run(peers):
    first = report(peers, ours=[(2.0, 4.0), (4.0, 4.0)], floor=[(1.0, 1.0), (1.0, 3.0)])
    rows = [peers["history_row"]("train_step", first)]
    page = peers["history_page"]([*rows, {**rows[0], "commit": "def5678", "ratio": {}}])
    lines = page.splitlines()
    assert "## train step, 32 x 192 tokens" in lines
    assert "| date | commit | processor | floor / ours |" in lines
    # by hand: wall (1/2 + 1/4) / 2, CPU (1/4 + 3/4) / 2
    assert f"| {rows[0]['date']} | abc1234 | AMD EPYC 7B13, 64-Core | 0.38 (0.50) |" in lines
    assert f"| {rows[0]['date']} | def5678 | AMD EPYC 7B13, 64-Core |  |" in lines


def test_table_leaves_out_what_a_peer_does_not_do(peers):
    dense = report(peers, ours=[(2.0, 4.0)], floor=[(1.0, 1.0)])
    ragged = {"median": {"ours": {"wall": 1.0, "cpu": 2.0}}, "ratio": {}, "peak_mb": {"ours": 10.0}}
    table = peers["peers_table"]({**dense, "cases": {**dense["cases"], "rollout_ragged": ragged}})
    assert "| train step, 32 x 192 tokens | 2.00 (4.00), 100 | 1.00 (1.00), 50 | 0.50 (0.25) |" in table
    assert "| rollout, 32 ragged lengths | 1.00 (2.00), 10 |  |  |" in table
    assert "commit abc1234" in table


def test_every_case_has_a_suite_and_the_floor_knows_it(peers):
    floor = (BENCHMARKS / "peers/floor.py").read_text()
    for case in peers["ALL_CASES"]:
        assert f'"{case}"' in floor or case in peers["NOT_DONE"]["floor"]


@pytest.mark.slow
def test_the_cases_run_on_the_present_code(peers, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", with_devices(1)["XLA_FLAGS"])
    ours = peers["Peer"]("ours", sys.executable, None)
    for case in ("score", "delta_grpo_step"):
        assert ours.request(prepare=case)["first_seconds"] > 0
    ours.close()


def test_results_and_tables_of_each_processor_are_kept(peers, tmp_path):
    amd = report(peers, ours=[(2.0, 4.0)], floor=[(1.0, 1.0)])
    intel_machine = MACHINE.replace("AMD EPYC 7B13, 64-Core", "Intel(R) Xeon(R) Processor")
    intel = report(peers, ours=[(4.0, 4.0)], floor=[(1.0, 1.0)], machine=intel_machine)
    names = [peers["results_path"]("cpu_dense", peers["processor_of"](one)).name for one in (intel, amd)]
    assert names == ["cpu_dense_intel-r-xeon-r-processor.json", "cpu_dense_amd-epyc-7b13-64-core.json"]
    for name, one in zip(names, (intel, amd), strict=True):
        (tmp_path / name).write_text(json.dumps(one))
    (tmp_path / "cpu_moe_amd-epyc.json").write_text(json.dumps(amd))
    tables = [peers["peers_table"](one) for one in (amd, intel)]
    assert peers["suite_tables"]("dense", tmp_path) == "\n\n".join(tables)


def test_a_run_of_some_cases_keeps_the_others_of_the_same_versions(peers, tmp_path):
    kept_cases, same = peers["kept_cases"], {"ours": {"jax": "1"}}
    path = tmp_path / "cpu_dense_amd-epyc.json"
    assert kept_cases(path, "dense", same) == ({}, {})
    path.write_text(json.dumps(report(peers, ours=[(2.0, 4.0)], floor=[(1.0, 1.0)])))
    # a system that the earlier run did not have removes no case, and the earlier run's systems stay
    kept, versions = kept_cases(path, "dense", same | {"skyrl": {"jax": "3"}})
    assert list(kept) == ["train_step"] and kept["train_step"]["commit"] == "abc1234"
    assert versions == {"ours": {"jax": "1"}, "floor": {"jax": "1"}}
    assert kept_cases(path, "dense", {"ours": {"jax": "2"}}) == ({}, {})
    later = report(peers, ours=[(2.0, 4.0)], floor=[(1.0, 1.0)]) | {"commit": "def5678", "cases": kept}
    assert "| train step, 32 x 192 tokens (commit abc1234) | 2.00 (4.00), 100 |" in peers["peers_table"](
        later
    )


def test_pages_are_those_of_the_results(peers):
    readme = (BENCHMARKS / "README.md").read_text()
    for suite in peers["SUITES"]:
        tables = peers["suite_tables"](suite)
        assert tables and f"<!-- cpu_{suite} begin -->\n{tables}\n<!-- cpu_{suite} end -->" in readme
    assert (BENCHMARKS / "HISTORY.md").read_text() == peers["history_page"](peers["read_history"]())


def test_every_script_with_results_writes_the_commit():
    for script in BENCHMARKS.glob("*.py"):
        text = script.read_text()
        if "json.dumps(" in text and "write_text(" in text:
            assert "report_head(" in text or "git_commit(" in text, script.name


def test_results_name_no_folder_of_the_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["start.py", "--against", "/home/someone/older", "--repetitions", "3"])
    command = run_script("machine.py")["report_head"](computes=False)["command"]
    assert command == "python benchmarks/start.py --against older --repetitions 3"
    for file in BENCHMARKS.glob("results/*.json"):
        assert not re.search(r'"command": "[^"]*[ =\']/', file.read_text()), file.name


def test_start_reads_the_line_of_the_first_step_and_the_seconds_of_a_process():
    start = run_script("start.py")
    line = "12:00:00 " + startup_line({"import": 2.0, "compile": 1.25, "data": 0.01})
    assert start["FIRST_STEP"].search(line)[1] == "import 2.0, compile 1.2"
    assert start["cpu_seconds"](os.getpid()) == pytest.approx(time.process_time(), abs=0.2)
    runs = [{"wall": wall, "cpu": cpu} for wall, cpu in ((3.0, 1.0), (1.0, 5.0), (2.0, 2.0))]
    assert start["median_run"](runs) == {"wall": 2.0, "cpu": 2.0}


def test_start_compares_runs_that_are_side_by_side():
    rows = [
        {
            "this": {"wall": wall, "cpu": 1.0, "peak MiB": 300.0},
            "other": {"wall": 2.0, "cpu": 4.0, "peak MiB": 400.0},
        }
        for wall in (1.0, 3.0, 4.0)
    ]
    ratios = run_script("start.py")["ratios_between"]
    assert ratios(rows) == {"wall": [0.5, 1.5, 2.0], "cpu": [0.25] * 3, "peak MiB": [0.75] * 3}
    helps = [{tree: {"wall": 1.0, "cpu": 1.0} for tree in ("this", "other")}]
    assert ratios(helps) == {"wall": [1.0] * 3, "cpu": [1.0] * 3}  # a command without a step has no peak


def test_start_ends_a_command_at_its_first_step(monkeypatch):
    start = run_script("start.py")
    line = "first step done 1.5 s after the start: import 1.0"
    code = f"import sys, time; print({line!r}); time.sleep(int(sys.argv[1]))"
    globals_of = start["measure_command"].__globals__
    monkeypatch.setitem(globals_of, "TRAIN", [sys.executable, "-c", code])
    begin = time.perf_counter()
    run = start["measure_command"](["60"], dict(os.environ), True)
    assert run["phases"] == "import 1.0" and time.perf_counter() - begin < 30
    monkeypatch.setitem(globals_of, "TRAIN", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="failed"):
        start["measure_command"]([], dict(os.environ), True)
