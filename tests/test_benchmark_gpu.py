"""Tests of benchmarks/gpu.py: limits, resuming, saving, the table of README.md, the longest row by plan."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
BACKWARD = "attention backward, head_dim 128, TFLOP/s"
FAKE = """
import json, os, subprocess, sys, time
part = sys.argv[2]
emit = lambda mark, value: print(mark + " " + json.dumps(value), flush=True)
with open({log!r}, "a") as log:
    log.write(part + "\\n")
if part == "head":
    emit("RESULT", ["device", "1 x NVIDIA H200"])
if part == "attention":
    emit("RESULT", ["attention backward, head_dim 128, TFLOP/s", 505.0])
if part == "update":
    emit("RESULT", ["first update with its compilation, s", 30.0])
    emit("FAILURE", "RuntimeError: no memory")
if part == "rollout":
    emit("RESULT", ["decoding Qwen3-0.6B, 256 slots, ms a token", 7.0])
    child = subprocess.Popen(["sleep", "60"])
    print(f"child {{child.pid}}", flush=True)
    open({log!r} + ".pid", "w").write(str(child.pid))
    time.sleep(60)
if part == "strict":
    os._exit(7)
"""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Return benchmarks/gpu.py, whose parts are processes of the script FAKE."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(log=str(tmp_path / "log")))
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "hash_sources", lambda: "aaaa")
    return gpu


def run(gpu, folder, only, *, limit=10.0, again=False):
    """Measure parts, and return the report and the parts that were started."""
    (folder / "log").write_text("")
    options = argparse.Namespace(
        compile=None, small=False, only=only, again=again, limit=limit, results=folder / "results.json"
    )
    report = json.loads(gpu.measure_parts(options).read_text())
    return report["parts"], (folder / "log").read_text().splitlines()[1:]  # the first one is the head


def is_alive(pid):
    """Return whether a process runs; one that ended may not have been waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_limits_of_all_parts_add_up_to_12_minutes(gpu):
    assert gpu.HEAD_SECONDS + sum(part.limit for part in gpu.PARTS.values()) <= 12 * 60


def test_each_result_stands_beside_its_target(gpu, tmp_path):
    parts, started = run(gpu, tmp_path, ["attention"])
    assert started == ["attention"] and parts["attention"]["reason"] == ""
    anchor = "FlashAttention-3 on an H100 (arXiv 2407.08608): 542"
    assert parts["attention"]["results"] == {BACKWARD: {"value": 505.0, "target": 500, "anchor": anchor}}
    assert parts["attention"]["device"] == "1 x NVIDIA H200" and parts["attention"]["sources"] == "aaaa"


def test_a_part_that_fails_keeps_its_results_and_the_others_run(gpu, tmp_path):
    parts, started = run(gpu, tmp_path, ["update", "strict", "attention"])
    assert started == ["update", "strict", "attention"]
    assert parts["update"]["reason"] == "failed: RuntimeError: no memory"
    assert parts["update"]["results"] == {"first update with its compilation, s": {"value": 30.0}}
    assert parts["strict"]["reason"] == "ended with code 7" and parts["strict"]["results"] == {}
    assert parts["attention"]["reason"] == ""


def test_a_part_is_stopped_at_its_limit_with_its_processes(gpu, tmp_path):
    start = time.perf_counter()
    parts, _ = run(gpu, tmp_path, ["rollout"], limit=2.0)
    assert time.perf_counter() - start < 20
    assert parts["rollout"]["reason"] == "stopped after 2 s"
    assert parts["rollout"]["results"]["decoding Qwen3-0.6B, 256 slots, ms a token"]["value"] == 7.0
    assert not is_alive(int((tmp_path / "log.pid").read_text()))


def test_a_run_continues_where_an_earlier_one_stopped(gpu, tmp_path, monkeypatch):
    run(gpu, tmp_path, ["update", "attention"])
    # A part that was never started comes before the failed one; the complete one is not measured again.
    parts, started = run(gpu, tmp_path, ["attention", "update", "more kernels"])
    assert started == ["more kernels", "update"]
    assert list(parts) == ["attention", "update", "more kernels"]  # in order of value
    assert run(gpu, tmp_path, ["attention"], again=True)[1] == ["attention"]
    # Other code: everything again, and results of the earlier code are not mixed in.
    monkeypatch.setattr(gpu, "hash_sources", lambda: "bbbb")
    parts, started = run(gpu, tmp_path, ["attention"])
    assert started == ["attention"] and parts["update"]["sources"] == "aaaa"


def test_results_of_a_stopped_part_stay_when_the_same_code_measures_less(gpu, tmp_path):
    script = Path(gpu.__file__)
    run(gpu, tmp_path, ["update"])
    script.write_text(script.read_text().replace("first update", "second update"))
    parts, _ = run(gpu, tmp_path, ["update"])
    names = ["first update with its compilation, s", "second update with its compilation, s"]
    assert list(parts["update"]["results"]) == names


def test_the_file_is_complete_when_the_run_itself_is_killed(tmp_path):
    script, results = tmp_path / "fake.py", tmp_path / "results.json"
    script.write_text(FAKE.format(log=str(tmp_path / "log")))
    code = f"import gpu, sys; gpu.__file__ = {str(script)!r}; sys.argv[1:] = sys.argv[2:]; gpu.main()"
    words = [sys.executable, "-c", code, "", "--only", "rollout", "--results", str(results)]
    path = os.pathsep.join([str(BENCHMARKS), str(ROOT), str(ROOT / "kernels")])
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path})
    pid_file = tmp_path / "log.pid"
    for _ in range(200):
        if pid_file.exists() and pid_file.read_text():
            break
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=120) == 143
    part = json.loads(results.read_text())["parts"]["rollout"]
    assert part["reason"] == "the run ended before the part did"
    assert part["results"]["decoding Qwen3-0.6B, 256 slots, ms a token"]["value"] == 7.0
    assert not is_alive(int(pid_file.read_text()))


