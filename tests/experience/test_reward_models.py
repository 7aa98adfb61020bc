"""Reward models in memory: what they score, where it lands, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt, encode_supervised
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.preference import pairwise_prompt, pointwise_prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.metrics import statistics
from jaxrl_llm.experience.reward_models import add_scores, load_reward_model
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.experience.win_rate import Comparison, model_judge
from jaxrl_llm.forks import Fork
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.tokenizer import classifier_tokenizer
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.rewards.config import RewardModelConfig
from jaxrl_llm.sharding.placement import MeshConfig, devices_of, make_mesh
from jaxrl_llm.structs import Episode, Trajectory

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    value_head=True,
)  # fmt: skip
STEP = StepConfig(row_tokens=32, rows=2)
TOKENIZER = make_tokenizer()
CHAT = ChatConfig()
SUM = Example(None, "1+2=")


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


@jax.jit
def values_of(weights, tokens):
    return weights.values(weights(tokens, jnp.arange(tokens.shape[1])[None]))


def values(weights, t):
    """The value after each token, from the model alone."""
    return np.asarray(values_of(weights, np.concatenate([t.prompt_ids, t.response_ids])[None]))[0]


def judge(folder, **fields):
    return load_reward_model(
        RewardModelConfig(path=str(folder), **fields), STEP, mesh(), TOKENIZER, chat=CHAT
    )


def test_the_score_is_the_value_after_the_last_token(weights, folder):
    batch = [trajectory("3"), trajectory("3+4"), trajectory("99")]
    scores = judge(folder)(batch, [SUM] * 3)
    for t, row in zip(batch, scores, strict=True):
        assert row[-1] == pytest.approx(values(weights, t)[-1], abs=1e-4)
        assert not row[:-1].any()


def add_all(judges, trajectories, examples):
    add_scores(judges, trajectories, [judge.start(trajectories, examples) for judge in judges])


def test_a_model_on_other_devices_than_the_policy_gives_the_same_scores(weights, folder):
    other = make_mesh(MeshConfig(tensor=2), jax.devices()[4:8])
    placed = load_reward_model(RewardModelConfig(path=str(folder)), STEP, other, TOKENIZER, chat=CHAT)
    batch = [trajectory("3"), trajectory("3+4")]
    with jax.set_mesh(mesh()):  # the policy's, as in a run
        scores = placed(batch, [SUM, SUM])
    assert devices_of(placed.params) == set(jax.devices()[4:8])
    for row, t in zip(scores, batch, strict=True):
        assert row[-1] == pytest.approx(values(weights, t)[-1], rel=1e-5)


def test_models_are_mixed_by_weight_and_kept_apart(weights, folder):
    """1 (verifier) + 0.5 v + 2 (v - 1) / 4."""
    t = trajectory("3+4")
    v = values(weights, t)[-1]
    add_all([judge(folder, weight=0.5), judge(folder, weight=0.5, mean=1.0)], [t], [SUM])
    assert t.reward == pytest.approx(1 + 0.5 * v + 2 * (v - 1) / 4, abs=1e-4)
    np.testing.assert_allclose(t.components, [1.0, 0.5 * v, 2 * (v - 1) / 4], atol=1e-4)
    assert t.token_rewards is None


def test_a_process_model_scores_the_end_of_each_step(weights, folder):
    """Steps end with a newline; the last one before the end token."""
    t = trajectory("3\n4\n5")
    add_all([judge(folder, kind="process", weight=2.0)], [t], [SUM])
    after = values(weights, t)[len(t.prompt_ids) :]
    wanted = np.zeros(6)
    for place in (1, 3, 4):
        wanted[place] = 2 * after[place]
    np.testing.assert_allclose(t.token_rewards, wanted, atol=1e-4)
    assert t.reward == 1.0


def test_models_read_each_token_of_a_rewritten_history_once(weights, folder):
    """The second context drops the line "3" and reads "4" again. The process model scores both lines in the
    first one, "5" in the second one; the outcome model reads the second one.
    """
    first, again = trajectory("3\n4\n"), trajectory("4\n5")
    prompt, ids = len(first.prompt_ids), [*first.response_ids[:4], *again.response_ids]
    t = dataclasses.replace(
        again, response_ids=np.array(ids, np.int32), mask=np.array([1, 1, 1, 1, 0, 0, 1, 1]),
        forks=(Fork(prompt + 4, prompt),),
    )  # fmt: skip
    assert t.once.tolist() == [True] * 4 + [False] * 2 + [True] * 2
    before, after = values(weights, first)[prompt:], values(weights, again)[prompt:]
    ((scores,), (score,)) = (judge(folder, kind=kind)([t], [SUM]) for kind in ("process", "outcome"))
    np.testing.assert_allclose(scores, [0, before[1], 0, before[3], 0, 0, after[2], 0], atol=1e-4)
    np.testing.assert_allclose(score, [0] * 7 + [after[3]], atol=1e-4)
    assert statistics([t])["response_tokens/mean"] == 6
    assert reward_sample(SUM, t).response_ids == (*ids[:4], *ids[6:])


def test_a_generative_model_is_asked_for_yes_or_no(weights, tmp_path):
    """The probability of Y against N as the first letter of its answer."""
    plain = dataclasses.replace(MODEL, value_head=False)
    model = models.with_heads(weights, plain)
    save_model(model, plain, tmp_path / "lm", TOKENIZER, dtype="float32")
    t = trajectory("3+4")
    (scores,) = judge(tmp_path / "lm", kind="generative")([t], [SUM])
    question = Example(({"role": "user", "content": pointwise_prompt("1+2=", "3+4")},), None)
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


def test_a_classifier_whose_padding_was_the_end_scores_the_end(weights, tmp_path):
    """A batch of texts of several lengths, padded by the folder's own tokenizer, in transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    save_model(weights, MODEL, folder := tmp_path / "hf", tokenizer, dtype="float32")
    assert tokenizer.pad_token == tokenizer.eos_token
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.pad_token_id == loaded.pad_token_id != loaded.eos_token_id
    batch = [trajectory("3"), trajectory("3+4")]
    ids = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in batch]
    padded = loaded.pad({"input_ids": ids}, return_tensors="pt")
    with torch.no_grad():
        logits = model(**padded).logits[:, 0].tolist()
    assert logits == pytest.approx([values(weights, t)[-1] for t in batch], abs=1e-4)


