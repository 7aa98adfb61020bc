"""An engine of the gateway's tests that writes given texts, and a program elsewhere that connects."""

import json
import threading
import urllib.error
import urllib.request

import numpy as np

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import TEMPLATE, make_tokenizer
from jaxrl_llm.envs.config import EnvConfig, GatewayConfig
from jaxrl_llm.envs.gateway.gateway import RUN_KEY
from jaxrl_llm.envs.load import make_gateway
from jaxrl_llm.rollout.config import SamplingConfig

TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATE
)
END = "<|im_end|>"
SIZES = {"max_prompt_tokens": 60_000, "max_response_tokens": 60_000, "slots": 4, "sampling": SamplingConfig()}
RUN = "key of the run"
ROW = Prompt(Example(({"role": "user", "content": "hello"},), None, answer="42"), np.array([2]), 0)


def encode(text):
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class ScriptedEngine:
    """One trajectory after another, each in a thread: the texts in order, the last one again and again.

    Attributes:
        replies: the last reply of each trajectory.
        read: the ids that the policy has read and written, by trajectory.
    """

    def __init__(self, gateway, *texts, trajectories=1, row=ROW):
        self.dialogue = gateway.dialogue([row] * trajectories, None)
        self.texts, self.replies, self.read = texts, {}, {}
        self.threads = [
            threading.Thread(target=self._talk, args=(i,), daemon=True) for i in range(trajectories)
        ]
        for thread in self.threads:
            thread.start()

    def _talk(self, name):
        reply = self.dialogue.reply(name, 0, None, [], start=0).result()
        read, ids, number = [*reply.ids], [], 0
        while not reply.done:
            turn = encode(self.texts[min(number, len(self.texts) - 1)])
            for stop in reply.stop:
                if stop in self.texts[min(number, len(self.texts) - 1)]:
                    text = self.texts[min(number, len(self.texts) - 1)]
                    turn = encode(text[: text.index(stop) + len(stop)])
            turn = turn[: reply.max_tokens]
            start, number = len(ids), number + 1
            ids, read = [*ids, *turn], [*read, *turn]
            logprobs = [-0.5] * len(turn)
            reply = self.dialogue.reply(name, 0, None, ids, start=start, logprobs=logprobs).result()
            if not reply.done:
                ids, read = [*ids, *reply.ids], [*read, *reply.ids]
        self.read[name], self.replies[name] = read, reply

    def result(self, name=0):
        """Return the episode of a trajectory, and the text that the policy has read and written."""
        self.threads[name].join(30)
        return self.replies[name].episode, TOKENIZER.decode(self.read[name])


def open_gateway(monkeypatch, *, format="hermes", history="strict", max_turns=50, sizes=SIZES, **settings):
    """Return a gateway that programs elsewhere connect to."""
    monkeypatch.setenv(RUN_KEY, RUN)
    config = EnvConfig(gateway=GatewayConfig(**settings), format=format, history=history, max_turns=max_turns)
    return make_gateway(config, TOKENIZER, ChatConfig(), **sizes)


class Program:
    """A program elsewhere: claims a trajectory, and calls."""

    def __init__(self, gateway):
        self.root = gateway.server.address
        while (claimed := self.send("/trajectories", {}, RUN)) and claimed[0] == 429:
            pass
        assert claimed[0] == 200, claimed
        self.base, self.key = claimed[1]["base_url"], claimed[1]["api_key"]
        self.row = claimed[1]["row"]

    def send(self, path, body, key=None, **headers):
        """Return (status, reply); a text if it is a stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key != "":
            headers["Authorization"] = f"Bearer {key or self.key}"
        url = path if path.startswith("http") else self.root + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as reply:
                text = reply.read().decode()
                return reply.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def call(self, path, **body):
        """Return the reply of a call that is answered."""
        status, reply = self.send(self.base + path, body)
        assert status == 200, reply
        return reply

    def done(self, reward=1.0):
        """End the trajectory."""
        self.send(self.base.removesuffix("/v1") + "/reward", {"reward": reward})
        self.send(self.base.removesuffix("/v1") + "/done", {})


def events_of(text):
    """Return the data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
