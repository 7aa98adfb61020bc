#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh virtual environment and trains from it, outside the checkout.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$checkout/.venv/bin/python" -m build --wheel --outdir "$work/dist" "$checkout"
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q "$work"/dist/*.whl
cd "$work"
"$work/venv/bin/python" -m jaxrl_llm.train --config grpo_tiny.py --run_dir "$work/run" \
    --steps 3 --warm_start.steps 3 --eval.prompts 16
test -f "$work/run/hf/model.safetensors" -o -f "$work/run/hf/model.safetensors.index.json"
"$work/venv/bin/python" -m jaxrl_llm export --checkpoint "$work/run" --out "$work/exported"
test -f "$work/exported/config.json"
"$work/venv/bin/python" -m jaxrl_llm view "$work/run"
test -s "$work/run/view.html"
printf '#!/bin/sh\npython -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8\n' > "$work/verl.sh"
"$work/venv/bin/jaxrl-llm" import-config "$work/verl.sh" --out "$work/recipe.py"
test -s "$work/recipe.py"
answer=$("$work/venv/bin/python" -m jaxrl_llm train --config grpo_tiny.py --lora_r 4 2>&1 || true)
grep -q -- "Here it is --lora.rank" <<< "$answer"
if "$work/venv/bin/python" -m pip list 2>/dev/null | grep -iE '^(torch|libtpu|jax-cuda|nvidia)'; then
    echo "the base install brought an accelerator package or torch" >&2
    exit 1
fi
echo "the wheel trains, exports, views and imports configs outside the checkout"