def test_padding_of_a_classifier_is_a_token_that_no_text_ends_with(capsys):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")

    def pad(vocab_size, **special):
        words = {"a": 0, "</s>": 1, "<s>": 2}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        settings = {"eos_token": "</s>", "pad_token": "</s>", **special}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
        found = classifier_tokenizer(tokenizer, vocab_size)
        return found.pad_token, found.pad_token_id

    assert pad(4, bos_token="<s>") == ("<s>", 2) and pad(4, pad_token="a") == ("a", 0)
    assert pad(4, pad_token=None) == ("<|pad|>", 3)
    assert pad(9, additional_special_tokens=["<x>", "<|reserved_0|>"]) == ("<|reserved_0|>", 4)
    assert pad(3) == ("</s>", 1) and "vocabulary of 3 has no token for padding" in capsys.readouterr().err


def test_a_classifier_of_others_is_read_as_in_transformers(weights, tmp_path, capsys):
    """Padding is the end token: the last token that is no padding is the one before."""
    folder = tmp_path / "hf"
    save_model(weights, MODEL, folder, TOKENIZER, dtype="float32")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"pad_token_id": TOKENIZER.eos_token_id}))
    t = trajectory("3+4")
    (scores,) = judge(folder)([t], [SUM])
    assert scores[-1] == pytest.approx(values(weights, t)[-2], abs=1e-4)
    assert "its pad_token_id 1 ends texts, so the token before is scored, as in t" in capsys.readouterr().err
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]])).logits
    assert float(logits[0, 0]) == pytest.approx(scores[-1], abs=1e-4)


# --- a model with a tokenizer or a template of its own


