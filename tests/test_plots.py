"""The figures: aggregates equal numbers worked out by hand, gaps stay gaps, files are whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from numpy.testing import assert_allclose

from dspark import plots, tables

META = {"commit": "0123abc", "clean": True, "device": "cpu", "seed": 0, "packages": {"torch": "2.13.0"}}


def row(drafter, benchmark, n, speedup=1.0, half=0.0, accept=(), **other):
    """One cell with the columns of n_sweep.csv that the figures read; tau follows from the acceptances."""
    return {
        "profile": "test",
        "engine": "dspark",
        "target": "toy",
        "drafter": drafter,
        "benchmark": benchmark,
        "n": n,
        "temperature": 0.0,
        "concurrency": 1,
        "seed": 0,
        "dtype": "bfloat16",
        "prompts": 32,
        "steps": 100,
        "tau": 1 + sum(accept),
        **{f"accept_pos_{k}": accept[k - 1] if k <= len(accept) else np.nan for k in range(1, 9)},
        "speedup": speedup,
        "speedup_low": speedup - half,
        "speedup_high": speedup + half,
        **other,
    }


@pytest.fixture
def table():
    """Two drafters on two of the project's own sets at n = 3 and 7, and the baseline."""
    return pd.DataFrame(
        [
            row("autoregressive", "own-gsm8k", 0),
            row("autoregressive", "own-aime", 0),
            row("prompt-lookup", "own-gsm8k", 3, 1.1, 0.1, (0.2, 0.0, 0.0)),
            row("prompt-lookup", "own-aime", 3, 0.9, 0.1, (0.1, 0.0, 0.0)),
            row("prompt-lookup", "own-gsm8k", 7, 1.0, 0.1, (0.2,) + (0.0,) * 6),
            row("prompt-lookup", "own-aime", 7, 0.8, 0.1, (0.1,) + (0.0,) * 6),
            row("dspark", "own-gsm8k", 3, 2.0, 0.3, (0.8, 0.6, 0.4)),
            row("dspark", "own-aime", 3, 1.5, 0.4, (0.6, 0.3, 0.1)),
            row("dspark", "own-gsm8k", 7, 2.4, 0.3, (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1)),
            row("dspark", "own-aime", 7, 1.4, 0.4, (0.6, 0.3, 0.1, 0.1, 0.0, 0.0, 0.0)),
        ]
    )


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


def drawn_line(axes, drafter):
    """(x, y) of the line that carries the drafter's label."""
    label = plots.DRAFTER_STYLE[drafter]["label"]
    return next(line for line in axes.lines if line.get_label() == label).get_data()


def test_speedup_is_the_unweighted_mean_with_a_band_of_independent_benchmarks(table):
    plot = plots.speedup_vs_n(table)
    data = plot.data.set_index(["drafter", "n"])
    assert list(data.index) == [("dspark", 3), ("dspark", 7), ("prompt-lookup", 3), ("prompt-lookup", 7)]
    assert_allclose(data["speedup"], [1.75, 1.9, 1.0, 0.9])
    # dspark: sqrt(0.3^2 + 0.4^2) / 2; prompt lookup: sqrt(0.1^2 + 0.1^2) / 2
    half = np.array([0.25, 0.25, 0.02**0.5 / 2, 0.02**0.5 / 2])
    assert_allclose(data["speedup_low"], data["speedup"] - half)
    assert_allclose(data["speedup_high"], data["speedup"] + half)
    axes = plot.figure.axes[0]
    assert_allclose(drawn_line(axes, "dspark"), [[3, 7], [1.75, 1.9]])
    assert_allclose(drawn_line(axes, "autoregressive")[1], 1)
    assert {"1.75× → 1.90×", "1.00× → 0.90×", "Speedup\n(mean of 2 own sets)"} <= set(texts(plot.figure))
    assert "independent" in plot.how["error_bars"] and "own-aime 32" in plot.caption
    top = max(axes.get_ylim())
    assert all(t.get_position()[1] < top for t in axes.texts), "a value is written outside the axes"


