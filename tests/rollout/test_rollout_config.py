"""Settings of rollout and servers: ranges of numbers, rules across fields."""

import dataclasses
import math
import typing

import pytest

from jaxrl_llm.ranges import problems, range_of
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig, flag_value

CONFIGS = [RolloutConfig(), ServersConfig()]


def numbers(config):
    """Fields of whole and of other numbers."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        plain = {*typing.get_args(typing.get_type_hints(type(config))[field.name])} or {
            typing.get_type_hints(type(config))[field.name]
        }
        if plain & {int, float}:
            yield field.name, hints[field.name], float in plain


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_number_has_a_range_that_refuses_nonsense(config):
    assert list(problems(config)) == []
    fields = list(numbers(config))
    assert len(fields) >= 6
    for name, hint, is_float in fields:
        assert range_of(hint), name
        for value in (-1, 10**18, *((math.nan, math.inf, -math.inf) if is_float else ())):
            found = list(problems(dataclasses.replace(config, **{name: value})))
            assert [field for field, _ in found] == [name], (name, value)


@pytest.mark.parametrize(
    ("config", "field", "text"),
    [
        (ServersConfig(flags='--tp 2 "--x'), "flags", "is '--tp 2 \"--x': No closing quotation. Write it as"),
        (
            ServersConfig(flags="--tp 2 --api-key=7"),
            "flags",
            "holds the value of --api-key, which `ps`",
        ),
        (
            ServersConfig(router="host:1"),
            "router",
            "is wrong: 'host:1' is no address; write http://host:port.",
        ),
        (
            ServersConfig(transport="group", python="/no/python"),
            "python",
            "is '/no/python': no such",
        ),
        (
            RolloutConfig(cache="ring", cache_dtype="int8"),
            "cache_dtype",
            "is int8: it needs --rollout.cache pa",
        ),
        (
            RolloutConfig(cache="ring", draft_tokens=7),
            "draft_tokens",
            "is 7: rejected drafts would overwrite a ring. Set --rollout.cache paged (or auto), or --rol",
        ),
        (
            RolloutConfig(engine="sglang", launch=1, draft_tokens=7),
            "draft_tokens",
            "is 7: it is for the native engine. Set it to 0; servers have other drafts, such",
        ),
        (RolloutConfig(launch=1), "launch", "is for servers: add --rollout.engine sglang or vllm."),
        (
            RolloutConfig(servers=("http://127.0.0.1:1",)),
            "servers",
            "is for servers: add --rollout.eng",
        ),
        (
            RolloutConfig(max_staleness=1),
            "max_staleness",
            "is 1: the native engine generates while the trainer learns only on separate devices. Add "
            "them, such as --devices 0:4 --rollout.devices 4:8, or --rollout.engine sglang; or set it to 0.",
        ),
        (
            RolloutConfig(engine="sglang"),
            "engine",
            "is sglang: it needs either --rollout.servers http://host",
        ),
        (RolloutConfig(engine="sglang", servers=("a:1",)), "servers", "is wrong: 'a:1' is no address; write"),
        (
            RolloutConfig(engine="sglang", servers=("@a", "@b")),
            "servers",
            "is @a @b: it must be addresses, or",
        ),
    ],
)
def test_rules_across_fields(config, field, text):
    ((name, problem),) = problems(config)
    assert name == field and problem.startswith(text)


@pytest.mark.parametrize("field", ["slots", "chunk", "prefill_tokens", "page", "pages"])
def test_sizes_begin_at_one(field):
    assert not list(problems(RolloutConfig(**{field: 1})))
    assert [name for name, _ in problems(RolloutConfig(**{field: 0}))] == [field]


def test_the_last_value_of_a_flag_counts():
    words = ["--tp", "2", "--tp=4", "--device", "cpu", "--flag"]
    assert [flag_value(words, name) for name in ("--tp", "--device", "--flag", "--none")] == [
        "4",
        "cpu",
        "",
        None,
    ]
