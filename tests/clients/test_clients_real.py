"""Real clients read exported folders: the same greedy text, and lm-eval the accuracy of our own evaluation.

Each client has an environment of its own (scripts/clients.sh, scripts/sglang_cpu/install.sh); a test whose
environment is absent is skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHONS = {
    name: ROOT / folder / "bin/python"
    for name, folder in {
        "transformers 5": ".venv-clients",
        "transformers 4": ".venv-clients4",
        "vllm": ".venv-clients-vllm",
    }.items()
} | {"sglang": Path(os.environ.get("JAXRL_SGLANG_PYTHON", "JAXRL_SGLANG_PYTHON"))}
MAX_TOKENS = 8
RUN = {"eval.every": 100, "eval.prompts": 64, "checkpoint.every": 0, "log.tensorboard": False}
HEAD_DIM = 32  # vLLM's attention on a CPU has no 16
TASK = """
task: held_out
dataset_path: json
dataset_kwargs: {{data_files: {{test: {prompts}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{do_sample: false, max_gen_toks: {max_tokens}, until: []}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def needs(*clients):
    """Skips a test, before any model is trained for it, where a client is not installed."""
    absent = [str(PYTHONS[client]) for client in clients if not PYTHONS[client].is_file()]
    return pytest.mark.skipif(bool(absent), reason=f"no interpreter {', '.join(absent)}")


def each(*clients):
    return pytest.mark.parametrize("client", [pytest.param(name, marks=needs(name)) for name in clients])


def run_client(client, tmp_path, jobs):
    """Return the responses of a client, one list a job of (model, adapter, chats)."""
    keys = ("model", "adapter", "chats")
    request = {"max_tokens": MAX_TOKENS, "jobs": [dict(zip(keys, job, strict=True)) for job in jobs]}
    (tmp_path / "jobs.json").write_text(json.dumps(request))
    script = [str(Path(__file__).with_name("client.py")), client.split()[0]]
    command = [PYTHONS[client], *script, str(tmp_path / "jobs.json"), str(tmp_path / "out.json")]
    subprocess.run(command, check=True, timeout=400, env=client_environment())
    reply = json.loads((tmp_path / "out.json").read_text())
    print(client, reply["versions"])
    return reply["texts"]


def client_environment():
    """Without the settings of our tests."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that gets some held-out sums right, not all."""
    run_dir, shape = str(tmp_path_factory.mktemp("base")), {"model.architecture.head_dim": HEAD_DIM}
    return jaxrl_llm.run("sft_tiny.py", steps=150, run_dir=run_dir, **RUN, **shape)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """The same after a few steps of adapters: folders `hf`, merged, and `adapter`."""
    settings = {"model.path": str(base.model), "lora.rank": 4, "optim.learning_rate": 2e-3}
    run_dir = str(tmp_path_factory.mktemp("tuned"))
    return jaxrl_llm.run("sft_tiny.py", steps=10, run_dir=run_dir, **settings, **RUN)


@pytest.fixture(scope="module")
def chats(tuned):
    rows = (tuned.run_dir / "prompts.jsonl").read_text().splitlines()
    return [json.loads(row)["messages"] for row in rows]


@pytest.fixture(scope="module")
def ours(tuned, chats):
    """Our greedy text; as a check that this is no constant, several distinct ones."""
    responses = jaxrl_llm.generate(tuned.model, chats, temperature=0.0, max_tokens=MAX_TOKENS)
    texts = [response.text for (response,) in responses]
    assert len(texts) == 64 and len(set(texts)) > 5
    return texts


@each("transformers 5", "transformers 4")
def test_transformers_and_peft_generate_our_text(client, base, tuned, chats, *, ours, tmp_path):
    adapter = str(tuned.run_dir / "adapter")
    jobs = [(str(tuned.model), "", chats), (str(base.model), adapter, chats), (str(base.model), "", chats)]
    merged, adapted, before = run_client(client, tmp_path, jobs)
    assert merged == ours
    assert adapted == ours
    assert before != ours  # else the adapter would show nothing


@each("vllm", "sglang")
def test_servers_generate_our_text(client, tuned, chats, ours, *, tmp_path):
    assert run_client(client, tmp_path, [(str(tuned.model), "", chats)]) == [ours]


@needs("transformers 5")
def test_lm_eval_measures_the_accuracy_of_our_evaluation(tuned, tmp_path):
    prompts = tuned.run_dir / "prompts.jsonl"
    task = TASK.format(prompts=prompts, max_tokens=MAX_TOKENS)
    (tmp_path / "held_out.yaml").write_text(task)
    model = ["--model", "hf", "--model_args", f"pretrained={tuned.model},dtype=float32", "--device", "cpu"]
    tasks = ["--tasks", "held_out", "--include_path", str(tmp_path), "--apply_chat_template"]
    command = [PYTHONS["transformers 5"], "-m", "lm_eval", "run", *model, *tasks]
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    environment = client_environment() | cache
    out = tmp_path / "results"
    subprocess.run(
        [*command, "--output_path", str(out)], check=True, timeout=400, env=environment, cwd=tmp_path
    )
    (file,) = out.rglob("results_*.json")
    accuracy = json.loads(file.read_text())["results"]["held_out"]["exact_match,none"]
    assert 0.0 < accuracy < 1.0
    assert accuracy == tuned.metrics[-1]["eval/pass@1"]


def of_family(family, **changes):
    sizes = {"vocab_size": 128, "hidden_size": 32, "mlp_size": 48, "num_layers": 2, "max_position": 256}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    return TransformerConfig(family=family, qk_norm=family[:5] == "qwen3", **sizes | heads | changes)


LLAMA3 = RopeConfig(5e5, "llama3", 8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0)
FAMILIES = [
    of_family("qwen2", qkv_bias=True, sliding_window=8, window_layers=(False, True)),
    of_family("qwen3", rope=RopeConfig(1e6, "yarn", 4.0, original_max_position=16)),
    of_family("llama", rope=LLAMA3, tie_embeddings=False),
    of_family("mistral", sliding_window=8, rope=RopeConfig(1e4)),
    of_family("baichuan", num_kv_heads=4, rope=RopeConfig(1e4), tie_embeddings=False),
    of_family("qwen3_moe", moe=MoEConfig(8, 2, expert_size=16), tie_embeddings=False),
    of_family("mixtral", moe=MoEConfig(8, 2, expert_size=48), mlp_size=48, tie_embeddings=False),
]


@needs("transformers 5", "transformers 4")
def test_transformers_4_reads_every_family_as_transformers_5_does(tmp_path):
    """By token ids: the logits of 5 are compared with ours in tests/models, test_model_parity.py and
    test_moe_parity.py."""
    jobs, prompts = [], np.random.default_rng(0).integers(2, 128, (8, 20)).tolist()
    for config in FAMILIES:
        folder = tmp_path / config.family
        save_model(models.init(config, jax.random.key(0)), config, folder, make_tokenizer(), dtype="float32")
        jobs.append((str(folder), "", prompts))
    newest, older = (run_client(f"transformers {version}", tmp_path, jobs) for version in (5, 4))
    assert older == newest
    assert len({tuple(ids) for responses in older for ids in responses}) > 30
