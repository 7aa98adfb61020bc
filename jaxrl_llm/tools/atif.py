"""Samples of runs as trajectories in the Agent Trajectory Interchange Format (ATIF v1.8).

A conversation is the document's steps. A branch of it, or a conversation that a program began beside it, is
in `subagent_trajectories`; the answer to the turn that it follows refers to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.report import jsonl
from jaxrl_llm.thoughts import split_thought
from jaxrl_llm.tools.conversation import Message, SampleTurn, Span, as_text, sample_turns

VERSION = "ATIF-v1.8"
Document = dict[str, Any]


@dataclass(frozen=True)
class AtifSource:
    """Names that all documents of a run have."""

    run: str
    version: str  # of jaxrl_llm
    model: str


@dataclass
class TokenData:
    """Ids and numbers of a sample's tokens; empty for a sample without them."""

    ids: list[int] = field(default_factory=list)  # of prompt and response
    prompt: int = 0  # tokens of the prompt
    columns: dict[str, Any] = field(default_factory=dict)  # `per_token`

    def ids_of(self, spans: list[Span]) -> list[int] | None:
        """Return the ids of spans; None if some are not in the row."""
        known = all(end <= len(self.ids) for _, end in spans)
        return [i for start, end in spans for i in self.ids[start:end]] if known and self.ids else None

    def numbers(self, name: str, span: Span) -> list[float] | None:
        """Return the numbers of tokens; None if some are not in the row."""
        start, end = span[0] - self.prompt, span[1] - self.prompt
        column = self.columns.get(name)
        column = column if isinstance(column, list) else [column] * len(self.columns.get("text", ()))
        part = column[start:end] if start >= 0 else []
        return part if len(part) == end - start and all(isinstance(x, int | float) for x in part) else None


def atif_document(row: jsonl.Row, index: int, source: AtifSource) -> Document:
    """Return a row of samples.jsonl as an ATIF trajectory.

    Args:
        index: number of the row in the file.
    """
    turns = sample_turns(row)
    tools = turns[0].tools or row.get("tools")
    document = DocumentWriter(turns, read_tokens(row), source).document(
        turns[0], f"{source.run}/{row['step']}/{index}"
    )
    document["agent"] |= {"tool_definitions": tools} if tools else {}
    result = {key: row.get(key) for key in ("reward", "outcome", "score", "finish", "failure")}
    document["final_metrics"]["extra"] = {key: x for key, x in result.items() if x is not None}
    document["extra"] = {"training_step": row["step"], "split": "eval" if row.get("eval") else "train"}
    return document


def read_tokens(row: jsonl.Row) -> TokenData:
    """Return ids and numbers of a row's tokens; none if they cannot be used."""
    ids = row.get("token_ids") if isinstance(row.get("token_ids"), dict) else {}
    parts = [ids.get("prompt"), ids.get("response")]
    if not all(isinstance(part, list) and all(type(i) is int for i in part) for part in parts):
        return TokenData()
    columns = row.get("per_token")
    return TokenData([*parts[0], *parts[1]], len(parts[0]), columns if isinstance(columns, dict) else {})


