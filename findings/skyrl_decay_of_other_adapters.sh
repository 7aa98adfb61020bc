#!/bin/sh
# SkyRL 0.3.0, JAX backend: an optimizer step of one adapter shrinks the adapters of all other models that the
# engine holds. Their slots are rows of the same arrays; gradients of other slots are set to zero, but AdamW's
# weight decay needs no gradient: each step of a client with weight_decay w and learning rate l multiplies the
# others' A and B by 1 - l w, and their trained weights fade without a call of their owners. It does not happen
# with weight_decay 0, which is Tinker's default.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch "skyrl[jax,tinker]==0.3.0"
JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'EOF'
import importlib.metadata
import logging
import sys
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import numpy as np
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tinker import types
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

versions = {name: importlib.metadata.version(name) for name in ("skyrl", "jax", "flax", "optax")}
print("python", sys.version.split()[0], versions)
folder = sys.argv[1]
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
config = Qwen3Config(vocab_size=32, tie_word_embeddings=True, **sizes, **heads)
Qwen3ForCausalLM(config).save_pretrained(folder)
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)

engine = JaxBackend(folder, JaxBackendConfig(max_lora_adapters=3, max_lora_rank=4))
for name in ("one", "other"):
    engine.create_model(name, types.LoraConfig(rank=4, alpha=8, seed=0))
slot = engine.models["other"].adapter_index


def weights():
    layers = engine.lora_params["model"]["layers"]["_stacked"]
    return np.asarray(layers["mlp"]["down_proj"]["lora_A"][...])[0, slot]


seen = {}
for decay in (0.0, 0.5):
    before = weights()
    adam = types.AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay)
    engine.optim_step("one", types.OptimStepInput(adam_params=adam))
    seen[decay] = sorted({round(float(x), 4) for x in (weights() / before).flat})
    print(f"a step of model one with weight_decay {decay}: A of model other is multiplied by {seen[decay]}")
sys.exit(seen != {0.0: [1.0], 0.5: [0.995]})
EOF