class Recorder:
    """Keeps the ids that a reward model reads, in place of computing with them."""

    def __init__(self, monkeypatch, tokenizer):
        self.texts = []

        def start(model, params, items, names=("logprobs",)):
            self.texts += [tokenizer.decode(item.tokens[:-1]) for item in items]
            return lambda: [
                {name: np.zeros(len(item.tokens), np.float32) for name in names} for item in items
            ]

        monkeypatch.setattr("jaxrl_llm.learn.scoring.Scorer.start", start)


@pytest.fixture(scope="module")
def other(weights, tmp_path_factory):
    """A folder with other ids and another template: [role] content / at the end of a turn."""
    path = tmp_path_factory.mktemp("other") / "hf"
    save_model(weights, MODEL, path, TOKENIZER, dtype="float32")
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    for name in ("chat_template.jinja",):
        (path / name).write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}/{% endfor %}\n")
    return path


def chat_of(*turns):
    return Example(tuple({"role": role, "content": text} for role, text in turns), None)


CHATS = [
    (ChatConfig(system_prompt="Add."), chat_of(("user", "a?")), "[system] Add./[user] a?/"),
    (
        CHAT,
        chat_of(("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")),
        "[system] S/[user] a/[assistant] b/[user] c/",
    ),
    (CHAT, SUM, "1+2="),
]


@pytest.mark.parametrize(("chat", "example", "prompt"), CHATS)
def test_a_model_with_another_tokenizer_reads_the_whole_chat_by_its_own_template(
    other, monkeypatch, chat, example, *, prompt
):
    """System prompt and earlier turns included; its ids for the same letters are others."""
    model = load_reward_model(RewardModelConfig(path=str(other)), STEP, mesh(), TOKENIZER, chat=chat)
    seen = Recorder(monkeypatch, model.tokenizer)
    t = trajectory("ab")
    model([t], [example])
    assert seen.texts == [prompt + (f"ab{TOKENIZER.eos_token}" if example is SUM else "[assistant] ab/")]
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    assert model.tokenizer.convert_tokens_to_ids(["a", "b"]) == [b, a]


