"""ATIF: documents with fixed values, and the format's own models on them where these are installed."""

import importlib.util
import json

import pytest
from view_runs import agent_run, conversation, write_run

from jaxrl_llm.__main__ import main
from jaxrl_llm.tools.atif import AtifSource, atif_document

SOURCE = AtifSource("run", "0.1.0", "org/model")
ROWS = {
    "agent": agent_run(),
    "without tree": conversation(1, 1.0),
    "thought": {"step": 1, "eval": True, "prompt": "p", "response": "<think>why</think>so", "reward": None},
    "damaged": {**agent_run(), "tree": [{}], "token_ids": {"prompt": "x"}, "per_token": [], "messages": "m"},
    "empty": {"step": 1},
}


def steps_of(document):
    """Return (source, message or results, is it copied) of each step."""
    return [(s["source"], s["message"], s.get("is_copied_context", False)) for s in document["steps"]]


def test_a_conversation_with_a_tool_a_sub_agent_and_a_branch():
    document = atif_document(agent_run(7), 3, SOURCE)
    assert document["schema_version"] == "ATIF-v1.8" and document["trajectory_id"] == "run/7/3"
    assert document["agent"]["tool_definitions"][0]["function"]["name"] == "weather"
    first, second = (
        [("system", "Answer.", False), ("user", "Rain in Paris?", False)],
        ("user", "Sure?", False),
    )
    texts = [("agent", "<call>", False), ("agent", "Yes.", False)]
    assert steps_of(document)[:-1] == [*first, *texts, second]
    call, _, _, last = document["steps"][2:]
    arguments = {"city": "Paris", "days": 2}
    assert call["tool_calls"] == [{"tool_call_id": "c1", "function_name": "weather", "arguments": arguments}]
    assert call["observation"]["results"] == [
        {"source_call_id": "c1", "content": "12 mm"},
        {"subagent_trajectory_ref": [{"trajectory_id": "run/7/3/1"}]},
        {"subagent_trajectory_ref": [{"trajectory_id": "run/7/3/4"}]},
    ]
    assert call["metrics"] == {
        "prompt_tokens": 4, "completion_tokens": 2, "prompt_token_ids": [1, 2, 3, 4],
        "completion_token_ids": [104, 105], "logprobs": [-0.125, -0.25],
        "extra": {"trained_tokens": 2, "advantages": [0.5, 0.5]},
    }  # fmt: skip
    invalid = [{"text": "{", "error": "the JSON is broken"}]
    assert call["extra"] == {"reward": 0.25, "invalid_calls": invalid}
    assert last["extra"] == {"history_rewritten": True}
    assert last["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 115, 116]
    totals = {"total_prompt_tokens": 15, "total_completion_tokens": 5, "total_steps": 6}
    result = {"reward": 0.5, "outcome": "correct", "finish": "stop"}
    assert document["final_metrics"] == totals | {"extra": result}
    # The sub-agent, and the branch: its copied steps have the answer that it read.
    helper, branch = document["subagent_trajectories"]
    assert steps_of(helper) == [("user", "Summarize: 12 mm", False), ("agent", "Wet.", False)]
    assert steps_of(branch) == [
        *[(source, message, True) for source, message, _ in [*first, texts[0]]], ("agent", "No.", False)
    ]  # fmt: skip
    assert branch["steps"][2]["observation"]["results"] == [{"source_call_id": "c1", "content": "no rain"}]
    assert branch["steps"][3]["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 104, 105, 118, 119]
    assert branch["final_metrics"]["total_completion_tokens"] == 1  # copies do not count


def test_a_row_without_tokens_has_its_messages():
    document = atif_document(ROWS["thought"], 0, SOURCE)
    assert document["steps"][1] == {
        "step_id": 2, "source": "agent", "message": "so", "llm_call_count": 1, "reasoning_content": "why"
    }  # fmt: skip
    assert document["extra"] == {"training_step": 1, "split": "eval"}
    damaged = atif_document(ROWS["damaged"], 0, SOURCE)
    assert not any("metrics" in step for step in damaged["steps"]) and len(damaged["steps"]) == 8


def test_view_writes_a_file_a_sample(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": 1}], list(ROWS.values()), {"versions": {"jaxrl-llm": "0.2"}})
    assert main(["view", str(run), "--atif", str(tmp_path / "out")]) == 0
    assert "5 trajectories (ATIF)" in capsys.readouterr().out
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == [f"run-000001-{i:05}.json" for i in range(5)]
    assert json.loads(files[0].read_text()) == atif_document(agent_run(), 0, AtifSource("run", "0.2", "?"))
    assert main(["view", str(run), "--atif", str(run / "metrics.jsonl")]) == 2
    assert "cannot be written (File exists). Set another folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("atif"), reason="atif is not installed")
@pytest.mark.parametrize("name", ROWS)
def test_the_models_of_the_format_read_every_document(name):
    import atif

    document = atif_document(ROWS[name], 0, SOURCE)
    assert atif.Trajectory.model_validate(document).to_json_dict() == document
