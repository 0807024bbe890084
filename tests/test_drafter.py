"""The drafter against a plain float64 twin, and the conventions that public implementations got wrong."""

import itertools

import pytest
import torch
from tiny import HIDDEN, VOCAB, packed_row, tiny_config, tiny_drafter, tiny_model, tiny_target
from twin import twin_heads, twin_hidden

import dspark.drafter
from dspark.anchors import MicroBatch, sample_anchors, supervision
from dspark.decode import answer
from dspark.drafter import DSparkDrafter, vocabulary_maps
from dspark.losses import drafter_loss
from dspark.target import Target
from dspark.train import TrainConfig

KEPT = torch.arange(0, VOCAB, 3)
LAYOUTS = {"anchor-first": True, "fill-in": False}
VARIANTS = {
    "anchor-first": {},
    "fill-in": {"sample_from_anchor": False},
    "causal": {"is_causal": True},
    "causal fill-in": {"is_causal": True, "sample_from_anchor": False},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rnn fill-in": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "no heads": {"markov_rank": 0, "confidence_head": False},
    "confidence alone": {"markov_rank": 0, "confidence_head_with_markov": False},
    "markov alone": {"confidence_head": False},
    "sliding": {"sliding_layers": (1,), "sliding_window": 6},
    "sliding fill-in": {"sliding_layers": (0, 1), "sliding_window": 5, "sample_from_anchor": False},
    "sliding causal": {"sliding_layers": (0,), "sliding_window": 3, "is_causal": True},
    "causal where it slides": {"sliding_layers": (0,), "sliding_window": 3, "is_causal": None},
    "pruned": {"draft_ids": KEPT},
    "pruned gated fill-in": {"draft_ids": KEPT, "markov_head_type": "gated", "sample_from_anchor": False},
}
TIGHT = {"rtol": 1e-4, "atol": 2e-5}  # float32 against float64 through two layers


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


# ---- training forward, decoding forward and twin agree on the same block


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_training_and_decoding_and_the_twin_give_the_same_block(toy, variant):
    drafter = tiny_drafter(toy, **variant)
    row = packed_row([11, 7])
    anchors = torch.tensor([0, 1, 5, 9, 11, 12, 16])  # first and last rows of documents among them
    for n in {1, 2, drafter.config.max_draft_tokens}:
        trained = drafter.block_hidden(row.features, row.positions, row.tokens, anchors, row.starts[anchors], n)
        assert trained.shape == (len(anchors), n, HIDDEN)
        for hidden, anchor in zip(trained, anchors.tolist(), strict=True):
            context = row.features[row.starts[anchor] : anchor]
            torch.testing.assert_close(
                hidden.double(), twin_hidden(drafter, context, int(row.tokens[anchor]), n), **TIGHT
            )
            cache = drafter.new_cache(20)
            drafter.extend(cache, context[:3])  # prefill, then what a step committed
            drafter.extend(cache, context[3:])
            token = row.tokens[anchor : anchor + 1]
            draft = drafter.draft(token, cache, n, temperature=0.7, generator=torch.Generator().manual_seed(anchor))
            previous = torch.cat([token, draft.tokens[:-1]])
            logits, confidence = twin_heads(drafter, hidden.double(), previous)
            torch.testing.assert_close(draft.q.double(), (logits / 0.7).softmax(-1), **TIGHT)
            if drafter.markov_head:
                m = drafter.markov_head(previous[None], hidden[None])[0]
                taught = drafter.lm_head(hidden) + drafter.markov_head.bias(m)
                torch.testing.assert_close(taught.double(), logits, **TIGHT)
            assert (draft.confidence is None) == (confidence is None)
            if confidence is not None:
                torch.testing.assert_close(draft.confidence.double(), confidence, **TIGHT)


def test_greedy_drafts_are_the_argmax_of_the_twin(toy):
    for variant in ({}, {"draft_ids": KEPT, "sample_from_anchor": False}, {"markov_head_type": "rnn"}):
        drafter = tiny_drafter(toy, **variant)
        row, n = packed_row([9]), 3
        cache = drafter.new_cache(9)
        drafter.extend(cache, row.features[:8])
        draft = drafter.draft(row.tokens[8:], cache, n)
        hidden = twin_hidden(drafter, row.features[:8], int(row.tokens[8]), n)
        logits, _ = twin_heads(drafter, hidden, torch.cat([row.tokens[8:], draft.tokens[:-1]]))
        assert draft.q is None
        assert draft.tokens.tolist() == drafter.to_target_ids(logits.argmax(-1)).tolist()


