#!/bin/sh
# Importing ml_dtypes 0.7.0 takes over 100 times as long as 0.6.0: 0.4 s of processor time rather than 3.5 ms, in each process
# that imports jax, which is half of jax's import. It registers loops of numpy's ufuncs for pairs of its types, and
# numpy looks for each new loop in the list of the earlier ones, so the time grows with the square of their number.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "numpy==2.4.6"
for version in 0.6.0 0.7.0; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" "ml_dtypes==$version"
done
"$folder/venv/bin/python" - "$folder" <<'EOF'
import subprocess
import sys

code = """
import time

import numpy

start = time.process_time()
import ml_dtypes

print(time.process_time() - start, ml_dtypes.__version__, numpy.__version__)
"""
seconds = {}
for version in ("0.6.0", "0.7.0"):
    runs = []
    for _ in range(5):
        environment = {"PYTHONPATH": f"{sys.argv[1]}/{version}", "OPENBLAS_NUM_THREADS": "1"}
        printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        runs.append(float(printed.split()[0]))
        assert printed.split()[1:] == [version, "2.4.6"]
    seconds[version] = sorted(runs)[2]
    print("ml_dtypes", version, "with numpy 2.4.6: median of 5 imports", round(seconds[version], 4), "CPU s")
print("ratio", round(seconds["0.7.0"] / seconds["0.6.0"]))
sys.exit(seconds["0.7.0"] < 20 * seconds["0.6.0"])
EOF
