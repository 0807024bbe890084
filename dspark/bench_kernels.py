"""`python3 -m dspark bench kernels`: the kernels against their floors, their references and what else there is.

A case is a kernel at a shape that occurs, with the FLOPs and bytes that no implementation can do without (counted, not
measured: products and softmaxes of the visible part only, every input and output once). On a GPU each contender is
timed, and the share is that of the nearer ceiling, both ceilings measured there: a large bfloat16 product and a copy
(more than 1 where what is counted more than once, as Markov decode's W2, stays in the GPU's cache). Without a GPU
nothing is timed: Triton's interpreter has no speed worth telling.
"""

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from dspark import evaluate, kernels, plots
from dspark.config import PRESETS, DSparkConfig
from dspark.heads import MarkovHead
from dspark.kernels import (
    acceptance_loss_reference,
    block_attention_reference,
    markov_decode_reference,
    verify_reference,
)
from dspark.paths import ROOT

SHAPES = {"SmolLM2": "smollm2-135m", "Qwen3-8B": "qwen3-8b", "Kimi-K2.6": "kimi-k2.6"}
ANCHORS = 512  # blocks of a training row, as in DeepSpec's recipe
REQUESTS = (1, 64)
SIZE = 2  # bytes of a bfloat16
PRODUCT, COPY = 8192, 2**30  # edge of the product and bytes of the copy that are the ceilings


@dataclass(frozen=True)
class Case:
    """contenders() allocates on the GPU and gives {"kernel": ..., name of another: ...}, functions to time. What they
    compile, capture or prepare they do at their first call, so that one that fails does not take the others along."""

    kernel: str
    shape: str
    what: str
    flops: int
    bytes: int
    contenders: Callable[[], dict[str, Callable]]


def visible_pairs(anchors: list[int], n: int, causal: bool = False, window: int | None = None) -> int:
    """(slot, key) pairs that blocks of one document see: context rows before the anchor, and own slots."""
    own = n * (n + 1) // 2 if causal else n * n
    reach = [min(anchor, anchor if window is None else max(0, window - i - 1)) for anchor in anchors for i in range(n)]
    return sum(reach) + own * len(anchors)


def cases() -> list[Case]:
    every = []
    for shape, preset in SHAPES.items():
        config = PRESETS[preset]
        every += [attention_training(shape, config, backward) for backward in (False, True)]
        every += [attention_decoding(shape, config, B) for B in REQUESTS]
        every += [markov(shape, config, B) for B in REQUESTS]
        every.append(loss(shape, config))
        every += [verification(shape, config, B) for B in REQUESTS]
    return every


def _randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


# ---- one case a kernel


