"""Markov decode and verification, kernel and reference, against float64 twins that loop over requests and tokens."""

import numpy as np
import pytest
import torch
from kernel_runs import DEVICE, DTYPES, assert_near, fresh_generator, kernels
from tiny import tiny_config

from dspark.heads import MarkovHead
from dspark.kernels import (
    markov_decode,
    markov_decode_reference,
    markov_decode_triton,
    verify,
    verify_reference,
    verify_triton,
)

# numpy warns where the interpreter computes in masked lanes what is then thrown away
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

# ---- Markov decode


def markov_problem(B, n, D, rank, extra, dtype=torch.float32, kind="vanilla"):
    """(base, hidden, anchors, head, d2t); `extra` target ids have no draft id, and -inf stands in every row."""
    generator = fresh_generator()
    config = tiny_config(vocab_size=D + extra, draft_vocab_size=D, markov_rank=rank, markov_head_type=kind)
    head = MarkovHead(config).to(DEVICE, dtype)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter)
    base = torch.randn(B, n, D, generator=generator)
    base[:, :, torch.randint(0, D, (D // 5,), generator=generator)] = -torch.inf
    hidden = torch.randn(B, n, config.hidden_size, generator=generator)
    anchors = torch.randint(0, D + extra, (B,), generator=generator)
    kept = torch.randperm(D + extra, generator=generator)[:D].sort().values
    d2t = (kept - torch.arange(D)).to(DEVICE) if extra else None
    return base.to(DEVICE, dtype), hidden.to(DEVICE, dtype), anchors.to(DEVICE), head, d2t


def markov_twin(base, anchors, head, tokens):
    """Logits [B, n, D] and W1's rows [B, n, r] in float64 along given tokens."""
    w1, w2 = (w.detach().double().cpu() for w in (head.markov_w1.weight, head.markov_w2.weight))
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], 1).cpu()
    return base.double().cpu() + w1[previous] @ w2.T, w1[previous]


def philox_uniforms(seed: int, count: int) -> np.ndarray:
    """u[c] of Philox-4x32-10 (Salmon et al. 2011) with key `seed` and counter (c, 0, 0, 0), as Triton makes them."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.arange(count, dtype=np.uint64), *[np.zeros(count, dtype=np.uint64)] * 3]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & mask, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    signed = c[0].astype(np.uint32).astype(np.int32).astype(np.float64)
    return np.where(signed < 0, -signed - 1, signed) * 4.6566127342e-10


def check_tokens(tokens, scores, slack):
    """Every token is a best one of its float64 scores [B, n, D], to `slack`."""
    lost = scores.max(-1).values - scores.gather(-1, tokens[..., None].cpu())[..., 0]
    assert float(lost.max()) <= slack


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, n, D, rank, extra", [(1, 3, 71, 24, 30), (3, 2, 40, 200, 0), (1, 1, 130, 8, 0), (17, 2, 33, 16, 9)]
)
def test_greedy_markov_tokens_are_the_argmax_of_their_own_context(B, n, D, rank, extra, dtype):
    base, hidden, anchors, head, d2t = markov_problem(B, n, D, rank, extra, dtype)
    with kernels(markov_decode_triton, "_position") as launches, torch.no_grad():
        got = markov_decode(base, hidden, anchors, head, d2t)
    assert launches["_position"] == n
    scores, embeddings = markov_twin(base, anchors, head, got.tokens)
    drafted = got.tokens if d2t is None else torch.searchsorted(d2t + torch.arange(D, device=DEVICE), got.tokens)
    check_tokens(drafted, scores, 1e-4)
    assert torch.equal(got.embeddings.double().cpu(), embeddings) and got.logits is None
    with torch.no_grad():
        plain = markov_decode_reference.markov_decode(base, hidden, anchors, head, d2t)
    if dtype == torch.float32:
        assert torch.equal(got.tokens, plain.tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, n, D, extra", [(1, 3, 71, 20), (3, 2, 37, 0)])
def test_sampled_markov_tokens_are_gumbel_maxima_of_their_own_seeds(B, n, D, extra, dtype):
    base, hidden, anchors, head, d2t = markov_problem(B, n, D, 8, extra, dtype)
    seeds = torch.tensor([5, 2**40 + 3, 77], device=DEVICE)[:B]
    with kernels(markov_decode_triton, "_position"), torch.no_grad():
        got, again = (markov_decode(base, hidden, anchors, head, d2t, 0.7, seeds) for _ in range(2))
        last = slice(B - 1, B)
        alone = markov_decode(base[last], hidden[last], anchors[last], head, d2t, 0.7, seeds[last])
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert torch.equal(got.tokens[last], alone.tokens)  # whatever else is in the batch
    scores, _ = markov_twin(base, anchors, head, got.tokens)
    finite = torch.isfinite(scores)
    assert torch.equal(torch.isfinite(got.logits.cpu()), finite)
    assert_near(got.logits.cpu()[finite], scores[finite] / 0.7, dtype)
    noise = np.stack([philox_uniforms(seed, n * D).reshape(n, D) for seed in seeds.tolist()])
    with np.errstate(divide="ignore"):
        gumbel = torch.from_numpy(-np.log(-np.log(noise)))
    drafted = got.tokens if d2t is None else torch.searchsorted(d2t + torch.arange(D, device=DEVICE), got.tokens)
    check_tokens(drafted, scores / 0.7 + gumbel, 1e-3)


def test_ties_and_hopeless_rows_go_to_the_lowest_id():
    base, hidden, anchors, head, _ = markov_problem(1, 3, 90, 8, 0)
    base.fill_(-1.0)
    base[0, 0, 70], base[0, 0, 11] = 0.0, -0.0  # equal, in two tiles
    base[0, 2] = -torch.inf
    head.markov_w2.weight.data.zero_()
    with kernels(markov_decode_triton, "_position"), torch.no_grad():
        assert markov_decode(base, hidden, anchors, head).tokens.tolist() == [[11, 0, 0]]
    assert markov_decode_reference.markov_decode(base, hidden, anchors, head).tokens.tolist() == [[11, 0, 0]]


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_without_a_kernel_are_the_references(kind, monkeypatch):
    monkeypatch.setenv("DSPARK_KERNELS", "triton")
    problem = markov_problem(2, 3, 30, 8, 5, kind=kind)
    with torch.no_grad():
        got, plain = markov_decode(*problem), markov_decode_reference.markov_decode(*problem)
    assert torch.equal(got.tokens, plain.tokens) and torch.equal(got.embeddings, plain.embeddings)


def test_the_reference_draws_from_the_q_that_it_states():
    base, hidden, anchors, head, _ = markov_problem(1, 1, 5, 8, 0)
    with torch.no_grad():
        drafts = [markov_decode_reference.markov_decode(base, hidden, anchors, head, None, 1.5, torch.tensor([seed]))
                  for seed in range(2000)]  # fmt: skip
    q = drafts[0].logits[0, 0].softmax(-1)
    counts = torch.bincount(torch.cat([d.tokens[0] for d in drafts]), minlength=5)
    assert ((counts - 2000 * q).abs() < 4 * (2000 * q * (1 - q)).sqrt() + 1).all()


# ---- verification


def verify_problem(B, n, V, kept=None, dtype=torch.float32):
    """(logits, drafts, rows, uniforms, q, to_draft): drafts mostly likely, 0 .. n of them, -inf in every row."""
    generator = fresh_generator()
    logits = 3 * torch.randn(B, n + 1, V, generator=generator)
    logits[:, :, torch.randint(0, V, (V // 4,), generator=generator)] = -torch.inf
    ids = torch.arange(V) if kept is None else torch.randperm(V, generator=generator)[:kept].sort().values
    q = torch.rand(B, n, len(ids), generator=generator).pow(4)
    q = q / q.sum(-1, keepdim=True)
    likely = logits[:, :n, ids].argmax(-1)
    drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, n) if n else likely
    drafts = ids[torch.where(torch.rand(B, n, generator=generator) < 0.7, likely, drawn)]
    lengths = torch.randint(0, n + 1, (B,), generator=generator)
    lengths[0] = n
    to_draft = None
    if kept is not None:
        to_draft = torch.full((V,), -1)
        to_draft[ids] = torch.arange(kept)
        to_draft = to_draft.to(DEVICE)
    uniforms = torch.rand(B, n + 1, generator=generator)
    real = torch.arange(n + 1) <= lengths[:, None]
    rows = (real.flatten().cumsum(0) - 1).view_as(real).where(real, -1)
    return logits.to(DEVICE, dtype), drafts.to(DEVICE), rows.to(DEVICE), uniforms.to(DEVICE), q.to(DEVICE), to_draft


def residuals(logits, drafts, temperature, q, to_draft):
    """(p, wide, r) in float64, [n+1, V], [n, V], [n+1, V]: target, draft and residual (unnormalised) of one request."""
    p = (logits.double() / temperature).softmax(-1)
    ids = range(p.shape[1]) if to_draft is None else to_draft.tolist()
    wide = torch.zeros_like(p[:-1])
    for k, x in enumerate(drafts.tolist()):
        if q is None:
            wide[k, x] = 1
        else:
            wide[k] = torch.tensor([float(q[k, d]) if d >= 0 else 0.0 for d in ids], dtype=torch.float64)
    r = torch.cat([(p[:-1] - wide).clamp_min(0), p[-1:]])
    return p, wide, r


def verify_twin(got, logits, drafts, lengths, temperature, uniforms, q, to_draft, slack=1e-5):
    """Whether (accepted, following) of one request is what float64 gives, uniforms moved by no more than `slack`."""
    p, wide, r = residuals(logits, drafts, temperature, q, to_draft)
    accepted, following = (int(x) for x in got)
    for k in range(min(accepted + 1, lengths)):
        x, u = int(drafts[k]), float(uniforms[k])
        ratio = float(p[k, x] / wide[k, x])
        if (u - slack >= ratio) if k < accepted else (u + slack < ratio):
            return False
    r = r[accepted] if accepted < lengths and float(r[accepted].sum()) > 0 else p[accepted]
    below, goal = float(r[:following].sum()), float(uniforms[-1]) * float(r.sum())
    return (
        accepted <= lengths and float(r[following]) > 0 and below - slack <= goal <= below + float(r[following]) + slack
    )


def a_likely_other(accepted, following, logits, drafts, lengths, temperature, uniforms, q, to_draft):
    """The likeliest token but `following`: wide enough that a uniform moved by `slack` does not reach it."""
    p, _, r = residuals(logits, drafts, temperature, q, to_draft)
    r = r[accepted] if accepted < lengths else p[accepted]
    r[following] = -1
    return r.argmax()


SHAPES = [(3, 4, 50, None), (2, 1, 1500, 1000), (1, 7, 131, 40), (5, 2, 16, 16), (2, 0, 30, None), (1, 16, 20, None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("B, n, V, kept", SHAPES)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_greedy_verification_keeps_the_matching_prefix(B, n, V, kept, ragged, implementation, dtype):
    logits, drafts, rows, *_ = verify_problem(B, n, V, kept, dtype)
    real = rows >= 0 if ragged else torch.ones_like(rows, dtype=torch.bool)
    options = {"rows": rows} if ragged else {}
    given = logits[real] if ragged else logits
    if implementation == "triton":
        with kernels(verify_triton, "_verify") as launches:
            got = verify(given, drafts, **options)
        assert launches["_verify"] == 1
    else:
        got = verify_reference.verify(given, drafts, **options)
    for i in range(B):
        choice, k = logits[i].argmax(-1).tolist(), 0
        while k < n and real[i, k + 1] and choice[k] == drafts[i, k]:
            k += 1
        assert (int(got.accepted[i]), int(got.following[i])) == (k, choice[k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("B, n, V, kept", SHAPES)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_sampled_verification_is_that_of_float64(B, n, V, kept, certain, implementation, dtype):
    logits, drafts, rows, uniforms, q, to_draft = verify_problem(B, n, V, kept, dtype)
    q, to_draft = (None, None) if certain else (q, to_draft)
    packed = (logits[rows >= 0], drafts, rows, 0.8, uniforms, q, to_draft)
    if implementation == "triton":
        with kernels(verify_triton, "_verify") as launches:
            got, again = verify(*packed), verify(*packed)
        assert launches["_verify"] == 2
        assert torch.equal(got.accepted, again.accepted) and torch.equal(got.following, again.following)
    else:
        got = verify_reference.verify(*packed)
    for i in range(B):
        of_q = (None if certain else q[i].cpu(), None if to_draft is None else to_draft.cpu())
        one = (logits[i].cpu(), drafts[i].cpu(), int((rows[i] >= 0).sum()) - 1, 0.8, uniforms[i].cpu(), *of_q)
        mine = (got.accepted[i], got.following[i])
        assert verify_twin(mine, *one)
        assert not verify_twin((mine[0], a_likely_other(*mine, *one)), *one)


def test_the_verify_kernel_at_the_edges():
    """Ties in two shares of a row, a row of -inf, p equal to q, a certain target, uniforms 0 and just below 1."""
    logits = torch.full((1, 3, 2600), -10.0, device=DEVICE)
    logits[0, :, [2100, 700]] = 5.0
    hopeless = torch.cat([logits[:, :1], torch.full_like(logits[:, 1:], -torch.inf)], 1)
    with kernels(verify_triton, "_verify"):
        got = verify(logits, torch.tensor([[700, 2100]], device=DEVICE))
        assert (got.accepted.tolist(), got.following.tolist()) == ([1], [700])
        for second, accepted in ((0, 2), (1, 1)):  # id 0 is the argmax of a row of -inf
            drafts = torch.tensor([[700, second]], device=DEVICE)
            for got in (verify(hopeless, drafts), verify_reference.verify(hopeless, drafts)):
                assert (got.accepted.tolist(), got.following.tolist()) == ([accepted], [0])
        row = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 1.0], device=DEVICE)
        same, drafts = row.expand(2, 3, 5).contiguous(), torch.tensor([[2, 1]] * 2, device=DEVICE)
        q = row.softmax(-1).expand(2, 2, 5).contiguous()
        uniforms = torch.tensor([[0.0, 0.0, 0.0], [1 - 2**-24] * 3], device=DEVICE)
        assert verify(same, drafts, None, 1.0, uniforms, q).following.tolist() == [0, 4]  # never the impossible 3
        sure = torch.full((1, 2, 5), -torch.inf, device=DEVICE)
        sure[0, :, 3] = 1.0
        got = verify(sure, drafts[:1, :1], None, 1.0, uniforms[1:, :2], q[:1, :1])
        assert (got.accepted.tolist(), got.following.tolist()) == ([0], [3])


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_cuda_graph_of_drafting_and_verification_follows_its_inputs(temperature):
    """Captured once, replayed on other inputs: what the same calls give without a graph, and the reference's tokens."""
    first, other = (markov_problem(3, 4, 300, 16, 40) for _ in range(2))
    base, hidden, anchors, head, d2t = first
    seeds, uniforms = torch.arange(3, device=DEVICE), torch.rand(3, 5, device=DEVICE)
    logits = torch.randn(3, 5, 340, device=DEVICE)
    to_draft = torch.full((340,), -1, device=DEVICE)
    to_draft[torch.arange(300, device=DEVICE) + d2t] = torch.arange(300, device=DEVICE)

    @torch.no_grad()
    def step():
        drafted = markov_decode(base, hidden, anchors, head, d2t, temperature, seeds)
        q = drafted.logits.softmax(-1) if temperature else None
        verified = verify(logits, drafted.tokens, None, temperature, uniforms, q, to_draft if temperature else None)
        return drafted, q, verified

    with kernels(markov_decode_triton, "_position"), kernels(verify_triton, "_verify"):
        step()  # compiles, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drafted, q, verified = step()
        base.copy_(other[0])
        anchors.copy_(other[2])
        seeds.add_(7)
        uniforms.copy_(torch.rand_like(uniforms))
        logits.copy_(torch.randn_like(logits)).scatter_(-1, step()[0].tokens[:, :1, None], 9.0)  # a likely first draft
        plain = step()
        graph.replay()
    for got, wanted in zip((*drafted, q, *verified), (*plain[0], plain[1], *plain[2]), strict=True):
        assert (got is None) == (wanted is None) and (got is None or torch.equal(got, wanted))
    rest = (None, temperature, uniforms, q, to_draft if temperature else None)
    for got, wanted in zip(verified, verify_reference.verify(logits, drafted.tokens, *rest), strict=True):
        assert torch.equal(got, wanted)
    if not temperature:  # at others kernel and reference draw by other noise
        with torch.no_grad():
            reference = markov_decode_reference.markov_decode(base, hidden, anchors, head, d2t)
        assert torch.equal(drafted.tokens, reference.tokens)


def test_a_forced_choice_is_obeyed_or_refused(monkeypatch):
    logits, drafts = torch.zeros(1, 2, 4), torch.zeros(1, 1, dtype=torch.long)
    monkeypatch.setenv("DSPARK_KERNELS", "fast")
    with pytest.raises(ValueError, match="one of auto, triton, reference"):
        verify(logits, drafts)
    monkeypatch.setenv("DSPARK_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        verify(logits, drafts)
    monkeypatch.setenv("DSPARK_KERNELS", "auto")
    assert verify(logits, drafts).accepted.tolist() == [1]
