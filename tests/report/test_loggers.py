"""Loggers: one run of the service over all starts of a training run, tables of samples, params."""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import sqlite3
import subprocess
import sys
import types

import pytest

from jaxrl_llm.config import RewardConfig, TrainConfig
from jaxrl_llm.recipe.dump import describe_run
from jaxrl_llm.report import loggers
from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.log import RunLog

SAMPLE = {"prompt": "1+1=", "response": "2", "reward": None, "outcome": "failed", "finish": "stop"}
SAMPLE |= {"response_tokens": 1, "turns": []}
CELLS = [None, None, "1+1=", "2", None, "failed", None, None, "stop", 1]
FLAGS = {"progress": "none", "tensorboard": False}

SIGNATURES = {
    "wandb.init": ("entity", "project", "id", "resume", "name", "dir", "group", "tags"),
    "wandb.Run.log": ("data", "step", "commit"),
    "wandb.Table": ("columns", "data"),
    "mlflow.set_experiment": ("experiment_name",),
    "mlflow.start_run": ("run_id", "run_name", "tags"),
    "mlflow.log_dict": ("dictionary", "artifact_file"),
    "mlflow.log_params": ("params",),
    "mlflow.log_metrics": ("metrics", "step"),
    "mlflow.set_tag": ("key", "value"),
    "mlflow.end_run": (),
    "swanlab.init": ("workspace", "project", "id", "resume", "name", "log_dir", "group", "tags"),
    "swanlab.Run.log": ("data", "step"),
    "trackio.init": ("project", "name", "group", "resume", "embed"),
    "trackio.Run.log": ("metrics", "step"),
    "trackio.Table": ("columns", "data"),
}
"""Parameters of wandb 0.31, mlflow 3.17, swanlab 0.10 and trackio 0.43 that are used; others fail."""


class Fake(types.ModuleType):
    """A library whose calls are recorded as (function, arguments), with the parameters of SIGNATURES."""

    offline, step = True, 0

    def __init__(self, name: str, monkeypatch, **attributes):
        super().__init__(name)
        self.calls, self.fails_after = [], math.inf
        for key in (key for key in SIGNATURES if key.startswith(name)):
            setattr(self, key.rpartition(".")[2], self.recorder(key))
        self.config = types.SimpleNamespace(update=lambda tree, **_: self.calls.append(("config", tree)))
        self.finish = lambda: self.calls.append(("finish", {}))
        vars(self).update(attributes)
        monkeypatch.setitem(sys.modules, name, self)

    def recorder(self, key):
        parameters = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in SIGNATURES[key]]

        def call(*args, **kwargs):
            arguments = inspect.Signature(parameters).bind_partial(*args, **kwargs).arguments
            if arguments.get("step", 0) > self.fails_after:
                raise ConnectionError("no network")
            self.calls.append((key.rpartition(".")[2], arguments))
            return self if key.endswith(("init", "start_run")) else arguments

        return call

    def arguments(self, function):
        return [arguments for name, arguments in self.calls if name == function]


def fake_mlflow(monkeypatch, params=()):
    run = types.SimpleNamespace(run_id="r1"), types.SimpleNamespace(params=dict(params), tags={})
    return Fake("mlflow", monkeypatch, info=run[0], data=run[1])


def log_steps(run_dir, config, steps, resume=-1, *, close=True):
    """Log these steps, and end as after a kill or in good order."""
    log = RunLog(run_dir, config, 10, resume_step=resume)
    for step in steps:
        log.samples(step, [SAMPLE])
        log.step(step, {"loss": 1 / step, "bad": math.nan}, tokens=1)
    if close:
        log.close()


# -- wandb


def test_wandb_gets_numbers_and_tables_and_is_left_alone_when_it_fails(tmp_path, monkeypatch, capsys):
    fake = Fake("wandb", monkeypatch)
    config = LogConfig(**FLAGS, wandb="team/project", name="x", group="g", tags=("a", "b"))
    fake.fails_after = 1
    log = RunLog(tmp_path / "run", config, 3)
    log.config({"seed": 1})
    for step in (1, 2, 3):
        log.samples(step, [SAMPLE])
        log.step(step, {"loss": 0.5, "bad": math.nan}, tokens=1)
    log.close()
    (start,) = fake.arguments("init")
    assert start | {"id": ""} == {
        "entity": "team",
        "project": "project",
        "id": "",
        "resume": "allow",
        "name": "x",
        "dir": str(tmp_path / "run"),
        "group": "g",
        "tags": ["a", "b"],
    }
    assert fake.arguments("config") == [{"seed": 1}]
    (logged,) = fake.arguments("log")
    assert (logged["step"], logged["commit"], logged["data"]["loss"]) == (1, True, 0.5)
    assert not {"bad", "step", "kind"} & logged["data"].keys()
    assert logged["data"]["samples"] == {"columns": list(loggers.SAMPLE_COLUMNS), "data": [[1, *CELLS]]}
    assert capsys.readouterr().out == (
        "warning: wandb cannot be written (ConnectionError: no network); training continues.\n"
    )
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "run/loggers.json").read_text())["wandb"]["step"] == 1


