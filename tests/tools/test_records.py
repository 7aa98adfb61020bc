"""`plan --records`: estimates beside compiled plans, the search, the commands, docs/records.md."""

import importlib.util
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_kernels.chips import CHIPS, GIB
from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.plan import records
from jaxrl_llm.plan.compiled import CompileTarget
from jaxrl_llm.plan.models import planned_model
from jaxrl_llm.plan.records import MODELS, DeviceRecord, RecordSearch, estimated_activations, recipe_flags
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.tools import plan as command

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs/records.json").read_text())


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIT = load_script("fit")
DENSE = [
    case for case in FIT.CASES if case.topology in ("h100", "h200", "rtx4090") and "Qwen3-" in case.model
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_estimates_are_what_compilers_report(case):
    """Of the update within 7%, of a prefill within 25%: the plans of docs/fit on one device."""
    argv = ["--config", "grpo_qwen.py", "--model.path", case.model, *case.flags.split(), *FIT.FLAGS]
    config = from_command_line(argv, writes=False).config
    model = trained_config(planned_model(config.model), config)
    compiled = json.loads((ROOT / f"docs/fit/{case.name}.json").read_text())["phases"]
    for name, tolerance in (("update: accumulate", 0.07), ("rollout: prefill", 0.25)):
        [phase] = [phase for phase in compiled if phase["name"] == name]
        traced = SimpleNamespace(name=name, mesh=SimpleNamespace(size=1))
        ours = estimated_activations(config, model, traced)
        assert ours == pytest.approx(phase["memory"]["activations"], rel=tolerance)


def target(name="h100", memory=60 * GIB):
    topology = parse_topology(name)
    return CompileTarget(topology, [], memory, CHIPS[topology.kind], compiler="")


class Arithmetic(RecordSearch):
    """A search whose recipes take 1 GiB and 2^20 bytes a token of a row, and a slot 1 GiB."""

    def estimate(self, target, flags):
        words = flags.split()
        value = dict(zip(words[::2], words[1::2], strict=True))
        cache = GIB * int(value.get("--rollout.slots", 0))
        model = 4 * GIB * MODELS.index(value["--model.path"])
        update = GIB + model + 2**20 * int(value["--tokens_per_device"])
        kinds = [{"KV cache": cache, "activations": GIB + model}, {"KV cache": 0, "activations": update}]
        return [SimpleNamespace(memory=kind, peak=sum(kind.values())) for kind in kinds]


def test_the_search_ends_below_the_memory(monkeypatch):
    """Rows: 1 + 4 (0.6B) + T / 1024 of 60 GiB, T = 56,320. Models: 1 + 4 i + 4 of 30 GiB, i = 6; 2 slots more
    would be 1 + 24 + 8."""
    monkeypatch.setattr(records, "_num_weights", lambda model: 0)
    search, found = Arithmetic(), {}
    for record in search.records(target()):
        found[record.name, record.model] = record
    assert found["longest row, SFT", "Qwen/Qwen3-0.6B"].tokens == 55 * 1024
    assert found["longest row, GRPO", "Qwen/Qwen3-4B"].tokens == (60 - 1 - 12) * 1024
    small = {record.name: record for record in search.records(target(memory=30 * GIB))}
    assert small["largest model, LoRA on nf4"].model == MODELS[6]
    assert "--rollout.slots 4 " in small["largest model, LoRA on nf4"].flags
    more = {record.name: record for record in search.records(target(memory=41 * GIB))}
    assert more["largest model, LoRA on nf4"].model == MODELS[7]
    assert "--rollout.slots 8 " in more["largest model, LoRA on nf4"].flags
    nothing = list(search.records(target(memory=GIB / 2)))
    assert {record.tokens for record in nothing} == {0}
    lines = records.record_lines(target(), [nothing[0], found["longest row, SFT", "Qwen/Qwen3-0.6B"]])
    assert (
        lines[1].endswith("does not fit")
        and lines[3] == f"    {found['longest row, SFT', MODELS[1]].command}"
    )


def test_flags_have_types_of_the_device_and_yarn_beyond_the_positions():
    flags, _ = records.METHODS["all weights, 8-bit moments"]
    assert "--optim.grad_dtype bfloat16" in recipe_flags(target(), MODELS[1], flags, 4096)
    on_t4 = recipe_flags(target("t4"), MODELS[1], flags, 4096)
    assert "bfloat16" not in on_t4 and "--rollout.dtype float16" in on_t4 and "--model.dtype float16" in on_t4
    assert "yarn" not in recipe_flags(target(), MODELS[1], "", 40_960)
    longer = recipe_flags(target(), MODELS[1], "", 65_792)
    assert longer.endswith("--model.yarn_factor 3 --model.yarn_original 32768")


@pytest.mark.parametrize("device", ["t4", "h100", "v5e-1"])
def test_commands_are_the_recipes_that_were_planned(device):
    for row in (row for row in ROWS if row["device"] == device and row["tokens"]):
        assert row["command"] == DeviceRecord(**{name: row[name] for name in DeviceRecord._fields}).command
        words = shlex.split(row["command"])
        assert words[:4] == ["python", "-m", "jaxrl_llm", "plan"]
        place = words.index("--topology")
        assert words.pop(place + 1) == device and words.pop(place) == "--topology"
        config = from_command_line(words[4:], writes=False).config
        assert config.model.path == row["model"]
        assert config.row_tokens == config.tokens_per_device == row["tokens"]
        assert planned_model(config.model).max_position >= row["tokens"]
        assert bool(config.lora.rank) == ("LoRA" in row["name"] or "row" in row["name"])
        assert (config.lora.quantize == "nf4") == ("nf4" in row["name"])


def test_larger_devices_have_no_smaller_records():
    by_device = {}
    for row in ROWS:
        by_device.setdefault(row["device"], []).append(row)
    assert list(by_device) == list(records.DEVICES)
    of = lambda row: MODELS.index(row["model"]) if row["name"].startswith("largest") else row["tokens"]
    for smaller, larger in (
        *(("t4", "l4"), ("l4", "rtx4090"), ("rtx4090", "a100-40"), ("a100-40", "a100"), ("a100", "h200")),
        *(("h100", "h200"), ("h200", "b200"), ("v5e-1", "v6e-1")),
    ):
        for a, b in zip(by_device[smaller], by_device[larger], strict=True):
            assert a["name"] == b["name"] and of(a) <= of(b), (smaller, larger, a["name"])


def test_the_page_is_that_of_the_records(tmp_path, monkeypatch):
    script = load_script("records")
    monkeypatch.setattr(script, "PAGE", tmp_path / "records.md")
    script.write_page()
    assert (tmp_path / "records.md").read_text() == (ROOT / "docs/records.md").read_text()
    for row in (row for row in ROWS if row["compiled"]):
        compiled = row["compiled"]["peak"]["bytes"]
        assert row["compiled"]["fits"] and compiled == pytest.approx(row["estimate"], rel=0.15), row[
            "command"
        ]


def test_the_command_prints_and_writes_records(tmp_path, monkeypatch, capsys):
    one = DeviceRecord("cpu", "largest model, LoRA", MODELS[1], 4096, "--lora.rank 16", 2.0**30, 2.0**31)
    monkeypatch.setattr(RecordSearch, "records", lambda self, target: iter([one]))
    assert command.main(["--records", "True", "--topology", "cpu", "--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "  largest model, LoRA: Qwen/Qwen3-0.6B, rows of 4,096 tokens, 1.00 GiB"
    assert printed[2].endswith("--eval.every 0 --topology cpu --lora.rank 16")
    [row] = json.loads((tmp_path / "r.json").read_text())
    assert row == {"label": "estimated, not compiled", **one._asdict(), "command": one.command}
    with pytest.raises(ValueError, match=r"--config grpo_qwen\.py is not read. Leave it out"):
        command.main(["--records", "True", "--config", "grpo_qwen.py"])


def test_devices_of_one_generation_are_estimated_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        records, "trace_step", lambda config, target: asked.append(target) or (config, {}, [])
    )
    search, flags = RecordSearch(), recipe_flags(target(), MODELS[1], "", 4096)
    for name in ("h100", "h200", "a100", "h100"):
        assert search.estimate(target(name), flags) == []
    assert [one.topology.name for one in asked] == ["h100", "a100"]
