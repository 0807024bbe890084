"""Block attention, kernel and reference, against a dense mask in float64 (pitfall 33)."""

import pytest
import torch
from kernel_runs import DEVICE, DTYPES, assert_near, fresh_generator, kernels
from twin import dense_attention, seen

from dspark.kernels import block_attention
from dspark.kernels import block_attention_reference as reference
from dspark.kernels import block_attention_triton as kernel

CASES = {
    "one document": ([20], [1, 4, 9, 19]),
    "several documents": ([5, 9, 7], [0, 4, 5, 6, 13, 14, 20]),
    "one anchor": ([20], [11]),
    "empty context": ([6, 6], [0, 6]),
    "anchors at the end": ([8, 8], [7, 15]),
    "an anchor twice": ([20], [9, 9, 12]),
    "a document without anchors": ([6, 6, 6], [3, 14]),
}


def problem(lengths, anchors, n, heads, kv, d, dtype=torch.float32, seed=None):
    """(five inputs that want a gradient, anchors, starts, a gradient for the output), fresh unless a seed is given."""
    generator = fresh_generator() if seed is None else torch.Generator().manual_seed(seed)
    total, anchors, ends = sum(lengths), torch.tensor(anchors), torch.tensor(lengths).cumsum(0)
    starts = (ends - torch.tensor(lengths))[torch.searchsorted(ends, anchors, right=True)]
    shapes = ((len(anchors), n, heads, d), *[(total, kv, d)] * 2, *[(len(anchors), n, kv, d)] * 2)
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    signal = torch.randn(shapes[0], generator=generator).to(DEVICE, dtype)
    return inputs, anchors.to(DEVICE), starts.to(DEVICE), signal


def exact(inputs, anchors, starts, signal, causal, window):
    """Output and gradients by concatenated keys and a dense mask, in float64."""
    doubles = [x.detach().cpu().double().requires_grad_() for x in inputs]
    q, context_k, context_v, block_k, block_v = doubles
    out = []
    for i, (anchor, start) in enumerate(zip(anchors.tolist(), starts.tolist(), strict=True)):
        k = torch.cat([context_k[start:anchor], block_k[i]])
        v = torch.cat([context_v[start:anchor], block_v[i]])
        out.append(dense_attention(q[i], k, v, seen(q.shape[1], anchor, start, causal, window)))
    out = torch.stack(out)
    return out, torch.autograd.grad(out, doubles, signal.cpu().double())


def check(lengths, anchors, causal, window, n, heads, kv, d, dtype=torch.float32):
    inputs, anchors, starts, signal = problem(lengths, anchors, n, heads, kv, d, dtype)
    wanted, gradients = exact(inputs, anchors, starts, signal, causal, window)
    with kernels(kernel, "_forward", "_backward_q", "_backward_kv"):
        out = block_attention(*inputs, anchors, starts, causal, window)
        mine = torch.autograd.grad(out, inputs, signal)
    assert out.dtype == dtype
    assert_near(out, wanted, dtype)
    for got, want in zip(mine, gradients, strict=True):
        assert_near(got, want, dtype)