def test_samples_of_an_evaluation_are_told_from_those_of_the_step(tmp_path, monkeypatch):
    fake = Fake("wandb", monkeypatch)
    log = RunLog(tmp_path, LogConfig(**FLAGS, wandb="p"), 3)
    log.samples(1, [SAMPLE | {"eval": True, "data_source": "gsm8k", "score": 0.25, "win": 0.5}])
    log.samples(1, [SAMPLE])
    log.step(1, {}, tokens=1)
    columns, rows = fake.arguments("log")[0]["data"]["samples"].values()
    evaluation, step = (dict(zip(columns, row, strict=True)) for row in rows)
    assert {"eval": True, "data_source": "gsm8k", "score": 0.25, "win": 0.5}.items() <= evaluation.items()
    assert evaluation["prompt"] == step["prompt"] == "1+1=" and step["eval"] is None


def test_settings_that_are_not_given_are_left_to_the_environment(tmp_path, monkeypatch):
    fake = Fake("wandb", monkeypatch)
    for name in ("WANDB_NAME", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.setenv(name, "mine")
    log_steps(tmp_path, LogConfig(**FLAGS, wandb="p"), ())
    (start,) = fake.arguments("init")
    assert start["id"] == "mine"
    assert [start[key] for key in ("entity", "name", "dir", "group", "tags")] == [None] * 5
    (loggers_file,) = tmp_path.glob("loggers.json")
    assert json.loads(loggers_file.read_text())["wandb"]["id"] == "mine"


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_killed_and_resumed_run_continues_with_every_step_once(name, tmp_path, monkeypatch):
    table = types.SimpleNamespace(Table=lambda: types.SimpleNamespace(add=lambda *cells: cells))
    fake = Fake(name, monkeypatch, echarts=table)
    config = LogConfig(**FLAGS, **{name: "p"})
    log_steps(tmp_path, config, range(1, 6), close=False)  # killed
    log_steps(tmp_path, config, range(4, 8), resume=3)  # steps 4 and 5 are taken again
    ids = [start["id"] for start in fake.arguments("init")]
    assert ids[0] == ids[1] and len(ids[0]) == 12
    assert [call["step"] for call in fake.arguments("log")] == [1, 2, 3, 4, 5, 6, 7]
    log_steps(tmp_path, config, range(1, 3))  # no checkpoint: training starts anew, and so does the run
    assert fake.arguments("init")[2]["id"] not in ids
    assert [call["step"] for call in fake.arguments("log")][7:] == [1, 2]


def test_what_a_kill_left_unsent_is_sent_from_metrics_jsonl(tmp_path, monkeypatch):
    """wandb sends what it has every few seconds: online, the server's step is the truth."""
    config = LogConfig(**FLAGS, wandb="p")
    Fake("wandb", monkeypatch)
    log_steps(tmp_path, config, range(1, 6), close=False)
    fake = Fake("wandb", monkeypatch, offline=False, step=3)  # the server has steps up to 2
    log_steps(tmp_path, config, range(5, 7), resume=4)
    assert [call["step"] for call in fake.arguments("log")] == [3, 4, 5, 6]
    assert fake.arguments("log")[0]["data"]["samples"]["data"] == [[3, *CELLS]]


@pytest.mark.parametrize("name", loggers.EXTRAS)
def test_a_logger_that_is_not_installed_is_a_warning(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    RunLog(tmp_path, LogConfig(**FLAGS, **{name: "x"}), 1).step(1, {}, tokens=1)
    line = capsys.readouterr().out
    assert line.startswith(f"warning: {name} cannot be written (ModuleNotFoundError: ")
    assert line.endswith(f"training continues. Fix: pip install 'jaxrl-llm[{name}]'\n")


def test_a_damaged_loggers_json_is_a_warning(tmp_path, monkeypatch, capsys):
    Fake("wandb", monkeypatch)
    (tmp_path / "loggers.json").write_text("{")
    log_steps(tmp_path, LogConfig(**FLAGS, wandb="p"), (4,), resume=3)
    assert "warning: loggers.json cannot be written (JSONDecodeError" in capsys.readouterr().out
    assert json.loads((tmp_path / "loggers.json").read_text())["wandb"]["step"] == 4


# -- mlflow


def test_mlflow_gets_params_numbers_and_tables_under_names_it_accepts(tmp_path, monkeypatch):
    fake = fake_mlflow(monkeypatch)
    config = LogConfig(mlflow="mine", group="g", tags=("a", "k=v"))
    logger = loggers.Mlflow(config, tmp_path / "run", "", total_steps=50_000)
    logger.config({"command": [], "config": {"a": {"b": 1e-5}, "c": "x" * 7000, "d": [{"e": None}, {}]}})
    logger.step(1234, {"step": 1234, "eval/pass@1": 0.5, "x(y)": 1}, [SAMPLE | {"step": 1234}])
    logger.step(1235, {"step": 1235}, [SAMPLE | {"step": 1235}])
    logger.close()
    assert fake.arguments("set_experiment") == [{"experiment_name": "mine"}]
    tags = {"a": "true", "k": "v", "group": "g"}
    assert fake.arguments("start_run") == [{"run_id": None, "run_name": "run", "tags": tags}]
    (params,) = fake.arguments("log_params")
    assert params == {"params": {"a.b": "1e-05", "c": "x" * 6000, "d.0.e": "null"}}
    assert fake.arguments("log_metrics") == [
        {"metrics": {"eval/pass_at_1": 0.5, "x_y_": 1}, "step": 1234},
        {"metrics": {}, "step": 1235},
    ]
    file, table = fake.arguments("log_dict")[-1].values(), "samples/from_step_001000.json"  # 100 in all
    rows = [[1234, *CELLS], [1235, *CELLS]]
    assert list(file) == [{"columns": loggers.SAMPLE_COLUMNS, "data": rows}, table]
    (tag,) = fake.arguments("set_tag")
    assert tag == {"key": "mlflow.loggedArtifacts", "value": json.dumps([{"path": table, "type": "table"}])}
    assert fake.arguments("end_run") == [{}]


def test_params_of_a_resumed_run_are_never_changed_and_no_request_has_too_many(tmp_path, monkeypatch):
    fake = fake_mlflow(monkeypatch, {"k0": "0", "k1": "1"})
    logger = loggers.Mlflow(LogConfig(mlflow="mine"), tmp_path, "r1", 1)
    logger.config({"config": {f"k{i}": i + 1 for i in range(252)}})
    assert fake.arguments("start_run")[0]["run_id"] == "r1"
    assert [len(call["params"]) for call in fake.arguments("log_params")] == [100, 100, 50]
    assert not {"k0", "k1"} & {key for call in fake.arguments("log_params") for key in call["params"]}


def test_the_params_of_a_run_fit_mlflow_and_have_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2hunter2")
    fake = fake_mlflow(monkeypatch)
    config = TrainConfig(
        run_dir="runs/hunter2hunter2",
        log=LogConfig(mlflow="mine", progress="none"),
        reward=RewardConfig(name="https://user:hunter2@host"),
    )
    logger = loggers.Mlflow(config.log, tmp_path, "", 1)
    logger.config(describe_run(config, "recipe.py", []))
    params = {key: text for call in fake.arguments("log_params") for key, text in call["params"].items()}
    assert params["reward.name"] == "https://***@host" and params["run_dir"] == "runs/***"
    assert "hunter2" not in json.dumps(params) and params["optim.b1"] == "0.9"
    assert max(map(len, params)) <= 250 and max(map(len, params.values())) <= 6000
    assert len(params) > 150


# -- trackio


def test_trackio_continues_its_own_run_and_stores_the_config_with_the_first_step(tmp_path, monkeypatch):
    fake = Fake("trackio", monkeypatch, id="r1")
    config = LogConfig(**FLAGS, trackio="p", name="x", group="g", tags=("a",))
    log_steps(tmp_path, config, (1, 2))
    fake.calls.clear()
    log = RunLog(tmp_path, config, 10, resume_step=2)
    log.step(3, {"loss": 0.5}, tokens=1)
    assert not fake.arguments("log")  # Trackio takes no config after a step
    log.config({"seed": 1})
    assert [name for name, _ in fake.calls] == ["init", "config", "log"]
    assert fake.arguments("config") == [{"seed": 1, "tags": ["a"]}] and fake.arguments("log")[0]["step"] == 3
    start = {"project": "p", "name": "x", "group": "g", "embed": False}
    assert fake.arguments("init") == [start | {"resume": "allow"}]
    log.close()
    fake.calls.clear()
    fake.id = "another"  # took the name since
    log_steps(tmp_path, config, (4,), resume=3)
    assert [call["resume"] for call in fake.arguments("init")] == ["allow", "never"]
    assert [call["step"] for call in fake.arguments("log")] == [1, 2, 3, 4]


# -- the libraries themselves, where they are installed

needs = lambda name: pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed")
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_loggers import FLAGS, LogConfig, log_steps
name, run_dir, first, last, resume = sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:7])
config = LogConfig(**FLAGS, **{name: "project"}, group="g", tags=("a",))
log_steps(run_dir, config, range(first, last + 1), resume)
"""


def in_process(name, run_dir, first, last, *, resume, **environment):
    """Log steps with a library in a process of its own."""
    folder, words = os.path.dirname(__file__), map(str, (name, run_dir, first, last, resume))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", RUN, folder, *words]
    done = subprocess.run(command, env=environment, cwd=run_dir, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout + done.stderr


def wandb_records(file):
    """Return the records of a .wandb file: a header of 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, []
    while place < len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(b"".join(parts))
            parts = []


