#!/bin/sh
# safetensors 0.8.0 with numpy writes the types of ml_dtypes that it does not read. `save_file` takes bfloat16 and
# float8_e4m3fn, the types of published model folders. `load_file` and `get_slice` read bfloat16 and raise
# AttributeError for float8, which they look for in numpy itself; `load`, from bytes, raises KeyError for bfloat16, too.
# Without torch, float8 has to be taken from the file's bytes by the offsets of its header.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "safetensors==0.8.0" "numpy==2.4.6" "ml_dtypes==0.6.0"
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys

import ml_dtypes
import numpy
import safetensors
import safetensors.numpy

print("safetensors", safetensors.__version__, "numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)


def get_slice(file):
    with safetensors.safe_open(file, framework="np") as handle:
        return handle.get_slice("x")[0:2]


def load(file):
    with open(file, "rb") as handle:
        return safetensors.numpy.load(handle.read())["x"]


seen = {}
for name in ("bfloat16", "float8_e4m3fn"):
    file = f"{sys.argv[1]}/{name}.safetensors"
    safetensors.numpy.save_file({"x": numpy.arange(4).reshape(2, 2).astype(getattr(ml_dtypes, name))}, file)
    for read in (get_slice, lambda file: safetensors.numpy.load_file(file)["x"], load):
        way = "load_file" if read.__name__ == "<lambda>" else read.__name__
        try:
            seen[name, way] = read(file).tolist()
        except (AttributeError, KeyError) as error:
            seen[name, way] = f"{type(error).__name__}: {error}"
        print(name, way, seen[name, way])
numbers = [[0.0, 1.0], [2.0, 3.0]]
read = {key: "numbers" if value == numbers else value.split(":")[0] for key, value in seen.items()}
expected = {("bfloat16", way): "numbers" for way in ("get_slice", "load_file")} | {("bfloat16", "load"): "KeyError"}
expected |= {("float8_e4m3fn", way): "AttributeError" for way in ("get_slice", "load_file")}
sys.exit(read != expected | {("float8_e4m3fn", "load"): "KeyError"})
EOF
