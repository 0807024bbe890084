"""The figures of notebook 02, from the tables of dspark.ablation, dspark.schedule and dspark.batched."""

import itertools

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from dspark.plots import COLUMN, PAGE, STYLE, Plot

LABELS = {
    "none": "no head (DFlash)", "markov": "Markov", "confidence": "confidence", "both": "both (DSpark)",
    "joint": "both, trained jointly",
    "gated": "gated Markov + confidence", "rnn": "rnn Markov + confidence",
}  # fmt: skip
_COLOURS, _MARKERS = sns.color_palette("colorblind").as_hex(), "os^Dv<>P"
LEAST_BLOCKS = 20  # of a bin that is drawn
_SEEDS = "line: mean over seeds, band: their range"


def _lines(ax, data: pd.DataFrame, x: str, y: str, group: str) -> None:
    """A line a group in order of appearance, with a band from y_low to y_high where the data has them."""
    looks = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKERS))  # noqa: B905
    for (name, line), (colour, marker) in zip(data.groupby(group, sort=False), looks):  # noqa: B905
        ax.plot(line[x], line[y], color=colour, marker=marker, label=LABELS.get(name, str(name)))
        if f"{y}_low" in line:
            ax.fill_between(line[x], line[f"{y}_low"], line[f"{y}_high"], color=colour, alpha=0.15, linewidth=0)


def _over(data: pd.DataFrame, by: list[str], y: str) -> pd.DataFrame:
    """Mean and range of y over seeds or rounds, as columns y, y_low, y_high."""
    grouped = data.groupby(by, sort=False)[y]
    return pd.DataFrame({y: grouped.mean(), f"{y}_low": grouped.min(), f"{y}_high": grouped.max()}).reset_index()


def _legend(figure: Figure, ax, ncols: int) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=ncols)


@mpl.rc_context(STYLE)
def acceptance_of_arms(positions: pd.DataFrame) -> Plot:
    """Conditional and unconditional acceptance per position (the paper's figure 2); positions: ablation.by_position."""
    sides = [_over(positions, ["heads", "position"], y) for y in ("conditional", "unconditional")]
    figure = Figure((PAGE, 2.4))
    axes = figure.subplots(1, 2, sharey=True)
    labels = ("Accepted given all before it", "Accepted with all before it")
    for ax, data, y in zip(axes, sides, labels, strict=True):
        _lines(ax, data, "position", data.columns[2], "heads")
        ax.set(xlabel="Draft position $k$", ylabel=y, xticks=sorted(data.position.unique()), ylim=(-0.03, 1.03))
    _legend(figure, axes[0], 4)
    caption = (f"Acceptance per draft position, blocks of all benchmarks pooled ({_SEEDS}). A detached confidence head "
               "changes no draft: its arms lie on those without it.")  # fmt: skip
    return Plot(figure, sides[0].merge(sides[1]), caption, {"error_bars": "range over seeds"})


@mpl.rc_context(STYLE)
def block_sizes(seeds: pd.DataFrame) -> Plot:
    """Accepted length and drafting time against block size (the paper's figure 4); seeds: ablation.by_seed."""
    depth = seeds.num_hidden_layers.astype(str) + np.where(seeds.num_hidden_layers == 1, " layer", " layers")
    data = seeds.assign(drafter=seeds.heads.map(LABELS) + ", " + depth)
    sides = [_over(data, ["drafter", "block_size"], y).sort_values("block_size") for y in ("tau", "draft_ms")]
    figure = Figure((PAGE, 2.4))
    axes = figure.subplots(1, 2)
    labels = ("Accepted length τ", "Drafting a block (ms)")
    for ax, side, y in zip(axes, sides, labels, strict=True):
        _lines(ax, side, "block_size", side.columns[2], "drafter")
        ax.set(xlabel="Block size γ = n", ylabel=y, xticks=sorted(side.block_size.unique()))
    axes[1].set_ylim(0)
    _legend(figure, axes[0], 3)
    spread = _SEEDS if seeds.seed.nunique() > 1 else "one seed: differences of a few hundredths are noise"
    caption = f"Accepted length, and the median time of drafting one block alone ({spread})."
    return Plot(figure, sides[0].merge(sides[1]), caption, {"error_bars": "range over seeds"})


