"""Learning curve of a run, curve.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.report import jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#767676"  # distinct for colour-blind people
HELD_OUT = {
    "eval/pass@1": "held-out accuracy",  # of generated answers
    "eval/accuracy": "held-out accuracy",  # of preference pairs
    "eval/win_rate": "win rate against the start",
}
"""Metric from 0 to 1 -> label; the first one with the most points is drawn."""


def draw_curve(run_dir: Path) -> Path | None:
    """Draw run_dir/curve.png from metrics.jsonl.

    Draws training accuracy and reward (or the loss, without a reward), held-out accuracy or win rate, and
    held-out reward (or loss); the SFT warm-up is shaded. A note marks a run without held-out evaluation.
    Returns: the path of the picture, or None without points.
    """
    from matplotlib.figure import Figure  # half a second to import

    rows = jsonl.read_rows(run_dir / "metrics.jsonl")
    train = [row for row in rows if row.get("kind") != "warm_start"]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _style(axes)
    # The series that the run has.
    accuracy, reward, loss = series(train, "accuracy"), series(train, "reward/mean"), series(rows, "loss")
    held_out, label = max(
        ((series(rows, key), label) for key, label in HELD_OUT.items()), key=lambda x: len(x[0])
    )
    held_out_reward, held_out_loss = series(rows, "eval/reward"), series(rows, "eval/loss")
    # Training values as lines, held-out values as points.
    if len(accuracy):
        _line(axes, accuracy, BLUE, "training accuracy")
    if len(reward) and not _equal(reward, accuracy):
        _line(axes, reward, ORANGE, "training reward")
    if len(held_out_reward) and not _equal(held_out_reward, held_out):
        _points(axes, held_out_reward, ORANGE, "held-out reward", form="{:.3g}")
    if len(held_out):
        _points(axes, held_out, GREEN, label, form="{:.1%}")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.0), max(high, 1.08))
    if not len(accuracy) and not len(reward) and len(loss):
        _loss(axes, loss, held_out_loss, second_axis=len(held_out) + len(held_out_reward) > 0)
    elif not len(accuracy) + len(reward) + len(held_out):
        return None
    if not len(held_out) + len(held_out_reward) + len(held_out_loss):
        axes.set_title("no held-out evaluation", loc="right", fontsize=9, color=GREY)
    # The SFT warm-up, cut if it is long.
    warm_up = [row["step"] for row in rows if row.get("kind") == "warm_start"]
    first, last = max(rows[0]["step"] - 1, 0), rows[-1]["step"] + 1
    if warm_up and max(warm_up) < last - 1:  # a long SFT warm-up is cut, to a third of the run's width
        first = max(first, max(warm_up) - (last - max(warm_up)) // 3)
    if warm_up:
        _shade(axes, max(min(warm_up) - 1, first), max(warm_up))
    axes.set_xlim(first, last)
    axes.set_title(run_dir.resolve().name, loc="left", fontsize=13, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    path = run_dir / "curve.png"
    temporary = path.with_name(".curve.tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
    return path


def series(rows: list[jsonl.Row], key: str) -> np.ndarray:
    """Return (step, value) pairs, float64 [n, 2], of the steps that have a number."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return np.asarray(pairs, np.float64).reshape(-1, 2)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred mean over about a twentieth of the run; the window shrinks at the ends."""
    half = len(values) // 40
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _equal(points: np.ndarray, others: np.ndarray) -> bool:
    return points.shape == others.shape and np.allclose(points, others)


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y", color=GREY, alpha=0.2, lw=0.8)
    axes.tick_params(colors=GREY, labelcolor="black")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # half a step is none


def _shade(axes: Axes, start: int, end: int) -> None:
    """Shade the SFT warm-up, with its name at the top."""
    axes.axvspan(start, end, color=GREY, alpha=0.12, lw=0)
    transform = axes.get_xaxis_transform()
    axes.text(
        (start + end) / 2,
        0.98,
        "SFT\nwarm-up",
        transform=transform,
        color=GREY,
        ha="center",
        va="top",
        fontsize=9,
    )


def _line(axes: Axes, points: np.ndarray, color: str, label: str) -> None:
    """Draw the values in a faint colour, and their running mean."""
    steps, values = points.T
    axes.plot(steps, values, color=color, alpha=0.25, lw=1)
    axes.plot(steps, smooth(values), color=color, lw=2, label=label)


def _points(axes: Axes, points: np.ndarray, color: str, label: str, *, form: str) -> None:
    """Draw values of held-out data; the last point is labelled with its value."""
    axes.plot(*points.T, color=color, marker="o", ms=6, lw=1.5, mec="white", label=label, zorder=4)
    step, value = points[-1]
    axes.annotate(
        form.format(value),
        (step, value),
        xytext=(0, 8),
        textcoords="offset points",
        color=color,
        fontweight="bold",
        ha="right",
    )


def _loss(axes: Axes, points: np.ndarray, held_out: np.ndarray, second_axis: bool) -> None:
    """Draw the loss and the held-out loss, on a second axis if the first shows accuracy."""
    if second_axis:
        axes.set_ylabel("accuracy")
        axes = axes.twinx()
        axes.spines[["top", "left"]].set_visible(False)
    _line(axes, points, BLUE, "loss")
    if len(held_out):
        _points(axes, held_out, BLUE, "held-out loss", form="{:.3g}")
    axes.set_ylabel("loss")
