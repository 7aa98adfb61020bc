"""Real clients of the gateway, each unmodified: a tool is called, and the conversation is one trajectory.

The clients are in a separate environment (`scripts/clients.sh .venv-clients-agents`); without it the tests
are skipped.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.envs.config import EnvConfig, GatewayConfig
from jaxrl_llm.envs.load import make_gateway

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/envs/gateway"))
from scripted import END, SIZES, TOKENIZER, ScriptedEngine  # noqa: E402

PYTHON = Path(os.environ.get("JAXRL_AGENTS_PYTHON", ROOT / ".venv-clients-agents/bin/python"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=f"no interpreter {PYTHON}")]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


WEATHER = f"<think>I look.</think>{call('weather', city='Oslo')}{END}"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo warm"


@pytest.mark.parametrize(
    ("client", "texts"),
    [
        ("openai", (WEATHER, f"warm{END}")),
        ("openai_responses", (WEATHER, f"warm{END}")),
        ("anthropic", (WEATHER, f"warm{END}")),
        ("litellm", (WEATHER, f"warm{END}")),
        ("litellm_hosted_vllm", (WEATHER, f"warm{END}")),
        ("litellm_anthropic", (WEATHER, f"warm{END}")),
        ("openai_agents", (WEATHER, f"warm{END}")),
        ("openai_agents_chat", (WEATHER, f"warm{END}")),
        ("smolagents", (WEATHER, f"{call('final_answer', answer='warm')}{END}")),
        ("mini_swe_agent", [f"{call('bash', command=line)}{END}" for line in ("echo hi", SUBMIT)]),
    ],
)
def test_a_client_has_a_conversation_with_a_tool(client, texts, caplog):
    command = f"{PYTHON} {Path(__file__).parent / 'gateway_clients.py'} {client}"
    config = EnvConfig(
        gateway=GatewayConfig(command=command, reward="exit", memory_mb=0), max_turns=4, format="hermes"
    )
    with make_gateway(config, TOKENIZER, ChatConfig(), **SIZES) as gateway:
        engine = ScriptedEngine(gateway, *texts)
        engine.threads[0].join(300)
        episode, text = engine.result()
    assert (episode.failure, episode.reward, episode.turns) == ("", 1.0, 2)
    assert texts[0].removesuffix(END) in text and text.endswith(texts[1])
    # Two send settings on purpose, smolagents asks for a tool, openai-agents for strict arguments.
    noted = ("openai", "anthropic", "smolagents", "openai_agents", "openai_agents_chat")
    assert ("not used" in caplog.text) == (client in noted)
