"""CPU kernels of Qwen3.5 in plain torch, which SGLang does not publish: slow, for small models in tests.

The gated delta rule (arXiv 2412.06464) adds tokens one by one. A state has the axes heads, values, keys.
"""

# ruff: noqa: PLR0917 - SGLang passes these arguments by position

import torch
from torch.nn.functional import conv1d, silu, softplus


def causal_conv1d_fn_cpu(
    x, weight, bias, *, conv_states, has_initial_state, cache_indices, query_start_loc, **_
):
    """Convolve the rows of x (channels x tokens), and keep the last inputs of each row in its state."""
    out = torch.empty_like(x)
    for i, slot in enumerate(cache_indices.tolist()):
        start, end = query_start_loc[i : i + 2].tolist()
        state = conv_states[slot] * has_initial_state[i]
        inputs = torch.cat([state, x[:, start:end]], dim=1)
        out[:, start:end] = silu(conv1d(inputs, weight[:, None], bias, groups=len(weight)))
        conv_states[slot] = inputs[:, -state.shape[1] :]
    return out


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices):
    rows, old = torch.arange(len(x) + 1), torch.ones(len(x))
    states = {"conv_states": conv_states, "has_initial_state": old, "cache_indices": conv_state_indices}
    return causal_conv1d_fn_cpu(x.T, weight, bias, query_start_loc=rows, **states).T


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    return -A_log.float().exp() * softplus(a.float() + dt_bias), b.float().sigmoid()


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    """Return the outputs (1 x tokens x heads x values), and change the states."""
    out, repeats = torch.empty_like(v), v.shape[2] // k.shape[2]
    q, k = (x[0].float().repeat_interleave(repeats, dim=1) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, decay, beta = q * q.shape[-1] ** -0.5, g.view(v.shape[1:3]).exp(), beta.view(v.shape[1:3])
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for t in range(*cu_seqlens[i : i + 2].tolist()):
            state = state * decay[t, :, None, None]
            change = beta[t, :, None] * (v[0, t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + change[..., None] * k[t, :, None]
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t])
        initial_state[slot] = state
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **_
):
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens
    )[0]


def rms_norm(x, weight, eps):
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    return rms_norm(x, weight, eps) * silu(z)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    q, gate = q_gate.view(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    k = rms_norm(k.view(len(k), -1, head_dim), 1 + k_weight.float(), eps)
    return tuple(x.flatten(1) for x in (rms_norm(q, 1 + q_weight.float(), eps), k, gate))


def fused_sigmoid_mul_cpu(x, gate):
    x.mul_(gate.sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, k_heads, v_heads, k_dim, v_dim):
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv, z.unflatten(-1, (v_heads, v_dim)), b, a


for name in [name for name in globals() if name.startswith("fused_")]:
    setattr(torch.ops.sgl_kernel, name, globals()[name])
torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_cpu = None  # of models whose attention has no gate
