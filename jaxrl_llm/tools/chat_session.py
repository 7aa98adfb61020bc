"""A conversation in the terminal, as `chat` has it: answers, streamed, and commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.rows import Example, Message
from jaxrl_llm.data.template import set_template
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.command import working
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.host.processes import show_warnings
from jaxrl_llm.host.signals import interrupts_call
from jaxrl_llm.host.start import open_compilation_cache
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.keys import type_hints, type_words
from jaxrl_llm.recipe.values import parse_value
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import PartialResponse, Request, text_of
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.partial import new_responses
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.placement import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.thoughts import as_message, readable
from jaxrl_llm.tools.config import ChatArguments
from jaxrl_llm.tools.models import StoredModel, open_model, pick_dtype
from jaxrl_llm.tools.output import print_progress
from jaxrl_llm.user_file import did_you_mean, expand_home

BLOCK = '"""'
"""Begins and ends a message of several lines."""
HELP = """/reset            begin a new conversation; the system prompt stays
/undo             remove the last question and its answer
/regen            another answer to the last question
/system TEXT      set the system prompt; without TEXT remove it
/history          print the conversation
/save FILE        append the conversation to a JSONL file, as a row that training reads
/NAME VALUE       temperature, top_k, top_p, min_p, max_tokens or seed; without VALUE show it
/exit, Ctrl-D     end
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; \"\"\" begins and ends a message of
several lines; // begins a message with a slash."""
PATIENCE = 8.0  # seconds within an answer before a line says that the next tokens are computed
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
TOKENS_A_CALL = 4
"""Tokens decoded per device call, after which they are shown."""
INCOMPLETE = "\ufffd"
"""Decoded in place of a character of which some bytes are not generated yet."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, which could change the terminal -> printed text."""


def open_session(args: ChatArguments) -> Session:
    """Load the model and return a session on the terminal, or on the lines of a pipe.

    Raises:
        UserError: a model or setting that cannot be used, with the fix.
    """
    show_warnings()
    check_kernels_setting()
    open_compilation_cache()
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    mesh, dtype = chat_mesh(args.mesh), pick_dtype(args.dtype)
    with working(f"loading {args.model}"):
        model = open_model(args.model, args)
        tokenizer = model.read_tokenizer()
        set_template(tokenizer, args.chat)
        longest = min(args.context, model.config.max_position)
        model = model.for_length(longest)
        args = dataclasses.replace(args, context=longest, max_tokens=min(args.max_tokens, longest - 1))
        engine = conversation_engine(
            model, tokenizer, mesh=mesh, dtype=dtype, context=args.context, max_tokens=args.max_tokens
        )
    return Session(args, tokenizer, engine, terminal_lines())


class AnswerStoppedError(Exception):
    """Ctrl-C during an answer."""


class CommandError(Exception):
    """A command that cannot be done; the message is printed."""