@mpl.rc_context(STYLE)
def reliability_diagrams(bins: pd.DataFrame) -> Plot:
    """Predicted against observed prefix survival, a panel a position (the paper's figure 6).

    bins: rows of schedule.reliability with `position` and `calibration` (before STS, after STS)."""
    positions = sorted(bins.position.unique())
    bins = bins[bins.blocks >= LEAST_BLOCKS]
    columns = min(4, len(positions))
    figure = Figure((PAGE, 0.6 + 1.6 * -(-len(positions) // columns)))
    axes = figure.subplots(-(-len(positions) // columns), columns, sharex=True, sharey=True, squeeze=False).ravel()
    for ax, position in itertools.zip_longest(axes, positions):
        if position is None:
            ax.set_axis_off()
            continue
        ax.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
        _lines(ax, bins[bins.position == position], "predicted", "observed", "calibration")
        ax.set(title=f"$k={position}$", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    figure.supxlabel("Predicted: drafts 1 to $k$ survive", fontsize=8)
    figure.supylabel("Observed", fontsize=8)
    _legend(figure, axes[0], 2)
    caption = ("Prefix survival, predicted and observed, in ten bins of equal width, on prompts that no fit has seen; "
               f"bins of fewer than {LEAST_BLOCKS} blocks are left out.")  # fmt: skip
    return Plot(figure, bins, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def step_costs(profile: pd.DataFrame) -> Plot:
    """Milliseconds of a step against the tokens that it verifies, a line for each number of requests."""
    data = profile.assign(line="R = " + profile.requests.astype(str))
    figure = Figure((PAGE, 2.4))
    axes = figure.subplots(1, 2)
    for ax, y, label in zip(axes, ("step_ms", "sps"), ("A step (ms)", "Steps per second"), strict=True):
        _lines(ax, data, "tokens", y, "line")
        ax.set(xlabel="Tokens verified $B$", ylabel=label, ylim=(0, None))
        ax.set_xscale("log", base=2)
    _legend(figure, axes[0], 5)
    caption = "What a whole step costs (draft, verify, commit), measured in the engine: medians, R requests, B tokens."
    return Plot(figure, data, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def threshold_sweep(table: pd.DataFrame, undrafted: float) -> Plot:
    """What a confidence threshold saves and costs (the paper's figure 5); rows of scheduling.csv with `threshold`, and
    the decoding tokens/s of the target alone under the same load."""
    figure = Figure((PAGE, 2.2))
    axes = figure.subplots(1, 3)
    table = table.sort_values("threshold")
    labels = {"tau": "Accepted length τ", "verified_per_token": "Verified per token",
              "decode_tokens_per_s": "Tokens/s"}  # fmt: skip
    for ax, (y, label) in zip(axes, labels.items(), strict=True):
        _lines(ax, table, "threshold", y, "drafter")
        ax.set(xlabel="Threshold on survival", ylabel=label)
    axes[2].axhline(undrafted, color="0.3", linewidth=0.8, linestyle=(0, (1, 1)), label="no drafts")
    _legend(figure, axes[2], 3)
    caption = (f"Verifying only drafts whose survival reaches a threshold, at concurrency {table.concurrency.iloc[0]}: "
               "what is left of τ, what is computed, and the speed, beside that of the target alone.")  # fmt: skip
    return Plot(figure, table, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def ranking_of_confidences(calibration: pd.DataFrame) -> Plot:
    """AUROC of prefix survival by position, a line for each source of confidences; rows of schedule.calibration_table
    with `confidence`."""
    figure = Figure((COLUMN, 2.2))
    ax = figure.subplots()
    ax.axhline(0.5, color="0.7", linewidth=0.8)
    _lines(ax, calibration, "position", "auroc_after", "confidence")
    ax.set(xlabel="Draft position $k$", ylabel="AUROC of “drafts 1 to $k$ survive”", ylim=(0.45, 1))
    _legend(figure, ax, 1)
    caption = (
        "How well confidences rank prefixes by whether they survive (0.5: not at all), on prompts no fit has seen."
    )
    return Plot(figure, calibration, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def load_curves(table: pd.DataFrame) -> Plot:
    """Throughput against concurrency, and against the speed of one user (the paper's figures 7 and 8)."""
    table = table.assign(each=table.decode_tokens_per_s / table.concurrency)
    sides = [_over(table, ["policy", "concurrency"], y) for y in ("decode_tokens_per_s", "each")]
    data = sides[0].merge(sides[1])
    figure = Figure((PAGE, 2.8))
    left, right = figure.subplots(1, 2)
    _lines(left, data, "concurrency", "decode_tokens_per_s", "policy")
    _lines(right, data.drop(columns=["decode_tokens_per_s_low", "decode_tokens_per_s_high"]), "each",
           "decode_tokens_per_s", "policy")  # fmt: skip
    left.set(xlabel="Requests at once", ylabel="Tokens/s, all requests", xticks=sorted(data.concurrency.unique()))
    right.set(xlabel="Tokens/s of each request", ylabel="Tokens/s, all requests")
    _legend(figure, left, 3)
    caption = ("Decoding speed under load, prefills left out. Left: all requests together (line: mean over rounds, "
               "band: their range). Right: against the speed of each, concurrency falling.")  # fmt: skip
    return Plot(figure, data, caption, {"error_bars": "range over rounds"})