def test_published_points_are_hollow_and_named_apart_from_measured_ones(table):
    published = tables.published_speedup(("Kimi-K2.6",)).query("benchmark == 'mean of 6'")
    bare, plot = plots.speedup_vs_n(table), plots.speedup_vs_n(table, published)
    measured = plot.data[plot.data["source"] == "measured"]
    pd.testing.assert_frame_equal(measured[bare.data.columns], bare.data)
    theirs = plot.data[plot.data["source"] == "release post"].set_index(["drafter", "n"])["speedup"]
    assert theirs.to_dict() == {
        ("dspark", 3): 2.17, ("dspark", 7): 2.55, ("eagle3-mla", 3): 2.01, ("eagle3-mla", 7): 2.01
    }  # fmt: skip
    lines = {line.get_label(): line for line in plot.figure.axes[0].lines}
    theirs, ours = lines["DSpark, published (Kimi-K2.6)"], lines["DSpark"]
    assert_allclose(theirs.get_data(), [[3, 7], [2.17, 2.55]])
    assert_allclose(ours.get_data(), [[3, 7], [1.75, 1.9]])
    assert theirs.get_markerfacecolor() == "none" != ours.get_markerfacecolor()
    assert theirs.get_color() == ours.get_color() and theirs.get_linestyle() != ours.get_linestyle()
    assert max(plot.figure.axes[0].get_ylim()) > 2.55
    assert "published, not measured here (release post)" in plot.caption and "Hollow" not in bare.caption
    entries = [text.get_text() for text in plot.figure.legends[0].get_texts()]
    assert "DSpark, published (Kimi-K2.6)" in entries and "DSpark" in entries


def test_published_points_sit_on_the_bar_of_their_own_benchmark(table):
    table["benchmark"] = table["benchmark"].replace({"own-gsm8k": "LiveCodeBench"})
    plot = plots.benchmark_bars(table, published=tables.published_speedup(("Kimi-K2.6",)))
    theirs = plot.data[plot.data["source"] != "measured"]
    assert theirs[["benchmark", "drafter", "n", "speedup"]].values.tolist() == [
        ["LiveCodeBench", "dspark", 3, 1.86], ["LiveCodeBench", "dspark", 7, 1.87]
    ]  # fmt: skip
    upper = plot.figure.axes[0]
    marks = [
        c.get_offsets().tolist()
        for c in upper.collections
        if len(c.get_offsets()) == 1 and "1.86" in str(c.get_offsets())
    ]
    bar = next(patch for patch in upper.patches if patch.get_height() == pytest.approx(2.0))  # dspark's, same name
    assert marks == [[pytest.approx([bar.get_x() + bar.get_width() / 2, 1.86])]]


def test_published_accepted_lengths_widen_the_axis(table):
    published = tables.published_tau().query("benchmark == 'mean of 6'").assign(n=9)
    plot = plots.accepted_length_vs_n(table, published)
    assert_allclose(plot.data["tau"].iloc[-1], 3.0278, atol=1e-4)
    assert max(plot.figure.axes[0].get_xlim()) > 9


def test_speedup_band_uses_the_intervals_of_the_table_even_where_they_are_lopsided(table):
    table["speedup_high"] += 0.2  # half-widths: 0.3 -> 0.4 and 0.4 -> 0.5
    data = plots.speedup_vs_n(table).data.set_index(["drafter", "n"])
    assert_allclose(data.loc[("dspark", 3), "speedup_high"], 1.75 + (0.4**2 + 0.5**2) ** 0.5 / 2)


def test_accepted_length_is_the_mean_of_the_benchmarks(table):
    plot = plots.accepted_length_vs_n(table)
    data = plot.data.set_index(["drafter", "n"])["tau"]
    assert_allclose(data.loc["dspark"], [(2.8 + 2.0) / 2, (3.5 + 2.1) / 2])
    assert_allclose(data.loc["prompt-lookup"], [1.15, 1.15])
    assert "2.40 → 2.80" in texts(plot.figure)


def test_acceptance_by_position_conditional_is_the_ratio_of_prefix_acceptances(table):
    plot = plots.acceptance_by_position(table, 3)
    data = plot.data.set_index(["drafter", "position"])
    assert (data["n"] == 3).all()
    assert_allclose(data.loc["dspark", "unconditional"], [0.7, 0.45, 0.25])
    assert_allclose(data.loc["dspark", "conditional"], [0.7, 0.45 / 0.7, 0.25 / 0.45])
    assert_allclose(data.loc["dspark", "conditional"].cumprod(), data.loc["dspark", "unconditional"])
    # Position 2 is never accepted: nothing is known of position 3 given position 2.
    assert_allclose(data.loc["prompt-lookup", "unconditional"], [0.15, 0, 0])
    assert_allclose(data.loc["prompt-lookup", "conditional"], [0.15, 0, np.nan])
    assert np.isnan(drawn_line(plot.figure.axes[1], "prompt-lookup")[1][2])
    assert data.loc["dspark", "reached"].tolist() == [200, 140, 90]
    few = plots.acceptance_by_position(table.assign(steps=40), 3).data.set_index(["drafter", "position"])
    assert_allclose(few.loc["dspark", "conditional"], [0.7, 0.45 / 0.7, 0.25 / 0.45])  # 36 steps reached position 3
    assert_allclose(few.loc["prompt-lookup", "conditional"], [0.15, np.nan, np.nan])  # 12 steps reached position 2


