"""One trajectory of a program: its calls, one after another, as the turns of one conversation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import encode_prompt, prompt_messages
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.messages import parsed_arguments
from jaxrl_llm.data.observation import RewrittenHistory, encode_observation
from jaxrl_llm.data.rows import Example, Message, RowError
from jaxrl_llm.data.template import control_tokens, token_ids
from jaxrl_llm.envs.calls import check_arguments, parse_calls
from jaxrl_llm.envs.env import state_key
from jaxrl_llm.envs.formats import ToolCall
from jaxrl_llm.envs.gateway.call import Answer, Call, CallError, ToolUse, check_size, too_long
from jaxrl_llm.errors import UserError
from jaxrl_llm.forks import TurnRecord, common_length
from jaxrl_llm.rollout.engine import Reply, raw_text, reads_thought
from jaxrl_llm.structs import Episode
from jaxrl_llm.thoughts import split_thought

CALL_MARKS = ("<tool_call>", "<seed:tool_call>", "<function=", "<|python_tag|>", "<|python_start|>")
MAX_CALLS = 10_000  # remembered for clients that repeat them


@dataclass(frozen=True)
class Limits:
    """Limits of every trajectory of a run."""

    prompt_tokens: int
    response_tokens: int
    turns: int
    needs_reward: bool  # nothing but the program rewards
    keeps_history: bool  # a template that rewrites earlier turns does not change what the policy has read


@dataclass(frozen=True)
class End:
    """The end of a trajectory."""

    reward: float | None = None  # None = the run's reward functions score the last turn
    failure: str = ""


@dataclass(eq=False)
class ProgramChat:
    """One conversation of a program."""

    first: Call
    read: list[Message] = field(default_factory=list)  # for the template; the policy's turns as it wrote them
    context: list[int] = field(default_factory=list)  # prompt, turns and observations
    known: list[Message | Answer] = field(default_factory=list)  # messages of its newest call, and the answer
    text: str = ""  # the same of a prompt in plain text
    end: str = ""  # control token that ended the newest turn
    stopped_by: str = ""  # string that stopped the newest turn
    turn: int = -1  # number of the newest turn


class Renderer:
    """Calls as token ids, and turns as answers.

    Args:
        call_format: returns the format of tool calls. Raises UserError: it is not known.
    """

    def __init__(self, tokenizer: Any, chat: ChatConfig, call_format: Callable[[], str]):
        self.tokenizer, self.chat, self.call_format = tokenizer, chat, call_format
        self.vocab_size = len(tokenizer)
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        self._controls = frozenset(tokenizer.convert_tokens_to_ids(list(control_tokens(tokenizer))))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with control tokens."""
        return raw_text(self.tokenizer, ids)

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the control token that ends a turn, or ""."""
        return self.decode(ids[-1:]) if ids[-1] in self._controls else ""

    def answer(self, call: Call, context: Sequence[int], ids: list[int], logprobs: list[float]) -> Answer:
        """Return a turn as programs read it."""
        # The text up to a stop string.
        end = self.end_of(ids)
        text = self.decode(ids[: len(ids) - bool(end)])
        found = [(text.find(stop), stop) for stop in call.stop if stop in text]
        at, stopped_by = min(found, default=(len(text), ""))
        # Thought, tool calls and the text before them.
        thought, shown = "", text[:at]
        if call.messages:
            thought, shown = split_thought(shown, reads_thought(self.tokenizer, context))
        calls = self._calls(shown, call) if call.tools else []
        if calls:
            starts = [shown.find(mark) for mark in CALL_MARKS if mark in shown]
            shown = shown[: min(starts, default=0)].strip()
        complete = end or stopped_by or not call.max_tokens or len(ids) < call.max_tokens
        finish = "tool_calls" if calls else "stop" if complete else "length"
        return Answer(
            id=call.id,
            content=shown,
            thought=thought,
            calls=tuple(calls),
            finish=finish,
            stopped_by=stopped_by,
            ids=ids,
            logprobs=logprobs,
            tokens=[self.decode([i]) for i in ids],
            num_context=len(context),
        )

    def _calls(self, text: str, call: Call) -> list[ToolUse]:
        """Return the tool calls of a text; text that cannot be read as a call stays text."""
        schemas = {tool["function"]["name"]: tool["function"] for tool in call.tools}
        uses = []
        for use in parse_calls(text, self.call_format()):
            if isinstance(use, ToolCall):
                typed = check_arguments(use, schemas[use.name]) if use.name in schemas else use
                arguments = typed.arguments if isinstance(typed, ToolCall) else use.arguments
                id = f"call_{call.turn:06}{len(uses):03}"  # not random: templates may show it to the policy
                uses.append(ToolUse(id, use.name, json.dumps(arguments, ensure_ascii=False)))
        return uses


class AgentSession:
    """One trajectory. Everything runs in the gateway's event loop.

    Args:
        row: the row of data, for the program and for reward functions.
    """

    def __init__(self, row: dict[str, Any], renderer: Renderer, limits: Limits):
        self.id, self.key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self.row, self.renderer, self.limits = row, renderer, limits
        self.episode, self.reward = Episode(), None  # type: Episode, float | None
        self.ended, self._rates_turns = False, False
        self._events: asyncio.Queue[Call | End] = asyncio.Queue()
        self._calls: dict[bytes, Call] = {}  # hash of the body -> its newest call
        self._pending: Call | None = None  # that the engine answers
        self._branches: list[ProgramChat] = []  # conversations; most programs have one
        self._present: ProgramChat | None = None  # that the policy has read last
        self._used = 0  # tokens of the response, observations included

    def submit(self, digest: bytes, repeats: bool, make: Callable[[], Call]) -> Call:
        """Queue a call, or return the earlier one that a client repeats.

        A client repeats a call whose answer it has not got: it says so, or its connection was cut.

        Args:
            digest: hash of protocol and body.
            repeats: the client says that it repeats a call.
        """
        known = self._calls.get(digest)
        if known and (repeats or known.is_lost()):
            return known
        if self.ended:
            raise CallError(400, "this trajectory has ended", "trajectory_ended")
        if len(self._calls) >= MAX_CALLS:
            raise CallError(400, f"this trajectory has had {MAX_CALLS} calls")
        call = self._calls[digest] = make()
        call.answer = asyncio.get_running_loop().create_future()
        self._events.put_nowait(call)
        return call

    def rate_turn(self, reward: float) -> None:
        """Set the reward of the newest turn; before the first turn it is a CallError."""
        if not self.episode.records:
            raise CallError(400, "turn_reward is the reward of the newest turn, and no call was answered yet")
        self._rates_turns = True
        self._amend_turn(reward=reward)

    def _amend_turn(self, **fields: Any) -> None:
        amended = dataclasses.replace(self.episode.records[-1], **fields)
        self.episode = dataclasses.replace(self.episode, records=(*self.episode.records[:-1], amended))

    def end(self, end: End) -> None:
        """End the trajectory after the calls that wait."""
        self._events.put_nowait(end)

    async def next(self, ids: list[int], logprobs: list[float]) -> Reply:
        """Answer the pending call with the policy's turn, and return the next call as the engine's reply."""
        if ids:
            await self._deliver(ids, logprobs)
        while isinstance(event := await self._events.get(), Call):
            try:
                new, keep = await asyncio.to_thread(self._extend, event)
            except CallError as error:
                self._refuse(event, error)
            except (RowError, UserError) as error:
                self._refuse(event, CallError(400, str(error)))
            else:
                self._pending = event
                return Reply(
                    new, False, self.episode, keep=keep, max_tokens=event.max_tokens, stop=event.stop
                )
        return self.close(event)

    def close(self, end: End) -> Reply:
        """Refuse the calls that wait, and return the end of the conversation."""
        self.ended = True
        waiting = [self._events.get_nowait() for _ in range(self._events.qsize())]
        for call in [self._pending, *waiting]:
            if isinstance(call, Call):
                self._refuse(call, CallError(400, "this trajectory has ended", "trajectory_ended"))
        failure, reward = end.failure, end.reward if self.reward is None else self.reward
        if self._rates_turns:
            reward = (reward or 0.0) + sum(record.reward or 0.0 for record in self.episode.records)
        if not failure and not self._branches:
            failure = "the program ended without a call"
        if not failure and reward is None and self.limits.needs_reward:
            failure = "the program posted no reward (--env.gateway.reward post)"
        self.episode = dataclasses.replace(self.episode, reward=reward, failure=failure)
        return Reply([], True, self.episode)

    def _refuse(self, call: Call, error: CallError) -> None:
        if call.answer and not call.answer.done():
            call.answer.set_exception(error)
            call.answer.exception()  # read: the client may have left
        self._calls = {digest: known for digest, known in self._calls.items() if known is not call}

    async def _deliver(self, ids: list[int], logprobs: list[float]) -> None:
        """Answer the pending call, and add its turn to the conversation."""
        call, branch, renderer = self._pending, self._present, self.renderer
        answer = await asyncio.to_thread(renderer.answer, call, branch.context, ids, logprobs)
        self._pending, self._used = None, self._used + len(ids)
        branch.end, branch.stopped_by = renderer.end_of(ids), answer.stopped_by
        own = {"role": "assistant", "content": renderer.decode(ids[: len(ids) - bool(branch.end)])}
        branch.context, branch.read = [*branch.context, *ids], [*branch.read, own]
        branch.known, branch.text = [*call.messages, answer], f"{call.prompt}{answer.content}"
        record = self._record(call, branch, answer)
        branch.turn = len(self.episode.records)
        self.episode = dataclasses.replace(
            self.episode,
            turns=self.episode.turns + 1,
            records=(*self.episode.records, record),
            tool_calls=self.episode.tool_calls + len(answer.calls),
            messages=(*self.episode.messages, own),
        )
        if not call.answer.done():
            call.answer.set_result(answer)

    def _record(self, call: Call, branch: ProgramChat, answer: Answer) -> TurnRecord:
        """Return the record of the pending call's turn."""
        opening = {}
        if branch.turn < 0:
            prompt = call.prompt if isinstance(call.prompt, str) else self.renderer.decode(call.prompt)
            opening = {"messages": call.messages or [{"role": "prompt", "content": prompt}]}
            opening |= {"tools": call.tools} if call.tools else {}
        calls = (
            {"id": c.id, "name": c.name, "arguments": parsed_arguments(c.arguments)} for c in answer.calls
        )
        place = len(self.episode.messages)
        return TurnRecord(self._used, place, branch.turn, calls=tuple(calls), opening=opening)

    def _extend(self, call: Call) -> tuple[list[int], int | None]:
        """Return the ids that a call adds, and how many of the present context they follow; None = all.

        Sets the call's ids and its limit of tokens.

        Raises:
            CallError, RowError, UserError: the call is refused, and changes nothing.
        """
        if self.episode.turns >= self.limits.turns:
            reason = f"the trajectory has had its {self.limits.turns} calls (--env.max_turns)"
            raise CallError(400, reason, "max_turns")
        if call.messages and call.messages[-1]["role"] == "assistant":
            raise CallError(400, "the last message must not be the assistant's")
        if isinstance(call.prompt, list) and (wrong := max(call.prompt)) >= self.renderer.vocab_size:
            raise CallError(400, f"token id {wrong} is outside the vocabulary")
        check_size(call, (self.limits.prompt_tokens + self.limits.response_tokens) * self.renderer.longest)
        # The context of the policy, and how much of it was read already.
        continued = (self._continued(branch, call) for branch in reversed(self._branches))
        branch, read, context = next(filter(None, continued), None) or self._begun(call)
        keep, room = None, self.limits.response_tokens
        new = context
        if self._present is not None:
            present = self._present.context
            length = min(len(present), len(context) - 1)
            keep = common_length(np.equal(present[:length], context[:length]))
            new, room = context[keep:], room - self._used - len(context) + keep
            keep = None if keep == len(present) else keep
        if room < 1:
            raise too_long(f"{self.limits.response_tokens} tokens follow the first prompt at most")
        # It is accepted.
        if self._present is not None:
            self._used += len(new)
            observed = self._new_messages(branch, call, read)
            self._amend_turn(state=state_key(observed or new))
            self.episode = dataclasses.replace(self.episode, messages=(*self.episode.messages, *observed))
        if branch not in self._branches:
            self._branches.append(branch)
        branch.read, branch.context, self._present = read, context, branch
        call.max_tokens = min(call.max_tokens or room, room)
        call.turn, call.id = self.episode.turns, f"{self.id}-{self.episode.turns}"
        return new, keep

    def _new_messages(self, branch: ProgramChat, call: Call, read: list[Message]) -> list[Message]:
        """Return the messages that a call adds: a new conversation may begin with those of another one."""
        if branch in self._branches:
            return read[len(branch.read) :]
        beginnings = (list(map(_is_same, other.known, call.messages)) for other in self._branches)
        had = max((common_length(np.array([*equal, False])) for equal in beginnings), default=0)
        return read[len(read) - len(call.messages) + had :]

    def _begun(self, call: Call) -> tuple[ProgramChat, list[Message], list[int]]:
        """Return a new conversation, its messages, and its prompt."""
        renderer, read = self.renderer, list[Message]()
        if call.messages:
            example = _example(call)
            ids = encode_prompt(renderer.tokenizer, example, renderer.chat).tolist()
            read = prompt_messages(example, renderer.chat) or list(call.messages)
        elif isinstance(call.prompt, list):
            ids = call.prompt
        else:
            ids = token_ids(renderer.tokenizer, call.prompt, "the prompt")
        if not ids:
            raise CallError(400, "the prompt has no tokens")
        if not self._branches and len(ids) > self.limits.prompt_tokens:
            limit = self.limits.prompt_tokens
            raise too_long(f"the prompt has {len(ids)} tokens, of {limit} (--max_prompt_tokens)")
        return ProgramChat(call), read, ids

    def _continued(
        self, branch: ProgramChat, call: Call
    ) -> tuple[ProgramChat, list[Message], list[int]] | None:
        """Return the conversation, its messages and its context if the call continues it; else None."""
        first, known = branch.first, branch.known
        if not call.messages or not first.messages:
            ids = None if call.messages or first.messages else self._rest_of_text(branch, call.prompt)
            return None if ids is None else (branch, [], branch.context + ids)
        # The conversation so far must be its beginning, and no turn of another policy may follow.
        new = call.messages[len(known) :]
        same = len(new) > 0 and all(map(_is_same, known, call.messages))
        if call.tools != first.tools or not same or any(m["role"] == "assistant" for m in new):
            return None
        # Render what follows.
        read = [*branch.read, *new]
        try:
            ids = encode_observation(
                self.renderer.tokenizer,
                _example(first),
                read,
                len(branch.read) - 1,
                config=self.renderer.chat,
                end=branch.end,
                strict=not self.limits.keeps_history,
            )
        except RewrittenHistory:
            return None
        return branch, read, branch.context + ids

    def _rest_of_text(self, branch: ProgramChat, prompt: str | list[int]) -> list[int] | None:
        """Return the ids that a completions prompt adds to a context; None = it does not continue it."""
        if isinstance(prompt, list):
            begins = prompt[: len(branch.context)] == branch.context
            return prompt[len(branch.context) :] or None if begins else None
        if not branch.text or not prompt.startswith(branch.text) or prompt == branch.text:
            return None
        rest = prompt[len(branch.text) :]
        for written in (branch.stopped_by, branch.end):  # the policy has read these tokens already
            rest = rest.removeprefix(written)
        return token_ids(self.renderer.tokenizer, rest, "the prompt", after=branch.text) or None


def _example(call: Call) -> Example:
    columns = {"tools": call.tools} if call.tools else {}
    return Example(tuple(call.messages), None, columns=columns, where="the call")


def _is_same(known: Message | Answer, message: Message) -> bool:
    """Return whether a message of a call is a message of the conversation so far.

    The policy's turn is the one whose text and tool calls the program was given: its thought may be left out,
    and fields of the client's own may be added.
    """
    if not isinstance(known, Answer):
        return known == message
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    calls = [call if isinstance(call, dict) else {} for call in calls]
    given = [(call.get("name"), parsed_arguments(call.get("arguments"))) for call in calls]
    return (
        message["role"] == "assistant"
        and message["content"].strip() == known.content.strip()
        and given == [(call.name, parsed_arguments(call.arguments)) for call in known.calls]
        and message.get("reasoning_content", known.thought) == known.thought
    )
