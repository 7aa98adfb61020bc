"""The gateway of a run: the trajectories of programs that call the policy over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxrl_llm.addresses import is_loopback
from jaxrl_llm.data.chat import prompt_row
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.envs.config import EnvConfig, GatewayConfig
from jaxrl_llm.envs.dialogue import MAX_REWARD, is_reward
from jaxrl_llm.envs.gateway.programs import KILL_SECONDS, Finished, ProgramRunner
from jaxrl_llm.envs.gateway.server import GatewayServer
from jaxrl_llm.envs.gateway.session import AgentSession, End, Limits, Renderer
from jaxrl_llm.envs.python_file import call_user
from jaxrl_llm.errors import UserError
from jaxrl_llm.loop_thread import LoopThread
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Reply
from jaxrl_llm.user_file import describe_error, get_attribute, import_user_file, split_name

RUN_KEY = "JAXRL_GATEWAY_KEY"
PATIENCE = 60.0  # seconds in addition to those of a program after which the run ends
REWARD_KEY = "env.gateway.reward"
log = logging.getLogger(__name__)


class ProgramDialogue:
    """`Dialogue` of one rollout call: each response is the run of a program."""

    def __init__(self, gateway: Gateway, prompts: Sequence[Prompt]):
        self.gateway, self.prompts = gateway, prompts
        self.patience = gateway.config.gateway.seconds + PATIENCE
        self._sessions: dict[tuple[int, int], AgentSession] = {}

    def reply(
        self,
        prompt_index: int,
        response_index: int,
        conversation: Any,
        ids: Sequence[int],
        *,
        start: int,
        logprobs: Sequence[float] = (),
    ) -> Future[Reply]:
        """Return the next call of the program as the reply to a turn, as `Dialogue.reply`."""
        work = self._reply((prompt_index, response_index), list(ids[start:]), list(logprobs))
        return self.gateway.thread.start(work)

    async def _reply(self, name: tuple[int, int], turn: list[int], logprobs: list[float]) -> Reply:
        if not turn:
            self._end(name)
            row = self.gateway.row(self.prompts[name[0]])
            self._sessions[name] = await self.gateway.open(row)
        try:
            reply = await self._sessions[name].next(turn, logprobs)
        except BaseException:  # the end of the run, or a defect here
            self._end(name)
            raise
        if reply.done:
            self._end(name)
        return reply

    def end(self, prompt_index: int, response_index: int) -> None:
        """End a trajectory, as `Dialogue.end`."""
        self.gateway.thread.loop.call_soon_threadsafe(self._end, (prompt_index, response_index))

    def _end(self, name: tuple[int, int]) -> None:
        if session := self._sessions.pop(name, None):
            if not session.ended:
                session.close(End())
            self.gateway.close_session(session)


class Gateway(contextlib.AbstractContextManager):
    """Makes the dialogue of each rollout call; one server and one event loop serve all. A context manager.

    Args:
        slots: of the engine: the number of programs that run at once, if the config does not say.
        sampling: of the run.
    """

    columns: dict[str, Any] = {}  # noqa: RUF012, nothing is added to rows

    def __init__(
        self,
        config: EnvConfig,
        tokenizer: Any,
        chat: ChatConfig,
        *,
        call_format: Callable[[], str],
        max_prompt_tokens: int,
        max_response_tokens: int,
        slots: int,
        sampling: SamplingConfig,
    ):
        # What every trajectory needs.
        self.config, self.chat, self.opens_with = config, chat, max_prompt_tokens
        self._limits = Limits(
            prompt_tokens=max_prompt_tokens,
            response_tokens=max_response_tokens,
            turns=config.max_turns,
            needs_reward=config.gateway.reward == "post",
            keeps_history=config.history == "keep",
        )
        self._renderer = Renderer(tokenizer, chat, call_format)
        self._reward = load_trajectory_reward(config.gateway.reward)
        self._tasks: dict[str, asyncio.Task] = {}  # of programs, by trajectory
        self._waiting: list[AgentSession] = []  # for programs elsewhere
        self._slots = asyncio.Semaphore(config.gateway.copies or slots)
        self.line, self.thread = "", None
        if jax.process_index() != 0:  # replies come from process 0
            return
        # The server, in a thread.
        settings = config.gateway
        run_key = "" if settings.command else os.environ.get(RUN_KEY, "")
        if not settings.command and not run_key:
            raise UserError(
                "--env.gateway.port without a command: programs elsewhere need a key to connect. Set "
                f"{RUN_KEY} in the environment of the run and of the programs, or --env.gateway.command"
            )
        tokens = max_prompt_tokens + max_response_tokens
        self.server = GatewayServer(tokens, sampling, self._claim, run_key=run_key)
        self.thread = LoopThread("gateway")
        self._programs = ProgramRunner(settings.command, settings.memory_mb) if settings.command else None
        try:
            self.thread.run(self.server.start(settings.host, settings.port))
        except OSError as error:
            raise UserError(
                f"--env.gateway: cannot listen on {settings.host}, port {settings.port}: {error}"
            ) from None
        self.line = gateway_line(self.server.address, settings)

    def dialogue(self, prompts: Sequence[Prompt], key: jax.Array) -> ProgramDialogue:
        """Return the programs of responses to these prompts."""
        return ProgramDialogue(self, prompts)

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the row of data that a program reads."""
        example = prompt.example
        return {**example.columns, "answer": example.answer, **prompt_row(example, self.chat)}

    async def open(self, row: dict[str, Any]) -> AgentSession:
        """Return a new trajectory once a program may run, and start its program."""
        await self._slots.acquire()
        session = AgentSession(row, self._renderer, self._limits)
        self.server.add(session)
        if self._programs:
            self._tasks[session.id] = asyncio.create_task(self._run(session))
        else:
            self._waiting.append(session)
        return session

    def close_session(self, session: AgentSession) -> None:
        """Kill the program of a trajectory that has ended, and forget it."""
        self.server.remove(session)
        if session in self._waiting:
            self._waiting.remove(session)
        if task := self._tasks.pop(session.id, None):
            task.cancel()
        self._slots.release()

    def _claim(self) -> AgentSession | None:
        """Give a trajectory to a program elsewhere."""
        if not self._waiting:
            return None
        session = self._waiting.pop(0)
        self._tasks[session.id] = asyncio.create_task(self._expire(session))
        return session

    async def _expire(self, session: AgentSession) -> None:
        await asyncio.sleep(self.config.gateway.seconds)
        session.end(End(failure=self._too_long()))

    def _too_long(self) -> str:
        return f"the program took longer than {self.config.gateway.seconds:g} s (--env.gateway.seconds)"

    async def _run(self, session: AgentSession) -> None:
        """Run the program of a trajectory, and end the trajectory with it."""
        base = f"{self.server.address}/t/{session.id}"
        variables = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{base}/v1")
        variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), session.key)
        variables |= {"ANTHROPIC_BASE_URL": base, "GATEWAY_URL": base}
        try:
            async with asyncio.timeout(self.config.gateway.seconds):
                finished = await self._programs.run(session.row, variables)
            end = await self._judge(session, finished)
        except TimeoutError:
            end = End(failure=self._too_long())
        except OSError as error:
            end = End(failure=f"the program cannot be started: {error}")
        session.end(end)

    async def _judge(self, session: AgentSession, finished: Finished) -> End:
        """Return the end of a trajectory whose program has ended; a reward that was posted comes first."""
        code, how = finished.code, self.config.gateway.reward
        shown = f": {finished.output[-300:]}" if finished.output else ""
        if not session.episode.turns:
            return End(failure=f"the program ended without a call, with code {code}{shown}")
        if session.reward is not None:
            return End()
        if callable(self._reward):
            return await self._reward_of(session, finished)
        if how == "exit" and code in (0, 1):
            return End(reward=float(code == 0))
        if code:
            return End(failure=f"the program ended with code {code}{shown}")
        return End()

    async def _reward_of(self, session: AgentSession, finished: Finished) -> End:
        """Return the reward of the user's function, which has as long as a program."""
        messages = list(session.episode.messages)
        call = asyncio.create_task(call_user(self._reward, session.row, messages, finished.code))
        if not (await asyncio.wait({call}, timeout=self.config.gateway.seconds))[0]:
            call.cancel()
            limit = f"{self.config.gateway.seconds:g} s (--env.gateway.seconds)"
            return End(failure=f"--{REWARD_KEY} took longer than {limit}")
        try:
            value = call.result()
            if not isinstance(value, bool) and not is_reward(value):
                raise ValueError(f"the reward is {value!r:.80}, not a number within +-{MAX_REWARD:g}")
        except Exception as error:
            return End(failure=f"--{REWARD_KEY}: {describe_error(error)}")
        return End(reward=float(value))

    def __exit__(self, *_: object) -> None:
        """End the programs, then the server."""

        async def stop() -> None:
            await self.server.stop()
            await self.thread.loop.shutdown_default_executor()  # else its threads may outlive the gateway

        if not self.thread:
            return
        if self._programs:
            self._programs.close()
        self.thread.close(KILL_SECONDS, stop)


def gateway_line(address: str, settings: GatewayConfig) -> str:
    """Return the line of the start of a run, with a warning if others can connect."""
    does = f"a trajectory is a run of {settings.command!r}" if settings.command else "programs connect to it"
    line = f"gateway at {address}: {does}"
    if is_loopback(settings.host):
        return line
    return (
        f"{line}\nWARNING: --env.gateway.host {settings.host} is open to the network: whoever reaches the "
        "port and has a key can talk to the policy, and nothing is encrypted (docs/agents.md)"
    )


def load_trajectory_reward(name: str) -> Callable[[dict, list, int], float] | None:
    """Return the function of "file.py:function"; None for the other ways of rewarding.

    Raises:
        UserError: there is no such function of three arguments.
    """
    path, attribute = split_name(name)
    if not attribute:
        return None
    function = get_attribute(import_user_file(path, REWARD_KEY), attribute, REWARD_KEY)
    try:
        inspect.signature(function).bind({}, [], 0)
    except TypeError as error:
        raise UserError(
            f"--{REWARD_KEY} {name}: it is called as {attribute}(row, messages, exit_code): {error}"
        ) from None
    return function