@pytest.mark.slow
@needs("wandb")
def test_wandb_itself(tmp_path):
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    in_process("wandb", tmp_path, 1, 5, resume=-1, **offline)
    in_process("wandb", tmp_path, 4, 7, resume=3, **offline)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    records = [list(wandb_records(file)) for file in files]
    runs = [record.run for part in records for record in part if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1 and {run.run_group for run in runs} == {"g"}
    rows = [record.history for part in records for record in part if record.HasField("history")]
    assert [row.step.num for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    items = {item.key or ".".join(item.nested_key): item.value_json for item in rows[6].item}
    assert json.loads(items["loss"]) == 1 / 7
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json"))
    assert len(tables) == 7
    table = json.loads(tables[-1].read_text())
    assert table["columns"] == list(loggers.SAMPLE_COLUMNS) and table["data"][0][1:] == CELLS


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_itself(tmp_path):
    server = {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    in_process("mlflow", tmp_path, 1, 5, resume=-1, **server)
    in_process("mlflow", tmp_path, 4, 7, resume=3, **server)
    (run,) = (path.parent for path in tmp_path.glob("store/*/*/metrics"))
    lines = (run / "metrics/loss").read_text().splitlines()  # time, value, step
    assert [(int(line.split()[2]), float(line.split()[1])) for line in lines] == [
        (step, 1 / step) for step in range(1, 8)
    ]
    (table,) = run.glob("artifacts/samples/*.json")
    table = json.loads(table.read_text())
    assert [row[0] for row in table["data"]] == [1, 2, 3, 4, 5, 6, 7] and table["data"][0][1:] == CELLS
    assert (run / "tags/group").read_text() == "g" and (run / "tags/a").read_text() == "true"


@pytest.mark.slow
@needs("swanlab")
def test_swanlab_itself(tmp_path):
    in_process("swanlab", tmp_path, 1, 5, resume=-1, SWANLAB_MODE="offline")
    in_process("swanlab", tmp_path, 4, 7, resume=3, SWANLAB_MODE="offline")
    starts = list(tmp_path.glob("swanlab/run-*"))
    assert len(starts) == 2 and len({start.name.rpartition("-")[2] for start in starts}) == 1  # one id
    files = sorted((file.name[:3], file) for start in starts for file in start.glob("media/echarts/*.json"))
    assert [int(step) for step, _ in files] == [1, 2, 3, 4, 5, 6, 7]
    table = json.loads(files[-1][1].read_text())
    assert [column["field"] for column in table["colDefs"]] == list(loggers.SAMPLE_COLUMNS)
    assert table["rowData"] == [{"step": 7, **dict(zip(loggers.SAMPLE_COLUMNS[1:], CELLS, strict=True))}]


@pytest.mark.slow
@needs("trackio")
def test_trackio_itself(tmp_path):
    folder = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    in_process("trackio", tmp_path, 1, 5, resume=-1, **folder)
    in_process("trackio", tmp_path, 4, 7, resume=3, **folder)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio/project.db")) as file:
        rows = file.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY step").fetchall()
        configs = file.execute("SELECT run_id, config FROM configs").fetchall()
    assert {(run, name) for run, name, *_ in rows} == {(configs[0][0], tmp_path.name)} and len(configs) == 1
    assert [step for _, _, step, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    values = json.loads(rows[6][3])
    assert values["loss"] == 1 / 7 and "bad" not in values
    (cells,) = values["samples"]["_value"]
    assert cells == {"step": 7, **dict(zip(loggers.SAMPLE_COLUMNS[1:], CELLS, strict=True))}
    assert json.loads(configs[0][1])["_Group"] == "g"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", loggers.EXTRAS)
def test_the_fakes_have_the_parameters_of_the_libraries(name):
    library = pytest.importorskip(name)
    for key, parameters in SIGNATURES.items():
        if key.startswith(name):
            function = library
            for part in key.split(".")[1:]:
                function = getattr(function, part)
            assert set(parameters) <= inspect.signature(function).parameters.keys(), key
