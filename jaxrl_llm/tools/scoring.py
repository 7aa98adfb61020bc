"""Log-probs and rewards of given responses, as `score` writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.chat import encode_conversation, encode_prompt
from jaxrl_llm.data.config import ChatConfig, SourceConfig
from jaxrl_llm.data.files import open_rows
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.data.preference import read_example, split_response
from jaxrl_llm.data.rows import RESPONSE_KEYS, Example, RowError, check_row, check_text, first_column
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.command import working
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.host.processes import show_warnings
from jaxrl_llm.learn.scoring import BucketedScorer, bucketed_step
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.kernels import check_kernels_setting, prefix_sharing
from jaxrl_llm.rollout.engine import text_of
from jaxrl_llm.sharding.placement import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.config import ScoreArguments
from jaxrl_llm.tools.models import StoredModel, open_model, pick_dtype
from jaxrl_llm.tools.output import ProgressBar, ResumableOutput, json_line, settings_of, with_date
from jaxrl_llm.tools.response_rewards import ResponseRewarder, encode_response
from jaxrl_llm.tools.selection import (
    RewardedResponse,
    RewardSummary,
    plain_json,
    reward_columns,
    selected_rows,
)

NO_SOURCE = SourceConfig()
NOTHING_TO_REWARD = (
    'nothing to reward: a row needs "responses", "response", "chosen" and "rejected", or a chat that ends '
    "with an assistant turn"
)


def write_scores(args: ScoreArguments) -> None:
    """Write the log-probs of a model, if one is given, else rewards; continue the file of a killed command.

    Raises:
        UserError: a model, file or row that cannot be used, with the fix.
    """
    show_warnings()
    check_kernels_setting()
    rows = RawRows(args.data)
    with contextlib.ExitStack() as closing:
        open_devices()
        if args.model:
            model = open_model(args.model, args)
            args = replace(args, step=model.step)
        settings, args = settings_of(args, args.data), with_date(args)
        output = ResumableOutput(args.out, settings, args.resume, args.chat.date)
        score = logprob_scores(args, model, rows) if args.model else reward_scores(args, rows, closing)
        closing.enter_context(output)
        bar = ProgressBar(len(rows), "rows", output.rows_done)
        for start in range(output.rows_done, len(rows), args.window):
            numbers = range(start, min(start + args.window, len(rows)))
            lines, note = score(numbers)
            output.append(lines, numbers.stop)
            bar.update(numbers.stop, note)
        output.finish()


class RawRows:
    """Unchanged rows of a file or dataset, by number.

    Raises:
        UserError: no rows, or a part of a file cannot be read.
    """

    def __init__(self, path: Path):
        self.file = open_rows(SourceConfig(path=str(path)))
        if self.file.damage:
            raise UserError(self.file.damage[0].reason)
        if not len(self):
            raise UserError(f"{path} has no rows")

    def __len__(self) -> int:
        return self.file.size

    def __getitem__(self, number: int) -> tuple[dict[str, Any], str]:
        """Return (row, its place)."""
        row, where = self.file.get(number), self.file.where(number)
        check_row(row, where)
        return row, where


Scores = Callable[[range], tuple[list[str], str]]
"""(numbers of rows) -> (lines of the output, note for the progress)."""


def logprob_scores(args: ScoreArguments, model: StoredModel, rows: RawRows) -> Scores:
    """Return the function that computes log-probs; all rows are read before the weights are loaded."""
    mesh, config, tokenizer = make_mesh(args.mesh), model.config, None
    for row, where in (rows[i] for i in range(len(rows))):
        if "tokens" in row:
            check_tokens(row["tokens"], where, config)
        else:
            read_sequences(row, where)
            tokenizer = tokenizer or model.read_tokenizer()
    if config.rope.scaling == "longrope":  # the longest row chooses its frequencies
        groups = (encode_row(tokenizer, config, *rows[i], chat=args.chat)[1] for i in range(len(rows)))
        model = model.for_length(max(len(sequence["tokens"]) for group in groups for sequence in group))
    # Weights, and the function of their forward pass.
    dtype = pick_dtype(args.dtype)
    with working("loading the model"):
        params = model.load(mesh, TRAIN, dtype)
    shares = prefix_sharing(config, dtype, mesh)
    step = bucketed_step(dtype, temperature=args.temperature, share_prefixes=shares)
    scorer = BucketedScorer(step, mesh, args.batch_tokens)

    def score(numbers: range) -> tuple[list[str], str]:
        window = [encode_row(tokenizer, config, *rows[number], chat=args.chat) for number in numbers]
        with working(f"scoring {len(window)} rows"):
            results = logprobs_of(scorer, params, [one_prompt(group) for _, group in window])
        lines = []
        for (kind, group), found in zip(window, results, strict=True):
            scored = [s | {"logprobs": x.tolist()} for s, x in zip(group, found, strict=True)]
            lines.append(json_line(by_kind(kind, scored), args.model))
        return lines, ""

    return score


def one_prompt(group: list[dict[str, Any]]) -> Sequences:
    """Return the sequences of a row, and the number of prompt tokens if all share the prompt."""
    shared = group[0].get("prompt_tokens", 0)
    prompts = [sequence["tokens"][: sequence.get("prompt_tokens", 0)] for sequence in group]
    return Sequences([s["tokens"] for s in group], shared if all(p == prompts[0] for p in prompts) else 0)


def encode_row(
    tokenizer: Any, config: TransformerConfig, row: dict[str, Any], where: str, *, chat: ChatConfig
) -> tuple[str, list[dict[str, Any]]]:
    """Return (kind as of `GivenResponses`, sequences) of a row of `score --model`.

    A sequence is {"tokens": ids}, of a response with "prompt_tokens", how many of them are the prompt's.

    Raises:
        UserError: a row without a sequence, or one that the model cannot read; names file and line.
    """
    kind = "response"
    if "tokens" in row:
        sequences = [{"tokens": row["tokens"]}]
    elif isinstance(given := read_sequences(row, where), Example):
        sequences = [{"tokens": encode_conversation(tokenizer, given, chat).tolist()}]
    else:
        kind = given.kind
        each = zip(given.texts, given.tokens, strict=True)
        parts = [encode_given(tokenizer, given.example, *one, chat=chat) for one in each]
        sequences = [{"tokens": [*p.tolist(), *r.tolist()], "prompt_tokens": len(p)} for p, r in parts]
    for sequence in sequences:
        check_tokens(sequence["tokens"], where, config)
    return kind, sequences


def encode_given(
    tokenizer: Any, example: Example, text: str, tokens: Any, *, chat: ChatConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return (prompt ids, response ids), the sampled ones if the tokenizer reads the text in them.

    The text alone has other ids if the response was cut off, or sampled in other pieces.
    """
    known = has_ids(tokens) and min(tokens) >= 0 and max(tokens) < len(tokenizer)
    if known and text_of(tokenizer, tokens, getattr(tokenizer, "end_ids", ())) == text:
        return encode_prompt(tokenizer, example, chat), np.asarray(tokens, np.int32)
    return encode_response(tokenizer, example, text, chat)


