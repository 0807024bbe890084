"""The CPU's kernels against torch in float64, rounded once, and every row as if it stood alone."""

import pytest
import torch
import torch.nn.functional as F

from dspark.kernels import cpu
from dspark.packed import Packed

EPS = 1e-5
ONCE = {"rtol": 2**-8, "atol": 1e-4}  # half a step of bfloat16, and float32 sums
TWICE = {"rtol": 2**-7, "atol": 1e-3}  # what goes in was rounded too, now and then the other way
ROWS = (*range(1, 14), 40)  # a dozen rows share one reading of the weights


@pytest.fixture(scope="session")
def kernels():
    if not cpu.serves(torch.zeros(1, 2, dtype=torch.bfloat16)):
        pytest.skip("the CPU's kernels are not available here")
    return torch.ops.dspark


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def scattered(x):
    """The same numbers, every second one of a longer tensor's last axis."""
    return torch.stack([x, torch.full_like(x, 1)], -1).flatten(-2)[..., ::2]


# ---- products


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 160])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_is_the_exact_product_rounded_once(kernels, rows, outputs):
    x, weight, bias = normal(rows, 98), normal(outputs, 98), normal(outputs)
    exact = F.linear(x.double(), weight.double())
    got = Packed(weight)(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, **ONCE)
    assert torch.equal(Packed(weight, bias)(x), got + bias)


def test_linear_takes_any_leading_axes_and_strides(kernels):
    x, packed = normal(2, 3, 64), Packed(normal(48, 64))
    assert packed.blocked and packed(x).shape == (2, 3, 48)
    assert torch.equal(packed(x), packed(x.flatten(0, 1)).view(2, 3, 48))
    assert torch.equal(packed(scattered(x)), packed(x))
    assert torch.equal(packed(x.transpose(0, 1)), packed(x).transpose(0, 1))
    assert packed(x[:, :0]).shape == (2, 0, 48)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_multiplied_alone_is_bit_for_bit_the_row_among_others(kernels, rows):
    x, packed = normal(rows, 576), Packed(normal(640, 576))
    assert torch.equal(torch.cat([packed(row) for row in x.split(1)]), packed(x))


# ---- what lies between them


@pytest.mark.parametrize("width", [16, 64, 576])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_add_rms_norm_leaves_the_rounded_sum_and_its_norm(kernels, rows, width):
    x, delta, weight = normal(rows, width), normal(rows, width, seed=1), normal(width)
    for added, sum in ((None, x), (delta, x + delta)):
        total, normed = kernels.add_rms_norm(x, added, weight, EPS)
        assert torch.equal(total, sum)
        torch.testing.assert_close(
            normed.double(), F.rms_norm(sum.double(), (width,), weight.double(), EPS), rtol=2**-8, atol=1e-5
        )
        alone = [None] * rows if added is None else added.split(1)
        again = [kernels.add_rms_norm(*row, weight, EPS) for row in zip(x.split(1), alone, strict=True)]
        assert torch.equal(torch.cat([row for row, _ in again]), total)
        assert torch.equal(torch.cat([row for _, row in again]), normed)
    tiny = kernels.add_rms_norm(x * 2**-10, None, weight, 1e-2)[1]  # where epsilon is what counts
    wanted = F.rms_norm(x.double() * 2**-10, (width,), weight.double(), 1e-2)
    torch.testing.assert_close(tiny.double(), wanted, rtol=2**-8, atol=1e-6)


def test_add_rms_norm_takes_any_strides(kernels):
    x, delta, weight = normal(3, 64), normal(3, 64, seed=1), normal(64)
    total, normed = kernels.add_rms_norm(x, delta, weight, EPS)
    for left, right in ((scattered(x), delta), (x, scattered(delta)), (scattered(x), scattered(delta))):
        for got, wanted in zip(kernels.add_rms_norm(left, right, weight, EPS), (total, normed), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [1, 13, 40])
def test_silu_mul_is_exact_rounded_once_and_row_by_row(kernels, rows):
    gate, up = 4 * normal(rows, 1536), normal(rows, 1536, seed=1)
    gate[:, :5] = torch.tensor([0.0, -100.0, 100.0, -3e38, 3e38])
    up[:, :5] = torch.tensor([2.0, 2.0, 2.0, 0.5, 0.5])
    both = torch.cat([gate, up], 1)
    got = kernels.silu_mul(both)
    torch.testing.assert_close(got.double(), F.silu(gate.double()) * up.double(), rtol=2**-8, atol=1e-6)
    assert torch.equal(torch.cat([kernels.silu_mul(row) for row in both.split(1)]), got)


