#!/bin/sh
# JAX 0.10.2 exchanges gradients of a scan if `with_refs` gets a buffer for a later input and none for an earlier one.
# `jax.vjp(f, a, b)` of a scan over both a and b returns the gradients of a and b; `backward.with_refs(0, buffer)` is
# to return the gradient of a and to add that of b to the buffer. They are exchanged, without an error where both have
# one shape, and with "Expected cotangent type" otherwise. A buffer for a, or for both, is right: the transpose of scan
# puts inputs with buffers first, but the inputs of its body stay in their order.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax[cpu]==${JAX:-0.10.2}"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'EOF'
import sys

import jax
import jax.numpy as jnp

print("jax", jax.__version__)


def f(a, b):
    return jax.lax.scan(lambda sum, x: (sum + 2 * x[0] + 3 * x[1], None), 0.0, (a, b))[0]


def gradients(*with_buffer):
    buffers = [jax.new_ref(jnp.zeros(2)) if wanted else 0 for wanted in with_buffer]
    _, backward = jax.vjp(f, jnp.ones(2), jnp.ones(2))
    found = backward.with_refs(*buffers)(1.0)
    return [(buffer[...] if wanted else x).tolist() for wanted, buffer, x in zip(with_buffer, buffers, found)]


right = [[2.0, 2.0], [3.0, 3.0]]
seen = {which: gradients(*which) for which in ((0, 0), (1, 0), (1, 1), (0, 1))}
for which, found in seen.items():
    print("buffers", which, found, "" if found == right else "exchanged")
sys.exit(seen.pop((0, 1)) != right[::-1] or any(found != right for found in seen.values()))
EOF
