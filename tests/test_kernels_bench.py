"""What the benchmark counts, how it tabulates and draws, and that it times nothing without a GPU."""

import json
import math
import os

import pandas as pd
import pytest
import torch
from twin import seen

from dspark import bench_kernels, plots
from dspark.__main__ import main
from dspark.bench_kernels import Case, visible_pairs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_visible_pairs_are_those_of_the_dense_mask(causal, window):
    anchors, n = [0, 1, 5, 20], 3
    wanted = sum(int(seen(n, anchor, 0, causal, window).sum()) for anchor in anchors)
    assert visible_pairs(anchors, n, causal, window) == wanted


def test_floors_of_a_shape_worked_out_by_hand():
    table = bench_kernels.counted().set_index(["kernel", "shape", "what"])
    kimi = table.loc[("Markov decode", "Kimi-K2.6", "B 1, n 7, D 32,000, r 256")]
    assert kimi.flops == 2 * 7 * 32000 * 256 and kimi.bytes == 2 * 7 * (32000 * 256 + 32000 + 2 * 256)
    assert table.loc[("verify", "Kimi-K2.6", "greedy, B 64, n 7, V 163,840")].bytes == 2 * 64 * 8 * 163840
    assert len(table) == len(table.index.unique()) == 3 * 9


def test_without_a_gpu_it_counts_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "nothing was timed" in said and "Kimi-K2.6" in said and "millisec" not in said
    assert not list(tmp_path.iterdir())


def fail():
    raise RuntimeError("no room\nfor it")


def synthetic_table(monkeypatch) -> pd.DataFrame:
    """`measured()` with invented times, 2 ms a call: no measurement, and nothing of it runs on a GPU."""

    def invented(function):
        assert os.environ["DSPARK_KERNELS"] == "triton"
        function()
        return 2.0, 1.0, 3.0

    two = {"kernel": lambda: None, "reference": fail}
    made_up = [Case("a", "toy", "half of the product's rate", 10**9, 10**6, lambda: two),
               Case("b", "toy", "half of the copy's rate", 10**6, 10**9, lambda: {"kernel": lambda: None}),
               Case("c", "toy", "inputs do not fit", 10**6, 10**6, fail)]  # fmt: skip
    monkeypatch.setenv("DSPARK_KERNELS", "reference")
    for name, stand_in in (("cases", lambda: made_up), ("ceilings", lambda: {"flops": 1e12, "bytes": 1e12}),
                           ("_extra_mbytes", lambda function: 0.0), ("_milliseconds", invented)):  # fmt: skip
        monkeypatch.setattr(bench_kernels, name, stand_in)
    return bench_kernels.measured()


def test_a_contender_that_fails_leaves_its_error_and_the_others_rows(monkeypatch):
    table = synthetic_table(monkeypatch).set_index(["kernel", "contender"])
    assert table.error.to_dict() == {
        ("a", "kernel"): "", ("a", "reference"): "RuntimeError: no room", ("b", "kernel"): "",
        ("c", "kernel"): "RuntimeError: no room",
    }  # fmt: skip
    for name, unit in (("a", "flops"), ("b", "bytes")):
        row = table.loc[name, "kernel"]
        assert (row.share_of_ceiling, row.ceiling, row.times_the_kernels) == (0.5, unit, 1)
    assert table.loc["a", "kernel"].tflops == 0.5 and table.loc["b", "kernel"].gbytes_per_s == 500
    assert all(math.isnan(table.loc[at, "milliseconds"]) for at in (("a", "reference"), ("c", "kernel")))


def test_the_roofline_of_a_synthetic_table_is_drawn_and_saved(monkeypatch, tmp_path):
    plot = bench_kernels.roofline(synthetic_table(monkeypatch))
    plots.save(plot, "kernels_roofline", tmp_path, {"gpu": "none: synthetic numbers, no measurement"})
    written = {ending: tmp_path / f"kernels_roofline.{ending}" for ending in ("pdf", "png", "csv", "json")}
    assert all(path.stat().st_size for path in written.values())
    assert pd.read_csv(written["csv"]).kernel.tolist() == ["a", "b"]
    assert "synthetic" in json.loads(written["json"].read_text())["run"]["gpu"]
