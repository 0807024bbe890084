"""Packed layers compute what the plain ones do, row by row alike, and leave what is stored or trained alone."""

import re
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from test_drafter import VARIANTS
from test_kernels_cpu import kernels  # noqa: F401
from tiny import HIDDEN, tiny_drafter, tiny_target

from dspark import batched, checkpoint
from dspark.config import PRESETS
from dspark.decode import answer
from dspark.drafter import BLOCK_ROOM
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.kernels import cpu
from dspark.packed import Packed
from dspark.schedule import Fixed, Threshold
from dspark.target import EMBEDDED, Target

QUESTIONS = ("Why do leaves turn red in autumn?", "Write a short poem about a lighthouse.", "What is 17 plus 25?")
TAPS = PRESETS[EMBEDDED].target_layer_ids
BF16 = torch.bfloat16
needs_kernels = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def real():
    return Target.load(EMBEDDED, BF16, layer_ids=TAPS)


@pytest.fixture(scope="module")
def committed(real):
    return checkpoint.load(COMMITTED_DRAFTER, real)


@pytest.fixture(scope="module")
def prompts(real):
    return [real.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture
def other_kernels(monkeypatch):
    """Sets an environment variable, and lets the kernels be looked for anew, now and afterwards."""

    def change(name, value):
        monkeypatch.setenv(name, value)
        cpu.available.cache_clear()

    yield change
    cpu.available.cache_clear()


def view(cache, row):
    """One request of a cache, written through."""
    one = object.__new__(type(cache))
    one.k, one.v = ([layer[row : row + 1] for layer in part] for part in (cache.k, cache.v))
    return one


# ---- the target, bit for bit


@needs_kernels
@pytest.mark.parametrize("pieces", [[20], [7, 13], [1, 4, 1, 8, 6]])
def test_tokens_together_are_bit_for_bit_the_tokens_one_at_a_time(real, prompts, pieces):
    assert real.row_invariant
    tokens, length = torch.tensor([prompts[0][:20]]), 20
    alone, together = real.new_cache(1, length), real.new_cache(1, length)
    single = [real.forward(tokens[:, i : i + 1], alone, i) for i in range(length)]
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    several = [real.forward(tokens[:, at : at + size], together, at) for at, size in zip(starts, pieces, strict=True)]
    for part in ("hidden", "features"):
        wanted, got = (torch.cat([getattr(out, part) for out in outs], 1) for outs in (single, several))
        assert torch.equal(got, wanted) and got.shape[:2] == (1, length)
    hidden = torch.cat([out.hidden[0] for out in single])
    assert torch.equal(torch.cat([real.logits(row) for row in hidden.split(1)]), real.logits(hidden))
    for mine, theirs in zip(together.k + together.v, alone.k + alone.v, strict=True):
        assert torch.equal(mine, theirs) and mine[0, :, -1].any()


@needs_kernels
def test_a_ragged_packed_forward_is_bit_for_bit_each_request_alone(real, prompts):
    tails, starts = [[11, 12, 13, 14], [15], [16, 17]], [len(prompt) for prompt in prompts]
    cache = real.new_cache(3, 64)
    for row, prompt in enumerate(prompts):
        real.forward(torch.tensor([prompt]), view(cache, row), 0)
    tokens = torch.tensor([tail + [0] * (4 - len(tail)) for tail in tails])
    real_ones = (torch.arange(4) < torch.tensor([[len(tail)] for tail in tails])).flatten().nonzero()[:, 0]
    out = real.forward(tokens, cache, torch.tensor(starts), real_ones)
    assert out.hidden.shape == (1, 7, real.hidden_size) and out.features.shape == (1, 7, len(TAPS) * real.hidden_size)
    parts = [part[0].split([4, 1, 2]) for part in out]
    for row, (prompt, tail) in enumerate(zip(prompts, tails, strict=True)):
        alone, end = real.new_cache(1, 64), len(prompt) + len(tail)
        real.forward(torch.tensor([prompt]), alone, 0)
        wanted = real.forward(torch.tensor([tail]), alone, len(prompt))
        assert torch.equal(parts[0][row], wanted.hidden[0]) and torch.equal(parts[1][row], wanted.features[0])
        for mine, single in zip(cache.k + cache.v, alone.k + alone.v, strict=True):
            assert torch.equal(mine[row, :, :end], single[0, :, :end])


@needs_kernels
def test_the_kernels_states_are_as_near_to_float32_as_torchs(real, target, other_kernels):  # target: float32
    tokens = torch.randint(100, 40000, (24, 4), generator=torch.Generator().manual_seed(0))
    other_kernels("DSPARK_KERNELS", "reference")
    plain = Target.load(EMBEDDED, BF16, layer_ids=TAPS)
    assert real.row_invariant and not plain.row_invariant
    exact, mine, torchs = (t.forward(tokens, t.new_cache(24, 4), 0) for t in (target, real, plain))
    for part in ("hidden", "features"):
        wanted, *outs = (getattr(out, part).float() for out in (exact, mine, torchs))
        error, usual = (float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean()) for out in outs)
        assert error < 1.1 * usual, part


