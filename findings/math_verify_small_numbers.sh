#!/bin/sh
# math-verify 0.9.0 accepts a number that is wrong by any factor where both are small: floats are rounded to six
# decimals and other numbers compared with evalf(chop=True), so 3.2e-19 "equals" 1.6e-19, and 1/2^98 "equals"
# 1/2^99. Its documentation names float_rounding (6) and numeric_precision (15) without saying that
# they are decimals, not significant digits. And two boxes that are near each other are one set, so that a
# corrected answer, \boxed{41}, no, \boxed{42}, is not 42.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "math-verify==0.9.0" "sympy==1.14.0" "latex2sympy2_extended==1.11.0"
"$folder/venv/bin/python" - <<'END'
import importlib.metadata
import sys

from math_verify import parse, verify

for name in ("math-verify", "sympy", "latex2sympy2_extended"):
    print(name, importlib.metadata.version(name))
cases = [
    (r"1.6\times 10^{-19}", r"\boxed{3.2\times 10^{-19}}", True),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", True),
    ("1.6", r"\boxed{3.2}", False),
    ("42", r"\boxed{41}, no, \boxed{42}", False),
    ("42", r"\boxed{42}", True),
]
seen = []
for gold, given, expected in cases:
    equal = verify(parse(f"${gold}$"), parse(given))
    print(f"gold {gold}, response {given}: {equal}")
    seen.append(equal == expected)
sys.exit(not all(seen))
END
