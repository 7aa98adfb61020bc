"""Adapters of some modules, of several ranks and with saved matrices: logits of peft, and what trains on."""

import dataclasses
import json

import numpy as np
import pytest
from hf_oracle import TOLERANCE, hf_logits, our_logits, random_tokens
from lora_models import merged, with_stored_adapters
from test_peft_parity import SOME, our_base, peft_folder

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.peft import load_adapter, save_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.models.lora import with_lora

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers'
BETWEEN = r"model\.layers\.(0\.self_attn\.(q|v)|1\.mlp\.down)_proj"
CASES = {
    # settings of peft; our rank, targets; B of a layer that has no adapter, or the key that stops training
    "ranks": ({"rank_pattern": {"q_proj": 2, "1.self_attn.o_proj": 6}}, 6, SOME, "rank_pattern"),
    "alphas": ({"alpha_pattern": {"0.mlp.down_proj": 3, "down_proj": 9}}, 4, SOME, "alpha_pattern"),
    "ranks, one alpha / rank": (
        {"rank_pattern": {r"0.*\.q_proj": 2}, "alpha_pattern": {r"0.*\.q_proj": 3}},
        4,
        SOME,
        ("q", 0, slice(2, None)),
    ),
    "rslora ranks": ({"rank_pattern": {"q_proj": 9}, "use_rslora": True}, 9, SOME, "rank_pattern"),
    "regex": ({"target_modules": BETWEEN}, 4, ("q_proj", "v_proj", "down_proj"), ("v", 1)),
    "layers": ({"layers_to_transform": [1]}, 4, SOME, ("down", 0)),
    "layers by name": ({"layers_to_transform": 0, "layers_pattern": "layers"}, 4, SOME, ("o", 1)),
    "all but some": (
        {"target_modules": [*SOME, "k_proj"], "exclude_modules": r".*\.1\.self_attn\.[kq]_proj"},
        4,
        ("q_proj", "k_proj", *SOME[1:]),
        ("k", 1),
    ),
    "saved": ({"modules_to_save": ["lm_head", "embed_tokens"]}, 4, SOME, "modules_to_save"),
}


@pytest.mark.parametrize(("settings", "rank", "targets", "untrained"), CASES.values(), ids=CASES)
def test_logits_are_pefts_and_training_is_pefts_or_refused(tmp_path, *, settings, rank, targets, untrained):
    """A and B are 0 where peft has none: both gradients are 0, and the run trains what peft would."""
    model, tokens = peft_folder(tmp_path / "theirs", **settings), random_tokens()
    base, read = our_base(), read_adapter_config(tmp_path / "theirs", our_base().config)
    assert (read.rank, read.targets) == (rank, targets)
    ours, expected = with_stored_adapters(base, tmp_path / "theirs"), hf_logits(model, tokens)
    np.testing.assert_allclose(our_logits(merged(ours), tokens), expected, atol=TOLERANCE, rtol=0)
    config = with_lora(base.config, read)
    if isinstance(untrained, str):
        with pytest.raises(UserError, match=rf"{untrained}=.* (alpha / rank|trains these in peft).*merge it"):
            load_adapter(tmp_path / "theirs", config, trains=True)
        return
    adapter, (weight, *place) = load_adapter(tmp_path / "theirs", config, trains=True), untrained
    a, b = (adapter[f"layers.{weight}_lora_{matrix}"] for matrix in "ab")
    assert not np.moveaxis(a, -1, 1)[tuple(place)].any() and not b[tuple(place)].any()
    assert a.any() and b.any()
    # An export of it has the same outputs.
    save_adapter(ours, tmp_path / "ours", "base")
    again = with_stored_adapters(base, tmp_path / "ours")
    np.testing.assert_allclose(our_logits(merged(again), tokens), expected, atol=TOLERANCE, rtol=0)


def test_saved_matrices_of_tied_models_and_layers_with_a_regex_are_refused(tmp_path):
    peft_folder(tmp_path, modules_to_save=["embed_tokens"])
    tied = dataclasses.replace(our_base().config, tie_embeddings=True)
    with pytest.raises(UserError, match=r"modules_to_save=.*unties head and embedding in peft.*merge it"):
        read_adapter_config(tmp_path, tied)
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text()) | {"modules_to_save": None}
    file.write_text(json.dumps(raw | {"target_modules": ".*q_proj", "layers_to_transform": [0]}))
    with pytest.raises(UserError, match=r"layers_to_transform=\[0\] is not read by peft with a regex"):
        read_adapter_config(tmp_path, our_base().config)
