"""Every figure of the project, drawn from the tidy tables that the evaluation writes.

A figure function takes a `pandas.DataFrame` with the columns of `n_sweep.csv` and returns a `Plot`: the
matplotlib figure, a table of exactly what is drawn, a caption, and how the numbers came about. `save` writes
the four files of a plot. Nothing is resampled here: intervals come from the table. A missing number is a gap.

A figure shows one setting (`SETTING`); select the rows first:

    table = pd.read_csv("n_sweep.csv").query("engine == 'dspark' and temperature == 0")
    save(speedup_vs_n(table), "speedup_vs_n", folder, meta)
"""

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from scipy.optimize import isotonic_regression

COLUMN, PAGE = 3.25, 6.75  # inches: one column and across both, so that figures print at their own size

# DejaVu Sans ships with matplotlib: no font look-up, the same bytes on every machine.
STYLE = {
    **sns.axes_style("ticks", {"axes.spines.top": False, "axes.spines.right": False}),
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("axes.labelsize", "axes.titlesize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 6),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "text.usetex": False,
    "pdf.fonttype": 42,  # TrueType: text in the PDF stays text
    "savefig.bbox": None,  # a tight box would change the printed width
}

_BLUE, _ORANGE, _GREEN, _, _PINK, _BROWN, _, _GREY, _, _SKY = sns.color_palette("colorblind").as_hex()

# Keyword arguments of `Axes.plot`. The order is the order of legends and bars.
DRAFTER_STYLE = {
    "autoregressive": {"color": _GREY, "marker": "", "linestyle": (0, (1, 1)), "label": "Autoregressive"},
    "dspark": {"color": _BLUE, "marker": "o", "linestyle": "-", "label": "DSpark"},
    "dspark-scheduled": {"color": _SKY, "marker": "P", "linestyle": (0, (4, 1, 1, 1)), "label": "DSpark, scheduled"},
    "dflash": {"color": _ORANGE, "marker": "s", "linestyle": (0, (5, 1.5)), "label": "DFlash"},
    "eagle3": {"color": _GREEN, "marker": "^", "linestyle": (0, (3, 1, 1, 1)), "label": "Eagle3"},
    "eagle3-mla": {"color": _PINK, "marker": "D", "linestyle": (0, (1, 0.7)), "label": "Eagle3-MLA"},
    "prompt-lookup": {"color": _BROWN, "marker": "v", "linestyle": (0, (2, 1)), "label": "Prompt lookup"},
}

# The order is the order of bars. The project's own sets keep their own names: they are not the benchmarks.
BENCHMARK_LABELS = {
    name: name
    for name in (
        "GSM8K",
        "MATH500",
        "AIME",
        "HumanEval",
        "LiveCodeBench",
        "SPEED-Bench Coding",
        "own-gsm8k",
        "own-math500",
        "own-aime",
        "own-humaneval",
        "own-livecodebench",
        "own-speed-coding",
    )
} | {"SPEED-Bench Coding": "SPEED-Bench\nCoding"}

# A figure that mixed two of these would compare what is not comparable.
SETTING = ("profile", "engine", "target", "temperature", "concurrency", "seed", "dtype")
MARKED_N = (3, 7)  # the two that the published results report
LEAST_REACHED = 30  # steps: of fewer no share is drawn
MASK_COLOURS = {"context": _BLUE, "own block": _ORANGE, "not visible": "#ececec"}
_SPEEDUP = "Speedup is tokens/s over the autoregressive tokens/s of the same engine, prompts and settings."
_GAP = "A gap is a value that was not measured on every benchmark."


@dataclass(frozen=True)
class Plot:
    """A figure with all that a reader needs to check it; shows itself at the end of a notebook cell.

    figure: drawn at printed size.
    data: one row a drawn mark, missing numbers as NaN.
    caption: what is shown, over what, with what intervals.
    how: "error_bars" (what they are), "setting" and "prompts" (benchmark -> count); goes into the JSON.
    """

    figure: Figure
    data: pd.DataFrame
    caption: str
    how: dict

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


def save(plot: Plot, name: str, folder: str | Path, meta: dict) -> list[Path]:
    """Write NAME.pdf, .png (200 dpi), .csv (exactly what is drawn) and .json (how), replacing what is there.

    meta: metadata of the run behind the table, as in the .json beside it: commit, whether the tree was clean,
        package versions, machine, device, seed. Stored as it is under "run".
    The same plot gives the same bytes: no dates, no versions.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pdf, png, csv, how = (folder / f"{name}.{ending}" for ending in ("pdf", "png", "csv", "json"))
    with mpl.rc_context(STYLE):
        plot.figure.savefig(pdf, metadata={"CreationDate": None, "Creator": "dspark", "Producer": None})
        plot.figure.savefig(png, dpi=200, metadata={"Software": "dspark"})
    plot.data.to_csv(csv, index=False, lineterminator="\n")
    record = {"figure": name, "caption": plot.caption, **plot.how, "run": meta}
    how.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [pdf, png, csv, how]


@mpl.rc_context(STYLE)
def speedup_vs_n(table: pd.DataFrame, published: pd.DataFrame | None = None) -> Plot:
    """Mean speedup of the benchmarks against n for each drafter, with its 95% band; its values at n = 3 and 7 beside.

    published: means of others' benchmarks (target, drafter, n, speedup, source) to draw hollow beside the measured.

    The band treats the B benchmarks as independent: half-width = sqrt(sum_b half_b^2) / B, half_b from the
    bootstrap interval of benchmark b.
    """
    how = _check(table, "speedup", "speedup_low", "speedup_high")
    speedup, low, high = (_by_benchmark(table, c) for c in ("speedup", "speedup_low", "speedup_high"))
    half = np.sqrt((((high - low) / 2) ** 2).sum(axis=1, skipna=False)) / speedup.shape[1]
    mean = speedup.mean(axis=1, skipna=False)
    data = pd.DataFrame({"speedup": mean, "speedup_low": mean - half, "speedup_high": mean + half})
    data = data.reset_index()
    figure = _against_n(data, "speedup", f"Speedup\n(mean of {_sets(table)})", "{:.2f}×", published)
    bars = (
        "95% interval of the mean: half-width sqrt(sum of squared half-widths) / benchmarks, from each "
        "benchmark's bootstrap over prompts, the benchmarks treated as independent"
    )
    caption = (
        f"Speedup against the number of speculative tokens n: unweighted mean of the per-benchmark "
        f"speedups ({_scope(how)}). {_SPEEDUP} Band: {bars}. {_GAP}"
    )
    return _with_published(Plot(figure, data, caption, {"error_bars": bars, **how}), published)


@mpl.rc_context(STYLE)
def accepted_length_vs_n(table: pd.DataFrame, published: pd.DataFrame | None = None) -> Plot:
    """Accepted length tau against n for each drafter: mean of the benchmarks, each pooled over its steps.

    published: as for `speedup_vs_n`, with tau.
    """
    how = _check(table, "tau")
    data = _by_benchmark(table, "tau").mean(axis=1, skipna=False).rename("tau").reset_index()
    figure = _against_n(data, "tau", f"Accepted length τ\n(mean of {_sets(table)})", "{:.2f}", published)
    caption = (
        f"Accepted length tau (tokens per verification step, bonus included) against the number of "
        f"speculative tokens n: unweighted mean of the benchmarks, each its total tokens over total "
        f"steps ({_scope(how)}). {_GAP}"
    )
    return _with_published(Plot(figure, data, caption, {"error_bars": "none", **how}), published)


@mpl.rc_context(STYLE)
def acceptance_by_position(table: pd.DataFrame, n: int) -> Plot:
    """Acceptance of draft position k = 1..n: left that all of 1..k are accepted, right k given that k-1 was.

    Left is the mean of the benchmarks' `accept_pos_k`; right is left_k / left_{k-1}, so that the running
    product of the right panel is the left one. Where fewer than LEAST_REACHED steps accepted k-1, k is a gap.
    """
    columns = [f"accept_pos_{k}" for k in range(1, n + 1)]
    how = _check(table, "steps", *columns, n_values=(n,))
    steps, *shares = (_by_benchmark(table, c).xs(n, level="n") for c in ("steps", *columns))  # [drafters, benchmarks]
    positions = pd.RangeIndex(1, n + 1, name="position")
    prefix = pd.DataFrame([share.mean(axis=1, skipna=False) for share in shares], index=positions)
    reached = [(steps * before).sum(axis=1).round() for before in (1.0, *shares[:-1])]  # steps, by what came before k
    reached = pd.DataFrame(reached, index=positions)
    conditional = (prefix / prefix.shift(fill_value=1.0)).where(reached >= LEAST_REACHED)
    sides = {"unconditional": prefix, "conditional": conditional, "reached": reached}
    data = pd.DataFrame({name: side.unstack() for name, side in sides.items()}).reset_index()
    data.insert(1, "n", n)
    figure = Figure((PAGE, 2.4))
    axes = figure.subplots(1, 2, sharey=True)
    labels = {"unconditional": "Accepted with all before it", "conditional": "Accepted given all before it"}
    for ax, (column, label) in zip(axes, labels.items(), strict=True):
        _lines(ax, data, "position", column)
        ax.set(xlabel="Draft position $k$", ylabel=label, xticks=range(1, n + 1), ylim=(-0.03, 1.03))
    _legend(figure, axes[0])
    caption = (
        f"Acceptance per draft position at n={n}, mean of the benchmarks ({_scope(how)}). Left: share "
        f"of steps that accept positions 1 to k. Right: that share divided by the one of k-1, where at least "
        f"{LEAST_REACHED} steps got there. Prompt lookup's steps without a draft accept none. {_GAP}"
    )
    return Plot(figure, data, caption, {"error_bars": "none", **how})


@mpl.rc_context(STYLE)
def benchmark_bars(
    table: pd.DataFrame, n_values: tuple[int, ...] = MARKED_N, published: pd.DataFrame | None = None
) -> Plot:
    """Speedup of each drafter on each benchmark, a panel for each n, with the table's 95% intervals.

    published: as for `speedup_vs_n`, of one target and with `benchmark`: hollow marks on the bars of the same name.
    """
    numbers = ["speedup", "speedup_low", "speedup_high"]
    how = _check(table, *numbers, n_values=n_values)
    benchmarks, drafters = list(how["prompts"]), _drafters(table)
    if published is not None:
        drawn = {"benchmark": benchmarks, "drafter": drafters, "n": n_values}
        published = published[np.logical_and.reduce([published[name].isin(kept) for name, kept in drawn.items()])]
    whole = pd.MultiIndex.from_product([n_values, benchmarks, drafters], names=["n", "benchmark", "drafter"])
    data = table.set_index(whole.names)[numbers].reindex(whole).reset_index()
    figure = Figure((PAGE, 0.5 + 1.5 * len(n_values)))
    axes = figure.subplots(len(n_values), sharex=True, sharey=True, squeeze=False)[:, 0]
    width = 0.8 / len(drafters)
    for ax, n in zip(axes, n_values, strict=True):
        ax.axhline(1, **DRAFTER_STYLE["autoregressive"])
        for i, drafter in enumerate(drafters):
            bars = data[(data["n"] == n) & (data["drafter"] == drafter)]
            x = np.arange(len(benchmarks)) + (i - (len(drafters) - 1) / 2) * width
            style = DRAFTER_STYLE[drafter]
            ax.bar(x, bars["speedup"], 0.92 * width, color=style["color"], label=style["label"])
            ax.vlines(x, bars["speedup_low"], bars["speedup_high"], color="0.15", linewidth=0.8)
            if published is not None:
                theirs = published[(published["n"] == n) & (published["drafter"] == drafter)]
                at = [x[benchmarks.index(name)] for name in theirs["benchmark"]]
                hollow = {"facecolors": "none", "edgecolors": "0.15", "linewidths": 0.8, "s": 14, "zorder": 3}
                ax.scatter(at, theirs["speedup"], marker=style["marker"], **hollow)
        ax.set_ylabel(f"Speedup, $n={n}$")
        ax.set_xticks(range(len(benchmarks)), [BENCHMARK_LABELS.get(b, b) for b in benchmarks])
    _legend(figure, axes[0])
    bars = "95% bootstrap interval over prompts"
    caption = (
        f"Speedup on each benchmark at n={' and '.join(map(str, n_values))} ({_scope(how)}). "
        f"{_SPEEDUP} Error bars: {bars}. An absent bar was not measured."
    )
    return _with_published(Plot(figure, data, caption, {"error_bars": bars, **how}), published)


@mpl.rc_context(STYLE)
def step_parts(table: pd.DataFrame) -> Plot:
    """Left: milliseconds of a step's parts, one bar a (drafter, n). Right: the speedup that they and tau predict
    against the measured one. Rows of `tables.cost_model`."""
    figure = Figure((PAGE, 2.6))
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    bottom, at = np.zeros(len(table)), np.arange(len(table))
    for part, colour in {"draft": "0.35", "verify": "0.85", "commit": "0.6"}.items():  # colours mean drafters
        left.bar(at, table[f"{part}_ms"], 0.7, bottom, color=colour, label=part)
        bottom += table[f"{part}_ms"]
    left.axhline(table["autoregressive_ms"].iloc[0], color="0.15", linewidth=0.8, linestyle=(0, (1, 1)))
    names = [
        f"{DRAFTER_STYLE[drafter]['label']}\n$n={n}$" for drafter, n in zip(table["drafter"], table["n"], strict=True)
    ]
    left.set_xticks(at, names)
    left.set_ylabel("One step (ms); dotted: one plain token")
    for drafter, rows in table.groupby("drafter", sort=False):
        right.plot(rows["predicted"], rows["speedup"], **DRAFTER_STYLE[drafter] | {"linestyle": ""})
        for n, x, y in zip(rows["n"], rows["predicted"], rows["speedup"], strict=True):
            right.annotate(f"{n}", (x, y), (4, -6), textcoords="offset points", fontsize=5, color="0.3")
    ends = [table[["predicted", "speedup"]].min().min(), table[["predicted", "speedup"]].max().max()]
    right.plot(ends, ends, color="0.7", linewidth=0.8)
    right.set(xlabel="Predicted: τ × plain token / step", ylabel="Measured speedup")
    _legend(figure, left)
    caption = (
        "The parts of a greedy step, each timed alone after one prompt (medians), against one plain token; and the "
        "speedup that they predict from the accepted length against the mean measured speedup, prefill included; the "
        "number beside a mark is its n."
    )
    return Plot(figure, table, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def learning_curves(table: pd.DataFrame) -> Plot:
    """Held-out accepted length against draft tokens trained on, one panel an n; table: tables.held_out, whose parts are
    drawn as lines of their own."""
    values = sorted(table["n"].unique())
    figure = Figure((COLUMN, 2.2))
    axes = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for ax, n in zip(axes, values, strict=True):
        for drafter, lines in table[table["n"] == n].groupby("drafter", sort=False):
            style = DRAFTER_STYLE[drafter]
            for part, line in lines.groupby("part"):
                ax.plot(line["draft_tokens"] / 1e6, line["tau"], **style)
                style = style | {"label": None}  # one entry in the legend
                if part > 1:
                    look = {"color": "0.6", "linewidth": 0.7, "linestyle": (0, (1, 2)), "label": "other prompts",
                            "zorder": 0}  # fmt: skip
                    ax.axvline(line["draft_tokens"].min() / 1e6, **look)
        ax.set(title=f"$n$ = {n}", xlabel="Draft tokens, millions", xlim=(0, None))
    axes[0].set_ylabel("Held-out accepted length τ")
    _legend(figure, axes[0])
    caption = (
        "Accepted length of real greedy decoding on self-written prompts that no training has seen, against the "
        "supervised draft tokens so far. A line is one training. A drafter trained in parts has a line for each, and "
        "from the grey line on other data and other held-out prompts: the step there is no progress."
    )
    return Plot(figure, table, caption, {"error_bars": "none"})


@mpl.rc_context(STYLE)
def block_mask(mask: np.ndarray, labels: tuple[list[str], list[str]], title: str) -> Plot:
    """The attention mask of drafter blocks as a picture.

    mask: bool [queries, keys], true where the query sees the key. Keys are [context; block], as in the
        drafter: the last `queries` keys are the queries' own positions, all before them are context.
    labels: one text for each query, one for each key.
    """
    mask = np.asarray(mask)
    queries, keys = labels
    if mask.dtype != bool or mask.shape != (len(queries), len(keys)) or len(queries) > len(keys):
        raise ValueError(
            f"mask must be bool [queries, keys], queries <= keys, with a label for each; got "
            f"{mask.dtype} {mask.shape} with {len(queries)} and {len(keys)} labels"
        )
    context = len(keys) - len(queries)
    kind = np.where(mask, np.arange(len(keys)) >= context, 2)  # [queries, keys] index into MASK_COLOURS
    row, column = np.indices(mask.shape).reshape(2, -1)
    data = pd.DataFrame(
        {
            "query": row,
            "key": column,
            "query_label": np.array(queries)[row],
            "key_label": np.array(keys)[column],
            "kind": np.array(list(MASK_COLOURS))[kind.ravel()],
        }
    )
    width = COLUMN if len(keys) <= 12 else PAGE
    figure = Figure((width, 1.2 + (width - 0.7) * len(queries) / len(keys)))  # cells about square
    ax = figure.subplots()
    ax.pcolormesh(
        kind,
        cmap=mpl.colors.ListedColormap(list(MASK_COLOURS.values())),
        vmin=0,
        vmax=2,
        edgecolor="white",
        linewidth=0.8,
    )
    ax.axvline(context, color="0.15", linewidth=1.0)
    ax.invert_yaxis()
    ax.set_xticks(np.arange(len(keys)) + 0.5, keys, rotation=90)
    ax.set_yticks(np.arange(len(queries)) + 0.5, queries)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(title=title, xlabel="Key", ylabel="Query")
    patches = [Patch(color=colour, label=name) for name, colour in MASK_COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    caption = f"{title}: the keys that each query of the block sees. The line parts context and block."
    return Plot(figure, data, caption, {"error_bars": "none"})


def _check(table: pd.DataFrame, *columns: str, n_values: tuple[int, ...] = ()) -> dict:
    """Refuse a table that one figure cannot show; return its "setting" and its "prompts" per benchmark."""
    needed = (*SETTING, "drafter", "benchmark", "n", "prompts", *columns)
    if missing := [c for c in needed if c not in table]:
        raise ValueError(f"the table has no column {missing[0]!r}; it has {', '.join(table.columns)}")
    for column in SETTING:
        if len(values := table[column].unique().tolist()) > 1:
            raise ValueError(
                f"one figure shows one {column}, the table holds {values}: "
                f"select first, e.g. table[table[{column!r}] == {values[0]!r}]"
            )
    if unknown := set(table["drafter"]) - set(DRAFTER_STYLE):
        raise ValueError(f"drafter {min(unknown)!r} has no style: add it to DRAFTER_STYLE")
    cell = ["drafter", "benchmark", "n"]
    if (twice := table.duplicated(cell)).any():
        raise ValueError(f"the table holds two rows for {table.loc[twice, cell].iloc[0].to_dict()}: keep one")
    measured = sorted(set(table.loc[table["drafter"].isin(_drafters(table)), "n"].tolist()))
    if absent := set(n_values) - set(measured):
        raise ValueError(f"the table has no rows with n={min(absent)}, only n={measured}")
    prompts = table.drop_duplicates(["benchmark", "prompts"]).set_index("benchmark")["prompts"]
    if (mixed := prompts.index.duplicated()).any():
        raise ValueError(
            f"benchmark {prompts.index[mixed][0]!r} was run with different numbers of prompts: "
            "rerun it so that all drafters answer the same ones"
        )
    return {
        "setting": table[list(SETTING)].iloc[0].to_dict(),
        "prompts": {name: int(prompts[name]) for name in _ordered(prompts.index, BENCHMARK_LABELS)},
    }


def _ordered(values, order: dict) -> list[str]:
    """The distinct values: those in `order` in its order, the others after them by name."""
    return [v for v in order if v in set(values)] + sorted(set(values) - set(order))


def _drafters(table: pd.DataFrame) -> list[str]:
    """The drafters that draft; the autoregressive baseline is the line at 1."""
    drafters = [d for d in _ordered(table["drafter"], DRAFTER_STYLE) if d != "autoregressive"]
    if not drafters:
        raise ValueError("the table holds no row of a drafter: sweep one first, or select less")
    return drafters


def _by_benchmark(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """`column` with a row for each (drafter, n), a column for each benchmark, NaN where it was not measured.

    All drafters get all n, so that a line does not run across an n that its drafter lacks.
    """
    drafted = table[table["drafter"] != "autoregressive"]
    n_values = sorted(drafted["n"].unique())
    cells = pd.MultiIndex.from_product([_drafters(table), n_values], names=["drafter", "n"])
    values = drafted.pivot(index=cells.names, columns="benchmark", values=column)
    return values.reindex(index=cells, columns=table["benchmark"].unique())


def _sets(table: pd.DataFrame) -> str:
    """What the mean is over, for an axis label: "6 own sets" are not "6 benchmarks"."""
    own = {name.startswith("own-") for name in table["benchmark"]}
    kind = "prompt sets" if len(own) > 1 else "own sets" if own == {True} else "benchmarks"
    count = table["benchmark"].nunique()
    return f"{count} {kind.removesuffix('s') if count == 1 else kind}"


def _scope(how: dict) -> str:
    """Benchmarks with their prompt counts and the setting, for a caption."""
    prompts = ", ".join(f"{name} {count}" for name, count in how["prompts"].items())
    return "; ".join([f"prompts: {prompts}", *(f"{key} {value}" for key, value in how["setting"].items())])


def _lines(ax, data: pd.DataFrame, x: str, y: str) -> None:
    """A line for each drafter, with a band where the data has one."""
    for drafter, line in data.groupby("drafter", sort=False):
        style = DRAFTER_STYLE[drafter]
        ax.plot(line[x], line[y], **style)
        if f"{y}_low" in line:
            band = line[x], line[f"{y}_low"], line[f"{y}_high"]
            ax.fill_between(*band, color=style["color"], alpha=0.15, linewidth=0)
            ax.vlines(*band, color=style["color"], alpha=0.4, linewidth=0.8)  # a lone point fills no width


def _against_n(data: pd.DataFrame, column: str, label: str, form: str, published: pd.DataFrame | None) -> Figure:
    """One column wide: `column` against n for each drafter, over the autoregressive line at 1."""
    figure = Figure((COLUMN, 2.4))  # outside pyplot: nothing global to close, no second picture in a notebook
    ax = figure.subplots()
    ax.axhline(1, **DRAFTER_STYLE["autoregressive"])
    _lines(ax, data, "n", column)
    n = sorted(data["n"].unique())
    if published is not None:
        _hollow(ax, published, column)
        n = sorted({*n, *published["n"]})
    ax.set(xlabel="Speculative tokens $n$", ylabel=label, xticks=n, xlim=(min(n) - 0.4, max(n) + 0.4))
    _mark_values(ax, data, column, form)
    _legend(figure, ax)
    return figure


def _hollow(ax, published: pd.DataFrame, column: str) -> None:
    """Published points, told apart from measured ones by hollow markers, paler lines and their own legend entries."""
    for (target, drafter), line in published.groupby(["target", "drafter"], sort=False):
        style = DRAFTER_STYLE[drafter]
        label = f"{style['label']}, published ({target})"
        line = line.sort_values("n")
        pale = {"linestyle": (0, (1, 2)), "linewidth": 0.7, "alpha": 0.6, "markersize": 5, "markerfacecolor": "none"}
        ax.plot(line["n"], line[column], color=style["color"], marker=style["marker"], label=label, **pale)


def _with_published(plot: Plot, published: pd.DataFrame | None) -> Plot:
    """The plot with what was drawn hollow in its data (`source`: measured, or the publication) and its caption."""
    if published is None:
        return plot
    columns = [*plot.data.columns.intersection(published.columns), "target", "source"]
    measured = plot.data.assign(target=plot.how["setting"]["target"], source="measured")
    data = pd.concat([measured, published[columns]], ignore_index=True)
    told = f" Hollow: published, not measured here ({'; '.join(sorted(set(published['source'])))}); other targets."
    return replace(plot, data=data, caption=plot.caption + told)


def _mark_values(ax, data: pd.DataFrame, column: str, form: str) -> None:
    """Write beside the lines what each drafter reaches at n = 3 and 7, moved apart where the values crowd."""
    marks = [n for n in MARKED_N if data.loc[data["n"] == n, column].notna().any()]
    if not marks:
        return
    points = data[data["n"].isin(marks)].pivot(index="drafter", columns="n", values=column)
    points = points.dropna(subset=marks[-1]).sort_values(marks[-1])
    bottom, top = ax.get_ylim()
    line = 0.075 * (top - bottom)  # height of a line of 6 pt text
    apart = line * np.arange(len(points))
    heights = isotonic_regression(points[marks[-1]] - apart).x + apart
    last = ax.get_xticks()[-1]
    look = {"fontsize": 6, "va": "center", "path_effects": [withStroke(linewidth=2, foreground="white")]}
    ax.text(last + 0.3, heights[-1] + line, f"$n$ = {' → '.join(map(str, marks))}", color="0.3", **look)
    for (drafter, values), height in zip(points.iterrows(), heights, strict=True):
        text = " → ".join(form.format(value) for value in values.dropna())
        ax.text(last + 0.3, height, text, color=DRAFTER_STYLE[drafter]["color"], **look)
    ax.set_ylim(min(bottom, heights[0] - line), max(top, heights[-1] + 2 * line))
    ax.set_xlim(right=last + 0.3 + 0.36 * (last - ax.get_xlim()[0]))  # room for the longest text


def _legend(figure: Figure, ax) -> None:
    """Above the axes, so that it never covers data."""
    named = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))  # each name once
    ncols = 6 if figure.get_figwidth() > COLUMN else 3 if max(map(len, named)) < 20 else 2
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=ncols)
