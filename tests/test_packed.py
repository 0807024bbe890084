"""Packed weights compute what the plain ones do, and leave what is stored or trained alone."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_drafter, tiny_target

from dspark.packed import Packed, _profits, pack
from dspark.target import EMBEDDED, Target

packs = pytest.mark.skipif(
    not _profits(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this processor has no packed bfloat16 products"
)


@packs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 300])
def test_a_packed_product_is_the_exact_one_rounded_once(rows, bias):
    torch.manual_seed(rows)
    x, weight, b = (torch.randn(shape).bfloat16() for shape in ((2, rows, 96), (160, 96), (160,)))
    packed = Packed(weight, b if bias else None)
    assert packed.blocked
    got = packed(x)
    exact = F.linear(x.double(), weight.double(), b.double() if bias else None)
    assert got.shape == (2, rows, 160) and got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), exact, rtol=2**-7, atol=1e-3)


def test_float32_is_left_as_it_is():
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    packed = Packed(weight)
    assert packed.weight is weight and torch.equal(packed(x), F.linear(x, weight))


@packs
def test_a_packed_drafter_drafts_alike_and_stores_alike():
    target = tiny_target()
    drafter = tiny_drafter(target).to(torch.bfloat16).eval().requires_grad_(False)
    context = torch.randn(9, drafter.fc.in_features).bfloat16()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}

    def draft():
        cache = drafter.new_cache(16)
        drafter.extend(cache, context)
        return drafter.draft(torch.tensor([5]), cache, 4, temperature=1.0, generator=torch.Generator().manual_seed(0))

    plain = draft()
    packed = pack(drafter)
    assert packed is drafter and isinstance(drafter.fc.forward, Packed)
    assert all(torch.equal(t, before[name]) for name, t in drafter.state_dict().items())
    assert torch.allclose(draft().q, plain.q, atol=2e-3)


@pytest.mark.bench
def test_bench_a_forward_with_packed_weights_and_without(monkeypatch, capsys):
    """Prints medians, in ms, of the embedded target's forward and LM head over 1, 4 and 8 tokens, both by turns."""
    packed = Target.load(EMBEDDED, torch.bfloat16)
    monkeypatch.setattr("dspark.packed._profits", lambda weight: False)
    plain, ids = Target.load(EMBEDDED, torch.bfloat16), torch.arange(5, 105)[None]
    targets = {"packed": packed, "plain": plain}
    caches = {name: target.new_cache(1, 128) for name, target in targets.items()}
    times = {(name, rows): [] for name in targets for rows in (1, 4, 8)}
    for target, cache in zip(targets.values(), caches.values(), strict=True):
        target.forward(ids, cache, 0)
        target.logits(torch.zeros(8, target.hidden_size, dtype=target.dtype))
    for _ in range(30):
        for name, rows in times:
            begun = time.perf_counter()
            targets[name].logits(targets[name].forward(ids[:, :rows], caches[name], 100).hidden).argmax(-1)
            times[name, rows].append(1e3 * (time.perf_counter() - begun))
    with capsys.disabled():
        for rows in (1, 4, 8):
            mine, other = (statistics.median(times[name, rows]) for name in targets)
            print(f"\n{rows} tokens: packed {mine:.1f} ms, plain {other:.1f} ms, {other / mine:.2f}x", end="")