def test_sampled_drafts_come_from_the_q_they_state(toy):
    drafter = tiny_drafter(toy, draft_ids=KEPT)
    cache = drafter.new_cache(4)
    drafter.extend(cache, packed_row([4]).features)
    draws = 500
    anchor, generator = torch.tensor([7]), torch.Generator().manual_seed(0)
    drafts = [drafter.draft(anchor, cache, 1, temperature=2.0, generator=generator) for _ in range(draws)]
    counts = torch.bincount(torch.cat([draft.tokens for draft in drafts]), minlength=VOCAB)[KEPT]
    q = drafts[0].q[0]
    spread = (draws * q * (1 - q)).sqrt()
    assert int(counts.sum()) == draws  # nothing outside the draft vocabulary
    assert ((counts - draws * q).abs() < 4 * spread + 1).all()


@pytest.mark.parametrize("variant", ["anchor-first", "rnn fill-in", "sliding fill-in", "pruned", "no heads"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_drafted_together_are_drafted_as_if_alone(toy, variant, temperature):
    """Ragged contexts in rows of one storage, in any order, with NaN wherever nothing was committed."""
    drafter, row, n = tiny_drafter(toy, **VARIANTS[variant]), packed_row([12]), 3
    caches, lengths = drafter.new_caches(5, 12), {3: 11, 0: 4, 1: 0, 4: 7}  # row 2 is nobody's
    for part in caches[0].storage:
        part.fill_(torch.nan)
    counts = [length // 2 for length in lengths.values()]  # in two goes, the second one for all at once
    for (at, length), count in zip(lengths.items(), counts, strict=True):
        drafter.extend(caches[at], row.features[: length - count])
    added = [row.features[length - count : length] for length, count in zip(lengths.values(), counts, strict=True)]
    drafter.extend_batch([caches[at] for at in lengths], torch.cat(added), counts)
    anchors = row.tokens[list(lengths.values())]
    together = drafter.draft_batch(
        anchors, [caches[at] for at in lengths], n, temperature, torch.Generator().manual_seed(5)
    )
    generator = torch.Generator().manual_seed(5)
    for i, length in enumerate(lengths.values()):
        cache = drafter.new_cache(12)
        drafter.extend(cache, row.features[:length])
        alone = drafter.draft(anchors[i : i + 1], cache, n, temperature, generator)
        assert together.tokens[i].tolist() == alone.tokens.tolist()
        for batch, one in zip(together[1:], alone[1:], strict=True):
            assert (batch is None) == (one is None)
            if one is not None:
                torch.testing.assert_close(batch[i], one, **TIGHT)
    with pytest.raises(ValueError, match="one call of new_caches"):
        drafter.draft_batch(anchors[:2], [caches[0], drafter.new_cache(12)], n)


# ---- layout (pitfalls 1, 3, 8, 53, 54)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_labels_follow_the_anchor_in_both_layouts(layout):
    config = tiny_config(sample_from_anchor=layout)
    n = config.max_draft_tokens
    assert n == (4 if layout else 3)
    row = packed_row([20])._replace(tokens=torch.arange(20))
    labels, supervised = supervision(row, torch.tensor([5]), n)
    assert labels.tolist() == [[6, 7, 8, 9][:n]] and supervised.all()


def permutation_drafter(target, shift: int, **changes) -> DSparkDrafter:
    """Its backbone says nothing; its Markov table puts +100 on token t + shift after token t."""
    drafter = tiny_drafter(target, markov_rank=VOCAB, **changes)
    drafter.lm_head.weight.zero_()
    drafter.markov_head.markov_w1.weight.data = torch.eye(VOCAB)
    drafter.markov_head.markov_w2.weight.data = 100 * torch.eye(VOCAB).roll(shift, 0)
    return drafter


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_markov_bias_looks_at_the_token_before_the_predicted_one(toy, layout):
    drafter = permutation_drafter(toy, 1, sample_from_anchor=layout, confidence_head=False)
    n = drafter.config.max_draft_tokens
    cache = drafter.new_cache(8)
    drafter.extend(cache, packed_row([6]).features)
    assert drafter.draft(torch.tensor([6]), cache, n).tokens.tolist() == [7, 8, 9, 10][:n]
    config = TrainConfig(ce_weight=1.0, kl_weight=0.0, dtype="float32")
    for rise, loss in ((1, 0.0), (2, 100.0)):  # teacher forcing: exact on rising tokens, lost where they rise by two
        row = packed_row([16])._replace(tokens=torch.arange(16) * rise)
        anchors = torch.arange(16 - n)
        labels, supervised = supervision(row, anchors, n)
        batch = MicroBatch(row, anchors, labels, supervised, supervised.float())
        _, log = drafter_loss(drafter, toy.lm_head, batch, float(supervised.sum()), config)
        assert log["ce"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 1000])
def test_a_block_starts_at_its_anchors_position(toy, layout, length, monkeypatch):
    drafter = tiny_drafter(toy, sample_from_anchor=layout)
    positions, rotary = [], drafter._rotary
    monkeypatch.setattr(drafter, "_rotary", lambda p: positions.append(p.flatten().tolist()) or rotary(p))
    cache = drafter.new_cache(length)
    drafter.extend(cache, torch.randn(length - 1, 2 * HIDDEN))  # `length` tokens committed, the anchor among them
    drafter.draft(torch.tensor([5]), cache, 3)
    context, block = positions
    assert context == list(range(length - 1))
    assert block == list(range(length - 1, length + (2 if layout else 3)))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_more_drafts_than_the_layout_allows_are_an_error(toy, layout):
    drafter = tiny_drafter(toy, sample_from_anchor=layout)
    most = 4 if layout else 3
    cache = drafter.new_cache(4)
    drafter.draft(torch.tensor([5]), cache, most)
    row, anchors = packed_row([9]), torch.tensor([3])
    for n in (0, most + 1):
        with pytest.raises(ValueError, match=f"num_speculative_tokens = {n}"):
            drafter.draft(torch.tensor([5]), cache, n)
        with pytest.raises(ValueError, match=f"num_speculative_tokens = {n}"):
            drafter.block_hidden(row.features, row.positions, row.tokens, anchors, anchors * 0, n)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_shorter_block_changes_its_first_drafts_only_if_slots_see_later_ones(toy, layout, causal):
    drafter = tiny_drafter(toy, sample_from_anchor=layout, is_causal=causal, sliding_layers=(0,), sliding_window=4)
    row, anchors = packed_row([12]), torch.tensor([2, 7])
    args = (row.features, row.positions, row.tokens, anchors, anchors * 0)
    long, short = drafter.block_hidden(*args, 3), drafter.block_hidden(*args, 2)
    difference = float((long[:, :2] - short).abs().max())
    assert difference < 1e-5 if causal else difference > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_flipping_is_causal_or_the_window_changes_the_block(toy, layout):
    row, anchors = packed_row([12]), torch.tensor([8])
    outputs = []
    for changes in ({}, {"is_causal": True}, {"sliding_layers": (0,), "sliding_window": 4}):
        drafter = tiny_drafter(toy, sample_from_anchor=layout, **changes)
        outputs.append(drafter.block_hidden(row.features, row.positions, row.tokens, anchors, anchors * 0, 3))
    for a, b in itertools.combinations(outputs, 2):
        assert float((a - b).abs().max()) > 1e-2


# ---- what a block may see (pitfalls 19, 20, 21)


@pytest.mark.parametrize("window", [None, 5])
def test_a_block_sees_no_feature_from_its_anchor_on(toy, window):
    sliding = {} if window is None else {"sliding_layers": (0, 1), "sliding_window": window}
    drafter = tiny_drafter(toy, **sliding)
    row, anchors, at = packed_row([16]), torch.tensor([2, 5, 6, 7, 11, 14]), 6
    args = (row.positions, row.tokens, anchors, row.starts[anchors], 3)
    before = drafter.block_hidden(row.features, *args)
    changed = row.features.clone()
    changed[at] += 1
    after = drafter.block_hidden(changed, *args)
    moved = (before != after).flatten(1).any(1)
    reach = 16 if window is None else at + window
    assert moved.tolist() == [at < a < reach for a in anchors.tolist()]


def test_blocks_do_not_see_each_other(toy):
    drafter = tiny_drafter(toy)
    row, anchors = packed_row([16]), torch.tensor([4, 5, 6])
    before = drafter.block_hidden(row.features, row.positions, row.tokens, anchors, anchors * 0, 4)
    tokens = row.tokens.clone()
    tokens[5] = 3 if tokens[5] != 3 else 4
    after = drafter.block_hidden(row.features, row.positions, tokens, anchors, anchors * 0, 4)
    assert (before != after).flatten(1).any(1).tolist() == [False, True, False]


def test_packed_documents_are_drafted_as_if_alone(toy):
    drafter = tiny_drafter(toy)
    both = packed_row([10, 6])
    assert both.positions.tolist() == [*range(10), *range(6)]
    anchors = sample_anchors(both, 100, torch.Generator().manual_seed(0))
    assert anchors.tolist() == [*range(9), *range(10, 15)]  # the last token of a document has nothing to predict
    packed = drafter.block_hidden(both.features, both.positions, both.tokens, anchors, both.starts[anchors], 4)
    for start, end in ((0, 10), (10, 16)):
        own = anchors[(anchors >= start) & (anchors < end)]
        alone = drafter.block_hidden(
            both.features[start:end], torch.arange(end - start), both.tokens[start:end], own - start, own * 0, 4
        )
        torch.testing.assert_close(packed[(anchors >= start) & (anchors < end)], alone)
    labels, supervised = supervision(both, anchors, 4)
    inside = [[a + k < (10 if a < 10 else 16) for k in range(1, 5)] for a in anchors.tolist()]
    assert supervised.tolist() == inside
    next_tokens = torch.cat([both.tokens, both.tokens[-1:]])[anchors + 1]
    assert torch.equal(labels[:, 0], next_tokens)


# ---- heads that are off (pitfall 36)


def test_rank_0_is_plain_dflash_bit_for_bit(toy):
    plain = tiny_drafter(toy, markov_rank=0, confidence_head=False)
    scored = tiny_drafter(toy, markov_rank=0, confidence_head_with_markov=False)
    silent = tiny_drafter(toy)
    for other in (scored, silent):
        other.load_state_dict({**other.state_dict(), **plain.state_dict()})
    silent.markov_head.markov_w2.weight.data.zero_()
    features, anchor = packed_row([9]).features, torch.tensor([8])
    drafts = []
    for drafter in (plain, scored, silent):
        cache = drafter.new_cache(9)
        drafter.extend(cache, features)
        generator = torch.Generator().manual_seed(3)
        drafts.append(drafter.draft(anchor, cache, 4, temperature=1.0, generator=generator))
    for other in drafts[1:]:
        assert torch.equal(drafts[0].tokens, other.tokens) and torch.equal(drafts[0].q, other.q)
    assert drafts[0].confidence is None and drafts[1].confidence.shape == drafts[2].confidence.shape == (4,)


def test_a_new_drafter_has_no_bias_and_even_confidence():
    torch.manual_seed(0)
    drafter = DSparkDrafter(tiny_config())
    hidden, previous = torch.randn(5, HIDDEN), torch.arange(5)
    m, _ = drafter.markov_head.step(previous, hidden, None)
    assert not drafter.markov_head.bias(m).any()
    assert not drafter.confidence_head(hidden, m).any()  # sigmoid(0) = 0.5


# ---- the draft vocabulary (pitfalls 39 to 43)


def test_vocabulary_maps_hold_offsets():
    d2t, t2d = vocabulary_maps(torch.tensor([1, 4, 5, 9]), 10)
    assert d2t.tolist() == [1, 3, 3, 6]
    assert t2d.nonzero().flatten().tolist() == [1, 4, 5, 9] and t2d.shape == (10,) and t2d.dtype == torch.bool


@pytest.mark.parametrize("ids", [[4, 1, 5], [1, 1, 4], [-1, 4], [1, 10]])
def test_vocabulary_ids_out_of_order_or_range_are_refused(ids):
    with pytest.raises(ValueError, match="rise strictly within 0..9"):
        vocabulary_maps(torch.tensor(ids), 10)


def test_ids_go_to_the_target_and_back(toy):
    drafter = tiny_drafter(toy, draft_ids=KEPT)
    assert torch.equal(drafter.to_target_ids(torch.arange(len(KEPT))), KEPT)
    back = drafter.to_draft_ids(torch.arange(VOCAB))
    assert back.tolist() == [i // 3 if i % 3 == 0 else -1 for i in range(VOCAB)]
    whole = tiny_drafter(toy)
    assert torch.equal(whole.to_draft_ids(KEPT), KEPT) and torch.equal(whole.to_target_ids(KEPT), KEPT)


def test_markov_table_reads_target_ids_and_writes_draft_columns(toy):
    """Kept {1, 4, 5, 9}: after draft index 2 (target id 5) the next bias must come from W1[5], not W1[2]."""
    ids = torch.tensor([1, 4, 5, 9])
    drafter = tiny_drafter(toy, draft_ids=ids, markov_rank=VOCAB)
    drafter.lm_head.weight.zero_()
    w1, w2 = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    assert w1.shape == (VOCAB, VOCAB) and w2.shape == (4, VOCAB)
    w1.data = torch.eye(VOCAB)
    w2.data = torch.zeros(4, VOCAB)
    after = {7: 2, 5: 3, 9: 0, 1: 2, 2: 1}  # token before (target id) -> favourite (draft id)
    for token, favourite in after.items():
        w2.data[favourite, token] = 100
    draft = drafter.draft(torch.tensor([7]), drafter.new_cache(4), 4)
    assert draft.tokens.tolist() == [5, 9, 1, 5]


def test_a_pruned_head_is_its_rows_of_the_targets_and_shares_nothing(toy):
    pruned = tiny_drafter(toy, draft_ids=KEPT)
    assert torch.equal(pruned.lm_head.weight, toy.lm_head[KEPT])
    assert pruned.lm_head.weight.untyped_storage().data_ptr() != toy.lm_head.untyped_storage().data_ptr()
    whole = tiny_drafter(toy)
    assert torch.equal(whole.lm_head.weight, toy.lm_head)
    with pytest.raises(ValueError, match=r"LM head is \(14, 32\), this drafter wants \(13, 32\)"):
        DSparkDrafter(tiny_config(draft_vocab_size=13)).adopt_target(toy.embed_tokens, toy.lm_head, KEPT)


# ---- through the kernels: natively on a GPU, elsewhere under Triton's interpreter


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # of lanes that are masked
def test_training_and_answering_through_the_kernels_equal_the_reference(monkeypatch):
    """Loss and gradients of a micro-batch, a greedy answer, and a sampled one, whose drafts the reference is given: it
    draws by other noise. All four kernels were launched."""
    from kernel_runs import DEVICE, kernels

    from dspark.kernels import acceptance_loss_triton, block_attention_triton, markov_decode_triton, verify_triton

    toy = Target(tiny_model().to(DEVICE), None, "tiny", (0, 2))
    drafter = tiny_drafter(toy, 3, KEPT, sliding_layers=(1,), sliding_window=6).to(DEVICE)
    row = packed_row([11, 7])
    row = type(row)(*(tensor.to(DEVICE) for tensor in row))
    anchors = torch.tensor([0, 1, 5, 9, 11, 12, 16], device=DEVICE)
    labels, supervised = supervision(row, anchors, 4)
    batch = MicroBatch(row, anchors, labels, supervised, supervised.float())
    config = TrainConfig(ce_weight=0.3, l1_weight=0.4, kl_weight=0.7, detach_confidence=False, dtype="float32")

    @torch.enable_grad()
    def trained():
        loss, log = drafter_loss(drafter, toy.lm_head[KEPT], batch, float(supervised.sum()), config)
        drafter.zero_grad()
        loss.backward()
        return log, {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}

    def answered(**sampling):
        got = answer(toy, drafter, [8], 4, 12, **sampling)
        return got.tokens, got.drafted, got.accepted

    drawn, draw, sampling = [], dspark.drafter.markov_decode, {"temperature": 0.8, "seed": 1}

    def record(*inputs):
        drawn.append(draw(*inputs))
        return drawn[-1]

    def replay(base, hidden, anchors, head, d2t, temperature, seeds):
        draft = drawn.pop(0)
        previous = torch.cat([anchors[:, None], draft.tokens[:, :-1]], 1)
        torch.testing.assert_close(draft.logits, (base + head.bias(head.markov_w1(previous))) / temperature, **TIGHT)
        return draft

    with (
        kernels(block_attention_triton, "_forward", "_backward_q", "_backward_kv"),
        kernels(acceptance_loss_triton, "_rows"),
        kernels(markov_decode_triton, "_position"),
        kernels(verify_triton, "_verify"),
    ):
        (log, gradients), greedy = trained(), answered()
        monkeypatch.setattr(dspark.drafter, "markov_decode", record)
        sampled = answered(**sampling)
    monkeypatch.setenv("DSPARK_KERNELS", "reference")
    monkeypatch.setattr(dspark.drafter, "markov_decode", replay)
    assert sampled == answered(**sampling) and drawn == []
    monkeypatch.setattr(dspark.drafter, "markov_decode", draw)
    assert greedy == answered() and any(greedy[2]) and any(sampled[2])  # some drafts were accepted
    wanted, exact = trained()
    assert log == pytest.approx(wanted, rel=1e-5)
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
