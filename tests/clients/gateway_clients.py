"""Real clients of the gateway's test: each plays the same two calls, knowing an address and a key.

    python gateway_clients.py NAME

The row is on standard input. Needs the client's package, and none of this project.
"""

import importlib.metadata
import json
import os
import sys

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}


def openai(question):
    """A chat, in two turns with a tool, the second a stream; before it the models, and a refusal."""
    from openai import BadRequestError, OpenAI

    client = OpenAI()
    assert client.models.list().data[0].id == "policy"
    messages, tools = [{"role": "user", "content": question}], [{"type": "function", "function": FUNCTION}]
    create = client.chat.completions.create
    try:
        create(model="m", messages=messages, response_format={"type": "json_object"})
    except BadRequestError as error:
        assert (error.param, error.code) == ("response_format", "unsupported_parameter")
    else:
        raise AssertionError("response_format is refused")
    settings = {"temperature": 0, "top_p": 0.9, "seed": 1, "tool_choice": "required"}
    first = create(model="m", messages=messages, tools=tools, **settings).choices[0].message
    call = first.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "20 C"}]
    stream = create(model="m", messages=messages, tools=tools, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def openai_responses(question):
    """The same through the API of responses."""
    from openai import OpenAI

    client, tools = OpenAI(), [{"type": "function", **FUNCTION}]
    first = client.responses.create(model="m", input=question, tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 C"}
    given = [{"role": "user", "content": question}, *(i.model_dump() for i in first.output), output]
    with client.responses.stream(model="m", input=given, tools=tools) as stream:
        return stream.get_final_response().output_text


def anthropic(question):
    from anthropic import Anthropic, BadRequestError

    client = Anthropic()
    tools = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
    given = {"model": "m", "max_tokens": 200, "tools": tools}
    messages = [{"role": "user", "content": question}]
    try:
        form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        client.messages.create(messages=messages, **given, extra_body={"output_config": form})
    except BadRequestError as error:
        assert "output_config.format" in error.body["error"]["message"]
    else:
        raise AssertionError("output_config.format is refused")
    more = {"tool_choice": {"type": "any"}, "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=messages, **given, **more)
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "20 C"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **given) as stream:
        return stream.get_final_text()


def litellm(question, model="openai/m", **more):
    import litellm as library

    messages, tools = [{"role": "user", "content": question}], [{"type": "function", "function": FUNCTION}]
    first = library.completion(model=model, messages=messages, tools=tools, **more).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "20 C"}
    messages += [first.model_dump(), result]
    return library.completion(model=model, messages=messages, tools=tools, **more).choices[0].message.content


def litellm_hosted_vllm(question):
    return litellm(question, "hosted_vllm/m", api_base=BASE, api_key=KEY)


def litellm_anthropic(question):
    return litellm(question, "anthropic/m", api_base=BASE.removesuffix("/v1"), api_key=KEY)


def openai_agents(question):
    import agents

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "20 C"

    agent = agents.Agent(name="a", instructions="be brief", model="m", tools=[weather])
    return agents.Runner.run_sync(agent, question).final_output


def openai_agents_chat(question):
    import agents

    agents.set_default_openai_api("chat_completions")
    return openai_agents(question)


def smolagents(question):
    import smolagents as library

    @library.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return "20 C"

    model = library.OpenAIModel(model_id="m", api_base=BASE, api_key=KEY)
    agent = library.ToolCallingAgent(tools=[weather], model=model, max_steps=4, verbosity_level=0)
    return str(agent.run(question))


def mini_swe_agent(question):
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name="openai/m", cost_tracking="ignore_errors")
    settings = {"system_template": "be brief", "instance_template": "{{task}}", "step_limit": 4}
    settings["cost_limit"] = 0.0
    agent = DefaultAgent(model, LocalEnvironment(), **settings)
    return str(agent.run(question))


if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    said = globals()[sys.argv[1]](json.load(sys.stdin)["prompt"])
    packages = ("openai", "anthropic", "litellm", "openai-agents", "smolagents", "mini-swe-agent")
    print({name: importlib.metadata.version(name) for name in packages}, repr(said))
    sys.exit(0 if "warm" in said else 1)
