"""Every number has a range; extreme values and random command lines end in one message, or in sizes."""

import contextlib
import dataclasses
import json
import math
import random
import signal
import typing
from collections.abc import Iterator

import jaxtyping
import pytest

from jaxrl_import.hints import MISSING, SAME
from jaxrl_llm import algos
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import (
    CriticConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
    WarmStartConfig,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.optim import make_optimizer, make_schedule
from jaxrl_llm.ranges import field_ranges
from jaxrl_llm.recipe.checks import check_config
from jaxrl_llm.recipe.dump import dump
from jaxrl_llm.recipe.keys import iter_fields, replace_at, short_repr, type_hints
from jaxrl_llm.recipe.load import config_classes, from_command_line, packaged_recipes
from jaxrl_llm.rollout.native.shapes import make_shapes

LIMIT = 10.0  # seconds for one call; milliseconds are usual

NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    1,
    -0.0,
    5e-324,
    1e-39,
    1e39,
    2**31,
    2**63,
    10**400,
    -(10**5000),
)
TEXTS = (
    "",
    "x" * 100_000,
    "\udc80",
    "\u65e5\u672c",
    "\x00",
    "~no_such_user/x",
    "[",
    "'",
    "@",
    "http://[",
    "-1",
)
OTHERS = (None, True, [], (), {}, ("",), (math.nan,), ((),), int, object(), MeshConfig(), (MeshConfig(), 3))

WORDS = (
    *(
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1",
        "1e39",
        "1e-39",
        "-1e400",
        "2147483648",
        "9223372036854775808",
        "1_0",
    ),
    *(
        "9" * 5000,
        "",
        " ",
        "x" * 10_000,
        "None",
        "True",
        "false",
        "--",
        "-",
        "=",
        "a=b",
        "-x",
        "--steps",
        "'",
        "[",
    ),
    *(
        "\udc80",
        "\u65e5\u672c",
        "\x00",
        "~no_such_user",
        "/dev/null",
        "@",
        "@/nowhere",
        "http://[",
        "{}",
        "task:x",
    ),
    *(
        "--tp 2",
        "--mem-fraction-static",
        "--mem-fraction-static x",
        "0 0",
        "k1",
        "sglang",
        "native",
        "float32",
    ),
)
JUNK = (
    "--",
    "---",
    "-h1",
    "=",
    "--=",
    "--=3",
    "--.",
    "--.=1",
    "--steps.",
    "--" + "k" * 100_000,
    "--\udc80",
    "-",
    "x",
)


def full_config(algo: str) -> TrainConfig:
    """Return a config that has every part that a recipe may have."""
    source = SourceConfig(path="task:arithmetic")
    return TrainConfig(
        algo=algos.ALGOS[algo].config,
        max_prompt_tokens=16,
        max_response_tokens=16,
        model=ModelConfig(architecture=TransformerConfig(), tokenizer="tiny"),
        critic=CriticConfig(mesh=MeshConfig()),
        data=DataConfig(train=(source,), eval=(source,)),
        reward=RewardConfig(models=(RewardModelConfig(path="m"),)),
        warm_start=WarmStartConfig(steps=10, sources=(source,)),
    )


