"""Tables of other systems' keys, and the conversion of a file's settings by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_import.effects import changes_result
from jaxrl_import.values import (
    LEFT_OUT,
    NotHereError,
    Setting,
    SourceSettings,
    convert_value,
    is_secret,
    keeps_unknown,
    leaves,
    printable,
    same,
    unknown_names,
    yaml_value,
)
from jaxrl_llm.addresses import MASKED
from jaxrl_llm.errors import UserError

DEFAULT = "default"
NO_CLIP = "rewards are not clipped: clip them in a function, --reward.name FILE.py:FUNCTION"
OTHER_MUON = "an update of Muon is as large as AdamW's, with Nesterov's momentum: set --optim.learning_rate"
SCHEDULES = {
    "cosine_with_min_lr": ("cosine", 0.1),
    "cosine": ("cosine", 0.0),
    "linear": ("linear", 0.0),
    "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0),
}
"""Schedule of the other systems -> the schedule here, the last learning rate over the first."""
UNREAD = "the other settings leave it without effect"


@dataclass(frozen=True)
class Field:
    """Counterpart of a key of another system."""

    ours: str = ""
    """Key of the same meaning; "" = several keys follow from it, by the system's rules."""
    convert: Callable[[Any], Any] = same
    """Reads the value; raises ValueError with the expected form."""
    hint: str = ""
    """Keys that follow from it, where `ours` is empty."""


@dataclass(frozen=True)
class System:
    """Keys, defaults and rules of another system."""

    name: str
    title: str
    tables: Mapping[str, Mapping[str, Field]]
    """Trainer -> key -> its counterpart."""
    defaults: Mapping[str, Mapping[str, Any]]
    """Trainer -> key -> the system's default, if it matters."""
    rules: Mapping[str, Callable[[Conversion], None]]
    """Trainer -> rules for several keys together."""
    aliases: Mapping[str, str]
    """Older spelling of a key -> the present one; "a|b" if it depends on the trainer."""


class Result(NamedTuple):
    """A key here."""

    value: Any
    origin: str
    """Keys and values that it comes from."""
    stated: bool
    """Written even where the value is the default."""


class Assumptions(NamedTuple):
    """Facts that a file does not state, from the command line."""

    devices: int | None
    engine: str
    """native or sglang."""
    define: Mapping[str, str]
    """Values of keys, in the place of the file's; "" leaves a key out."""