@dataclass
class DocumentWriter:
    """Makes the documents of one sample."""

    turns: list[SampleTurn]
    tokens: TokenData
    source: AtifSource

    def document(self, first: SampleTurn, name: str) -> Document:
        """Return the trajectory of a conversation, or of a branch from its first own turn on."""
        # Steps that a branch shares with its conversation are copies.
        steps, others, shared = list[Document](), list[Document](), []
        turn = first
        while turn.after >= 0:
            turn = self.turns[turn.after]
            shared.insert(0, turn)
        for turn in shared:  # the answers to the last one are those of the branch
            self._add(steps, turn, copied=True, answered=turn is not shared[-1])
        own = len(steps)
        # Its own, and what branches off from them.
        turn = first
        while turn is not None:
            step = self._add(steps, turn)
            for branch in (t for t in self.turns if t.under == turn.number):
                others.append(self.document(branch, f"{name}/{branch.number}"))
                reference = {"subagent_trajectory_ref": [{"trajectory_id": others[-1]["trajectory_id"]}]}
                _add_result(step, reference)
            turn = next((t for t in self.turns if t.after == turn.number and t.under is None), None)
        for number, step in enumerate(steps, 1):
            step["step_id"] = number
        # The document.
        metrics = [step["metrics"] for step in steps[own:] if "metrics" in step]
        totals = {
            f"total_{kind}": sum(m[kind] for m in metrics) for kind in ("prompt_tokens", "completion_tokens")
        }
        agent = {"name": "jaxrl_llm", "version": self.source.version, "model_name": self.source.model}
        return {
            "schema_version": VERSION,
            "session_id": self.source.run,
            "trajectory_id": name,
            "agent": agent,
            "steps": steps,
            "final_metrics": (totals if metrics else {}) | {"total_steps": len(steps)},
            **({"subagent_trajectories": others} if others else {}),
        }

    def _add(
        self, steps: list[Document], turn: SampleTurn, *, copied: bool = False, answered: bool = True
    ) -> Document:
        """Add the messages read since the turn before, and the turn; return the turn's step."""
        mark = {"is_copied_context": True} if copied else {}
        for message in turn.inputs:
            _add_input(steps, message, mark)
        step = _agent_step(turn, answered) | mark
        if metrics := self._metrics(turn):
            step["metrics"] = metrics
        steps.append(step)
        return step

    def _metrics(self, turn: SampleTurn) -> Document:
        """Return counts, ids, log-probs and training of a turn's tokens, where the sample has them."""
        if turn.tokens is None:
            return {}
        counts = {"prompt_tokens": sum(end - start for start, end in turn.read)}
        counts["completion_tokens"] = turn.tokens[1] - turn.tokens[0]
        known = {
            "prompt_token_ids": self.tokens.ids_of(turn.read),
            "completion_token_ids": self.tokens.ids_of([turn.tokens]),
            "logprobs": self.tokens.numbers("rollout_logprobs", turn.tokens),
        }
        extra = {"trained_tokens": turn.trained, "advantages": self.tokens.numbers("advantages", turn.tokens)}
        extra = {key: value for key, value in extra.items() if value is not None}
        known = {key: value for key, value in known.items() if value is not None}
        return counts | known | ({"extra": extra} if extra else {})


def _add_input(steps: list[Document], message: Message, mark: Document) -> None:
    """Add a message that the policy read: an answer to the step before, or a step."""
    role, content = as_text(message.get("role", "user")), as_text(message.get("content") or "")
    if role == "tool" and steps and steps[-1]["source"] == "agent":
        calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
        name = message.get("tool_call_id")
        result = {"source_call_id": name} if name in calls else {}
        _add_result(steps[-1], result | {"content": content})
        return
    source = {"system": "system", "developer": "system", "assistant": "agent"}.get(role, "user")
    step = {"step_id": 0, "source": source, "message": content} | mark
    if source == "agent":  # of a prompt: no turn of this trajectory
        step["is_copied_context"] = True
    if role not in ("system", "user", "assistant", "prompt"):
        step["extra"] = {"role": role}
    steps.append(step)


def _add_result(step: Document, result: Document) -> None:
    step.setdefault("observation", {"results": []})["results"].append(result)


def _agent_step(turn: SampleTurn, answered: bool) -> Document:
    """Return a turn as a step, with its tool calls and, if `answered`, their answers."""
    thought, message = split_thought(as_text((turn.text or {}).get("content") or ""))
    step = {"step_id": 0, "source": "agent", "message": message, "llm_call_count": 1}
    step |= {"reasoning_content": thought} if thought else {}
    extra = {"reward": turn.reward, "history_rewritten": turn.rewritten or None}
    for number, call in enumerate(turn.calls):
        answer, result = call.get("answer") if answered else None, {}
        shown = {key: value for key, value in call.items() if key != "answer"}
        if call.get("name"):
            name, arguments = as_text(call.get("id") or f"call_{turn.number}_{number}"), call.get("arguments")
            arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
            shown = {"tool_call_id": name, "function_name": as_text(call["name"]), "arguments": arguments}
            step.setdefault("tool_calls", []).append(shown)
            result = {"source_call_id": name}
        else:
            extra.setdefault("invalid_calls", []).append(shown)
        if answer:
            _add_result(step, result | {"content": as_text(answer.get("content") or "")})
    extra = {key: value for key, value in extra.items() if value is not None}
    return step | ({"extra": extra} if extra else {})
