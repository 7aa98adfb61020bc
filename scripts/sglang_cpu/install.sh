#!/usr/bin/env bash
# A virtual environment with SGLang that runs on a CPU, for trying and testing the bridge (2.7 GB):
#     scripts/sglang_cpu/install.sh .venv-sglang
# Its Python is then DIR/bin/python; servers need the flags that docs/servers.md shows.
set -euo pipefail
dir=${1:?"give the directory of the virtual environment"}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3.11}
if ! "$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" 2>/dev/null; then
  echo "SGLang's packages are pinned for Python 3.11, and $python is none. Install it, or name it: PYTHON=/path/to/python3.11 $0 $dir" >&2
  exit 1
fi
"$python" -m venv "$dir"
pip="$dir/bin/python -m pip install -q"
$pip torch==2.13.0
$pip transformers==5.19.0 tokenizers==0.23.2 numpy aiohttp fastapi "uvicorn>=0.51" uvloop orjson pyzmq requests psutil \
  setproctitle pybase64 partial_json_parser prometheus-client pydantic python-multipart msgspec pillow \
  packaging regex einops interegular IPython tqdm xxhash watchfiles scipy safetensors openai==2.8.0 \
  openai-harmony==0.0.4 anthropic "mistral_common>=1.11.5" loguru "llguidance>=1.7.6,<2" numba==0.65.1 distro \
  easydict python-dateutil dill sentencepiece==0.2.1
# Without their dependencies: those are CUDA packages, and nothing on a CPU calls them.
$pip --no-deps sglang==0.5.23 triton==3.7.1 torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7 \
  outlines==0.1.11 outlines_core==0.1.26 soundfile==0.13.1 cffi apache-tvm-ffi==0.1.11 gguf torch_memory_saver \
  sglang-router==0.3.2
site=$("$dir/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp -r "$here/shim/sgl_kernel" "$here/shim/sitecustomize.py" "$site/"
echo "$dir/bin/python has SGLang"