class Conversion:
    """Settings of another system on their way to keys here.

    Attributes: algo: name of the algorithm. results: key here -> value and origin. lost: key of the system
        that changes the result and is not carried over -> the replacement. unused: key of the system that
        changes no result -> why it has no counterpart. notes: sentences to read before a run.
    """

    def __init__(self, system: System, source: SourceSettings, assumed: Assumptions):
        self.system, self.trainer, self.assumed = system, source.trainer, assumed
        self.table, self.defaults = system.tables[source.trainer], system.defaults[source.trainer]
        self.settings = {self._present_name(key): new for key, new in leaves(source.settings, self.table)}
        self._gather_mappings()
        self._define(assumed.define)
        self.devices = assumed.devices or source.devices
        self.algo = ""
        self.results: dict[str, Result] = {}
        self.lost: dict[str, str] = {}
        self.unused: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.notes = list(source.notes)
        self._read: set[str] = set()
        self._defaulted: set[str] = set()
        self._leave_out_unknown()

    def run(self) -> None:
        """Convert everything: the fields of the table, then the system's rules.

        Raises:
            UserError: values cannot be read, or the purpose of the run is not supported.
        """
        for key, field in self.table.items():
            if field.ours and (key in self.settings or key in self.defaults):
                value = self.get(key)
                if value is not None:
                    self.put(field.ours, value, key)
        self.system.rules[self.trainer](self)
        self._share_columns()
        for key, setting in self.settings.items():
            if setting.value is None and key in self._defaulted - self.lost.keys():
                self.lose(
                    key, f"it is unset there; here it is {self.system.title}'s default, {self.get(key)}"
                )
            known = key in self._read or (key in self.table and setting.value is None)
            if not known and key not in self.lost and key not in self.unused:
                self._leave_out(key)
        if self.refused:
            raise NotHereError("\n".join(f"{self._where(key)}: {why}" for key, why in self.refused.items()))

    def _leave_out(self, key: str) -> None:
        """Sort a key without counterpart: it changes the result, or not."""
        if key in self.table:
            self.unused[key] = UNREAD
            return
        lost, reason = changes_result(self.system.name, key, self.settings[key].value)
        (self.lost if lost else self.unused)[key] = reason

    def _where(self, key: str) -> str:
        """Return file, line, key and value, for messages."""
        if self.is_set(key):
            return f"{self.settings[key].where}: {self.origin(key)}"
        files = [setting.where.rpartition(":")[0] for setting in self.settings.values()]
        return f"{files[0]}: {key}" if files else key

    def _share_columns(self) -> None:
        """Give the other sources the columns of the first: in other systems all files share them."""
        columns = [
            key for key in self.results if re.fullmatch(r"data\.train\.0\.(\w+_key|input_template)", key)
        ]
        others = [key for key in self.results if re.fullmatch(r"data\.(eval|train)\.\d+\.path", key)]
        for column in columns:
            for path in others:
                self.results.setdefault(path.replace("path", column.rpartition(".")[2]), self.results[column])

    def is_set(self, key: str) -> bool:
        """Return whether the file sets the key, to something."""
        return key in self.settings and self.settings[key].value is not None

    def get(self, key: str) -> Any:
        """Return the converted value of a key, or the system's default; None = unset.

        Raises:
            UserError: the value cannot be read, or only running the file would tell it.
        """
        convert = self.table[key].convert if key in self.table else same
        if self.is_set(key):
            self._read.add(key)
            if not keeps_unknown(convert) and unknown_names(self.settings[key].value):
                raise self._unknown_error()
            return convert_value(key, self.settings[key], convert)
        default = self.defaults.get(key)
        if default is not None and convert not in LEFT_OUT:
            self._defaulted.add(key)
        return None if default is None else convert(default)

    def first(self, *keys: str) -> tuple[str, Any]:
        """Return the first key that the file sets, or the last, and its value."""
        key = next((key for key in keys if self.is_set(key)), keys[-1])
        return key, self.get(key)

    def origin(self, *keys: str) -> str:
        """Return the keys with their values, as a comment; secrets are masked."""
        return ", ".join(
            f"{key} {MASKED if is_secret(key) else printable(self.settings[key].value)}"
            if self.is_set(key)
            else f"{key} {printable(self.defaults.get(key))} ({self.system.title}'s {DEFAULT})"
            for key in keys
        )

    def put(self, ours: str, value: Any, *keys: str, note: str = "", stated: bool = False) -> None:
        """Set a key here; the comment names the keys that it comes from."""
        origin = self.origin(*(key for key in keys if key in self.settings or key in self.defaults))
        self.results[ours] = Result(value, "; ".join(filter(None, (origin, note))), stated)

    def copy(self, ours: str, key: str, *, note: str = "", stated: bool = False) -> None:
        """Set a key here to the converted value of `key`."""
        if self.get(key) is None:
            self.refused[key] = f"it is not set, and must be. import-config --define {key}=VALUE sets it."
            return
        self.put(ours, self.get(key), key, note=note, stated=stated)

    def copy_set(self, ours: str, key: str) -> None:
        """Copy a key if the file sets it."""
        if self.is_set(key):
            self.copy(ours, key)

    def drop(self, key: str, reason: str) -> None:
        """State that a key that the file sets changes no result here."""
        if self.is_set(key):
            self.unused[key] = reason

    def drop_critic(self, reason: str = "") -> None:
        """Leave out the critic's settings; with a reason, state it of the keys that the file sets."""
        self.results = {key: result for key, result in self.results.items() if not key.startswith("critic.")}
        for key in self.settings if reason else ():
            if key.startswith("critic."):
                self.drop(key, reason)

    def lose(self, key: str, reason: str) -> None:
        """State that a key, set or by default, changes the result there and is not carried over."""
        self.lost[key] = reason

    def refuse(self, key: str, reason: str, instead: str = "") -> None:
        """Refuse the file: the key determines the purpose of the run, and its value is not supported.

        Args:
            instead: a supported value of the key.
        """
        fix = f"import-config --define {key}={instead} takes {instead} instead" if instead else ""
        self.refused[key] = f"{reason}. {fix or f'import-config --define {key}= leaves it out'}."

    def put_steps(self, epochs_key: str, steps_key: str = "") -> None:
        """Set the steps, or the epochs if the file counts epochs."""
        steps, epochs = self.get(steps_key) if steps_key else None, self.get(epochs_key)
        if steps and steps > 0:
            self.put("steps", steps, steps_key, stated=True)
        elif epochs:
            self.put("epochs", float(epochs), epochs_key)

    def put_minibatches(self, total: int, per_update: int, *keys: str, mixed: bool = False) -> int:
        """Set the updates of a step, and return them.

        Args:
            total: trajectories of a step.
            per_update: trajectories of an update.
            mixed: responses to one prompt may be in several of them.
        """
        updates = max(-(-total // max(per_update, 1)), 1)
        fitting = updates
        while total % fitting:
            fitting += 1
        note = f"{total} trajectories a step / {per_update} an update"
        if fitting != updates:
            note += f" are {updates}, the last one smaller; here updates are equal"
        self.put("minibatches_per_step", fitting, *keys, note=note)
        if mixed and fitting > 1:
            self.put("minibatches_of", "responses")
        return fitting

    def put_lengths(self, total: int, *keys: str) -> None:
        """Set both lengths of a row whose prompt and response are limited together."""
        note = f"{total} tokens together"
        self.put("max_prompt_tokens", total // 2, *keys, note=note)
        self.put("max_response_tokens", total - total // 2, *keys, note=note)

    def put_tokens_per_device(self, tokens: int, *keys: str, note: str = "") -> None:
        """Set the micro-batch; at least a row."""
        row = self.row_tokens()
        shards = max(self.value_of("mesh.sequence", 1), 1)
        if tokens * shards < row:
            note, tokens = f"{note}; here at least a row of {row}".strip("; "), -(-row // shards)
        self.put("tokens_per_device", tokens, *keys, note=note)

    def put_rows_per_device(self, rows: int, key: str) -> None:
        """Set the micro-batch of a system that counts it in rows."""
        self.put_tokens_per_device(rows * self.row_tokens(), key, note="x the tokens of a row")

    def row_tokens(self) -> int:
        """Return the tokens of a row: a trajectory, or two where responses are compared."""
        pair = 2 if self.algo in ("dpo", "cpo", "orpo", "simpo", "reward_model", "online_dpo", "kto") else 1
        return pair * (self.value_of("max_prompt_tokens", 512) + self.value_of("max_response_tokens", 1024))

    def put_schedule(self, key: str, prefix: str = "optim", *, without: str = "") -> None:
        """Set the schedule of the learning rate, and its end.

        Args:
            without: one of SCHEDULES that the system lacks.
        """
        name = str(self.get(key))
        known = name in SCHEDULES and name != without
        schedule, final = SCHEDULES[name] if known else ("cosine", 0.0)
        if not known:
            self.lose(key, f"there is no such schedule; {prefix}.schedule is cosine")
        self.put(f"{prefix}.schedule", schedule, key)
        if schedule != "constant":
            self.put(f"{prefix}.final_fraction", final, key)

    def put_sources(self, paths: Iterable[str], key: str, split: str = "train") -> None:
        """Set the training or evaluation sources."""
        for i, path in enumerate(paths):
            self.put(f"data.{split}.{i}.path", path, key)

    def put_weights(self, weights: Iterable[float], *keys: str) -> None:
        """Set the shares of the training sources."""
        for i, weight in enumerate(weights):
            if f"data.train.{i}.path" in self.results:
                self.put(f"data.train.{i}.weight", float(weight), *keys)

    def put_mesh(
        self,
        tensor: tuple[str, int],
        sequence: tuple[str, int],
        ulysses: bool,
        *,
        stage: tuple[str, int] = ("", 1),
    ) -> None:
        """Set tensor, context and pipeline parallelism; each is (its key, size)."""
        for axis, (key, size) in {"tensor": tensor, "sequence": sequence, "stage": stage}.items():
            if size and size > 1:
                self.put(f"mesh.{axis}", size, key)
        if sequence[1] and sequence[1] > 1 and ulysses:
            self.put("mesh.sequence_parallel", "ulysses", sequence[0])

    def put_engine(self, key: str, name: str, tensor: int, memory: float | None, *, stages: int = 1) -> None:
        """Set the rollout engine: the native one, or with --engine sglang servers of so many `stages`."""
        if self.assumed.engine == "native":
            self.notes.append(
                f"{self.origin(key) if key else name}: here responses come from the native engine, in the "
                "trainer's own processes. import-config --engine sglang sets SGLang servers instead"
            )
            return
        self.put("rollout.engine", "sglang", note=f"--engine sglang, in place of {name}")
        self.put("rollout.launch", max((self.devices or 1) // (tensor * stages), 1), note=f"tp {tensor}")
        pipeline = f"--pp-size {stages} " if stages > 1 else ""
        flags = f"--tp {tensor} {pipeline}--mem-fraction-static {memory or 0.5:g}"
        self.put("servers.flags", flags, note="as there")

    def fraction(self, key: str, of: str) -> float:
        """Return the value of one key divided by another's, at most 1; 1 if the other is 0."""
        whole = self.get(of)
        return round(min(self.get(key) / whole, 1.0), 6) if whole else 1.0

    def value_of(self, ours: str, default: Any) -> Any:
        """Return the value of a key here that is set already."""
        return self.results[ours].value if ours in self.results else default

    def _gather_mappings(self) -> None:
        """Join the items of a mapping, a.b and a.c, which is one value of the table, a."""
        for key, setting in list(self.settings.items()):
            whole, _, inner = key.rpartition(".")
            if key not in self.table and whole in self.table and self.table[whole].convert is same:
                del self.settings[key]
                before = self.settings.get(whole)
                items = dict(before.value) if before and isinstance(before.value, Mapping) else {}
                self.settings[whole] = Setting({**items, inner: setting.value}, setting.where)

    def _define(self, values: Mapping[str, str]) -> None:
        """Put values from outside in the place of the file's."""
        for name, text in values.items():
            key = self._present_name(name)
            if key in self.settings or key in self.table:
                self.settings.pop(key, None)
                if text:
                    self.settings[key] = Setting(yaml_value(text), f"--define {name}")

    def _present_name(self, key: str) -> str:
        names = self.system.aliases.get(key, key).split("|")
        return next(
            (name for name in names if name in self.table), key if "|" in "".join(names) else names[0]
        )

    def _leave_out_unknown(self) -> None:
        """Leave out settings without effect on the result whose value only running the file would tell."""
        for key, setting in list(self.settings.items()):
            fix = LEFT_OUT.get(self.table[key].convert, "") if key in self.table else ""
            if fix and unknown_names(setting.value):
                value, fix = printable(self.settings.pop(key).value), fix.replace("KEY", key)
                self.notes.append(f"{setting.where}: {key} is {value}, not known: {fix}")

    def _unknown_error(self) -> UserError:
        """Return the error of the settings whose value only running the file would tell."""
        lines = ["values that only running the file would tell; it is never run:"]
        for key, setting in self.settings.items():
            field = self.table.get(key)
            names = unknown_names(setting.value) if field and not keeps_unknown(field.convert) else []
            if names:
                words = [f"--define {name}=VALUE" for name in dict.fromkeys(names) if name.isidentifier()]
                fix = f"give {' '.join(words) or f'--define {key}=VALUE'}"
                lines.append(f"{setting.where}: {key} is {printable(setting.value)}: {fix}")
        return UserError("\n".join(lines))
