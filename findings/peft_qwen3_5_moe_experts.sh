#!/bin/sh
# An adapter of the experts of Qwen3.5-MoE (text) is ignored by peft 0.21 with transformers 5.24: PeftModel finds
# no table of renamed weights for `qwen3_5_moe_text`, whose experts transformers 5 keeps in one parameter, so it
# creates adapters for the other layers alone and drops the experts' tensors of the file. Of a LoRA that was trained
# on experts by name (gate_proj, up_proj, down_proj), the outputs are those of the other adapters. The same file on
# Qwen3-MoE is loaded with its experts. The only trace is a warning about rank_pattern keys, of which the file has none.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "peft==0.21.2" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'EOF'
import json
import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "full_attention_interval": 1},
}
print("transformers", transformers.__version__, "peft", peft.__version__, "torch", torch.__version__)


def logits(family, size):
    """Return logits with an adapter of q_proj and of the experts, whose B have this size."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, layer_types=["full_attention"] * 2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    adapter = {}
    for layer in range(2):
        queries = model.model.layers[layer].self_attn.q_proj.weight.shape[0]
        shapes = {"self_attn.q_proj": (queries, 32, 1.0)}
        for expert in range(4):
            shapes |= {f"mlp.experts.{expert}.{name}_proj": (16, 32, size) for name in ("gate", "up")}
            shapes[f"mlp.experts.{expert}.down_proj"] = 32, 16, size
        for name, (rows, columns, scale) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            adapter[f"{path}.lora_A.weight"] = torch.randn(4, columns)
            adapter[f"{path}.lora_B.weight"] = scale * torch.randn(rows, 4)
    folder = pathlib.Path(sys.argv[1]) / f"{family}{size}"
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 64}
    lora |= {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        return adapted(torch.arange(3, 20)[None]).logits


effects = {}
for family in ("qwen3_moe", "qwen3_5_moe_text"):
    without, with_experts = logits(family, 0.0), logits(family, 1.0)
    effects[family] = float((with_experts - without).abs().max())
    print(f"{family}: largest change of a logit by the experts' adapters {effects[family]:.3f}")
sys.exit(not (effects["qwen3_moe"] > 0.1 and effects["qwen3_5_moe_text"] == 0.0))
EOF