# ---- end to end


@needs_kernels
@pytest.mark.parametrize("n", [3, 7])
def test_speculative_answers_equal_plain_ones_exactly(real, committed, prompts, n):
    assert committed.packed is not None
    for prompt in prompts:
        plain, got = answer(real, None, prompt, 0, 32), answer(real, committed, prompt, n, 32)
        assert got.tokens == plain.tokens
        assert any(got.accepted) and got.steps < plain.steps


@needs_kernels
@pytest.mark.parametrize("policy", [Fixed(3), Threshold(3, 0.5)], ids=["fixed", "threshold"])
@pytest.mark.parametrize("concurrency", [2, 3])
def test_answers_served_together_equal_those_alone_exactly(real, committed, prompts, policy, concurrency):
    served = batched.serve(real, committed, prompts, policy, concurrency, 24)
    for prompt, got in zip(prompts, served, strict=True):
        assert got.tokens == answer(real, None, prompt, 0, 24).tokens and any(got.accepted)


# ---- the drafter


def pair(**changes):
    """The same drafter twice in bfloat16, plain and packed, and once in float32, all with heads that fit."""
    changes = {"head_dim": 64, **changes}
    plain, packed, exact = (tiny_drafter(tiny_target(dtype=BF16), **changes) for _ in range(3))
    return plain, packed.pack(), exact.float()


def drafted(drafter, n, lengths=(9, 0, 14), capacity=14):
    """What the LM head is given [B, n, H], the Draft, and the contexts' keys and values: ragged requests, in two goes,
    in rows of one storage that holds NaN wherever nothing was committed."""
    caches, features = (
        drafter.new_caches(4, capacity),
        torch.randn(40, 2 * HIDDEN, generator=torch.Generator().manual_seed(0)),
    )
    caches, features, heard = [caches[i] for i in (2, 0, 3)], features.to(drafter.fc.weight.dtype), []
    for part in caches[0].storage:
        part.fill_(torch.nan)
    counts = [min(length, 3) for length in lengths]
    for cache, length, count in zip(caches, lengths, counts, strict=True):
        if length > count:
            drafter.extend(cache, features[: length - count])
    last = [features[length - count : length] for length, count in zip(lengths, counts, strict=True)]
    drafter.extend_batch(caches, torch.cat(last), counts)
    assert [cache.length for cache in caches] == list(lengths)
    context = [part[:, :, :capacity].clone() for part in caches[0].storage]
    hook = drafter.lm_head.register_forward_pre_hook(lambda module, given: heard.append(given[0]))
    draft = drafter.draft_batch(torch.tensor([5, 6, 7]), caches, n, 1.0, torch.Generator().manual_seed(1))
    hook.remove()
    return heard[0], draft, context


def assert_alike(plain, packed, exact):
    """Two bfloat16 tensors, equally near to the one in float32, NaN in the same places."""
    assert plain.shape == packed.shape == exact.shape and plain.dtype == packed.dtype == BF16
    assert torch.equal(packed.isnan(), exact.isnan()) and torch.equal(plain.isnan(), exact.isnan())
    error, usual = (float((x.float() - exact).nan_to_num().norm() / exact.nan_to_num().norm()) for x in (packed, plain))
    assert error < 1.5 * usual + 1e-3 and error < 0.03, (error, usual)


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_drafter_drafts_like_the_plain_one(variant):
    plain, packed, exact = pair(**VARIANTS[variant])
    assert plain.packed is None and (packed.packed is None) == ("slid" in variant)  # the kernels have no window
    most = packed.config.max_draft_tokens
    for n in (1, most):
        hidden, drafts, contexts = zip(*(drafted(drafter, n) for drafter in (plain, packed, exact)), strict=True)
        assert_alike(*hidden)
        assert hidden[0].shape == (3, n, HIDDEN) and drafts[1].tokens.shape == (3, n)
        for kind in zip(*contexts, strict=True):
            assert_alike(*kind)
        assert (drafts[1].confidence is None) == (drafts[0].confidence is None)


@needs_kernels
@pytest.mark.parametrize("variant", ["anchor-first", "fill-in", "causal", "pruned gated fill-in"])
def test_a_request_is_drafted_bit_for_bit_alike_whatever_is_drafted_beside_it(variant):
    _, drafter, _ = pair(**VARIANTS[variant])
    hidden, _, context = drafted(drafter, 3)
    for i, (row, length) in enumerate(zip((2, 0, 3), (9, 0, 14), strict=True)):
        others = [length if j == i else 1 for j in range(3)]
        again, _, own = drafted(drafter, 3, others)
        assert torch.equal(again[i], hidden[i])
        for mine, theirs in zip(own, context, strict=True):
            assert torch.equal(mine[:, row, :length], theirs[:, row, :length])


