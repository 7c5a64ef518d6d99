"""Draws a run: what the model learned, and how long each push took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.demo.record import Run

PHASES = ("plan", "publish", "prepare", "commit", "canary")
COLOURS = ("#c7c7c7", "#4c78a8", "#9ecae9", "#f58518", "#b8a8d0")


def draw(run: Run, path: Path) -> None:
    """Draws the run into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    figure.suptitle(f"{run.model} learns by GRPO, {run.engine} follows", fontsize=14, fontweight="bold")
    plot_rewards(left, run)
    plot_pushes(right, run)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(0.2, len(run.steps) + 0.8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    stack = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    figure.supxlabel(f"{run.processor} · {stack} · seed {run.seed}", fontsize=9, color="dimgray")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_rewards(axes: Any, run: Run) -> None:
    steps = [step.step for step in run.steps]
    groups = [step.group_rewards for step in run.steps]
    axes.fill_between(
        steps,
        [min(g) for g in groups],
        [max(g) for g in groups],
        color="#54a24b",
        alpha=0.18,
        lw=0,
        label="from the worst to the best question",
    )
    for step, rewards in zip(steps, groups, strict=True):
        axes.plot([step] * len(rewards), rewards, ".", color="#54a24b", alpha=0.5, ms=5)
    axes.plot(steps, [step.reward for step in run.steps], "-o", color="#2f6b2a", lw=2, label="mean of the step's questions")
    ends = [steps[0] - 0.5, steps[-1] + 0.5]
    axes.plot(ends, [run.before.reward, run.after.reward], "D", color="#e45756", ms=7, label="questions never trained on")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(f"reward: {run.reward}", fontsize=9)
    axes.legend(loc="lower right", fontsize=9)


def plot_pushes(axes: Any, run: Run) -> None:
    steps = [step.step for step in run.steps]
    seconds = [step.push["seconds"] for step in run.steps]
    bottom = [0.0] * len(steps)
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        parts = ("connect", "describe", "plan") if phase == "plan" else (phase,)
        heights = [1e3 * sum(each.get(part, 0.0) for part in parts) for each in seconds]
        axes.bar(steps, heights, bottom=bottom, color=colour, width=0.66, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    pauses = [1e3 * step.push["pause"] for step in run.steps]
    axes.bar([step + 0.41 for step in steps], pauses, color="black", width=0.1, label="engine paused")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"a push: {run.steps[0].push['nbytes'] / 1e6:.3g} MB in {run.steps[0].push['tensors']} tensors", fontsize=9)
    axes.legend(fontsize=9)