def by_kind(kind: str, sequences: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sequences of a row as a row of the output."""
    if kind == "pair":
        return dict(zip(("chosen", "rejected"), sequences, strict=True))
    return {"responses": sequences} if kind == "responses" else sequences[0]


def read_sequences(row: dict[str, Any], where: str) -> GivenResponses | Example:
    """Return the responses of a row with their prompt; a chat without a response as an example.

    Raises:
        RowError: the row has neither; the message names file and line.
    """
    responds = {"responses", "chosen"} & row.keys() or first_column(row, RESPONSE_KEYS) is not None
    if "messages" in row and not responds:
        return read_example(row, where, NO_SOURCE)
    try:
        return read_responses(row, where)
    except RowError as error:
        reason = str(error).removeprefix(f"{where}: ")
        raise RowError(
            f'{where}: a row needs "tokens" (ids), "messages" (a chat), or a prompt with responses: {reason}'
        ) from error


class GivenResponses(NamedTuple):
    """Responses of a row of the data."""

    example: Example  # their prompt
    texts: list[str]
    tokens: list[Any]  # of each text, as `generate` wrote them, unchecked; None = not given
    kind: str  # "responses", "pair" or "response"


def reward_scores(args: ScoreArguments, rows: RawRows, closing: contextlib.ExitStack) -> Scores:
    """Return the function that rewards responses; all rows are checked before models are loaded."""
    rewarder = ResponseRewarder(
        args.reward, args.mesh, pick_dtype(args.dtype), args.batch_tokens, chat=args.chat, closing=closing
    )
    rewarder.open(read_responses(*rows[i]).example for i in range(len(rows)))
    summary = RewardSummary()

    def score(numbers: range) -> tuple[list[str], str]:
        window = [read_responses(*rows[number]) for number in numbers]
        each = [given.example for given in window for _ in given.texts]
        rewarded = iter(rewarder.score_texts(each, [text for given in window for text in given.texts]))
        groups = [[next(rewarded) for _ in given.texts] for given in window]
        lines = []
        for number, given, group in zip(numbers, window, groups, strict=True):
            if args.select == "all":
                results = [with_rewards(rows[number][0], given, group)]
            else:
                results = selected_rows(given.example, group, args, args.chat)
            lines += [json_line(row, "a reward model") for row in results]
        return lines, summary.add(groups).removeprefix(", ")

    return score


def read_responses(row: dict[str, Any], where: str) -> GivenResponses:
    """Return the prompt and the responses of a row.

    Raises:
        RowError: it has no prompt or no response; names file and line.
    """
    if isinstance(row.get("responses"), list):
        others = {name: value for name, value in row.items() if name != "responses"}
        texts = [r.get("text") if isinstance(r, dict) else r for r in row["responses"]]
        if not texts:
            raise RowError(f'{where}: "responses" is an empty list; leave the row out, or give it a response')
        for i, text in enumerate(texts):
            check_text(text, f"{where}: responses[{i}]")
        tokens = [r.get("tokens") if isinstance(r, dict) else None for r in row["responses"]]
        return GivenResponses(read_example(others, where, NO_SOURCE), texts, tokens, "responses")
    example = read_example(row, where, NO_SOURCE)
    if example.rejected is not None:
        (prompt, chosen), (_, rejected) = map(_split, (example, example.rejected))
        return GivenResponses(prompt, [chosen, rejected], [None, None], "pair")
    prompt, text = _split(example)
    return GivenResponses(prompt, [text], [None], "response")


def _split(example: Example) -> tuple[Example, str]:
    """Return (the prompt alone, text of the response), which may be empty."""
    if first_column(example.columns, RESPONSE_KEYS) == "":  # the policy stopped at once
        example = replace(example, response="")
    return split_response(example, NOTHING_TO_REWARD)


def with_rewards(
    row: dict[str, Any], given: GivenResponses, group: Sequence[RewardedResponse]
) -> dict[str, Any]:
    """Return the row with the rewards of its responses."""
    columns = [reward_columns(response) for response in group]
    row = {name: plain_json(value) for name, value in row.items()}
    if given.kind == "response":
        return row | columns[0]
    if given.kind == "pair":
        sides = zip(("chosen", "rejected"), columns, strict=True)
        return row | {f"{side}_{name}": value for side, more in sides for name, value in more.items()}
    before = [r if isinstance(r, dict) else {"text": r} for r in row["responses"]]
    return row | {"responses": [old | new for old, new in zip(before, columns, strict=True)]}


def check_tokens(ids: Any, where: str, config: TransformerConfig) -> None:
    """Raise UserError unless `ids` is a sequence of token ids of this model."""
    if not has_ids(ids):
        raise UserError(f'{where}: "tokens" must be a list of at least one integer')
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise UserError(f"{where}: token {outside} is outside the model's vocabulary of {config.vocab_size}")
    if len(ids) > config.max_position:
        raise UserError(
            f"{where}: {len(ids)} tokens exceed the model's {config.max_position} positions; shorten the row"
        )


def has_ids(value: Any) -> bool:
    """Return whether a value is a list of at least one integer."""
    valid = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return valid and bool(value)


class Sequences(NamedTuple):
    """Sequences of token ids that all begin with the same `shared` ones; 0 = read each by itself."""

    tokens: list[list[int]]
    shared: int = 0


def logprobs_of(
    scorer: BucketedScorer, params: Params, groups: Sequence[Sequences]
) -> list[list[np.ndarray]]:
    """Return the log-prob of each token after the first, nats, of each sequence of each group."""
    splits = lambda group: scorer.config.share_prefixes and len(group.tokens) > 1 and group.shared > 1
    groups = [group if splits(group) else group._replace(shared=0) for group in groups]
    items = [_items(group, i) for i, group in enumerate(groups)]
    scores = iter(scorer.start(params, [item for group in items for item in group])())
    found = [[next(scores)["logprobs"][1:] for _ in group] for group in items]
    return [_joined(group, each) for group, each in zip(groups, found, strict=True)]


def _items(group: Sequences, prompt: int) -> list[PackItem]:
    """Return the items to pack: the prompt, if it is shared, and each sequence, its response in the mask."""
    prompts = [group.tokens[0][: group.shared]] if group.shared else []
    starts = [0] * len(prompts) + [group.shared] * len(group.tokens)
    return [
        PackItem(np.array(ids, np.int32), (np.arange(len(ids)) >= start).astype(np.float32), prompt=prompt)
        for ids, start in zip([*prompts, *group.tokens], starts, strict=True)
    ]


def _joined(group: Sequences, scores: list[np.ndarray]) -> list[np.ndarray]:
    """Return the log-probs of whole sequences; scores of the prompt come first, if it is shared."""
    if not group.shared:
        return scores
    prompt, *responses = scores
    return [np.concatenate([prompt, response[group.shared - 1 :]]) for response in responses]
