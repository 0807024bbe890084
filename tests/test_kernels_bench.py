"""What the benchmark counts, and that it times nothing without a GPU."""

import pytest
import torch
from twin import seen

from dspark import bench_kernels
from dspark.__main__ import main
from dspark.bench_kernels import visible_pairs


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
