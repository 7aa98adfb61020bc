#!/bin/sh
# An adapter with overlapping keys in rank_pattern or alpha_pattern is another one after save_pretrained and
# from_pretrained: peft 0.21 uses the first key that matches a module, in the order of the dict, and writes the keys of
# adapter_config.json sorted. {"mlp.down_proj": 3, "down_proj": 9} gives the module alpha 3 in the process that trains it,
# and alpha 9 in each process that loads it, so the loaded adapter's effect is three times as large, without a warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "peft==0.21.2" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/adapter" <<'EOF'
import json
import pathlib
import sys

import peft
import torch
import transformers

print("transformers", transformers.__version__, "peft", peft.__version__, "torch", torch.__version__)
SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def factor(model):
    """Return alpha / rank of the one adapted module."""
    [module] = [m for name, m in model.named_modules() if name.endswith("mlp.down_proj")]
    return module.scaling["default"]


pattern = {"mlp.down_proj": 3, "down_proj": 9}
trained = peft.get_peft_model(base(), peft.LoraConfig(r=1, target_modules=["down_proj"], alpha_pattern=pattern))
trained.save_pretrained(sys.argv[1])
stored = json.loads((pathlib.Path(sys.argv[1]) / "adapter_config.json").read_text())["alpha_pattern"]
loaded = peft.PeftModel.from_pretrained(base(), sys.argv[1])
print("given", list(pattern), "stored", list(stored))
print("alpha / rank when trained", factor(trained), "when loaded", factor(loaded))
sys.exit((factor(trained), factor(loaded)) != (3.0, 9.0))
EOF
# Seen:
# transformers 5.24.0 peft 0.21.2 torch 2.13.0+cpu
# given ['mlp.down_proj', 'down_proj'] stored ['down_proj', 'mlp.down_proj']
# alpha / rank when trained 3.0 when loaded 9.0
