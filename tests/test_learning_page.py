"""docs/learning.md and docs/real.md, as benchmarks/learn.py writes them."""

import argparse
import json
from pathlib import Path

import pytest

from jaxrl_llm.report.progress import OCCASIONAL

EVALUATION = OCCASIONAL[0]  # metric of its seconds
WEIGHTS = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def learn(tmp_path, monkeypatch):
    """The script, in a folder without runs and results."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import learn
    import learn_page

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn_page, "ROOT", tmp_path)
    monkeypatch.setattr(learn_page, "RESULTS", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    return learn


def write_run(label, seed, accuracies, load=1.0):
    """Write what a finished run of the study real/grpo leaves: evaluations at steps 0, 8, 16 ..."""
    path = Path("runs/real/grpo") / label / str(seed)
    (path / "hf").mkdir(parents=True)
    rows = [{"step": 0, "kind": "start", "eval/pass@1": accuracies[0], "time/step": 9.0}]
    for step in range(1, 8 * (len(accuracies) - 1) + 1):
        row = {"step": step, "kind": "train", "reward/mean": 0.5, "time/step": 18.0}
        if step % 8 == 0:
            row |= {"eval/pass@1": accuracies[step // 8], "time/step": 20.0, EVALUATION: 2.0}
        rows.append(row)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"eval": {"prompts": 100, "samples": 1}, "prompts_per_step": 8, "responses_per_prompt": 8}
    (path / "config.json").write_text(json.dumps({"versions": {"jax": "0.10.2"}, "config": sizes}))
    record = {"load": load, "started": "2026-01-01", "commit": "abc"}
    (path / "record.json").write_text(json.dumps(record))
    (path / "before_after.json").write_text(
        json.dumps([{"prompt": "Problem: 1 + 2 =", "answer": "3", "before": "I think", "after": "3 | `3`"}])
    )


def test_sections_of_studies_without_results_are_kept(learn):
    section = "## LoRA calculator: reproduced\n\nA claim.\n\n| full | 0.9 |\n\n    full: python\n"
    page = Path("docs/learning.md")
    page.write_text(f"An introduction.\n\n{section}\n## Of no study: reproduced\n\nGone.\n")
    learn.write_report("tiny")
    text = page.read_text()
    assert section in text and text.startswith(learn.SUITES["tiny"].intro)
    assert "Gone." not in text and "kept from an earlier one: LoRA calculator." in text
    learn.write_report("tiny")
    assert page.read_text() == text


def test_margin_of_a_claim_is_one_of_means(learn):
    claim = learn.SUITES["tiny"].studies["lora_calculator"].holds
    assert claim({"full": [1.0, 0.9, 0.8], "rank_1": [0.7, 0.98, 0.9]})  # 0.86 is 0.04 below 0.9
    assert not claim({"full": [1.0, 0.9, 0.8], "rank_1": [0.7, 0.95, 0.87]})  # 0.84 is 0.06 below


def test_intervals_are_those_of_wilson(learn):
    from learn_page import interval

    assert interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # Z^2 / (n + Z^2)


def test_labels_that_end_apart_are_named(learn):
    """100 problems: 0.9 has the interval 0.826 to 0.945, 0.5 0.404 to 0.596, 0.55 0.452 to 0.644."""
    from learn_page import apart_line

    series = {"a": [[(0, 0.1), (8, 0.9)]], "b": [[(0, 0.1), (8, 0.5)]], "c": [[(0, 0.1), (8, 0.55)]]}
    assert apart_line(series, 100) == "Ends whose intervals do not overlap: a above b, c."
    assert apart_line({"b": series["b"], "c": series["c"]}, 100).endswith("none.")


def test_a_verdict_names_how_many_seeds_it_rests_on(learn):
    from learn_page import claim_verdict

    study, rises, falls = learn.SUITES["real"].studies["sft"], [(0, 0.1), (8, 0.5)], [(0, 0.5), (8, 0.1)]
    assert claim_verdict(study, {"sft": [rises]}) == "reproduced, 1 of 3 seeds"
    assert claim_verdict(study, {"sft": [rises, falls, rises]}) == "not reproduced"
    assert claim_verdict(study, {"sft": [rises] * 3}) == "reproduced"
    grpo = learn.SUITES["real"].studies["grpo"]
    runs = {"full": [rises] * 3, "lora": [rises] * 3, "trl": [rises]}
    assert claim_verdict(grpo, runs) == "reproduced, trl with 1 of 3 seeds"


def test_page_is_written_from_the_results_of_finished_runs(learn, capsys):
    write_run("full", 0, [0.1, 0.4, 0.5])
    write_run("full", 1, [0.1, 0.3, 0.7])
    write_run("lora", 0, [0.1, 0.15, 0.3], load=50.0)
    (Path("runs/real/grpo/full/2")).mkdir()  # not finished
    for _ in range(2):  # the second time from the results alone
        learn.collect("real", "grpo")
        learn.write_report("real")
        page = Path("docs/real.md").read_text()
        assert "## GRPO: trl not run\n" in page
        assert "| full | 0.100 0.100 | 0.500 0.700 | 0.600 | 0.531 to 0.665 |" in page  # n = 200
        assert "| full | 1024 1024 | 0.500 0.500 | 0.08 0.08 | 6400 6400 |" in page  # 16 x 18 s = 0.08 h
        assert "| lora | 1024 | 0.500 | other load | other load |" in page
        assert "full 5 (1.0) 5 (1.0); lora 5 (50.0)." in page  # 14 x 18 s + 2 x 20 s
        assert "| `1 + 2 =` | 3 | `I think` | `3 / '3'` |" in page
        assert (
            f"    lora: python -m jaxrl_llm.train --config grpo_smollm2.py --model.path {WEIGHTS} --lora"
            in page
        )
        for run in Path("runs/real/grpo").glob("*/*/metrics.jsonl"):
            run.unlink()
            run.parent.joinpath("hf").rmdir()
    assert Path("docs/real/grpo.png").exists()
    results = learn.result_path("real", "grpo")
    results.write_text(results.read_text().replace("step_seconds", "unknown"))  # as of runs from before it
    learn.write_report("real")
    assert "| full | 1024 1024 | 0.500 0.500 | other load |" in Path("docs/real.md").read_text()
    learn.print_summary("real", {"grpo": ["full"]})
    assert "grpo/full seed 1: eval/pass@1 0.100 -> 0.700, step 16, 5 minutes" in capsys.readouterr().out


def test_steps_timed_in_turn_are_the_hours_of_the_page(learn, monkeypatch):
    """Median of steps 3 to 7 of two runs each; the load of the long runs no longer matters."""
    write_run("full", 0, [0.1, 0.4], load=50.0)
    learn.collect("real", "grpo")
    order = []

    def run_all(jobs, options):
        (job,) = jobs
        order.append(str(job.path))
        assert job.arguments.endswith(learn.TIMED)
        (job.path / "hf").mkdir(parents=True)
        seconds = [50.0, 40.0, 30.0, 5.0, 6.0, 7.0, 8.0, 9.0]
        rows = [{"step": i, "kind": "train", "time/step": s} for i, s in enumerate(seconds)]
        (job.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(learn, "run_all", run_all)
    learn.time_steps(argparse.Namespace(suite="real"), "grpo", ["full", "lora"])
    assert order == [f"runs/real/time/grpo/{label}/{turn}" for turn in (0, 1) for label in ("full", "lora")]
    learn.collect("real", "grpo")
    learn.write_report("real")
    assert "| full | 512 | 0.500 | 0.02 | 16457 |" in Path("docs/real.md").read_text()  # 8 x 7 s


def test_a_run_is_measured_from_the_evaluation_after_its_warm_up(learn, tmp_path):
    def read(*kinds):
        rows = [{"step": i, "kind": kind, "loss": 1.0, "time/step": 5.0} for i, kind in enumerate(kinds)]
        rows[1]["eval/pass@1"] = 0.25
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return learn.rows_after_warm_up(tmp_path)

    assert [row["step"] for row in read("start", "train", "train")] == [0, 1, 2]
    first, second = read("warm_start", "warm_start", "train")
    assert first == {"step": 0, "kind": "warm_start", "time/step": 0.0, "eval/pass@1": 0.25}
    assert second["step"] == 1 and second["loss"] == 1.0


def test_runs_are_chosen_by_study_and_label(learn):
    suite = learn.SUITES["real"]
    assert learn.choose_runs(suite, ["grpo/full", "sft"]) == {"grpo": ["full"], "sft": None}
    assert list(learn.choose_runs(suite, ["all"])) == list(suite.studies)
    with pytest.raises(SystemExit, match="grpo/rloo: there are grpo, sft"):
        learn.choose_runs(suite, ["grpo/rloo"])
    assert learn.in_order(suite, ["grpo", "distillation"])[0] == ["sft", "grpo"]
    assert [str(job.path) for job in learn.jobs_of(suite, "grpo", [1], ["lora"])] == ["runs/real/grpo/lora/1"]


def test_commands_of_every_study_name_recipes_and_keys_that_exist(learn):
    from jaxrl_llm.recipe.load import from_command_line

    for suite in learn.SUITES.values():
        for name in suite.studies:
            for job in learn.jobs_of(suite, name, [0]):
                words = learn.shlex.split(job.arguments.removeprefix(learn.TRL))
                if "--model.path" in words:  # a folder or file that is not there yet
                    words[words.index("--model.path") + 1] = "org/model"
                config = from_command_line([*words, "--run_dir", "x"], writes=False).config
                assert config.seed == 0


def test_claim_of_a_rise_needs_a_low_start(learn):
    from learn_page import claim_verdict

    study = learn.SUITES["tiny"].studies["experts"]

    def ends(first):
        return {label: [[(0, first), (100, 0.95)]] * 3 for label in study.runs}

    assert claim_verdict(study, ends(0.4)) == "reproduced"
    assert claim_verdict(study, ends(0.6)) == "not reproduced"
