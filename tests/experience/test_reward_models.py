"""Reward models in memory: what they score, where it lands, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.preference import ask_one
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.experience.reward_models import add_scores, load_reward_model
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rewards.config import RewardModelConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.structs import Trajectory

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    value_head=True,
)  # fmt: skip
STEP = StepConfig(row_tokens=32, rows=2)
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def weights():
    params = models.init(MODEL, jax.random.key(0))
    params.value[...] = jax.random.normal(jax.random.key(1), (1, 32))
    return params


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "hf"
    save_model(weights, MODEL, path, TOKENIZER, dtype="float32")
    return path


def mesh():
    return make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])


def trajectory(text, prompt="1+2=", reward=1.0):
    ids = np.array([*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], np.int32)
    prompt_ids = np.array(TOKENIZER.encode(prompt, add_special_tokens=False), np.int32)
    return Trajectory(
        prompt_ids=prompt_ids, response_ids=ids, logprobs=np.zeros(len(ids)), mask=np.ones(len(ids)),
        versions=np.zeros(len(ids)), prompt_index=0, response_index=0, finish="stop", text=text,
        reward=reward, components=(reward,),
    )  # fmt: skip


def values(weights, t):
    """The value after each token, from the model alone."""
    tokens = jnp.concatenate([t.prompt_ids, t.response_ids])[None]
    hidden = weights(tokens, jnp.arange(tokens.shape[1])[None])
    return np.asarray(weights.values(hidden))[0]


def judge(folder, **fields):
    return load_reward_model(RewardModelConfig(path=str(folder), **fields), STEP, mesh(), TOKENIZER)


def test_the_score_is_the_value_after_the_last_token(weights, folder):
    batch = [trajectory("3"), trajectory("3+4"), trajectory("99")]
    scores = judge(folder)(batch, ["1+2="] * 3)
    for t, row in zip(batch, scores, strict=True):
        assert row[-1] == pytest.approx(values(weights, t)[-1], abs=1e-4)
        assert not row[:-1].any()


def test_models_are_mixed_by_weight_and_kept_apart(weights, folder):
    """1 (verifier) + 0.5 v + 2 (v - 1) / 4."""
    t = trajectory("3+4")
    v = values(weights, t)[-1]
    add_scores([judge(folder, weight=0.5), judge(folder, weight=2.0, mean=1.0, scale=4.0)], [t], ["1+2="])
    assert t.reward == pytest.approx(1 + 0.5 * v + 2 * (v - 1) / 4, abs=1e-4)
    np.testing.assert_allclose(t.components, [1.0, 0.5 * v, 2 * (v - 1) / 4], atol=1e-4)
    assert t.token_rewards is None


def test_a_process_model_scores_the_end_of_each_step(weights, folder):
    """Steps end with a newline; the last one before the end token."""
    t = trajectory("3\n4\n5")
    add_scores([judge(folder, kind="process", weight=2.0)], [t], ["1+2="])
    after = values(weights, t)[len(t.prompt_ids) :]
    wanted = np.zeros(6)
    for place in (1, 3, 4):
        wanted[place] = 2 * after[place]
    np.testing.assert_allclose(t.token_rewards, wanted, atol=1e-4)
    assert t.reward == 1.0


def test_a_generative_model_is_asked_for_yes_or_no(weights, tmp_path):
    """The probability of Y against N as the first letter of its answer."""
    plain = dataclasses.replace(MODEL, value_head=False)
    model = models.with_heads(weights, plain)
    save_model(model, plain, tmp_path / "lm", TOKENIZER, dtype="float32")
    t = trajectory("3+4")
    (scores,) = judge(tmp_path / "lm", kind="generative")([t], ["1+2="])
    question = Example(({"role": "user", "content": ask_one("1+2=", "3+4")},), None)
    ids = jnp.asarray(encode_prompt(TOKENIZER, question, ChatConfig()))[None]
    logits = model(ids, jnp.arange(ids.shape[1])[None])[0, -1] @ model.head.T
    yes, no = (logits[TOKENIZER.encode(w, add_special_tokens=False)[0]] for w in ("Yes", "No"))
    assert not scores[:-1].any()
    assert scores[-1] == pytest.approx(float(jax.nn.sigmoid(yes - no)), abs=1e-5)


def test_a_language_model_is_no_reward_model(weights, tmp_path):
    plain = dataclasses.replace(MODEL, value_head=False)
    save_model(models.with_heads(weights, plain), plain, tmp_path / "lm", TOKENIZER)
    with pytest.raises(ValueError, match=r"without a score head; train one with --algo reward_model"):
        judge(tmp_path / "lm")


def test_a_reward_model_is_a_classifier_to_transformers(weights, folder):
    """One label; the score of its last token is ours."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    t = trajectory("3+4")
    tokens = np.concatenate([t.prompt_ids, t.response_ids])[None]
    with torch.no_grad():
        model.config.pad_token_id = TOKENIZER.pad_token_id
        logits = model(torch.tensor(tokens)).logits
    assert float(logits[0, 0]) == pytest.approx(values(weights, t)[-1], abs=1e-4)
