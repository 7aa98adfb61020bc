#!/bin/sh
# transformers 5.24 does not read "qwen3moe.expert_feed_forward_length" of a GGUF file: moe_intermediate_size is its
# config's default, 768, whatever the file says. That is the size of Qwen3-30B-A3B's experts, so its files load; those of
# another size (Qwen3-235B-A22B has 1536) get a config of other experts, without a warning about that key.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0" "gguf==0.19.0" "torch==2.13.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'EOF'
import importlib.metadata
import sys

from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "gguf", "torch")))
file = f"{sys.argv[1]}/model.gguf"
writer = GGUFWriter(file, "qwen3moe")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(64)
writer.add_feed_forward_length(96)
writer.add_head_count(2)
writer.add_head_count_kv(1)
writer.add_key_length(32)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_expert_count(4)
writer.add_expert_used_count(2)
writer.add_expert_feed_forward_length(1536)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

stored = GGUFReader(file).get_field("qwen3moe.expert_feed_forward_length").contents()
config = AutoConfig.from_pretrained(sys.argv[1], gguf_file="model.gguf")
print("experts", config.num_experts, "of a token", config.num_experts_per_tok)
print("size of an expert in the file", stored, "in the config", config.moe_intermediate_size)
sys.exit((stored, config.moe_intermediate_size) != (1536, 768))
EOF
# Seen:
# transformers 5.24.0 gguf 0.19.0 torch 2.13.0+cpu
# experts 4 of a token 2
# size of an expert in the file 1536 in the config 768
