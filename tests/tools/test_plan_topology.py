"""Topologies of `plan` by name, and the table of chips."""

import re

import pytest

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import CHIPS, GIB, GPUS, MULTIPROCESSORS, TPUS
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.plan import compiled
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.tools import plan


@pytest.mark.parametrize(
    ("name", "platform", "kind", "shape"),
    [
        ("v5e-16", "tpu", "v5e", (4, 4)),
        ("v5litepod-8", "tpu", "v5e", (2, 4)),
        ("v6e-256", "tpu", "v6e", (16, 16)),
        ("v4-8", "tpu", "v4", (2, 2, 1)),
        ("v5p-256", "tpu", "v5p", (4, 4, 8)),
        ("tpu7x-16", "tpu", "tpu7x", (2, 2, 2)),
        ("v5e:4x4", "tpu", "v5e", (4, 4)),
        ("v5p:4x4x12", "tpu", "v5p", (4, 4, 12)),
        ("h100", "cuda", "h100", (1,)),
        ("h200x8", "cuda", "h200", (8,)),
        ("h200x64", "cuda", "h200", (64,)),
        ("a100x8", "cuda", "a100", (8,)),
        ("a100-40x2", "cuda", "a100-40", (2,)),
        ("rtx4090", "cuda", "rtx4090", (1,)),
        ("cpu", "cpu", "cpu", ()),
    ],
)
def test_names_of_topologies(name, platform, kind, shape):
    assert parse_topology(name)[1:] == (platform, kind, shape, 1)


def test_several_slices_are_a_number_before_the_name():
    assert parse_topology("2xv5e-256")[1:] == ("tpu", "v5e", (16, 16), 2)
    assert parse_topology("4xv5p:4x4x12")[1:] == ("tpu", "v5p", (4, 4, 12), 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-12", r"no such slice; v5e-1, v5e-4, v5e-8, v5e-16, .*v5e:AxB"),
        ("v5p-4", "no such slice; v5p-2, v5p-8"),
        ("v5e:2x2x1", "a shape of v5e has 2 numbers"),
        ("h100x12", "1 to 8 GPUs of one host, such as h100x8, or hosts of 8, such as h100x64"),
        ("h100x0", "1 to 8 GPUs of one host"),
        ("0xv5e-4", "unknown. Known: .* several slices such as 2xv5e-256"),
        ("2xv5e-12", "no such slice; v5e-1, v5e-4"),
        ("v9-8", "unknown. Known: v4-N"),
        ("v100", "unknown. Known: .* h100, h200, b200, a100, a100-40, l4, rtx4090, t4, N of them"),
        ("", "--topology is missing. Known: v4-N"),
    ],
)
def test_another_name_is_refused_with_those_that_exist(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(name)


def test_the_chip_table_is_of_devices():
    assert {kind: chip.flops for kind, chip in CHIPS.items()} == {
        "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12 / 2,
        "h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12, "a100": 312e12, "a100-40": 312e12,
        "l4": 121e12, "rtx4090": 165.2e12, "t4": 65e12,
    }  # fmt: skip
    assert CHIPS["v5e"].memory == 15.75 * GIB
    published = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
    assert all(chip.source for chip in CHIPS.values())
    assert set(published) == set(TPUS) == set(dispatch.TPU_KINDS.values())
    of_gpus = {
        "h100": 80, "h200": 141, "b200": 180, "a100": 80, "a100-40": 40, "l4": 24, "rtx4090": 24, "t4": 16
    }  # fmt: skip
    assert set(of_gpus) == set(GPUS) == set(MULTIPROCESSORS)
    assert all(0.9 < CHIPS[kind].memory / GIB / size <= 1 for kind, size in of_gpus.items())
    for kind, size in published.items():
        assert 0.9 < CHIPS[kind].memory * CHIPS[kind].devices / GIB / size <= 1.01


@pytest.mark.parametrize(
    ("environment", "fraction"),
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, 0.9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, 0.5),
        ({"XLA_CLIENT_MEM_FRACTION": ""}, 0.75),
    ],
)
def test_both_names_of_the_share_of_a_gpus_memory_are_read(environment, fraction):
    assert compiled.gpu_mem_fraction(environment) == fraction


@pytest.mark.parametrize("text", ["half", "0", "1.5"])
def test_a_share_of_a_gpus_memory_that_cannot_be_is_refused(text):
    with pytest.raises(ConfigError, match=r"XLA_CLIENT_MEM_FRACTION is .*must be a number above 0"):
        compiled.gpu_mem_fraction({"XLA_CLIENT_MEM_FRACTION": text})


def test_the_help_names_every_gpu_and_kind_of_tpu(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert words >= {*GPUS, *(f"{kind}-N" for kind in TPUS)}
