#!/bin/sh
# OLMo 3's `rope_theta` in the spelling of transformers 4 (one number, at the top of config.json) reaches half of
# the model in transformers 5.24: the key is taken out of the arguments for the layers with full attention, so the
# layers with a sliding window find none and get the default, 500,000. In 4.57 one base served all layers. Released
# models have 500,000, so only a model trained with another base computes something else, without a warning. A
# config.json that names both layer types in `rope_parameters` is read as written.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'EOF'
import sys

import transformers

print("python", sys.version.split()[0], "transformers", transformers.__version__)
old = transformers.AutoConfig.for_model("olmo3", rope_theta=1e6).rope_parameters
both = {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")}
new = transformers.AutoConfig.for_model("olmo3", rope_parameters=both).rope_parameters
bases = [{kind: rope["rope_theta"] for kind, rope in ropes.items()} for ropes in (old, new)]
print("rope_theta 1e6 at the top:", bases[0])
print("rope_parameters of both:  ", bases[1])
expected = {"full_attention": 1e6, "sliding_attention": 500_000.0}
sys.exit(not (bases[0] == expected and set(bases[1].values()) == {1e6}))
EOF
