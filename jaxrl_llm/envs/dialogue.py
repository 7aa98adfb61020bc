"""Conversations of one rollout call: turns to the environment, its answers as token ids."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.chat import chat_messages, encode_observation, prompt_messages
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.template import ChatConfig, control_tokens
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.env import Env, Message, Step, Turn
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine import DialogueError, Reply
from jaxrl_llm.structs import Episode

GRACE = 5.0  # seconds that a step may take beyond what its tool may
PATIENCE = 60.0  # seconds beyond that after which nothing can be expected


@dataclass(frozen=True)
class Talk:
    """One conversation; picklable if the environment's state is."""

    messages: list[Message]
    state: Any
    episode: Episode


class EnvDialogue:
    """Answers the turns of the policy's responses to `prompts`, all conversations at once.

    Args:
        seed: of this call; each conversation gets one of its own.
        loop: runs in a thread of its own, so that whatever an environment does, engines go on.
    """

    def __init__(
        self,
        env: Env,
        config: EnvConfig,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        chat: ChatConfig,
        seed: int,
        loop: asyncio.AbstractEventLoop,
    ):
        self.env, self.config, self.prompts, self.tokenizer = env, config, prompts, tokenizer
        self.chat, self.seed, self.loop = chat, seed, loop
        self.limit = None if getattr(env, "own_limits", False) else config.tool_timeout + GRACE
        self.patience = config.tool_timeout + GRACE + PATIENCE
        self._controls = frozenset(tokenizer.convert_tokens_to_ids(list(control_tokens(tokenizer))))

    def reply(
        self, prompt_index: int, response_index: int, talk: Talk | None, ids: Sequence[int], start: int
    ) -> Future[Reply]:
        """As `Dialogue.reply`."""
        work = self._reply(prompt_index, response_index, talk, list(ids), start)
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _reply(self, p: int, g: int, talk: Talk | None, ids: list[int], start: int) -> Reply:
        prompt = self.prompts[p]
        ended = ids[-1] in self._controls
        text = self._decode(ids[start : len(ids) - ended])
        try:
            async with asyncio.timeout(self.limit):
                if talk is None:
                    seed = ((self.seed * 1_000_003 + p) * 1_000_003 + g) & 0x7FFFFFFF
                    messages = prompt_messages(prompt.example, self.chat) or _plain(prompt)
                    talk = Talk(messages, await self.env.reset(prompt.example, seed), Episode())
                messages = [*talk.messages, {"role": "assistant", "content": text}]
                number = talk.episode.turns + 1
                read = functools.partial(self._decode, [*prompt.ids.tolist(), *ids[:start]])
                turn = Turn(text, messages, number, number >= self.config.max_turns, read)
                step = checked(await self.env.step(talk.state, turn))
        except (Exception, SystemExit) as error:  # the user's code
            if isinstance(error, TimeoutError) and self.limit:
                return self._failed(talk, f"the environment took longer than {self.limit:g} s")
            return self._failed(talk, f"{type(error).__name__}: {error}")
        episode = counted(talk.episode, step)
        if step.done or turn.last:
            episode = dataclasses.replace(episode, messages=(*talk.episode.messages, messages[-1]))
            return Reply([], True, episode)
        said = [self._cut(message, len(_listed(step))) for message in _listed(step)]
        episode = dataclasses.replace(episode, messages=(*talk.episode.messages, messages[-1], *said))
        seen, messages = len(messages) - 1, [*messages, *said]
        talk = Talk(messages, talk.state, episode)
        if step.raw:
            return Reply(self._ids(said[0]["content"]), False, episode, talk)
        return Reply(self._observation(prompt, messages, seen, ended), False, episode, talk)

    def _failed(self, talk: Talk | None, why: str) -> Reply:
        episode = talk.episode if talk else Episode()
        return Reply([], True, dataclasses.replace(episode, turns=episode.turns + 1, failure=why))

    def _observation(self, prompt: Prompt, messages: list[Message], seen: int, ended: bool) -> list[int]:
        """Ids of what was said and of the start of the next turn.

        Raises:
            DialogueError: the chat template cannot add to what was said.
        """
        try:
            strict = self.config.history == "strict"
            return encode_observation(
                self.tokenizer, prompt.example, messages, seen, self.chat, ended, strict
            )
        except ValueError as error:
            raise DialogueError(str(error)) from error

    def _cut(self, message: Message, count: int) -> Message:
        """The message with its share of `max_observation_tokens`; the policy reads that it was cut."""
        limit = max(self.config.max_observation_tokens // count, 1)
        text = message["content"]
        ids = self._ids(text[: 64 * limit])
        if len(ids) <= limit and len(text) <= 64 * limit:
            return message
        kept = self._decode(ids[:limit])
        return {**message, "content": f"{kept}\n[cut off: {len(kept)} of {len(text)} characters are shown]"}

    def _ids(self, text: str) -> list[int]:
        return (
            list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check_template(
    tokenizer: Any, chat: ChatConfig, role: str, columns: dict[str, Any], strict: bool
) -> None:
    """Whether a second turn can follow the first.

    Raises:
        ValueError: the template refuses the role of the answers, or rewrites what was said before.
    """
    from jaxrl_llm.data.rows import Example

    example = Example(({"role": "user", "content": "question"},), None, columns=columns)
    if chat_messages(example, chat) is None:
        return
    messages = [
        *prompt_messages(example, chat),
        {"role": "assistant", "content": "turn"},
        {"role": role, "content": "answer"},
    ]
    encode_observation(tokenizer, example, messages, len(messages) - 2, chat, ended=True, strict=strict)


def checked(step: Any) -> Step:
    """What an environment's step returned. Raises ValueError saying what is wrong with it."""
    if not isinstance(step, Step):
        raise UserError(f"step returned {type(step).__name__}, not a Step")
    if step.reward is not None and not math.isfinite(step.reward):
        raise UserError(f"step gave the reward {step.reward}")
    for message in _listed(step):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"a message needs role and content as text, not {message!r:.200}")
    return step


def counted(episode: Episode, step: Step) -> Episode:
    """The episode with one more turn answered."""
    reward = episode.reward
    if step.reward is not None:
        reward = (reward or 0.0) + float(step.reward)
    return Episode(
        turns=episode.turns + 1,
        reward=reward,
        tool_calls=episode.tool_calls + step.tool_calls,
        tool_errors=episode.tool_errors + step.tool_errors,
        timeouts=episode.timeouts + step.timeouts,
    )


def _listed(step: Step) -> list[Message]:
    if isinstance(step.says, str):
        return [{"role": "user", "content": step.says}]
    return list(step.says)


def _plain(prompt: Prompt) -> list[Message]:
    """The prompt as messages where no template is used."""
    example = prompt.example
    return list(example.messages) if example.messages else [{"role": "user", "content": example.text or ""}]
