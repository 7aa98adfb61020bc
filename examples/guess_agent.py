"""An agent that finds a number by asking a chat model, over any OpenAI-compatible address.

    echo '{"messages": [{"role": "user", "content": "1-15"}], "answer": "7"}' | python examples/guess_agent.py

It knows nothing of training: `--env.gateway.command` starts it for each row (configs/grpo_agent_tiny.py).
Exit code 0 = the number was found within five guesses.
"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

URL = urlsplit(os.environ["OPENAI_BASE_URL"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}


def call_model(connection: http.client.HTTPConnection, messages: list[dict]) -> dict:
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", f"{URL.path}/chat/completions", body, HEADERS)
    reply = json.load(connection.getresponse())
    return reply["choices"][0]["message"]


def play(row: dict) -> bool:
    connection = http.client.HTTPConnection(URL.hostname, URL.port)
    messages, number = list(row["messages"]), int(row["answer"])
    for _ in range(5):
        messages.append(call_model(connection, messages))
        guess = messages[-1]["content"].strip()
        if guess == str(number):
            return True
        says = ("higher" if int(guess) < number else "lower") if guess.isdecimal() else "a number"
        messages.append({"role": "user", "content": says})
    return False


if __name__ == "__main__":
    sys.exit(0 if play(json.load(sys.stdin)) else 1)