# ---- attention


def rope_table(length, d):
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def turned(x, norm, cos, sin):
    """x [N, heads, d], normed and rotated in float64; rounded where the caches' type makes the kernels round."""
    if norm is not None:
        x = F.rms_norm(x.double(), x.shape[-1:], norm.double(), EPS).bfloat16()
    a, b = x.double().chunk(2, -1)
    return (x.double() * cos[:, None].double() + torch.cat([-b, a], -1) * sin[:, None].double()).bfloat16()


def attended(q, keys, values, requests, visible):
    """q [N, h, d] over caches [B, g, L, d], in float64 -> [N, h d]."""
    rows = []
    for query, request, seen in zip(q.double(), requests.tolist(), visible.tolist(), strict=True):
        k, v = (x[request, :, :seen].double().repeat_interleave(len(query) // x.shape[1], 0) for x in (keys, values))
        weights = ((k @ query[..., None])[..., 0] / q.shape[-1] ** 0.5).softmax(-1)
        rows.append((weights[:, None] @ v)[:, 0])
    return torch.stack(rows).flatten(1)


class Case:
    """Rows of three requests (of four in the cache) with different pasts; NaN wherever nothing was committed."""

    def __init__(self, d, counts=(5, 1, 3), normed=True, whole=False, heads=6, groups=2, strides="target"):
        self.d, self.heads, self.groups, lengths = d, heads, groups, (17, 0, 30)
        wanted = [(request, n) for request, n in zip((2, 0, 3), counts, strict=True)]
        self.requests = torch.tensor([request for request, n in wanted for _ in range(n)])
        self.positions = torch.cat([first + torch.arange(n) for first, n in zip(lengths, counts, strict=True)])
        self.visible = self.positions + 1
        if whole:
            ends = torch.tensor([first + n for first, n in zip(lengths, counts, strict=True)])
            self.visible = ends.repeat_interleave(torch.tensor(counts))
        self.qkv = normal(len(self.positions), (heads + 2 * groups) * d)
        self.norms = (1 + normal(d) / 4, 1 + normal(d, seed=1) / 4) if normed else (None, None)
        self.rope = rope_table(40, d)
        self.past = []
        for seed in (2, 3):
            layer = torch.full((4, groups, 40, d), torch.nan, dtype=torch.bfloat16)
            for request, length in zip((2, 0, 3), lengths, strict=True):
                layer[request, :, :length] = normal(groups, length, d, seed=seed)
            if strides == "drafter":
                layer = layer.transpose(1, 2).contiguous().transpose(1, 2)
            self.past.append(layer)

    def caches(self):
        return [layer.clone() for layer in self.past]

    def run(self, caches, rows=slice(None), change=lambda index: index):
        where = [change(index[rows]) for index in (self.positions, self.requests, self.visible)]
        return torch.ops.dspark.attend(self.qkv[rows].contiguous(), *self.norms, EPS, *self.rope, *where, *caches)


@pytest.mark.parametrize("strides", ["target", "drafter"])
@pytest.mark.parametrize("whole", [False, True], ids=["causal", "whole block"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("d, heads, groups", [(64, 9, 3), (64, 4, 4), (128, 6, 2)])
def test_attend_writes_its_keys_and_values_and_sees_what_is_visible(kernels, d, heads, groups, normed, whole, strides):
    case = Case(d, normed=normed, whole=whole, heads=heads, groups=groups, strides=strides)
    keys, values = case.caches()
    assert keys.stride() == case.past[0].stride()
    out = case.run([keys, values])
    q, k, v = case.qkv.view(-1, heads + 2 * groups, d).split([heads, groups, groups], 1)
    cos, sin = (table[case.positions] for table in case.rope)
    at = (case.requests, slice(None), case.positions)
    torch.testing.assert_close(keys[at].double(), turned(k, case.norms[1], cos, sin).double(), **TWICE)
    assert torch.equal(values[at], v)
    for layer, past in zip((keys, values), case.past, strict=True):
        layer = layer.clone()
        layer[at] = past[at]
        assert torch.equal(layer.nan_to_num(7), past.nan_to_num(7))  # nothing else was touched
    wanted = attended(turned(q, case.norms[0], cos, sin), keys, values, case.requests, case.visible)
    assert out.shape == (9, heads * d)
    torch.testing.assert_close(out.double(), wanted, **TWICE)


@pytest.mark.parametrize("strides", ["target", "drafter"])
@pytest.mark.parametrize("d", [64, 128])
def test_attend_without_a_query_only_writes(kernels, d, strides):
    case = Case(d, strides=strides)
    all_of_it, no_query = case.caches(), case.caches()
    case.run(all_of_it)
    case.norms = (None, case.norms[1])
    case.qkv = case.qkv[:, case.heads * d :]
    assert case.run(no_query).shape == (9, 0)
    for got, wanted in zip(no_query, all_of_it, strict=True):
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("counts", [(1, 2, 1), (5, 1, 3), (9, 3, 1), (16, 20, 4)])
def test_a_row_attended_alone_is_bit_for_bit_the_row_among_others(kernels, d, counts):
    case = Case(d, counts)
    together, alone = case.caches(), case.caches()
    wanted = case.run(together)
    got = torch.cat([case.run(alone, slice(i, i + 1)) for i in range(len(wanted))])
    assert torch.equal(got, wanted) and not wanted.isnan().any()
    for mine, theirs in zip(alone, together, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_scores_far_apart_or_huge_do_not_overflow(kernels):
    case = Case(64, normed=False)
    case.qkv[:, : (case.heads + case.groups) * 64] *= 100
    keys, values = case.caches()
    out = case.run([keys, values])
    q = case.qkv.view(9, -1, 64)[:, : case.heads]
    q = turned(q, None, *(table[case.positions] for table in case.rope))
    torch.testing.assert_close(
        out.double(), attended(q, keys, values, case.requests, case.visible), rtol=2**-7, atol=0.02
    )


def test_indices_may_have_any_strides(kernels):
    case = Case(64)
    wanted = case.run(case.caches())
    assert torch.equal(case.run(case.caches(), change=scattered), wanted)
    block = slice(5, 6)  # one row, and the same row with indices that were expanded
    one = case.run(case.caches(), block)
    assert torch.equal(case.run(case.caches(), block, change=lambda index: index[0].expand(1)), one)
    case.requests, case.positions = torch.tensor(2).expand(9), 17 + torch.arange(9)
    case.visible = torch.tensor(26).expand(9)
    expanded = case.run(case.caches())
    case.requests, case.visible = case.requests.contiguous(), case.visible.contiguous()
    assert torch.equal(case.run(case.caches()), expanded)


# ---- the best token


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 40, 1000])
def test_argmax_is_the_first_of_the_highest(kernels, size):
    logits = normal(3, 50, size).round().abs().neg()  # few values, so ties; none above zero
    logits[0, :20, size // 2 :] = -torch.inf
    logits[0, 0] = -torch.inf
    first = [[row.tolist().index(max(row.tolist())) for row in rows] for rows in logits]
    assert kernels.argmax(logits).tolist() == first
    assert kernels.argmax(scattered(logits)).tolist() == first
    assert kernels.argmax(logits[1, 1]).tolist() == first[1][1] and kernels.argmax(logits[:, :0]).shape == (3, 0)


@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 39])
def test_argmax_finds_the_highest_anywhere(kernels, at):
    logits = normal(2, 40).clamp_max(1)
    logits[:, at] = 2
    assert cpu.argmax(logits).tolist() == cpu.argmax(logits.float()).tolist() == [at, at]


# ---- what does not fit


def test_inputs_that_do_not_fit_say_why(kernels):
    case, linear = Case(64), Packed(normal(32, 64))
    with pytest.raises(RuntimeError, match="x has 62 columns, the weight takes 64"):
        linear(normal(3, 62))
    with pytest.raises(RuntimeError, match="BFloat16"):
        linear(torch.zeros(3, 64))
    with pytest.raises(RuntimeError, match="rows of 24, a weight of 24: a multiple of 16 fits"):
        kernels.add_rms_norm(normal(3, 24), None, normal(24), EPS)
    with pytest.raises(RuntimeError, match="gates of 24: a multiple of 16"):
        kernels.silu_mul(normal(3, 48))
    with pytest.raises(RuntimeError, match="contiguous"):
        kernels.silu_mul(scattered(normal(3, 64)))
    with pytest.raises(RuntimeError, match="a request has no row in the cache"):  # request 3 is the fourth
        case.run([layer[:3] for layer in case.caches()])
    with pytest.raises(RuntimeError, match="head size 32: 64 or 128"):
        Case(32).run(Case(32).caches())
    with pytest.raises(RuntimeError, match="keys and values lie differently"):
        case.run([case.caches()[0], Case(64, strides="drafter").caches()[1]])
    with pytest.raises(RuntimeError, match="the cache is too short"):  # 33 places are needed
        case.run([layer[:, :, :32] for layer in case.caches()])
    case.run([layer[:, :, :33] for layer in case.caches()])
    with pytest.raises(RuntimeError, match="the cache is too short"):
        case.rope = rope_table(32, 64)
        case.run(case.caches())
    with pytest.raises(RuntimeError, match="the cache is too short"):
        case.rope, case.visible = rope_table(40, 64), torch.full((9,), 41)
        case.run(case.caches())


@pytest.mark.parametrize("columns", [1, 15, 48, 1003])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_probabilities_are_the_softmax(kernels, columns, temperature):
    logits = 8 * normal(5, columns)
    logits[1], logits[2, ::2] = -9e37, -torch.inf  # all alike, however low; ids that can never be drawn
    logits[2, 0] = 0
    got = kernels.probabilities(logits, temperature)
    exact = (logits.double() / temperature).softmax(-1)
    assert got.dtype == torch.float32 and torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-9)
    assert torch.equal(got[3:4], kernels.probabilities(logits[3:4], temperature))


def test_probabilities_are_the_same_in_threads_that_flush_subnormal_numbers(kernels):
    """Training sets that mode, for its own thread only, and the worker threads computed the other rows."""
    logits = 8 * normal(5, 1003)
    wanted = kernels.probabilities(logits, 0.3)
    assert torch.equal(torch.cat([kernels.probabilities(row, 0.3) for row in logits.split(1)]), wanted)
    assert 0 < wanted[wanted > 0].min() < 1e-25
    torch.set_flush_denormal(True)
    try:
        alone = [kernels.probabilities(row, 0.3) for row in logits.split(1)]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(torch.cat(alone), wanted)


@pytest.mark.parametrize("at", [0, 47, 49])
def test_argmax_beside_nan_stays_in_the_vocabulary(kernels, at):
    logits = torch.stack([torch.full((50,), torch.nan), torch.arange(50.0)]).bfloat16()
    logits[1, at] = torch.nan
    nothing_but_nan, beside_nan = kernels.argmax(logits).tolist()
    assert nothing_but_nan == 0 and 0 <= beside_nan < 50


@pytest.mark.parametrize("index, value, reason", [
    (0, -1, "stands before the first place"), (1, -1, "a request has no row"), (2, 0, "or sees none"),
])  # fmt: skip
def test_attend_refuses_indices_below_the_first(kernels, index, value, reason):
    case = Case(64)
    (case.positions, case.requests, case.visible)[index][4] = value
    with pytest.raises(RuntimeError, match=reason):
        case.run(case.caches())


@pytest.mark.parametrize("rows, width, caches", [(8, 12 * 64, 3), (9, 12 * 64 + 32, 3), (9, 8 * 64, 3)])
def test_attend_refuses_what_it_would_read_beyond(kernels, rows, width, caches):
    where, rope = torch.zeros(9, dtype=torch.long), torch.zeros(16, 64)
    keys, values = (torch.zeros(1, caches, 16, 64).bfloat16() for _ in range(2))
    with pytest.raises(RuntimeError, match="qkv does not fit"):
        kernels.attend(normal(rows, width), None, None, EPS, rope, rope, where, where, where + 1, keys, values)


def test_nothing_is_left_of_no_rows_and_no_logits_are_an_error(kernels):
    case = Case(64, (0, 0, 0))
    caches = case.caches()
    assert case.run(caches).shape == (0, 6 * 64)
    assert all(torch.equal(got.nan_to_num(7), past.nan_to_num(7)) for got, past in zip(caches, case.past, strict=True))
    for nothing in (kernels.argmax, lambda logits: kernels.probabilities(logits, 1.0)):
        with pytest.raises(RuntimeError, match="no logits"):
            nothing(normal(3, 0))
    with pytest.raises(RuntimeError, match="x has 0 columns, the weight takes 0"):
        kernels.linear(normal(3, 0), torch.zeros(1, 0, kernels.columns(), 2).bfloat16(), 1)
    with pytest.raises(RuntimeError, match="rows of 0, a weight of 0"):
        kernels.add_rms_norm(normal(3, 0), None, normal(0), EPS)
    with pytest.raises(RuntimeError, match="gates of 0"):
        kernels.silu_mul(normal(3, 0))


def test_another_cache_does_not_load_them_twice(kernels, monkeypatch, tmp_path):
    """Two libraries that register the same operations abort the process."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    cpu.available.cache_clear()
    assert cpu.available() and list(tmp_path.glob("kernels-*.so")) and kernels.argmax(normal(1, 16)).shape == (1,)
