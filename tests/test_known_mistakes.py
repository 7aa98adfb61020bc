"""Faults of other systems, seen in a run or in their source, and the tests that rule them out here.

The table says where each is; those that have no better place are below it.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.train import main

TESTS = {
    name
    for file in Path(__file__).parent.rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
}
RULED_OUT = {
    "the end token is dropped from what was sampled: stopping gets no gradient": """
        test_the_end_token_is_kept_and_named
        test_the_end_token_is_trained_on""",
    "a response that stops at once has an empty mask": """
        test_a_response_that_stops_at_once_still_has_a_token""",
    "rope_theta of the config is ignored": "test_all_fields_together_agree_and_each_matters",
    "masks are made from token values, and pad is the end token": """
        test_a_pad_token_that_is_the_end_token_changes_nothing
        test_supervised_end_tokens_are_learned_where_pad_is_the_end_token""",
    "resuming replays or skips data, or shuffles anew": """
        test_a_step_is_the_same_whatever_was_read_before
        test_stopped_by_budget_killed_stopped_by_signal""",
    "resuming exits with 0 and has trained nothing": """
        test_more_steps_continue_a_finished_run
        test_a_last_step_that_does_not_fit_fails_the_run""",
    "parameters are not donated: a second copy at the peak": "test_state_is_donated",
    "the loss is averaged over padding": """
        test_doubling_the_padding_changes_nothing
        test_microbatches_packing_and_padding_change_nothing""",
    "the loss depends on the split into micro-batches": """
        test_rows_apart_sum_to_rows_together
        test_microbatches_packing_and_padding_change_nothing""",
    "0 * NaN under a mask poisons the loss": """
        test_padding_under_the_mask_reaches_no_gradient
        test_garbage_under_the_mask_does_not_reach_the_sum""",
    "answers are looked for in the last characters only": """
        test_the_marked_answer_is_found_anywhere_in_the_response""",
    "a shift by one reaches across packed samples": """
        test_rows_by_hand
        test_packed_row_equals_separate_rows""",
    "text of several turns is tokenised again, and not alike": """
        test_supervised_prompt_has_the_ids_of_the_rollout_prompt
        test_turns
        test_logprobs_are_those_of_the_training_forward""",
    "rope_parameters are read by transformers 4 as theta 10000": """
        test_both_spellings_of_rope_say_the_same
        test_what_is_written_reads_back_here_and_in_transformers""",
    "an export needs one unsharded file": """
        test_every_byte_survives_import_and_export
        test_files_of_an_export""",
    "metrics, progress and the number of steps count different things": """
        test_everything_that_counts_steps_counts_the_same""",
    "the base install depends on an accelerator": """
        test_the_base_install_needs_no_accelerator
        test_training_imports_no_torch""",
}


@pytest.mark.parametrize("mistake", RULED_OUT)
def test_the_table_names_tests_that_exist(mistake):
    assert set(RULED_OUT[mistake].split()) <= TESTS


# --- a tokenizer whose pad token is its end token, as of many base models


def tokenizer_with_pad(pad: str):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = pad
    return tokenizer


MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.2, max_position=64,
)  # fmt: skip


@pytest.mark.slow
def test_a_pad_token_that_is_the_end_token_changes_nothing():
    """Ids, masks and log-probs of a rollout; a prompt may hold the end token, too."""
    prompts = [np.array(ids, np.int32) for ids in ([7, 1, 9], [1], [20, 21, 22, 1, 1])]
    requests = [Request(ids, i, 16, 12) for i, ids in enumerate(prompts)]
    params = models.init(MODEL, jax.random.key(0))
    found = []
    for pad in ("<pad>", "<|im_end|>"):
        tokenizer = tokenizer_with_pad(pad)
        mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
        engine = NativeEngine(RolloutConfig(), MODEL, mesh, tokenizer)
        engine.publish(params, version=0)
        found.append(engine.generate(requests, SamplingConfig(), jax.random.key(3)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    stopped = [t for t in found[1] if t.finish == "stop"]
    assert stopped and all(t.response_ids[-1] == 1 and t.mask.all() for t in stopped)
    for one, other in zip(*found, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.mask.tolist() == other.mask.tolist() == [1] * len(one.response_ids)
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_supervised_end_tokens_are_learned_where_pad_is_the_end_token():
    data = DataConfig(train=(SourceConfig(path="task:arithmetic"),))
    own, same = (
        Loader(data, tokenizer_with_pad(pad), 0, 32).supervised_batch(0, 8) for pad in ("<pad>", "<|im_end|>")
    )
    for (ids, mask), (other_ids, other_mask) in zip(own, same, strict=True):
        assert ids.tolist() == other_ids.tolist() and mask.tolist() == other_mask.tolist()
        assert (ids[-1], mask[-1]) == (1, 1)  # learns to stop
        assert (ids == 1).sum() == 2 and mask[
            np.flatnonzero(ids == 1)[0]
        ] == 0  # the user's end is not learned


# --- counting


@pytest.mark.slow
def test_everything_that_counts_steps_counts_the_same(tmp_path, capsys):
    """Metrics, samples, progress, checkpoints and --steps, over an SFT warm-up and a resumed run.

    With two updates a step a step is still one of --steps; those of the SFT warm-up are added.
    """
    command = [
        *("--config", "grpo_tiny.py", "--run_dir", str(tmp_path), "--warm_start.steps", "2"),
        *("--prompts_per_step", "4", "--responses_per_prompt", "4", "--minibatches_per_step", "2"),
        *("--warm_start.examples_per_step", "8", "--eval.every", "0", "--checkpoint.every", "1"),
        *("--checkpoint.keep", "9", "--log.progress", "plain", "--log.tensorboard", "false"),
        *("--mesh.data", "1", "--mesh.fsdp", "8", "--reward.workers", "1"),
    ]
    for steps, new in ((2, [1, 2, 3, 4]), (3, [5])):
        total = 2 + steps
        assert main([*command, "--steps", str(steps)]) == 0
        said = capsys.readouterr().out
        assert re.findall(r"^step (\d+)/(\d+)", said, re.M) == [(str(n), str(total)) for n in new]
        assert f"done: step {total} of {total}" in said
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, total + 1))
        assert [row["kind"] for row in rows] == ["warm_start"] * 2 + ["train"] * steps
        samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert sorted({row["step"] for row in samples}) == list(range(3, total + 1))  # of rollouts
        saved = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
        assert saved == set(range(1, total + 1))


# --- installing


def test_the_base_install_needs_no_accelerator():
    needed = [line for line in importlib.metadata.requires("jaxrl-llm") if "extra ==" not in line]
    names = {re.match(r"[\w.-]+(\[.*?\])?", line)[0].lower() for line in needed}
    assert "jax" in names  # plain: neither jax[tpu] nor jax[cuda13]
    foreign = re.compile(r"\[|torch|libtpu|nvidia|cuda|triton|vllm|sglang|tpu|rocm")
    assert not [name for name in names if foreign.search(name)]


def test_training_imports_no_torch():
    script = "import sys, jaxrl_llm.train; print(sorted({'torch', 'tensorflow'} & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