def test_the_command_names_no_folder_of_one_machine(gpu):
    words = ["--compile", "h100", "--results", "/data/x.json", "--only", "update"]
    assert gpu.shown_command(words) == "python benchmarks/gpu.py --compile h100 --only update"
    assert gpu.shown_command(["--small"]) == "python benchmarks/gpu.py --small"


def test_the_row_that_is_tried_and_the_roof_are_compiled(gpu):
    """The parts `qlora` and `rollout` start from results of --compile: 4.8 TB/s of an H200 give 5.0 ms."""
    import gpu_recipes
    import gpu_targets

    planned = gpu_targets.compiled_result("h100", "qlora", gpu_recipes.LONGEST)
    assert planned > 110_000
    for row in (planned, *gpu_recipes.qlora_rows(planned)):
        assert gpu_targets.compiled_result("h100", "qlora", gpu_recipes.bytes_name(row)) > 0
    roofs = [
        gpu_targets.compiled_result(kind, "rollout", "rollout: decode")["roof_ms"]
        for kind in ("h100", "h200")
    ]
    assert roofs[1] == pytest.approx(5.0, rel=0.01) and roofs[0] / roofs[1] == pytest.approx(4800 / 3352.32)
    assert gpu_targets.compiled_result("h100", "rollout", "no such result") is None


def test_full_shapes_are_refused_on_a_cpu(gpu, tmp_path):
    script = Path(gpu.__file__)
    script.write_text(script.read_text().replace("1 x NVIDIA H200", "2 cores of AMD EPYC"))
    with pytest.raises(SystemExit, match="no GPU, but 2 cores of AMD EPYC: --small"):
        run(gpu, tmp_path, ["attention"])
    assert not (tmp_path / "results.json").exists()


def test_table_has_each_target_beside_the_results_of_each_device(gpu):
    import gpu_targets

    entry = {"commit": "abc1234", "sources": "aaaa", "reason": "", "results": {}}
    results = {BACKWARD: {"value": 505.4}, "attention backward, head_dim 64, TFLOP/s": {"value": 311.0}}
    report = {
        "device": "1 x NVIDIA H200",
        "parts": {
            "attention": {**entry, "results": results},
            "rollout": {**entry, "reason": "stopped after 70 s"},
        },
    }
    before = json.loads((BENCHMARKS / "results/gpu_h200.json").read_text())
    lines = gpu_targets.targets_table([report], before).splitlines()
    assert lines[0] == "| work | target | anchor | H200, before | 1 x NVIDIA H200 |"
    fa3 = "FlashAttention-3 on an H100 (arXiv 2407.08608): "
    assert f"| {BACKWARD} | 500 | {fa3}542 | 385 | **505** |" in lines  # reached
    assert f"| attention backward, head_dim 64, TFLOP/s | 420 | {fa3}453 | 311 | 311 |" in lines
    decoding = "decoding Qwen3-0.6B, 256 slots, ms a token | at most 6.2 | "
    assert any(line.startswith(f"| {decoding}") and line.endswith("|  |") for line in lines)
    assert lines[-2:] == ["1 x NVIDIA H200: commit abc1234.", "- rollout: stopped after 70 s"]
    # Every number of an earlier run is found, as 65,116 tokens/s of the update.
    assert any("rows of 4,624, tokens/s | 90,000 |  | 65,116 |" in line for line in lines)


def test_the_table_of_the_page_is_made_from_the_results(gpu, tmp_path):
    import gpu_targets

    page = tmp_path / "README.md"
    page.write_text((BENCHMARKS / "README.md").read_text())
    gpu_targets.write_table(readme=page)
    assert page.read_text() == (BENCHMARKS / "README.md").read_text()


def test_a_qlora_part_has_the_memory_of_an_80_gb_card_on_a_larger_one(gpu):
    import gpu_targets

    fraction = gpu_targets.mem_fraction("qlora", "1 x NVIDIA H200")
    assert fraction == pytest.approx(0.9 * 84_942_979_072 / 150_109_880_320)
    assert gpu_targets.mem_fraction("qlora", "1 x NVIDIA H100 80GB HBM3") == 0.9
    assert gpu_targets.mem_fraction("attention", "1 x NVIDIA H200") == 0.9


@pytest.mark.parametrize("power", [1, 1.1])  # a line, and a curve
def test_longest_row_fits_and_is_within_1_percent_of_one_that_does_not(gpu, power):
    import gpu_compiled

    compiled = []

    def peak_of(row):
        compiled.append(row)
        return 10e9 + 3e5 * row**power

    row, peak = gpu_compiled.longest_row(peak_of, 70e9, (65_536, 131_072))
    limit = (60e9 / 3e5) ** (1 / power)  # 200,000 tokens of a line
    assert row % 1024 == 0 and row <= limit < row + max(row // 100, 1024)
    assert peak == peak_of(row) and len(compiled) <= 7


def test_every_part_is_measured_and_compiled(gpu):
    import gpu_compiled
    import gpu_parts
    import gpu_recipes

    assert list(gpu_parts.PARTS) == list(gpu.PARTS)
    assert gpu_compiled.OTHERS.keys() | gpu_recipes.recipes(small=False).keys() == gpu.PARTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["attention", "rollout", "grouped_matmul", "gated_delta", "qlora", "more kernels"]
)
def test_a_part_yields_the_results_that_have_targets(gpu, part):
    import gpu_parts

    names = [name for name, _ in gpu_parts.PARTS[part](True)]
    assert set(gpu.PARTS[part].targets) <= set(names)
