"""Programs of the gateway's tests: plain HTTP, nothing of jaxrl_llm. `python programs.py NAME`."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")


def post(path, body, base=BASE, key=KEY, **headers):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def chat(messages, **more):
    return post("/chat/completions", {"model": "m", "messages": messages, **more})


def two_turns(row):
    """Two calls, the second of at most 3 tokens; the reward is the number of calls, 0.5 of the first turn."""
    messages = list(row["messages"])
    first = chat(messages, logprobs=True)["choices"][0]
    post("/reward", {"turn_reward": 0.5}, base=os.environ["GATEWAY_URL"])
    messages += [first["message"], {"role": "user", "content": "go on"}]
    second = chat(messages, max_tokens=3)
    assert second["choices"][0]["finish_reason"] in ("stop", "length")
    assert second["usage"]["completion_tokens"] <= 3
    post("/reward", {"reward": 1.5}, base=os.environ["GATEWAY_URL"])


def completes(row):
    """Two short completions; the reward is the length of the text."""
    text = row["prompt"]
    for _ in range(2):
        text += post("/completions", {"prompt": text, "max_tokens": 4})["choices"][0]["text"] + "1"
    post("/reward", {"reward": len(text)}, base=os.environ["GATEWAY_URL"])


def refused(row):
    """Calls that are refused one by one leave the trajectory as it was."""
    for body in (
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user", "content": "x" * 1000}]},
        {"messages": row["messages"], "n": 0}, {"messages": row["messages"], "max_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ):  # fmt: skip
        try:
            post("/chat/completions", body)
        except urllib.error.HTTPError as error:
            assert error.code == 400, error.code
            assert json.load(error)["error"]["message"]
        else:
            raise AssertionError(body)
    try:
        post("/reward", {"turn_reward": 1.0}, base=os.environ["GATEWAY_URL"])
    except urllib.error.HTTPError as error:
        assert (error.code, "no call was answered yet" in json.load(error)["error"]["message"]) == (400, True)
    two_turns(row)


def branches(row):
    """A second conversation between two turns of the first, then the first call again."""
    messages = list(row["messages"])
    messages.append(chat(messages, max_tokens=5)["choices"][0]["message"])
    chat([{"role": "user", "content": "else"}], max_tokens=5)
    chat([*messages, {"role": "user", "content": "on"}], max_tokens=5)
    chat(row["messages"], max_tokens=5)


def no_call(row):
    """No call."""


def crashes(row):
    chat(row["messages"])
    print("the reason")
    sys.exit(3)


def wrong(row):
    chat(row["messages"])
    sys.exit(1)


def right(row):
    chat(row["messages"])


def sleeps(row):
    """Leaves a child behind, and never ends."""
    child = os.fork()
    if not child:
        time.sleep(1000)
    with open(row["pids"], "a") as file:
        print(os.getpid(), child, file=file)
    chat(row["messages"])
    time.sleep(1000)


def leaves_a_child(row):
    """Ends, while a child holds its output open."""
    chat(row["messages"])
    if not os.fork():
        time.sleep(1000)


def prints_first():
    """Prints more than a pipe holds before it reads its row."""
    print("x" * 1_000_000, flush=True)
    right(json.load(sys.stdin))


def greedy_of_memory(row):
    chat(row["messages"])
    bytearray(1 << 31)


if __name__ == "__main__":
    if sys.argv[1] == "prints_first":
        prints_first()
    else:
        globals()[sys.argv[1]](json.load(sys.stdin))
