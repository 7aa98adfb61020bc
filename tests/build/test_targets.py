"""Held-out sources of a dataset algorithm: those with targets have a loss, all have their responses evaluated."""

from jaxrl_llm.algos import dpo, sft
from jaxrl_llm.build.evaluation import sources_with_targets
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.experience.dataset import dataset_items

PAIRS, SUMS = (
    SourceConfig(path=f"task:{name}", options='{"size": 50}') for name in ("preference", "arithmetic")
)


def held_out(*sources):
    return Loader(DataConfig(train=(PAIRS,), eval=sources), make_tokenizer(), 0, 16, "eval", max_tokens=32)


def test_a_source_without_pairs_has_no_loss_of_dpo():
    loader = held_out(SUMS, PAIRS)
    assert sources_with_targets(loader, dpo.Config()) == [1]
    assert sources_with_targets(loader, sft.Config()) == [0, 1]
    assert sources_with_targets(held_out(SUMS), dpo.Config()) == []
    alone, kept = held_out(PAIRS), loader.of_sources([1])
    assert (loader.num_sources, kept.num_sources) == (2, 1)
    for one, other in zip(*(dataset_items(x, dpo.Config(), 0, 8) for x in (alone, kept)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
