"""Conversations of one rollout call: turns to the environment, observations as token ids."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm.data.chat import chat_messages, prompt_messages
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.observation import observe
from jaxrl_llm.data.rows import Example, without_reference
from jaxrl_llm.data.template import control_tokens, token_ids
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.env import Env, Message, Step, Turn, state_key
from jaxrl_llm.forks import TurnRecord
from jaxrl_llm.loop_thread import LoopThread
from jaxrl_llm.rollout.engine import DialogueError, Reply, raw_text
from jaxrl_llm.structs import Episode
from jaxrl_llm.user_file import describe_error

GRACE = 5.0  # seconds that a step may take in addition to its tool's limit
PATIENCE = 60.0  # seconds in addition after which a step counts as lost
MAX_REWARD = 1e6  # of one step; more is a mistake
MAX_COUNT = 1_000_000
CANCEL_SECONDS = 2.5  # for running conversations to end


@dataclass(frozen=True)
class Conversation:
    """One conversation so far; picklable if the environment's state is."""

    messages: list[Message]
    state: Any
    episode: Episode
    context: list[int]  # ids that the policy reads before its next turn, prompt included


@dataclass
class Conversations(contextlib.AbstractContextManager):
    """Makes the dialogue of each rollout call; their environments share an event loop in a thread, so that
    none can block an engine.

    A context manager.
    """

    env: Env
    config: EnvConfig
    tokenizer: Any
    chat: ChatConfig
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns that every row gets: the tools, for the chat template to show."""
    line: str = ""
    """Lines on the format of tool calls and on rewritten histories, for the start of a run; "" = none."""
    thread: LoopThread = field(default_factory=lambda: LoopThread("environments"))
    opens_with: ClassVar[int] = 0

    def dialogue(self, prompts: Sequence[Prompt], key: jax.Array) -> EnvDialogue:
        """Return the environment of responses to these prompts; the same key, the same seeds."""
        seed = int(np.asarray(jax.random.key_data(key)).ravel()[-1])
        return EnvDialogue(self, prompts, seed)

    def __exit__(self, *_: object) -> None:
        """Cancel running conversations; an environment that blocks its thread is abandoned."""
        self.thread.close(CANCEL_SECONDS)


class EnvDialogue:
    """Answers the turns of the policy's responses to `prompts`, all conversations at once.

    Args:
        run: environment, settings and thread of the conversations of all calls.
        seed: of this call; each conversation gets a separate seed.
    """

    def __init__(self, run: Conversations, prompts: Sequence[Prompt], seed: int):
        self.run, self.prompts, self.seed = run, prompts, seed
        seconds = run.config.tool_timeout + GRACE
        self.limit = None if getattr(run.env, "own_limits", False) else seconds
        self.patience = seconds + PATIENCE
        controls = run.tokenizer.convert_tokens_to_ids(list(control_tokens(run.tokenizer)))
        self._controls = frozenset(controls)

    def reply(
        self, prompt_index: int, response_index: int, conversation: Any, ids: Sequence[int], *, start: int
    ) -> Future[Reply]:
        """Return the reply to a turn, as `Dialogue.reply`."""
        work = self._reply(prompt_index, response_index, conversation, list(ids), start=start)
        return self.run.thread.start(work)

    async def _reply(
        self, p: int, g: int, conversation: Conversation | None, ids: list[int], *, start: int
    ) -> Reply:
        prompt = self.prompts[p]
        context = conversation.context if conversation else prompt.ids.tolist()
        end = raw_text(self.run.tokenizer, ids[-1:]) if ids[-1] in self._controls else ""
        # The policy's text; the environment's state is made on the first turn.
        text = raw_text(self.run.tokenizer, ids[start : len(ids) - bool(end)])
        try:
            async with asyncio.timeout(self.limit):
                if conversation is None:
                    seed = ((self.seed * 1_000_003 + p) * 1_000_003 + g) & 0x7FFFFFFF
                    messages = prompt_messages(prompt.example, self.run.chat) or _plain(prompt)
                    state = await self.run.env.reset(prompt.example, seed)
                    conversation = Conversation(messages, state, Episode(), context)
                messages = [*conversation.messages, {"role": "assistant", "content": text}]
                number = conversation.episode.turns + 1
                read = functools.partial(raw_text, self.run.tokenizer, context)
                turn = Turn(text, messages, number, number >= self.run.config.max_turns, read=read)
                step = check_step(await self.run.env.step(conversation.state, turn))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
            if asyncio.current_task().cancelling():  # the end of the run
                raise
            if isinstance(error, TimeoutError) and self.limit:
                return _failed(conversation, f"the environment took longer than {self.limit:g} s")
            return _failed(conversation, describe_error(error))
        # The end, or an observation.
        episode = add_step(conversation.episode, step, len(ids))
        if step.done or turn.last:
            episode = dataclasses.replace(episode, messages=(*episode.messages, messages[-1]))
            return Reply([], True, episode)
        talk = Conversation(messages, conversation.state, episode, [*context, *ids[start:]])
        return self._observe(prompt, talk, step, end=end)

    def _observe(self, prompt: Prompt, talk: Conversation, step: Step, *, end: str) -> Reply:
        """Return the step's observation and the start of the next turn as token ids.

        Args:
            talk: the conversation up to and with the policy's turn.
            end: the control token that ended the turn; "" = none.

        Raises:
            DialogueError: the chat template cannot add to the conversation.
        """
        # The messages of the observation, cut to their length.
        new = observed_messages(step)
        new = [self._cut(message, len(new)) for message in new]
        turn = talk.messages[-1]
        episode = dataclasses.replace(talk.episode, messages=(*talk.episode.messages, turn, *new))
        messages, keep = [*talk.messages, *new], None
        # Their ids, and the tokens of the conversation so far that the policy still reads.
        if step.raw:
            ids = token_ids(self.run.tokenizer, new[0]["content"], "an observation", after=turn["content"])
        else:
            try:
                ids, keep = observe(
                    self.run.tokenizer,
                    prompt.example,
                    messages,
                    len(talk.messages) - 1,
                    context=talk.context,
                    config=self.run.chat,
                    history=self.run.config.history,
                    end=end,
                )
            except ValueError as error:
                raise DialogueError(str(error)) from error
        keep = len(talk.context) if keep is None else keep
        conversation = Conversation(messages, talk.state, episode, [*talk.context[:keep], *ids])
        return Reply(ids, False, episode, conversation, keep=keep)

    def _cut(self, message: Message, count: int) -> Message:
        """Return the message cut to its share of `max_observation_tokens`; a note tells the policy."""
        limit = max(self.run.config.max_observation_tokens // count, 1)
        text = message["content"].encode(errors="replace").decode()  # no tokenizer takes lone surrogates
        message = {**message, "content": text}
        ids = token_ids(self.run.tokenizer, text[: 64 * limit], "an observation")
        if len(ids) <= limit and len(text) <= 64 * limit:
            return message
        kept = raw_text(self.run.tokenizer, ids[:limit])
        return {**message, "content": f"{kept}\n[cut off: {len(kept)} of {len(text)} characters are shown]"}


def check_template(
    tokenizer: Any, chat: ChatConfig, role: str, columns: dict[str, Any], *, history: str, rounds: int = 2
) -> bool:
    """Refuse a chat template that cannot render the turns after the first one, with or without thoughts.

    Args:
        history: `EnvConfig.history`.
        rounds: observations that a conversation may have; more than 2 are as 2.

    Returns: whether it rewrites earlier turns; known unless they are kept.

    Raises:
        UserError: the template refuses the role of observations, or a rewritten history is refused.
    """
    example = Example(({"role": "user", "content": "question"},), None, columns=columns)
    if chat_messages(example, chat) is None:
        return False
    rewrites, end = False, tokenizer.eos_token
    for content in ("turn", "<think>\nthought\n</think>\n\nturn"):
        messages = prompt_messages(example, chat)
        for _ in range(min(rounds, 2)):
            turn = [{"role": "assistant", "content": content}, {"role": role, "content": "answer"}]
            messages = [*messages, *turn]
            place = len(messages) - 2
            _, keep = observe(
                tokenizer, example, messages, place, context=(), config=chat, history=history, end=end
            )
            rewrites |= keep is not None
    return rewrites


def check_step(step: Any) -> Step:
    """Return the result of an environment's step if it is a valid Step.

    Raises:
        ValueError: it is invalid; the message names the field.
    """
    if not isinstance(step, Step):
        raise ValueError(f"step returned {type(step).__name__}, not a Step")
    if step.reward is not None and not is_reward(step.reward):
        raise ValueError(f"step gave the reward {step.reward!r:.80}; it must be within +-{MAX_REWARD:g}")
    counts = (step.tool_calls, step.tool_errors, step.timeouts)
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
        raise ValueError(f"step counted {counts!r:.80} tool calls, tool errors and time-outs")
    if not (step.state is None or isinstance(step.state, str)):
        raise ValueError(f"step gave the state {step.state!r:.80}; it must be a text, or None")
    messages = observed_messages(step)
    for message in messages:
        text = isinstance(message, dict) and (message.get("role"), message.get("content"))
        if not text or not all(isinstance(part, str) for part in text):
            raise ValueError(f"a message needs role and content as text, not {message!r:.200}")
    try:
        calls = json.loads(json.dumps(list(map(dict, step.calls)), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"step's calls must be a list of JSON objects: {error}") from None
    if step.raw and not messages:
        raise ValueError("step is raw and has no observation")
    return dataclasses.replace(step, calls=calls)


def add_step(episode: Episode, step: Step, end: int) -> Episode:
    """Return the episode with one more turn answered, but without its messages.

    Args:
        end: tokens of the response up to the end of the turn.
    """
    reward, own = episode.reward, None if step.reward is None else float(step.reward)
    if own is not None:
        reward = (reward or 0.0) + own
    last = len(episode.records) - 1
    state = state_key(observed_messages(step) if step.state is None else step.state)
    record = TurnRecord(end, len(episode.messages), last, own, calls=tuple(step.calls), state=state)
    return dataclasses.replace(
        episode,
        turns=episode.turns + 1,
        reward=reward,
        tool_calls=episode.tool_calls + step.tool_calls,
        tool_errors=episode.tool_errors + step.tool_errors,
        timeouts=episode.timeouts + step.timeouts,
        records=(*episode.records, record),
    )


def observed_messages(step: Step) -> list[Message]:
    """Return the messages of a step's observation."""
    if isinstance(step.observation, str):
        return [{"role": "user", "content": step.observation}]
    return list(step.observation)


def is_reward(value: Any) -> bool:
    """Return whether a value is a number within +-MAX_REWARD; True and False are none, nor is NaN."""
    value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_REWARD


def _failed(conversation: Conversation | None, reason: str) -> Reply:
    """Return the end of a conversation that failed."""
    episode = conversation.episode if conversation else Episode()
    return Reply([], True, dataclasses.replace(episode, turns=episode.turns + 1, failure=reason))


def _plain(prompt: Prompt) -> list[Message]:
    """Return the prompt as messages, if no template is used."""
    example = prompt.example
    if example.messages:
        return without_reference(example.messages)
    return [{"role": "user", "content": example.text or ""}]