@pytest.mark.parametrize("lengths, anchors", CASES.values(), ids=CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 64])
@pytest.mark.parametrize("heads, kv", [(4, 2), (6, 1), (3, 3)])
def test_reference_equals_a_dense_mask(lengths, anchors, causal, window, heads, kv):
    inputs, anchors, starts, signal = problem(lengths, anchors, 3, heads, kv, 8, seed=heads)
    wanted, gradients = exact(inputs, anchors, starts, signal, causal, window)
    out = reference.block_attention(*inputs, anchors, starts, causal, window)
    assert_near(out, wanted)
    for got, want in zip(torch.autograd.grad(out, inputs, signal), gradients, strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, anchors", CASES.values(), ids=CASES)
@pytest.mark.parametrize("causal, window", [(False, None), (True, 3)])
def test_kernel_equals_a_dense_mask(lengths, anchors, causal, window, dtype):
    check(lengths, anchors, causal, window, 3, 6, 2, 8, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths, anchors, causal, window, n, heads, kv, d",
    [
        ([101], [3, 64, 65, 100], False, None, 1, 2, 1, 64),  # gamma 1, contexts around a tile's edge
        ([67, 30], [0, 33, 66, 67, 95], True, 40, 16, 3, 3, 16),  # gamma 16, no grouping
        ([70], [69, 2, 33], False, 20, 5, 7, 1, 24),  # unsorted anchors, 7 heads a key head, odd head size
        ([40], list(range(40)), False, None, 2, 2, 2, 8),  # an anchor at every row
        ([33], [32], False, 8, 7, 2, 1, 128),  # the head size of Qwen3 and Kimi
    ],
)
def test_kernel_at_shapes_that_fit_no_tile(lengths, anchors, causal, window, n, heads, kv, d, dtype):
    check(lengths, anchors, causal, window, n, heads, kv, d, dtype)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_a_context_split_among_programs_gives_the_same(splits, monkeypatch):
    """Decoding: long contexts of ragged requests in one buffer; what is stale between them is never read. The longest
    has a tile of 32 keys for each of 8 programs."""
    capacity, lengths = 256, [253, 0, 20]
    inputs, *_ = problem([capacity] * 3, [0, 100, 200], 4, 4, 2, 8)
    starts = torch.arange(3, device=DEVICE) * capacity
    anchors = starts + torch.tensor(lengths, device=DEVICE)
    wanted, _ = exact(inputs, anchors, starts, torch.ones_like(inputs[0]), False, None)
    with torch.no_grad():
        for tensor in inputs[1:3]:
            for start, length in zip(starts.tolist(), lengths, strict=True):
                tensor[start + length : start + capacity] = torch.nan
    monkeypatch.setattr(kernel, "processors", lambda device: splits * 3 * 2)  # 3 tiles, 2 key heads
    with kernels(kernel, "_forward") as launches, torch.no_grad():
        assert_near(block_attention(*inputs, anchors, starts), wanted)
    assert launches["_forward", (3, 2, splits)] == 1  # the launcher caps what a context is too short for


@pytest.mark.filterwarnings("ignore:Input #")  # gradcheck would like float64
def test_the_kernel_repeats_itself_and_passes_gradcheck():
    inputs, anchors, starts, signal = problem([9, 4], [0, 7, 10], 2, 2, 1, 4)
    with kernels(kernel, "_forward", "_backward_q", "_backward_kv"):
        runs = []
        for _ in range(2):
            out = block_attention(*inputs, anchors, starts)
            runs.append((out, *torch.autograd.grad(out, inputs, signal)))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

        def of_values(v, own):
            return block_attention(*inputs[:2], v, inputs[3], own, anchors, starts)  # linear: any step will do

        values = [inputs[2], inputs[4]]
        assert torch.autograd.gradcheck(
            of_values, values, eps=0.5, atol=1e-3, fast_mode=True, check_undefined_grad=False
        )


@pytest.mark.parametrize("choice", ["triton", "reference"])
def test_no_block_at_all_is_one_clear_error(choice, monkeypatch):
    monkeypatch.setenv("DSPARK_KERNELS", choice)
    inputs, anchors, starts, _ = problem([9], [4], 2, 2, 1, 4)
    q, context_k, context_v, block_k, block_v = inputs
    with pytest.raises(ValueError, match="no anchor"):
        block_attention(q[:0], context_k, context_v, block_k[:0], block_v[:0], anchors[:0], starts[:0])


def test_autograd_and_the_compiler_see_one_operator():
    inputs, anchors, starts, _ = problem([9, 4], [0, 7, 10], 2, 2, 1, 4)
    torch.library.opcheck(kernel._attention, (*inputs, anchors, starts, False, None))
    with kernels(kernel, "_forward", "_backward_q", "_backward_kv"):
        eager = block_attention(*inputs, anchors, starts)
        compiled = torch.compile(lambda *x: block_attention(*x) * 2, fullgraph=True, backend="aot_eager")
        out = compiled(*inputs, anchors, starts)
        torch.testing.assert_close(out, eager * 2)
        mine, plain = (torch.autograd.grad(x.sum(), inputs) for x in (out, eager * 2))
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b)


def test_reference_in_bfloat16_is_within_its_rounding():
    inputs, anchors, starts, _ = problem([30], [3, 17, 29], 4, 4, 2, 16, torch.bfloat16)
    out = reference.block_attention(*(x.detach() for x in inputs), anchors, starts)
    exact = reference.block_attention(*(x.detach().float() for x in inputs), anchors, starts)
    assert out.dtype == torch.bfloat16
    assert float((out.float() - exact).norm() / exact.norm()) < 2**-7