@pytest.fixture(autouse=True)
def types_are_checked_by_us_alone():
    """The tests' import hook would refuse values of wrong types when a Config is made."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@contextlib.contextmanager
def time_limit(what: object) -> Iterator[None]:
    """Fail where the block takes longer than LIMIT, even if it catches every exception."""
    late = []

    def stop(*_):
        late.append(what)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert not late, f"longer than {LIMIT} s: {str(what)[:500]}"


def build(config: TrainConfig) -> None:
    """Compute what follows from an accepted config without a model or device."""
    for devices in (1, 8, 4096):
        sizes = derived(config, devices)
        assert all(isinstance(size, int) and size >= 0 for size in sizes.values())
    updates = config.steps * config.minibatches_per_step
    for optim in (config.optim, config.critic.optim):
        schedule = make_schedule(optim, updates)
        rates = [float(schedule(step)) for step in (0, 1, max(updates - 1, 0))]
        assert all(0 <= rate <= optim.learning_rate * (1 + 1e-6) for rate in rates), rates
        make_optimizer(optim, updates)
    algos.requirements(config.algo)
    rollout = config.rollout
    for ways, turns in ((1, False), (8, True)):
        make_shapes(
            config.max_prompt_tokens,
            config.max_response_tokens,
            rollout.slots,
            ways,
            prefill_tokens=rollout.prefill_tokens,
            turns=turns,
        )
    json.dumps(dump(config), allow_nan=False)


# -- ranges


def holds_number(hint: typing.Any) -> bool:
    return hint in (int, float) or any(map(holds_number, typing.get_args(hint)))


def has_range(cls: type, name: str) -> bool:
    return not holds_number(type_hints(cls)[name]) or field_ranges(cls)[name] is not None


@pytest.mark.parametrize("cls", sorted(config_classes(), key=lambda cls: cls.__qualname__))
def test_every_number_has_a_range(cls):
    assert [field.name for field in dataclasses.fields(cls) if not has_range(cls, field.name)] == []


# -- extremes


def extremes(algo: str) -> Iterator[tuple[str, object]]:
    known = dict(iter_fields(full_config(algo)))
    others = {key for key, _ in iter_fields(full_config("grpo"))} if algo != "grpo" else set()
    for key in known.keys() - others:
        if not has_range(type(known[key].owner), known[key].name):
            continue
        for value in (*NUMBERS, *TEXTS, *OTHERS):
            yield key, value


# With grpo come the keys that all algorithms share.
@pytest.mark.parametrize(
    "algo", [pytest.param(name, marks=[pytest.mark.slow] * (name == "grpo")) for name in sorted(algos.ALGOS)]
)
def test_extremes_of_every_field_are_refused_or_build(algo):
    config, wrong = full_config(algo), []
    for key, value in extremes(algo):
        try:
            changed = replace_at(config, key.split("."), value)
        except Exception:  # in a recipe: one line that names it
            continue
        with time_limit((key, type(value))):
            try:
                check_config(changed, writes=False)
                build(changed)
            except UserError as error:
                if len(str(error)) > 2000:
                    wrong.append((key, short_repr(value), "a long message"))
            except Exception as error:
                wrong.append((key, short_repr(value), short_repr(error)))
    assert wrong == []


# -- command lines


def usual_words(rng: random.Random, value: object) -> list[str]:
    """Return words for a field that has this value: it, or a number near it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return [str(word) for word in value] if isinstance(value, tuple) else [str(value)]
    return [str(type(value)(value * rng.choice((0, 0.5, 1, 2, 3))))]


def random_key(rng: random.Random, key: str) -> str:
    """Return the key, or one that is misspelt, of another system, or in another style."""
    kind = rng.random()
    if kind < 0.05:
        return "".join(rng.sample(key, len(key)))
    if kind < 0.10:
        return key[: rng.randint(0, len(key))]
    if kind < 0.15:
        return rng.choice([*SAME, *MISSING])
    if kind < 0.20:
        return rng.choice([key.replace("_", "-").upper(), f"no-{key}", key.replace("_", "-")])
    return key


def random_line(rng: random.Random, configs: dict[str, TrainConfig]) -> list[str]:
    """Return a command line of a packaged recipe, with an algorithm, fields and nonsense."""
    recipe = rng.choice(sorted(configs))
    fields = {k: f for k, f in iter_fields(configs[recipe]) if has_range(type(f.owner), f.name)}
    line = ["--config", recipe]
    if rng.random() < 0.2:
        line += ["--algo", rng.choice([*algos.ALGOS, "grppo", "", "none.py", recipe, "/dev/null.py"])]
    for _ in range(rng.randint(1, 4)):
        key = rng.choice(sorted(fields))
        words = [rng.choice(WORDS) for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3)))]
        if rng.random() < 0.6:
            words = usual_words(rng, fields[key].value)
        key = random_key(rng, key)
        line += [f"--{key}={' '.join(words)}"] if rng.random() < 0.3 else [f"--{key}", *words]
    if rng.random() < 0.05:
        line.insert(rng.randint(0, len(line)), rng.choice(JUNK))
    if rng.random() < 0.05:
        line += ["--help", rng.choice(["", "all", "rollout", "temperature", "nonsense", "--steps"])]
    return line if rng.random() < 0.95 else rng.sample(line, len(line))


@pytest.mark.slow
def test_random_command_lines_end_in_one_message_or_build(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    recipes = [path.name for path in packaged_recipes()]
    configs = {name: from_command_line(["--config", name], writes=False).config for name in recipes}
    ends = {"accepted": 0, "refused": 0, "help": 0}
    for _ in range(2000):
        line = random_line(rng, configs)
        with time_limit(line):
            try:
                config = from_command_line(line, writes=False).config
            except UserError as error:
                assert 0 < len(str(error)) < 4000, line
                ends["refused"] += 1
            except SystemExit as end:
                assert end.code == 0, line
                ends["help"] += 1
            else:
                build(config)
                ends["accepted"] += 1
    assert min(ends["accepted"], ends["refused"]) > 300, ends
    assert ends["help"] > 0, ends
    assert list(tmp_path.iterdir()) == []