def test_benchmark_bars_draw_the_table(table):
    plot = plots.benchmark_bars(table)
    data = plot.data.set_index(["n", "benchmark", "drafter"])
    assert list(data.index.unique("benchmark")) == ["own-gsm8k", "own-aime"]  # the order of BENCHMARK_LABELS
    assert data.loc[(7, "own-gsm8k", "dspark")].tolist() == pytest.approx([2.4, 2.1, 2.7])
    upper, lower = plot.figure.axes
    assert [bar.get_height() for bar in upper.patches] == pytest.approx([2.0, 1.5, 1.1, 0.9])
    assert [bar.get_height() for bar in lower.patches] == pytest.approx([2.4, 1.4, 1.0, 0.8])
    bars = [segment[:, 1].tolist() for segment in upper.collections[0].get_segments()]
    assert bars == [pytest.approx([1.7, 2.3]), pytest.approx([1.1, 1.9])]


def test_a_missing_number_is_a_gap_and_never_zero(table):
    cut = table[~((table["drafter"] == "dspark") & (table["benchmark"] == "own-aime") & (table["n"] == 3))]
    for plot, column in ((plots.speedup_vs_n(cut), "speedup"), (plots.accepted_length_vs_n(cut), "tau")):
        # One benchmark of two is not the mean of both, so the mean at n = 3 is missing as a whole.
        assert plot.data.set_index(["drafter", "n"])[column].isna().tolist() == [True, False, False, False]
        assert np.isnan(drawn_line(plot.figure.axes[0], "dspark")[1][0])
    heights = [bar.get_height() for bar in plots.benchmark_bars(cut).figure.axes[0].patches]
    assert heights == pytest.approx([2.0, np.nan, 1.1, 0.9], nan_ok=True)
    # A benchmark that only the baseline has run is missing, too.
    more = pd.concat([table, pd.DataFrame([row("autoregressive", "own-humaneval", 0)])])
    assert plots.speedup_vs_n(more).data["speedup"].isna().all()
    assert plots.acceptance_by_position(more, 3).data["unconditional"].isna().all()


def test_a_line_breaks_at_an_n_that_only_another_drafter_has(table):
    extra = [row("dspark", name, 5, 2.0, 0.1, (0.5,) * 5) for name in ("own-gsm8k", "own-aime")]
    plot = plots.speedup_vs_n(pd.concat([table, pd.DataFrame(extra)]))
    x, y = drawn_line(plot.figure.axes[0], "prompt-lookup")
    assert x.tolist() == [3, 5, 7] and np.isnan(y[1])


@pytest.mark.parametrize("spacing", [0.0, 0.01, 0.1, 0.4])
def test_written_values_never_cover_each_other_or_a_point(spacing):
    drafters = [d for d in plots.DRAFTER_STYLE if d != "autoregressive"]
    rows = [row(d, "own-aime", n, 1 + i * spacing + n / 5) for i, d in enumerate(drafters) for n in range(1, 9)]
    figure = plots.speedup_vs_n(pd.DataFrame(rows)).figure
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent().padded(-1) for text in axes.texts]  # the box is taller than its digits
    assert len(boxes) == len(drafters) + 1  # and what n they are of
    assert all(box.count_overlaps(boxes) == 1 for box in boxes), "two values overlap"
    cells = [(n, 1 + i * spacing + n / 5) for i in range(len(drafters)) for n in range(1, 9)]
    points = axes.transData.transform(cells)
    assert not any(box.contains(*point) for box in boxes for point in points), "a value covers a point"
    inside = axes.get_window_extent()
    assert all(inside.y0 < box.y0 and box.y1 < inside.y1 and box.x1 < figure.bbox.x1 for box in boxes)