class Session:
    """A conversation and its settings.

    Args:
        lines: messages and commands.
    """

    def __init__(self, args: ChatArguments, tokenizer: Any, engine: NativeEngine, lines: Iterator[str]):
        self.args, self.tokenizer, self.engine, self.lines = args, tokenizer, engine, lines
        self.system, self.messages, self.answers = args.chat.system_prompt, [], 0
        self.is_plain = args.chat.render == "plain" or not tokenizer.chat_template
        self.at_prompt = self.stopped = False

    def run(self) -> None:
        """Answer messages and do commands until the input ends."""
        if self.is_plain:
            print_progress("no chat template: the model continues the text (plain)")
        with interrupts_call(self.interrupt):
            while True:
                try:
                    self.at_prompt, self.stopped = True, False
                    line = next(self.lines, None)
                    self.at_prompt = False
                except KeyboardInterrupt:  # a generator that raised has ended
                    print()
                    self.lines = terminal_lines()
                    continue
                if line is None or line.strip() in ("/exit", "/quit"):
                    return
                try:
                    self.handle(line)
                except (CommandError, UserError) as error:
                    print_progress(f"error: {error}")

    def interrupt(self) -> None:
        """Stop the answer, or leave the line that is being typed; commands are finished."""
        self.stopped = True
        if self.at_prompt:
            self.at_prompt = False  # no second exception while the first one is handled
            raise KeyboardInterrupt

    def handle(self, line: str) -> None:
        """Do a command, or answer a message.

        Raises:
            CommandError, UserError: it cannot be done; the conversation is as before.
        """
        if line.startswith("/") and not line.startswith("//"):
            name, _, value = line[1:].strip().partition(" ")
            self.command(name, value.strip())
        elif line.strip():
            content = line[1:] if line.startswith("//") else line
            self.messages.append({"role": "user", "content": content})
            try:
                self.answer()
            except UserError:
                self.messages.pop()
                raise

    def command(self, name: str, value: str) -> None:
        """Do a command.

        Raises:
            CommandError: it is unknown or cannot be done.
        """
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print_progress(HELP),
            "reset": lambda _: self.messages.clear(),
            "undo": lambda _: self.undo(),
            "regen": lambda _: self.regenerate(),
            "system": self.set_system,
            "history": lambda _: self.print_history(),
            "save": self.save,
        }
        if name in NUMBERS:
            self.set_number(name, value)
        elif name in commands:
            commands[name](value)
        else:
            hint = did_you_mean(name, [*commands, *NUMBERS, "exit"])
            raise CommandError(
                f"/{name}: unknown command.{hint} /help lists them; // begins a message with /"
            )

    def undo(self) -> None:
        """Remove the last question and its answer."""
        if not self.messages:
            raise CommandError("/undo: the conversation is empty")
        del self.messages[-2:]

    def regenerate(self) -> None:
        """Replace the last answer."""
        if not self.messages:
            raise CommandError("/regen: no question to answer yet")
        before = self.messages.pop()
        try:
            self.answer()
        except UserError:
            self.messages.append(before)
            raise

    def set_system(self, text: str) -> None:
        """Set the system prompt of this and later conversations."""
        self.system = text

    def set_number(self, name: str, value: str) -> None:
        """Set or show a setting of sampling."""
        if value:
            try:
                number = parse_value(type_hints(ChatArguments)[name], [value])
            except ValueError:
                expected = type_words(type_hints(ChatArguments)[name])
                raise CommandError(f"/{name}: expected {expected}, got {value!r}") from None
            args = dataclasses.replace(self.args, **{name: number})
            if wrong := [f"/{key} {problem}" for key, problem in problems(args)]:
                raise CommandError("; ".join(wrong))
            self.args = args
        print_progress(f"{name} {getattr(self.args, name)}")

    def print_history(self) -> None:
        """Print the conversation."""
        for message in self.conversation():
            print(f"{message['role']}: {message['content'].translate(CONTROLS)}")

    def save(self, name: str) -> None:
        """Append the conversation to a file as a row."""
        if not name or not self.messages:
            raise CommandError("/save FILE: " + ("name a file" if self.messages else "nothing to save yet"))
        row = {"text": self.text()} if self.is_plain else {"messages": self.conversation()}
        try:
            with expand_home(name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CommandError(f"/save {name}: {error.strerror}") from None
        print_progress(f"saved to {name}")

    def conversation(self) -> list[Message]:
        """Return the messages, the system prompt first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def text(self) -> str:
        """Return the conversation without a template; messages of the user begin lines."""
        parts = [f"{self.system}\n\n"] if self.system else []
        for i, message in enumerate(self.messages):
            parts.append("\n" * (i > 0 and message["role"] == "user") + message["content"])
        return "".join(parts)

    def prompt_ids(self) -> Any:
        """Return the token ids of the conversation up to the answer, int32 [.].

        Raises:
            UserError: the template refuses the conversation, or the context has no token left for an answer.
        """
        if self.is_plain:
            example = Example(None, self.text(), where="the conversation")
            config = dataclasses.replace(self.args.chat, render="plain", system_prompt="")
        else:
            example = Example(tuple(self.conversation()), None, where="the conversation")
            config = dataclasses.replace(self.args.chat, render="chat", system_prompt="")
        ids = encode_prompt(self.tokenizer, example, config)
        if len(ids) >= self.args.context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, the context {self.args.context}: /undo or /reset"
            )
        return ids

    def answer(self) -> None:
        """Generate the answer to the conversation and stream it; Ctrl-C keeps the partial answer.

        Raises:
            UserError: as `prompt_ids`.
        """
        ids = self.prompt_ids()
        tokens = min(self.args.max_tokens, self.args.context - len(ids))
        request = Request(ids, self.answers, 1, tokens)
        (response,) = new_responses([request], jax.random.key(self.args.seed))
        self.answers += 1
        stream = TextStream(self.tokenizer, self.write, self.engine.eos_ids)
        with contextlib.ExitStack() as waiting:
            try:
                self.engine.finish(
                    [response],
                    *self.engine.published,
                    self.args,
                    dialogue=None,
                    before_chunk=lambda: self.before_chunk(stream, response, waiting),
                )
            except AnswerStoppedError:
                response.finish = "stopped"
        stream.update(response.ids, final=True)
        self.write("\n")
        self.messages.append(as_message(text_of(self.tokenizer, response.ids, self.engine.eos_ids)))
        notes = {"length": f"[cut off after {tokens} tokens]", "stopped": "[stopped]"}
        if note := notes.get(response.finish):
            print_progress(note)

    def before_chunk(
        self, stream: TextStream, response: PartialResponse, waiting: contextlib.ExitStack
    ) -> None:
        """Write the tokens of the last chunk, and begin to wait for the next.

        Raises:
            AnswerStoppedError: Ctrl-C.
        """
        waiting.close()
        stream.update(response.ids)
        first = PATIENCE if len(response.ids) > 1 else None  # no such lines within a text
        waiting.enter_context(working("waiting for tokens; new programs are compiled once", first=first))
        if self.stopped:
            raise AnswerStoppedError

    def write(self, text: str) -> None:
        """Write a part of an answer at once."""
        sys.stdout.write(text)
        sys.stdout.flush()


def terminal_lines() -> Iterator[str]:
    """Yield messages and commands: typed at a prompt with line editing and history, or lines of a pipe."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() its line editing and history
    read = (lambda prompt: input(prompt)) if interactive else _read_line
    with contextlib.suppress(EOFError):
        while True:
            yield _whole_message(read)


def _read_line(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _whole_message(read: Callable[[str], str]) -> str:
    """Return the next message; joins lines that are marked as continued."""
    line = read("> ")
    if line.strip().startswith(BLOCK):
        lines = [line.strip().removeprefix(BLOCK)]
        while BLOCK not in lines[-1]:
            lines.append(read("  "))
        lines[-1] = lines[-1].partition(BLOCK)[0]
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{read('  ')}"
    return line


def chat_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh over as many devices as its sizes need; over all devices if a size is -1."""
    sizes = config.sizes.values()
    devices = open_devices()
    return make_mesh(config, devices if -1 in sizes else devices[: math.prod(sizes)])


def conversation_engine(
    model: StoredModel, tokenizer: Any, *, mesh: Mesh, dtype: str, context: int, max_tokens: int
) -> NativeEngine:
    """Return an engine for one answer at a time, with the shapes of the longest conversation.

    So it has few programs, one per rung of each ladder, and a turn compiles at most the next rung.
    """
    rollout = RolloutConfig(slots=1, chunk=TOKENS_A_CALL, dtype=dtype)
    engine = NativeEngine(rollout, model.config, mesh, tokenizer, eos_ids=model.end_ids)
    engine.set_lengths(context, max_tokens, turns=True)
    engine.publish(model.load(mesh, TRAIN, dtype), version=0)
    return engine


class TextStream:
    """Text of tokens as they come, written once it cannot change: whole characters of UTF-8."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], end_ids: Sequence[int] = ()):
        self.tokenizer, self.write, self.end_ids, self.shown = tokenizer, write, end_ids, ""

    def update(self, ids: Sequence[int], final: bool = False) -> None:
        """Write the new part of the text of all tokens so far; `final` = no more tokens will come."""
        text = readable(text_of(self.tokenizer, ids, self.end_ids))
        text = text if final else text.rstrip(INCOMPLETE)
        if text.startswith(self.shown):
            self.write(text[len(self.shown) :].translate(CONTROLS))
            self.shown = text
