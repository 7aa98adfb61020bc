#!/bin/sh
# The tensors of a LoRA of Nemotron-H that peft 0.21 saves with transformers 5.24 do not have the names of the model's
# own file: weights are saved as backbone.layers.1.mixer.q_proj.weight (transformers renames its decoder, "model", on the
# way), the adapter as base_model.model.model.layers.1.mixer.q_proj.lora_A.weight. Whoever matches an adapter with the
# base by name finds no weight for it. peft itself reads both names.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "peft==0.21.2" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'EOF'
import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "layers_block_type": ["mamba", "attention", "mlp"],
}
print("transformers", transformers.__version__, "peft", peft.__version__, "torch", torch.__version__)
folder, tokens = pathlib.Path(sys.argv[1]), torch.arange(3, 20)[None]


def base():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("nemotron_h", **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model):
    with torch.no_grad():
        return model(tokens).logits


base().save_pretrained(folder / "model")
lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
adapted = peft.get_peft_model(base(), lora).eval()
adapted.save_pretrained(folder / "model_names")
weights = load_file(folder / "model/model.safetensors")
adapter = load_file(folder / "model_names/adapter_model.safetensors")
print("weights", [name for name in weights if "q_proj" in name], "adapter", *sorted(adapter), sep="\n  ")
without_prefix = {name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for name in adapter}
named = {name.replace("model.model.", "model.backbone.", 1): x for name, x in adapter.items()}
(folder / "file_names").mkdir()
save_file(named, folder / "file_names/adapter_model.safetensors")
config = (folder / "model_names/adapter_config.json").read_text()
(folder / "file_names/adapter_config.json").write_text(config)
same = []
for names in ("model_names", "file_names"):
    found = logits(peft.PeftModel.from_pretrained(base(), folder / names).eval())
    same.append(torch.equal(found, logits(adapted)) and not torch.equal(found, logits(base())))
    print(f"peft reads {names}: {same[-1]}")
sys.exit(not (all(same) and without_prefix.isdisjoint(weights)))
EOF