FIGURES = [
    plots.speedup_vs_n,
    plots.accepted_length_vs_n,
    plots.benchmark_bars,
    lambda table: plots.acceptance_by_position(table, 3),
]


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("engine", "vllm"),
        ("target", "other"),
        ("temperature", 1.0),
        ("concurrency", 8),
        ("seed", 1),
        ("profile", "smoke"),
    ],
)
def test_mixed_settings_are_refused_by_name(table, figure, column, other):
    both = pd.concat([table, table.assign(**{column: other})])
    with pytest.raises(ValueError, match=f"one figure shows one {column}, the table holds"):
        figure(both)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.drop(columns="speedup_low"), "no column 'speedup_low'"),
        (lambda t: t.replace({"drafter": {"dspark": "medusa"}}), "'medusa' has no style"),
        (lambda t: pd.concat([t, t.tail(1)]), "two rows for {'drafter': 'dspark', .*'n': 7}"),
        (lambda t: t[t["drafter"] == "autoregressive"], "no row of a drafter"),
        (lambda t: t.head(0), "no row of a drafter"),
        (lambda t: t[t["n"] != 3], r"no rows with n=3, only n=\[7\]"),
        (lambda t: t.assign(prompts=range(len(t))), "'own-gsm8k' was run with different numbers of prompts"),
    ],
)
def test_tables_that_cannot_be_drawn_are_refused(table, spoil, message):
    with pytest.raises(ValueError, match=message):
        plots.benchmark_bars(spoil(table))


def test_axis_label_never_calls_own_sets_benchmarks(table):
    real = table.replace({"benchmark": {"own-gsm8k": "GSM8K", "own-aime": "AIME"}})
    mixed = table.replace({"benchmark": {"own-aime": "AIME"}})
    one = table[table["benchmark"] == "own-aime"]
    labels = [plots.speedup_vs_n(t).figure.axes[0].get_ylabel() for t in (table, real, mixed, one)]
    sets = ["2 own sets", "2 benchmarks", "2 prompt sets", "1 own set"]
    assert labels == [f"Speedup\n(mean of {over})" for over in sets]
    assert all(label == name for name, label in plots.BENCHMARK_LABELS.items() if name.startswith("own-"))


def test_save_writes_four_files_of_what_is_drawn(table, tmp_path):
    plot = plots.speedup_vs_n(table)
    paths = plots.save(plot, "speedup", tmp_path / "new", META)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in paths)
    assert [p.suffix for p in paths] == [".pdf", ".png", ".csv", ".json"]
    pdf, png, csv, how = paths
    pd.testing.assert_frame_equal(pd.read_csv(csv), plot.data)
    assert imread(png).shape[:2] == (480, 650)  # 2.4 x 3.25 in at 200 dpi: nothing cropped the printed size
    record = json.loads(how.read_text())
    assert record["run"] == META and record["caption"] == plot.caption
    assert record["prompts"] == {"own-gsm8k": 32, "own-aime": 32}
    assert record["setting"] == {
        "profile": "test",
        "engine": "dspark",
        "target": "toy",
        "temperature": 0.0,
        "concurrency": 1,
        "seed": 0,
        "dtype": "bfloat16",
    }
    assert "independent" in record["error_bars"]
    assert b"CreationDate" not in pdf.read_bytes()


def test_pdf_embeds_truetype_fonts(table, tmp_path):
    with mpl.rc_context({"pdf.compression": 0}):
        pdf = plots.save(plots.speedup_vs_n(table), "speedup", tmp_path, META)[0].read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf


