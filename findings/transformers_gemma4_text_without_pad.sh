#!/bin/sh
# A Gemma 4 that also sees images (Gemma4ForConditionalGeneration, transformers 5.24) cannot read text alone if its
# pad_token_id is null: before it looks for images it fills their places with that id, and raises a TypeError also
# where there are none. Its language model, of the same weights and text_config, reads the text. So a tokenizer without a
# padding token, which no batch of one text needs, makes folders of the whole model unusable.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers

TEXT = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 16, "num_kv_shared_layers": 0},
    **{"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
}
print("transformers", transformers.__version__, "torch", torch.__version__)
tokens, failed = torch.arange(3, 20)[None], {}
for pad in (0, None):
    text = {**TEXT, "pad_token_id": pad}
    config = transformers.AutoConfig.for_model(
        "gemma4", text_config=text, vision_config=VISION, audio_config=None
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    language = transformers.AutoModelForCausalLM.from_config(config.text_config).eval()
    for model in (whole, language):
        name = type(model).__name__
        try:
            with torch.no_grad():
                model(input_ids=tokens)
        except TypeError as error:
            failed[name, pad] = True
            print(f"{name}, pad_token_id {pad}: TypeError: {str(error)[:60]}")
        else:
            print(f"{name}, pad_token_id {pad}: reads the text")
sys.exit(list(failed) != [("Gemma4ForConditionalGeneration", None)])
EOF
