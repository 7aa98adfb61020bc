"""Loss inputs laid out by hand: which sequence lies in which row of which micro-batch, NaN elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.structs import LossInputs

T = 24


def lay_out(lengths, rows, **per_token):
    """Inputs of one micro-batch as a function of the policy's log-probs of all trained tokens, end to end.

    A sequence of n trained tokens takes n + 2 places: one of the prompt, n, and a last one without target.

    Args:
        lengths: trained tokens of each sequence.
        rows: for each row the numbers of its sequences.
        per_token: name -> for each sequence what its trained tokens hold ([n] or a number); "values" is
            what its last place holds.
    """
    starts = np.cumsum([0, *lengths])
    place = np.full((len(rows), T), -1)
    segments, counts = np.zeros((len(rows), T), np.int32), np.ones((len(rows), T), np.float32)
    arrays = {name: np.full((len(rows), T), np.nan, np.float32) for name in per_token}
    for row, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, 1):
            end = at + lengths[i] + 2
            segments[row, at:end], counts[row, at:end] = segment, lengths[i]
            place[row, at + 1 : end - 1] = np.arange(starts[i], starts[i + 1])
            for name, values in per_token.items():
                where = end - 1 if name == "values" else slice(at + 1, end - 1)
                arrays[name][row, where] = values[i]
            at = end

    def loss_inputs(logprobs, num_tokens, num_sequences, **more):
        return LossInputs(
            logprobs=jnp.where(place >= 0, logprobs[place], jnp.nan),
            mask=jnp.asarray(place >= 0, jnp.float32),
            segments=jnp.asarray(segments),
            lengths=jnp.asarray(counts),
            num_tokens=jnp.float32(num_tokens),
            num_sequences=jnp.float32(num_sequences),
            **{name: jnp.asarray(x) for name, x in arrays.items()},
            **more,
        )

    return loss_inputs


def run(algorithm, config, logprobs, microbatches, **per_token):
    """(loss, metrics, gradient in the log-probs of each sequence) of a mini-batch.

    Args:
        policy: for each sequence the log-probs of its trained tokens.
        microbatches: for each micro-batch its rows, for each row the numbers of its sequences.
    """
    lengths = [len(p) for p in logprobs]
    flat = jnp.asarray(np.concatenate(logprobs), jnp.float32)
    made = [lay_out(lengths, rows, **per_token) for rows in microbatches]

    def total(flat):
        sizes = (sum(lengths), len(lengths))
        parts = [m(flat, *sizes) for m in made]
        if algorithm.baseline:
            z = sum(algorithm.baseline(part, config) for part in parts)
            parts = [m(flat, *sizes, baseline=z) for m in made]
        out = [algorithm.loss(part, config) for part in parts]
        metrics = {name: sum(metrics[name] for _, metrics in out) for name in out[0][1]}
        return sum(loss for loss, _ in out), metrics

    (loss, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(flat)
    return (
        float(loss),
        {name: float(x) for name, x in metrics.items()},
        np.split(np.asarray(gradient), np.cumsum(lengths)[:-1]),
    )