@needs_kernels
def test_a_block_may_be_as_long_as_the_room_and_a_longer_one_goes_to_torch(monkeypatch):
    drafters, taken = pair(block_size=BLOCK_ROOM + 4), []
    through = drafters[1]._draft_rows
    monkeypatch.setattr(drafters[1], "_draft_rows", lambda *given: taken.append(given[3]) or through(*given))
    for n in (BLOCK_ROOM, BLOCK_ROOM + 1, BLOCK_ROOM + 4):  # behind a context that fills its capacity
        assert_alike(*(drafted(drafter, n)[0] for drafter in drafters))
    assert taken == [BLOCK_ROOM]


@needs_kernels
def test_heads_of_another_size_are_left_to_torch():
    plain, packed, exact = pair(head_dim=32)
    assert packed.packed is None and isinstance(packed.fc.forward, Packed)
    assert_alike(*(drafted(drafter, 4)[0] for drafter in (plain, packed, exact)))


@needs_kernels
@pytest.mark.parametrize("variant", ["anchor-first", "rnn fill-in", "sliding", "pruned"])
def test_packing_changes_nothing_that_is_stored(variant):
    plain, packed, _ = pair(**VARIANTS[variant])
    drafted(packed, 3)
    before, after = plain.state_dict(), packed.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)


# ---- where the kernels do not serve


def test_float32_is_left_to_torch():
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    packed = Packed(weight)
    assert packed.weight is weight and torch.equal(packed(x), F.linear(x, weight))
    target = tiny_target()
    drafter = tiny_drafter(target, head_dim=64).pack()
    assert not target.row_invariant and drafter.packed is None and not isinstance(drafter.fc.forward, Packed)
    assert cpu.argmax(torch.tensor([[1.0, 3.0, 3.0, 2.0]])).tolist() == [1]


@needs_kernels
@pytest.mark.parametrize(
    "compiler, reason",
    [("no-such-compiler", r"no C\+\+ compiler \(no-such-compiler\)"), ("false", "non-zero exit status")],
)
def test_without_a_compiler_the_log_says_why_and_torch_decodes(real, prompts, compiler, reason, other_kernels, caplog):
    tokens = torch.tensor(prompts[:1])
    wanted = real.logits(real.forward(tokens, real.new_cache(1, 64), 0).hidden)[0].float()
    other_kernels("CXX", compiler)
    plain = Target.load(EMBEDDED, BF16, layer_ids=TAPS)
    said = [record.getMessage() for record in caplog.records if record.name == "dspark.kernels.cpu"]
    assert len(said) == 1 and re.search(reason, said[0])
    assert not cpu.available() and not plain.row_invariant
    drafter = checkpoint.load(COMMITTED_DRAFTER, plain)
    assert drafter.packed is None
    got = plain.logits(plain.forward(tokens, plain.new_cache(1, 64), 0).hidden)[0].float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    spoken = answer(plain, drafter, prompts[0], 3, 8)
    assert len(spoken.tokens) == 8 and any(spoken.accepted)


@needs_kernels
def test_the_environment_turns_the_kernels_off(other_kernels):
    weight = torch.zeros(32, 64, dtype=BF16)
    assert cpu.serves(weight) and Packed(weight).blocked
    other_kernels("DSPARK_KERNELS", "reference")
    assert not cpu.serves(weight) and Packed(weight).weight is weight
    _, drafter, _ = pair()
    assert drafter.packed is None and not isinstance(drafter.fc.forward, Packed)


@needs_kernels
@pytest.mark.bench
def test_bench_a_forward_with_the_kernels_and_without(real, monkeypatch, capsys):
    """Prints medians, in ms, of the embedded target's forward and LM head over 1, 4 and 8 tokens, all by turns."""
    real.logits(torch.zeros(1, real.hidden_size, dtype=BF16))  # lays the LM head out, which the variable would prevent
    monkeypatch.setenv("DSPARK_KERNELS", "reference")
    ids = torch.arange(5, 105)[None]
    plain, wide = (Target.load(EMBEDDED, dtype, layer_ids=TAPS) for dtype in (BF16, torch.float32))
    targets = {"kernels": real, "torch": plain, "torch in float32": wide}
    caches = {name: target.new_cache(1, 128) for name, target in targets.items()}
    times = {(name, rows): [] for name in targets for rows in (1, 4, 8)}
    for target, cache in zip(targets.values(), caches.values(), strict=True):
        target.logits(target.forward(ids, cache, 0).hidden[:, :8])
    for _ in range(30):
        for name, rows in times:
            begun = time.perf_counter()
            targets[name].logits(targets[name].forward(ids[:, :rows], caches[name], 100).hidden)
            times[name, rows].append(1e3 * (time.perf_counter() - begun))
    with capsys.disabled():
        for rows in (1, 4, 8):
            median = {name: statistics.median(times[name, rows]) for name in targets}
            said = (f"{name} {ms:.1f} ms ({ms / median['kernels']:.2f}x)" for name, ms in median.items())
            print(f"\n{rows} tokens: {', '.join(said)}", end="")
