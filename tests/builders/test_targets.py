"""Held-out sources without targets: no loss of a dataset algorithm, whose responses are evaluated there."""

import json

import pytest

from jaxrl_llm.algos import dpo, kto, sft
from jaxrl_llm.builders.data import check_held_out_rows
from jaxrl_llm.builders.evaluation import make_held_out_loss, sources_with_targets
from jaxrl_llm.config import EvalConfig, TrainConfig
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.dataset import dataset_items

PAIRS = SourceConfig(path="task:preference", options='{"size": 50}')


def held_out(*sources, **settings):
    config = DataConfig(train=(PAIRS,), eval=sources, **settings)
    return Loader(config, make_tokenizer(), 0, 16, split="eval", max_tokens=32)


def test_a_source_without_pairs_has_no_loss_of_dpo(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "response": str(i + 1)}) + "\n" for i in range(9))
    )
    loader = held_out(SourceConfig(path=str(file)), PAIRS)
    assert sources_with_targets(loader, dpo.Config()) == [1]
    assert sources_with_targets(loader, sft.Config()) == [0, 1]
    assert sources_with_targets(loader, kto.Config()) == [1]  # it reads two rows at least
    assert sources_with_targets(held_out(SourceConfig(path=str(file))), dpo.Config()) == []
    skipping = held_out(SourceConfig(path=str(file)), PAIRS, bad_rows="skip")
    assert sources_with_targets(skipping, dpo.Config()) == [1]
    alone, kept = held_out(PAIRS), loader.of_sources([1])
    assert (loader.num_sources, kept.num_sources) == (2, 1)
    for one, other in zip(*(dataset_items(x, dpo.Config(), 0, 8) for x in (alone, kept)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_held_out_prompts_are_no_bad_rows_of_dpo(tmp_path):
    """The default --data.bad_rows fail refused generated problems as pairs before the first step."""
    check_held_out_rows(held_out(SourceConfig(path="task:arithmetic"), PAIRS), "pairs")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"other": 1}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no prompt"):
        check_held_out_rows(held_out(PAIRS, SourceConfig(path=str(file))), "pairs")


def test_the_loss_is_of_every_held_out_row_once_and_of_each_name(tmp_path):
    """By weights alone, the two rows of a small file would be read as often as those of a large one."""
    made = {"a/test.jsonl": "ab", "b/test.jsonl": "cde", "big.jsonl": "fghijklm"}
    for name, letters in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = [json.dumps({"prompt": "?", "response": letter}) for letter in letters]
        (tmp_path / name).write_text("\n".join(rows))
    loader = held_out(*(SourceConfig(path=str(tmp_path / name)) for name in made))
    read = lambda items: "".join(sorted(make_tokenizer().decode(item.tokens[1:2]) for item in items))

    def evaluator(prompts, algo):
        return make_held_out_loss(TrainConfig(eval=EvalConfig(prompts=prompts), algo=algo), loader, None)

    whole = evaluator(100, sft.Config())
    assert read(whole.items) == "abcdefghijklm"
    assert {name: read(items) for name, items in whole.sources.items()} == {
        "test": "abcde",
        "big": "fghijklm",
    }
    some = evaluator(8, sft.Config())
    assert (len(some.items), len(set(read(some.items)))) == (8, 8)
    assert {name: len(items) for name, items in some.sources.items()} == {"test": 5, "big": 3}
