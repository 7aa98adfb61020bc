"""Whole runs whose responses come from servers: launched by one process, shared by two."""

import json
import sys
from pathlib import Path

import pytest
from aiohttp import web
from distributed import run_processes
from fake_sglang import FakeServer

from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.train import main

ARGS = [
    *("--config", "grpo_tiny.py", "--steps", "2", "--warm_start.steps", "1", "--prompts_per_step", "4"),
    *(
        "--responses_per_prompt",
        "2",
        "--eval.prompts",
        "4",
        "--eval.every",
        "2",
        "--rollout.engine",
        "sglang",
    ),
    *("--warm_start.examples_per_step", "8", "--tokens_per_device", "24", "--log.progress", "none"),
    *("--log.tensorboard", "false", "--reward.workers", "1", "--model.remat", "none"),
    *("--model.architecture.num_layers", "1", "--mesh.data", "1", "--mesh.fsdp", "8"),
]
TRAIN = """
import sys
from jaxrl_llm.train import main
sys.exit(main(sys.argv[1:]))
"""


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checked(run_dir):
    trained = [row for row in rows(run_dir) if row["kind"] == "train"]
    assert len(trained) == 2
    assert all(row["mismatch/max_abs"] < 1e-4 for row in trained)
    # where an evaluation has just sent the weights, the step need not
    assert {"bridge/probe_mean_abs", "bridge/gigabytes_per_second"} <= trained[-1].keys() | trained[0].keys()
    assert (run_dir / "hf/config.json").is_file()


@pytest.mark.slow
def test_a_run_starts_its_servers_and_leaves_nothing_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "stub"))
    monkeypatch.setenv(auth.API_KEY, "tell-4711")
    monkeypatch.setenv(auth.ADMIN_KEY, "change-4711")
    here = tmp_path / "shared"
    (here / "of somebody else").mkdir(parents=True)
    launched = ["--rollout.launch", "1", "--servers.python", sys.executable, "--servers.folder", str(here)]
    assert main([*ARGS, *launched, "--lora.rank", "2", "--run_dir", str(tmp_path / "run")]) == 0
    checked(tmp_path / "run")
    log = (tmp_path / "run/sglang_0.log").read_text()
    assert "the fake server is up" in log and "'--enable-lora', '--lora-strict-loading'" in log
    assert [path.name for path in here.iterdir()] == ["of somebody else"]
    assert not any(b"-4711" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.slow
def test_a_run_replays_the_routes_of_servers_that_it_starts(tmp_path, monkeypatch):
    """In the only update of a step the trainer's routers choose the same experts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "stub"))
    args = [*ARGS[2:], "--config", "grpo_moe_tiny.py", "--routing.replay", "rollout"]
    args += ["--model.architecture.tie_embeddings", "false"]
    launched = ["--rollout.launch", "1", "--servers.python", sys.executable]
    assert main([*args, *launched, "--run_dir", str(tmp_path / "run")]) == 0
    checked(tmp_path / "run")
    steps = [row for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert [row["moe/route_agreement"] for row in steps] == [1.0, 1.0]


def test_an_address_where_no_server_is_is_refused_before_any_step(tmp_path, capsys):
    assert main([*ARGS, "--rollout.servers", "http://127.0.0.1:9", "--run_dir", str(tmp_path / "run")]) == 2
    assert "error: --rollout.servers: http://127.0.0.1:9/model_info: Client" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
def test_servers_that_fail_in_the_run_end_it_with_a_message(tmp_path, capsys):
    server = FakeServer()
    server.refuses = True
    at_once = ["--warm_start.steps", "0", "--run_dir", str(tmp_path / "run")]
    assert main([*ARGS, "--rollout.servers", server.url, *at_once]) == 1  # nothing to save
    assert "error: no SGLang server can be used: http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("during", [1, 2], ids=["a step", "the last evaluation"])
def test_servers_that_go_away_end_it_saved_and_the_same_command_goes_on(tmp_path, capsys, during):
    server, run_dir = FakeServer(), tmp_path / "run"
    steps = lambda: len(rows(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0

    replies = []

    def goes_away(said):
        """In a step at once; for the evaluation after it once its eight responses are there."""
        replies.extend([said] * (steps() == during))
        server.down = len(replies) >= (8 if during == 2 else 1)
        return web.Response(status=500) if server.down and during == 1 else said

    server.spoil = goes_away
    args = [*ARGS, "--rollout.servers", server.url, "--servers.patience", "1", "--run_dir", str(run_dir)]
    assert main(args) == 75
    said = capsys.readouterr()
    assert "stopped by its servers: no SGLang server can be used for 1 s" in said.out + said.err
    assert steps() == during + (during == 2) and (run_dir / f"checkpoints/{steps()}").is_dir()
    server.behave()
    assert main(args) == 0
    checked(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "2"])
def test_two_processes_share_what_the_first_hears(tmp_path, rank):
    server = FakeServer()
    args = [*ARGS, "--lora.rank", rank, "--rollout.servers", server.url, "--run_dir", str(tmp_path / "run")]
    run_processes(TRAIN, 2, args, devices=4, initialize=False)
    checked(tmp_path / "run")
