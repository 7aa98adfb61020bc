#!/bin/sh
# An OLMo-hybrid that transformers 5.24 saves has convolutions of wrong shapes in its file. The model holds the three
# convolutions of a layer with the gated delta rule as one tensor, and save_pretrained splits it into three equal parts,
# whatever the channels of queries, keys and values: 43, 43 and 42 where the projections have 32, 32 and 64. transformers
# joins the parts again when it loads them, so its own round trip is exact; another reader of the safetensors finds
# taps of a key in the tensor of the queries.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'EOF'
import pathlib
import sys

import torch
import transformers
from safetensors import safe_open

print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
config = transformers.OlmoHybridConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=4,
    linear_num_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = transformers.OlmoHybridForCausalLM(config).eval()
model.save_pretrained(sys.argv[1])
shapes = {}
with safe_open(str(pathlib.Path(sys.argv[1]) / "model.safetensors"), "pt") as file:
    for name in ("q", "k", "v"):
        for part in ("proj", "conv1d"):
            key = f"model.layers.0.linear_attn.{name}_{part}.weight"
            shapes[f"{name}_{part}"] = tuple(file.get_slice(key).get_shape())
print(shapes)
again = transformers.OlmoHybridForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(3, 20)[None]
with torch.no_grad():
    difference = float((again(ids).logits - model(ids).logits).abs().max())
print("read again by transformers, largest difference of a logit:", difference)
wrong = [shapes[f"{name}_conv1d"][0] != shapes[f"{name}_proj"][0] for name in ("q", "k", "v")]
sys.exit(not (all(wrong) and difference == 0.0))
EOF
# Seen, without progress bars and notes on slower implementations:
# transformers 5.24.0 torch 2.13.0+cpu
# {'q_proj': (32, 32), 'q_conv1d': (43, 1, 4), 'k_proj': (32, 32), 'k_conv1d': (43, 1, 4), 'v_proj': (64, 32), 'v_conv1d': (42, 1, 4)}
# read again by transformers, largest difference of a logit: 0.0