def test_a_model_with_another_tokenizer_reads_text_with_its_start_and_end_tokens(other, tmp_path):
    """As it learned it: encode_supervised, and TRL's RewardTrainer, have both."""
    path = tmp_path / "starts"
    shutil.copytree(other, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos, eos = TOKENIZER.eos_token, "b"
    special = {"id": bos, "ids": [TOKENIZER.eos_token_id], "tokens": [bos]}
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": {bos: special}
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": bos, "eos_token": eos}))
    model = load_reward_model(RewardModelConfig(path=str(path)), STEP, mesh(), TOKENIZER, chat=CHAT)
    t = trajectory("3")
    row = dataclasses.replace(SUM, response="3")
    whole = encode_supervised(model.tokenizer, row, CHAT)[0].tolist()
    assert whole[0] == model.tokenizer.bos_token_id and whole[-1] == model.tokenizer.eos_token_id
    assert model.render(t, SUM) == whole
    assert model.render(dataclasses.replace(t, finish="length"), SUM) == whole[:-1]


def test_turns_of_a_conversation_are_read_with_their_roles(other, monkeypatch):
    model = judge(other)
    seen = Recorder(monkeypatch, model.tokenizer)
    turns = ({"role": "assistant", "content": "x"}, {"role": "tool", "content": "3"})
    t = trajectory("x3three")
    t.mask, t.answer, t.episode = np.array([1, 0, 1, 1, 1, 1, 1, 1]), "three", Episode(messages=turns)
    asked = chat_of(("user", "a?"))
    model([t], [asked])
    judged = dataclasses.replace(model, config=RewardModelConfig(path=str(other), kind="generative"))
    judged([t], [asked])
    assert seen.texts[0] == "[user] a?/[assistant] x/[tool] 3/[assistant] three/"
    answer = "assistant: x\n\ntool: 3\n\nassistant: three"
    assert seen.texts[1] == f"[user] {pointwise_prompt('a?', answer)}/"[-STEP.row_tokens - 128 + 1 :]


def test_a_generative_model_compares_two_responses(weights, tmp_path, monkeypatch):
    """Log-probs of 0 for A and ln 3 less for B: A is preferred with probability 3/4."""
    plain = dataclasses.replace(MODEL, value_head=False)
    save_model(models.with_heads(weights, plain), plain, tmp_path / "lm", TOKENIZER)
    config = RewardModelConfig(path=str(tmp_path / "lm"), kind="generative")
    model = load_reward_model(config, STEP, mesh(), TOKENIZER, chat=CHAT, responses=2)
    b, seen = TOKENIZER.encode("B", add_special_tokens=False)[0], []

    def start(model, params, items, names=("logprobs",)):
        seen.extend(TOKENIZER.decode(item.tokens) for item in items)
        return lambda: [{"logprobs": -np.log([1, 3])[[int(item.tokens[-1] == b)]]} for item in items]

    monkeypatch.setattr("jaxrl_llm.learn.scoring.Scorer.start", start)
    assert model_judge(model)([Comparison(SUM, "1+2=", "3", "4")]) == [pytest.approx(0.75)]
    assert [text[-1] for text in seen] == ["A", "B"] and pairwise_prompt("1+2=", "3", "4") in seen[0]
    assert model.scorer.config.row_tokens == 2 * 32 + 128


def test_a_template_alone_makes_a_model_read_anew(folder, tmp_path):
    assert not judge(folder).rerenders
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert judge(copy).rerenders
    assert not judge(copy, kind="process").rerenders  # it scores the policy's own tokens


def test_templates_that_refuse_the_policys_chats_are_found_at_the_start(other, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (copy / "chat_template.jinja").write_text(refuses)
    load = lambda chat: load_reward_model(
        RewardModelConfig(path=str(copy)), STEP, mesh(), TOKENIZER, chat=chat
    )
    load(CHAT)
    with pytest.raises(
        UserError, match=r"refuses the policy's chats \(.*no system role\)\. Use one that takes the ro"
    ):
        load(ChatConfig(system_prompt="Add.", render="chat"))


def test_a_process_model_of_another_vocabulary_is_refused(other):
    with pytest.raises(UserError, match="a process reward model scores the policy's own tokens"):
        judge(other, kind="process")


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_responses_that_share_a_prompt_get_the_scores_of_rows_of_their_own(folder, kind):
    """Two prompts, three responses each, of one line and of several; a row has each prompt once."""
    texts = ("3\n4\n5", "3\n", "12")
    batch = [trajectory(text, prompt) for prompt in ("1+2+3+4+5=", "7*8*9=") for text in texts]
    config = RewardModelConfig(path=str(folder), kind=kind)
    shared, alone = (
        load_reward_model(
            config, dataclasses.replace(STEP, share_prefixes=share), mesh(), TOKENIZER, chat=CHAT
        )
        for share in (True, False)
    )
    items = [item for t in batch for item in shared._items(t, SUM, 0)]
    assert shared.scorer.shared_tokens(items) == [9, 9, 5, 5]  # all but the last token of a prompt
    for row, expected in zip(shared(batch, [SUM] * 6), alone(batch, [SUM] * 6), strict=True):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_longrope_is_chosen_by_the_longest_text_of_the_run(folder, tmp_path):
    """Not by the row, which holds several texts. A template may add 128 tokens."""
    factors = {"short_factor": (1.0,) * 4, "long_factor": (4.0,) * 4}
    rope = RopeConfig(scaling="longrope", factor=2.0, original_max_position=200, **factors)
    model = dataclasses.replace(MODEL, family="phi3", rope=rope, max_position=400, qk_norm=False)
    save_model(models.init(model, jax.random.key(0)), model, tmp_path / "hf", TOKENIZER, dtype="float32")
    step = dataclasses.replace(STEP, row_tokens=1024)
    for longest, is_long in ((64, False), (80, True)):
        judge = load_reward_model(
            RewardModelConfig(path=str(tmp_path / "hf")), step, mesh(), TOKENIZER, chat=CHAT, longest=longest
        )
        assert judge.params.config.rope.is_long == is_long