def attention_training(shape: str, config: DSparkConfig, backward: bool) -> Case:
    T, n = config.max_position_embeddings, config.block_size
    anchors = [T * (i + 1) // (ANCHORS + 1) for i in range(ANCHORS)]
    rows, keys = ANCHORS * n * config.num_attention_heads, (T + ANCHORS * n) * config.num_key_value_heads
    pairs, d = visible_pairs(anchors, n), config.head_dim
    moved = (4 * rows + 4 * keys) if backward else (2 * rows + 2 * keys)  # q, o, do, dq and k, v, dk, dv

    def contenders():
        inputs, at = _attention_inputs(config, ANCHORS, T, True), torch.tensor(anchors, device="cuda")
        forward = {
            "kernel": lambda: kernels.block_attention(*inputs, at, at * 0),
            "reference": lambda: block_attention_reference.block_attention(*inputs, at, at * 0),
            "flex_attention": _flex_attention(inputs, at, at * 0),
        }
        return {name: _backward(function, inputs) for name, function in forward.items()} if backward else forward

    what = f"{'backward' if backward else 'forward'}, {ANCHORS} blocks of {n}, context {T:,}"
    work = (10 if backward else 4) * d * config.num_attention_heads * pairs
    return Case("block attention", shape, what, work, SIZE * moved * d, contenders)


def _attention_inputs(config: DSparkConfig, A: int, T: int, grad: bool) -> list[torch.Tensor]:
    n, heads, kv, d = config.block_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = ((A, n, heads, d), *[(T, kv, d)] * 2, *[(A, n, kv, d)] * 2)
    return [_randn(*s, grad=grad) for s in shapes]


def _backward(function: Callable, inputs: list[torch.Tensor]) -> Callable:
    """The backward pass of what `function` computes."""

    @functools.cache
    def forward():
        out = function()
        return out, torch.ones_like(out)

    return lambda: torch.autograd.grad(forward()[0], inputs, forward()[1], retain_graph=True)


def _flex_attention(inputs, anchors: torch.Tensor, starts: torch.Tensor) -> Callable:
    """Compiled flex_attention with a block mask of what each block sees, which is made once. It takes one list of keys:
    joining context and blocks is timed with it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, T = inputs[0].shape[1], len(inputs[1])

    def seen(batch, head, row, key):
        context = (key >= starts[row // n]) & (key < anchors[row // n])
        return context | (key >= T) & ((key - T) // n == row // n)

    @functools.cache
    def compiled():
        torch.compiler.reset()  # else the limit of recompilations leaves later shapes uncompiled
        rows = len(anchors) * n
        mask = create_block_mask(seen, None, None, rows, T + rows, device="cuda")
        return functools.partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True)

    def run():
        q, context_k, context_v, block_k, block_v = inputs
        k, v = torch.cat([context_k, block_k.flatten(0, 1)]), torch.cat([context_v, block_v.flatten(0, 1)])
        q, k, v = (x.transpose(0, 1)[None] for x in (q.flatten(0, 1), k, v))
        return compiled()(q, k, v)

    return run


def _graphed(function: Callable) -> Callable:
    """`function` as a CUDA graph: its launches without the time that Python takes between them."""

    @functools.cache
    def graph():
        function()  # compiles, which a capture cannot
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            function()
        return captured

    return lambda: graph().replay()


def attention_decoding(shape: str, config: DSparkConfig, B: int) -> Case:
    T, n, d = min(4096, config.max_position_embeddings), config.block_size, config.head_dim
    lengths = [T * (i + 1) // B for i in range(B)]
    rows, keys = B * n * config.num_attention_heads, (sum(lengths) + B * n) * config.num_key_value_heads

    def contenders():
        inputs = _attention_inputs(config, B, B * T, False)
        starts = torch.arange(B, device="cuda") * T
        at = starts + torch.tensor(lengths, device="cuda")
        return {
            "kernel": lambda: kernels.block_attention(*inputs, at, starts),
            "reference": lambda: block_attention_reference.block_attention(*inputs, at, starts),
            "flex_attention": _flex_attention(inputs, at, starts),
        }

    work = 4 * d * config.num_attention_heads * visible_pairs(lengths, n)
    what = f"decoding, {B} x {n} slots, contexts up to {T:,}"
    return Case("block attention", shape, what, work, SIZE * 2 * (rows + keys) * d, contenders)


def markov(shape: str, config: DSparkConfig, B: int) -> Case:
    n, D, r = config.max_draft_tokens, config.vocab_size_out, config.markov_rank

    def contenders():
        head = MarkovHead(config).to("cuda", torch.bfloat16).requires_grad_(False)
        base, anchors = _randn(B, n, D), torch.zeros(B, dtype=torch.long, device="cuda")
        args = (base, base, anchors, head, None, 0.0)
        return {
            "kernel": lambda: kernels.markov_decode(*args),
            "kernel, CUDA graph": _graphed(lambda: kernels.markov_decode(*args)),
            "reference": lambda: markov_decode_reference.markov_decode(*args),
        }

    moved = n * (D * r + B * D + 2 * B * r)
    return Case("Markov decode", shape, f"B {B}, n {n}, D {D:,}, r {r}", 2 * B * n * D * r, SIZE * moved, contenders)


def loss(shape: str, config: DSparkConfig) -> Case:
    N, D, H, r = ANCHORS * config.max_draft_tokens, config.vocab_size_out, config.hidden_size, config.markov_rank

    def contenders():
        hidden, m, w2 = _randn(N, H, grad=True), _randn(N, r, grad=True), _randn(D, r, grad=True)
        head, target_hidden, target_head = _randn(D, H), _randn(N, H), _randn(D, H)
        index, labels = torch.arange(N, device="cuda"), torch.randint(0, D, (N,), device="cuda")
        weights, wanted = torch.ones(N, device="cuda"), (hidden, m, w2)
        args = (hidden, m, head, w2, target_hidden, target_head, index, labels, weights, float(N))

        def eager():
            z = (F.linear(hidden, head) + F.linear(m, w2)).float()
            p = F.linear(target_hidden, target_head).float().softmax(-1)
            total = 0.1 * F.cross_entropy(z, labels) + 0.9 * (z.softmax(-1) - p).abs().sum(-1).mean()
            return torch.autograd.grad(total, wanted)

        def fused():
            from speculators.losses.fused import fused_ce_loss, fused_tv_loss

            z, t = (F.linear(hidden, head) + F.linear(m, w2))[None], F.linear(target_hidden, target_head)[None]
            total = 0.1 * fused_ce_loss(z, t).mean() + 1.8 * fused_tv_loss(z, t).mean()
            return torch.autograd.grad(total, wanted)

        def products():
            z, _ = torch.addmm(m @ w2.t(), hidden, head.t()), target_hidden @ target_head.t()
            return z @ head, z @ w2, z.t() @ m

        def graded(function):
            return lambda: torch.autograd.grad(function(*args).loss, wanted)

        found = {
            "kernel": graded(kernels.acceptance_loss),
            "reference": graded(acceptance_loss_reference.acceptance_loss),
            "eager": eager,
            "its products alone": torch.no_grad()(products),
        }
        if importlib.util.find_spec("speculators"):
            found["speculators' fused losses"] = fused
        return found

    work = 2 * N * H * D + 4 * N * (H + r) * D + 2 * N * r * D
    moved = SIZE * (D * (2 * H + r) + N * (3 * H + 2 * r)) + 4 * D * r
    return Case("acceptance loss", shape, f"N {N:,}, D {D:,}, H {H:,}, r {r}", work, moved, contenders)


def verification(shape: str, config: DSparkConfig, B: int) -> Case:
    n, V = config.max_draft_tokens, config.vocab_size

    def contenders():
        logits = _randn(B, n + 1, V)
        drafts = logits[:, :n].argmax(-1)  # all right, so that every row is read
        return {
            "kernel": lambda: kernels.verify(logits, drafts),
            "kernel, CUDA graph": _graphed(lambda: kernels.verify(logits, drafts)),
            "reference": lambda: verify_reference.verify(logits, drafts),
        }

    return Case("verify", shape, f"greedy, B {B}, n {n}, V {V:,}", 0, SIZE * B * (n + 1) * V, contenders)


# ---- counting and measuring


def counted() -> pd.DataFrame:
    """One row a case: what it cannot do without."""
    return pd.DataFrame([_about(case) for case in cases()]).assign(flops_per_byte=lambda t: t.flops / t.bytes)


def _about(case: Case) -> dict:
    return {name: getattr(case, name) for name in ("kernel", "shape", "what", "flops", "bytes")}


def _milliseconds(function: Callable) -> tuple[float, float, float]:
    """Median, 20% and 80% quantiles."""
    import triton.testing

    return tuple(triton.testing.do_bench(function, quantiles=(0.5, 0.2, 0.8)))


def ceilings() -> dict[str, float]:
    """FLOP/s of a bfloat16 product and bytes/s of a copy (read and written), of this GPU."""
    a, b = _randn(PRODUCT, PRODUCT), _randn(PRODUCT, PRODUCT)
    source = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product, copy = _milliseconds(lambda: a @ b)[0], _milliseconds(lambda: target.copy_(source))[0]
    return {"flops": 2 * PRODUCT**3 / product * 1e3, "bytes": 2 * COPY / copy * 1e3}


def _extra_mbytes(function: Callable) -> float:
    """Peak memory of one call beyond what was held before it, without the buffer that timing needs. A CUDA graph has
    none: it holds its memory from the capture on."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _result(function: Callable) -> dict:
    try:
        function()  # compiles
        extra = _extra_mbytes(function)
        median, low, high = _milliseconds(function)
    except Exception as error:  # of any kind: the other rows are worth having
        return {"error": _line(error)}
    return {"milliseconds": median, "low": low, "high": high, "extra_mbytes": extra}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def measured() -> pd.DataFrame:
    """One row a case and contender, with the error of one that failed. Times are those of calls, launches included."""
    os.environ["DSPARK_KERNELS"] = "triton"  # else a user's setting would have the reference timed as the kernel
    ceiling, rows = ceilings(), []
    for case in cases():
        try:
            torch.cuda.empty_cache()
            results = {name: _result(function) for name, function in case.contenders().items()}
        except Exception as error:  # no room for the inputs, say
            results = {"kernel": {"error": _line(error)}}
        rows += [_about(case) | {"contender": name} | result for name, result in results.items()]
    blank = dict.fromkeys(("milliseconds", "low", "high", "extra_mbytes"), float("nan")) | {"error": ""}
    table = pd.DataFrame([blank | row for row in rows])
    seconds = table.milliseconds / 1e3
    least = pd.DataFrame({unit: table[unit] / ceiling[unit] for unit in ceiling})  # seconds, at either ceiling
    ours = table[table.contender == "kernel"].set_index(["kernel", "shape", "what"]).milliseconds
    times = ours.reindex(table.set_index(["kernel", "shape", "what"]).index).to_numpy()
    return table.assign(
        tflops=table.flops / seconds / 1e12, gbytes_per_s=table.bytes / seconds / 1e9,
        share_of_ceiling=least.max(axis=1) / seconds, ceiling=least.idxmax(axis=1),
        times_the_kernels=table.milliseconds / times, **{f"ceiling_{k}": v for k, v in ceiling.items()},
    )  # fmt: skip


def roofline(table: pd.DataFrame) -> plots.Plot:
    """Achieved FLOP/s of the kernels against FLOPs a byte, under both measured ceilings."""
    ours = table[(table.contender == "kernel") & (table.tflops > 0)].assign(intensity=lambda t: t.flops / t.bytes)
    with mpl.rc_context(plots.STYLE):
        figure = Figure((plots.COLUMN, 2.6))
        ax = figure.subplots()
        flops, moved = float(table.ceiling_flops.iloc[0]), float(table.ceiling_bytes.iloc[0])
        knee, low, high = flops / moved, ours.intensity.min() / 2, ours.intensity.max() * 2
        ax.plot([low, knee, max(high, knee)], [low * moved / 1e12, flops / 1e12, flops / 1e12], color="0.4")
        for name, part in ours.groupby("kernel"):
            ax.scatter(part.intensity, part.tflops, label=name, s=14)
        ax.set(xscale="log", yscale="log", xlabel="FLOPs a byte, counted", ylabel="TFLOP/s")
        ax.legend()
    caption = "Kernels against the roofline: ceilings measured on the same GPU by a bfloat16 product and a copy."
    return plots.Plot(figure, ours, caption, {"error_bars": "none"})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".runs" / "bench", help="folder for the table and the figure"
    )
    out, clock = parser.parse_args(argv).out, time.perf_counter()
    with pd.option_context("display.width", 250, "display.max_colwidth", 60, "display.max_rows", None):
        if not torch.cuda.is_available():
            print(counted().to_string(index=False, formatters=dict.fromkeys(("flops", "bytes"), "{:.3g}".format)))
            print("No GPU here: FLOPs and bytes are counted from the shapes, nothing was timed and nothing written.")
            return
        table = measured()
        print(table.drop(columns=["flops", "bytes", "ceiling_flops", "ceiling_bytes"]).round(3).to_string(index=False))
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "kernels.csv", index=False)
    meta = {"device": evaluate.hardware(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    meta["wall_s"] = round(time.perf_counter() - clock)
    plots.save(roofline(table), "kernels_roofline", out, meta)
    print(f"written: {out / 'kernels.csv'} and the roofline beside it")