def test_same_table_gives_same_bytes_in_another_process_and_overwrites(table, tmp_path):
    table.to_csv(tmp_path / "n_sweep.csv", index=False)
    code = (
        "import sys, pandas as pd\n"
        "from dspark import plots\n"
        "table = pd.read_csv(sys.argv[1] + '/n_sweep.csv')\n"
        "plots.save(plots.speedup_vs_n(table), 'speedup', sys.argv[1] + '/child', {'commit': 'x'})\n"
        "plots.save(plots.benchmark_bars(table), 'bars', sys.argv[1] + '/child', {'commit': 'x'})\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(plots.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    for name, figure in (("speedup", plots.speedup_vs_n), ("bars", plots.benchmark_bars)):
        plots.save(figure(table.assign(speedup=table["speedup"] + 1)), name, tmp_path, {"commit": "old"})
        for path in plots.save(figure(table), name, tmp_path, {"commit": "x"}):
            assert path.read_bytes() == (tmp_path / "child" / path.name).read_bytes(), path.name


def test_a_plot_shows_itself_in_a_notebook_and_leaves_pyplot_alone(table):
    import matplotlib.pyplot as plt

    before, style = plt.get_fignums(), mpl.rcParams["font.family"]
    plot = plots.speedup_vs_n(table)
    assert plot._repr_png_().startswith(b"\x89PNG")
    assert plt.get_fignums() == before and mpl.rcParams["font.family"] == style


def test_styles_can_be_told_apart():
    for key in ("color", "marker", "linestyle", "label"):
        assert len({str(style[key]) for style in plots.DRAFTER_STYLE.values()}) == len(plots.DRAFTER_STYLE)


def test_block_mask_colours_context_own_block_and_hidden_keys():
    # Two blocks of two slots, anchored at 1 and 2: each sees the context before its anchor and all of itself.
    mask = np.repeat([[1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 1]], 2, axis=0).astype(bool)
    keys = ["t0", "t1", "t2", "a", "m", "a", "m"]
    plot = plots.block_mask(mask, (["a", "m", "a", "m"], keys), "Two blocks")
    kinds = plot.data.pivot(index="query", columns="key", values="kind").to_numpy()
    assert (kinds[:, :3] == np.where(mask[:, :3], "context", "not visible")).all()
    assert (kinds[:, 3:] == np.where(mask[:, 3:], "own block", "not visible")).all()
    axes = plot.figure.axes[0]
    mesh = axes.collections[0]
    plot.figure.draw_without_rendering()  # maps the values to colours
    drawn = [matplotlib.colors.to_hex(colour) for colour in mesh.get_facecolors()]
    assert drawn == [plots.MASK_COLOURS[kind] for kind in kinds.ravel()]
    assert [t.get_text() for t in axes.get_xticklabels()] == keys
    assert axes.get_ylim() == (4, 0)  # the first query on top


@pytest.mark.parametrize(
    ("mask", "labels"),
    [
        (np.ones((2, 3)), (["a", "b"], ["x", "y", "z"])),
        (np.ones((2, 3), bool), (["a", "b"], ["x", "y"])),
        (np.ones((3, 2), bool), (["a", "b", "c"], ["x", "y"])),
    ],
)
def test_block_mask_refuses_what_is_no_mask(mask, labels):
    with pytest.raises(ValueError, match="mask must be bool"):
        plots.block_mask(mask, labels, "wrong")


def test_a_cost_model_predicts_the_speedup_from_its_parts_and_tau():
    def parts(*ms):
        return dict(zip(("draft_ms", "verify_ms", "commit_ms"), ms, strict=True))

    timed = {("autoregressive", 0): parts(0, 40, 0), ("dspark", 3): parts(8, 50, 2), ("dflash", 3): parts(8, 50, 2)}
    means = pd.DataFrame({"drafter": ["dspark", "dflash"], "n": [3, 3], "tau": [3.0, 1.5], "speedup": [1.9, 1.0]})
    table = tables.cost_model(timed, means)
    assert table.drafter.tolist() == ["dspark", "dflash"] and table.break_even_tau.tolist() == [1.5, 1.5]
    assert table.predicted.tolist() == [2.0, 1.0] and table.speedup.tolist() == [1.9, 1.0]
    plot = plots.step_parts(table)
    assert plot.data is table and len(plot.figure.axes) == 2
    heights = sorted(patch.get_height() for patch in plot.figure.axes[0].patches)
    assert heights == [2, 2, 8, 8, 50, 50]


def test_recipes_count_what_a_drafter_began_from_and_leave_the_unknown_open(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"draft_tokens": 5, "init_draft_tokens": 2, "response_tokens": 9}))
    table = tables.recipes({"dspark": str(tmp_path), "dflash": "nowhere"})
    assert table.draft_tokens.fillna(-1).tolist() == [7, -1] and table.response_tokens.fillna(-1).tolist() == [9, -1]


def test_learning_curves_draw_each_part_of_a_training(tmp_path):
    for name, text in {
        "whole": "step,draft_tokens,seconds,tau_n3,tau_n7\n4,1000000,9,1.5,1.6\n8,2000000,18,1.7,1.8\n",
        "parts": "part,step,draft_tokens,seconds,tau_n3,tau_n7\n1,4,1000000,9,1.2,1.3\n2,4,3000000,9,1.4,1.5\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "heldout.csv").write_text(text)
    folders = {"dspark": str(tmp_path / "parts"), "dflash": str(tmp_path / "whole"), "eagle3": str(tmp_path)}
    table = tables.held_out(folders)
    assert table.groupby("drafter").size().to_dict() == {"dspark": 4, "dflash": 4}
    axes = plots.learning_curves(table).figure.axes
    curves = [[line for line in ax.lines if line.get_label() != "other prompts"] for ax in axes]
    drawn = [[(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in lines] for lines in curves]
    assert drawn == [
        [([1.0], [1.2]), ([3.0], [1.4]), ([1.0, 2.0], [1.5, 1.7])],
        [([1.0], [1.3]), ([3.0], [1.5]), ([1.0, 2.0], [1.6, 1.8])],
    ]
    starts = [[line.get_xdata()[0] for line in ax.lines if line.get_label() == "other prompts"] for ax in axes]
    assert starts == [[3.0], [3.0]]  # of the second part
    assert tables.held_out({"dspark": str(tmp_path)}).empty
