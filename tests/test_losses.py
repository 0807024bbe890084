"""The loss that takes its own gradient against float64 autograd, and the denominators that went wrong elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import HIDDEN, VOCAB, packed_row, tiny_drafter, tiny_target

from dspark.anchors import MicroBatch, supervision
from dspark.kernels import acceptance_loss_reference
from dspark.losses import acceptance_loss, accepted_length, confidence_loss, drafter_loss, position_weights
from dspark.train import TrainConfig

MIXES = {  # ce, l1, kl
    "ce": (1.0, 0.0, 0.0),
    "l1": (0.0, 1.0, 0.0),
    "kl": (0.0, 0.0, 1.0),
    "paper": (0.1, 0.9, 0.0),
    "default": (0.5, 0.0, 0.5),
    "all": (0.3, 0.4, 0.7),
}
N, U, D, RANK = 23, 9, 17, 5


def inputs(markov=True, trained_head=False) -> dict:
    """N slots that look at U target positions, D draft ids; a third of the labels outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    labels = torch.randint(0, D, (N,), generator=generator)
    labels[::3] = -1
    index = torch.randint(0, U, (N,), generator=generator)
    target_hidden, lm_head = randn(U, HIDDEN), randn(D, HIDDEN) / 3
    hidden, target_head = target_hidden[index] + randn(N, HIDDEN) / 2, lm_head + randn(D, HIDDEN) / 10  # q near p
    return {
        "hidden": hidden.requires_grad_(),
        "m": randn(N, RANK).requires_grad_() if markov else None,
        "lm_head": lm_head.requires_grad_(trained_head),
        "w2": randn(D, RANK).requires_grad_() if markov else None,
        "target_hidden": target_hidden.requires_grad_(),
        "target_head": target_head.requires_grad_(),
        "index": index,
        "labels": labels,
        "weights": torch.rand(N, generator=generator),
    }


def twin(hidden, m, lm_head, w2, target_hidden, target_head, index, labels, weights, normaliser, ce, l1, kl):
    """The same loss in float64, in the formulas of the paper, differentiated by autograd."""
    z = hidden.double() @ lm_head.double().T
    if m is not None:
        z = z + m.double() @ w2.double().T
    p = (target_hidden.double() @ target_head.double().T)[index].softmax(-1).detach()
    q = z.softmax(-1)
    each_ce = torch.where(labels >= 0, -q.log().gather(1, labels.clamp_min(0)[:, None])[:, 0], 0.0)
    each_l1 = (q - p).abs().sum(-1)
    each_kl = (p * (p.log() - q.log())).sum(-1)
    loss = ((ce * each_ce + l1 * each_l1 + kl * each_kl) * weights.double()).sum() / normaliser
    return loss, each_ce, each_l1, 1 - torch.minimum(p, q).sum(-1), z.argmax(-1) == p.argmax(-1)


# ---- value and gradient


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("chunk", [7, 256])  # 23 rows: three chunks and an odd tail, or one
def test_value_and_gradient_equal_autograd(mix, markov, chunk, monkeypatch):
    monkeypatch.setattr(acceptance_loss_reference, "_CHUNK", chunk)
    mine, normaliser = inputs(markov), 3.7
    terms = acceptance_loss(**mine, normaliser=normaliser, ce_weight=mix[0], l1_weight=mix[1], kl_weight=mix[2])
    plain = inputs(markov)
    loss, ce, l1, rejection, greedy = twin(**plain, normaliser=normaliser, ce=mix[0], l1=mix[1], kl=mix[2])
    tight = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(terms.loss.double(), loss, **tight)
    torch.testing.assert_close(terms.ce.double(), ce, **tight)
    torch.testing.assert_close(terms.l1.double(), l1, **tight)
    torch.testing.assert_close(terms.c_star.double(), 1 - rejection, **tight)  # overlap: sum of min(p, q)
    assert torch.equal(terms.greedy, greedy) and 0 < int(greedy.sum()) < N
    (2 * terms.loss).backward()  # the gradient from above must be passed on
    (2 * loss).backward()
    for name in ("hidden", "m", "w2") if markov else ("hidden",):
        torch.testing.assert_close(mine[name].grad, plain[name].grad, **tight)


def test_a_trained_head_gets_its_gradient_and_the_teacher_none():
    """Pitfall 35: no gradient reaches the target through the teacher's distribution, nor a frozen LM head."""
    mine, plain = inputs(trained_head=True), inputs(trained_head=True)
    acceptance_loss(**mine, normaliser=2.0, ce_weight=0.1, l1_weight=0.9, kl_weight=0.3).loss.backward()
    twin(**plain, normaliser=2.0, ce=0.1, l1=0.9, kl=0.3)[0].backward()
    for name in ("lm_head", "w2", "hidden"):
        torch.testing.assert_close(mine[name].grad, plain[name].grad, rtol=1e-5, atol=1e-5)
    assert mine["target_hidden"].grad is None and mine["target_head"].grad is None
    frozen = inputs()
    acceptance_loss(**frozen, normaliser=2.0).loss.backward()
    assert frozen["lm_head"].grad is None


def test_terms_for_the_log_carry_no_gradient():
    terms = acceptance_loss(**inputs(), normaliser=1.0)
    assert terms.loss.requires_grad
    assert not any(term.requires_grad for term in terms[1:])


def test_saturated_rows_stay_finite():
    """One-hot against one-hot: agreeing, disagreeing, and a label that the draft gives no mass at all."""
    scale = 1e4
    hidden = (scale * torch.eye(4)).requires_grad_()
    target_hidden = scale * torch.eye(4)[[0, 2, 2, 3]]
    labels = torch.tensor([0, 2, 0, -1])
    args = (hidden, None, torch.eye(4), None, target_hidden, torch.eye(4), torch.arange(4), labels, torch.ones(4))
    terms = acceptance_loss(*args, normaliser=4.0, ce_weight=1.0, l1_weight=1.0, kl_weight=1.0)
    terms.loss.backward()
    assert torch.isfinite(terms.loss) and torch.isfinite(hidden.grad).all()
    assert terms.l1.tolist() == [0, 2, 0, 0] and terms.c_star.tolist() == [1, 0, 1, 1]
    assert terms.ce.tolist() == [0, scale, scale, 0]
    assert terms.greedy.tolist() == [True, False, True, True]


@pytest.mark.parametrize("mix", [MIXES["l1"], MIXES["kl"], MIXES["all"]], ids=["l1", "kl", "all"])
def test_bfloat16_logits_near_the_target_keep_their_gradient(mix):
    """Pitfall 31: V = 1024, p close to q (overlap 0.98), gradient with respect to bf16 logits within 1% of float64."""
    width, rows = 1024, 8
    generator = torch.Generator().manual_seed(0)
    target_logits = (3 * torch.randn(rows, width, generator=generator)).bfloat16()
    z = (target_logits.float() + 0.05 * torch.randn(rows, width, generator=generator)).bfloat16().requires_grad_()
    labels = torch.randint(0, width, (rows,), generator=generator)
    rest = (torch.eye(width), None, target_logits, torch.eye(width), torch.arange(rows), labels, torch.ones(rows))
    terms = acceptance_loss(z, None, *rest, normaliser=1.0, ce_weight=mix[0], l1_weight=mix[1], kl_weight=mix[2])
    terms.loss.backward()
    assert 0.97 < float(terms.c_star.mean()) < 0.99
    exact = z.detach().double().requires_grad_()
    twin(exact, None, *rest, 1.0, *mix)[0].backward()
    error = (z.grad.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert float(error.max()) < 0.01


# ---- the draft vocabulary (pitfall 39)


def test_the_teacher_is_renormalised_over_the_kept_ids():
    """V = 10, kept {1, 4, 5, 9}: p is a softmax over the kept logits; a label outside has no CE but has L1."""
    kept = torch.tensor([1, 4, 5, 9])
    logits = torch.tensor([[5.0, 1, 7, 7, 2, 3, 0, 0, 0, 1]])
    z = torch.tensor([[0.3, -0.2, 0.5, 0.1]] * 2)
    head = torch.eye(10)[kept]
    labels = torch.tensor([2, -1])
    terms = acceptance_loss(
        z, None, torch.eye(4), None, logits, head, torch.tensor([0, 0]), labels, torch.ones(2), normaliser=1.0
    )
    p, q = torch.tensor([1.0, 2, 3, 1]).softmax(0), z[0].softmax(0)
    torch.testing.assert_close(terms.c_star, torch.minimum(p, q).sum().expand(2))
    torch.testing.assert_close(terms.ce, torch.tensor([-q[2].log(), 0.0]))


# ---- weights and denominators (pitfalls 4, 24)


def test_position_weights_are_those_of_the_paper():
    torch.testing.assert_close(position_weights(4, 4.0), torch.tensor([math.exp(-k / 4) for k in range(4)]))


def micro_batch(row, n: int, anchors=None) -> MicroBatch:
    anchors = torch.arange(len(row.tokens) - 1) if anchors is None else anchors
    labels, supervised = supervision(row, anchors, n)
    return MicroBatch(row, anchors, labels, supervised, supervised * position_weights(n, 4.0))


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_weighted_mean_of_ones_is_one(toy, sample_from_anchor):
    """Pitfall 4: the denominator sums weights, and the first prediction has weight 1 in both layouts."""
    drafter = tiny_drafter(toy, sample_from_anchor=sample_from_anchor, confidence_head=False)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
        drafter.markov_head.markov_w2.weight.zero_()
    batch = micro_batch(packed_row([12]), drafter.config.max_draft_tokens)
    assert (batch.weights[:, 0] == 1).all()
    config = TrainConfig(ce_weight=1 / math.log(VOCAB), kl_weight=0.0, dtype="float32")  # each token's loss is 1
    _, log = drafter_loss(drafter, toy.lm_head, batch, float(batch.weights.sum()), config)
    assert log["loss"] == pytest.approx(1.0, abs=1e-6)


def test_one_token_and_seven_tokens_weigh_as_eight():
    """Rank 0 holds 1 token of loss 8, rank 1 holds 7 of loss 0: 1.0, not the mean of means 4.0."""
    total = 0.0
    for count, logit in ((1, 8.0), (7, 0.0)):
        hidden = torch.tensor([[0.0, logit]]).repeat(count, 1)  # CE of label 0: log(1 + e^logit)
        terms = acceptance_loss(
            hidden, None, torch.eye(2), None, hidden, torch.eye(2), torch.arange(count),
            torch.zeros(count, dtype=torch.long), torch.ones(count), normaliser=8.0, ce_weight=1.0, l1_weight=0.0,
        )  # fmt: skip
        total += float(terms.loss)
    assert total == pytest.approx((math.log(1 + math.exp(8)) + 7 * math.log(2)) / 8, rel=1e-6)


def gradients(drafter, batches, config, target_head) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    normaliser = float(sum(batch.weights.sum() for batch in batches))
    for batch in batches:
        drafter_loss(drafter, target_head, batch, normaliser, config)[0].backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("detach", [True, False])
def test_micro_batches_give_the_gradient_of_their_concatenation(toy, detach):
    drafter = tiny_drafter(toy)
    config = TrainConfig(ce_weight=0.4, l1_weight=0.5, kl_weight=0.3, detach_confidence=detach, dtype="float32")
    whole = packed_row([10, 6])
    parts = []
    for start, end in ((0, 10), (10, 16)):
        row = type(whole)(*(tensor[start:end] for tensor in whole))
        parts.append(micro_batch(row._replace(starts=row.starts - start, ends=row.ends - start), 4))
    anchors = torch.tensor([a for a in range(15) if a != 9])
    together = gradients(drafter, [micro_batch(whole, 4, anchors)], config, toy.lm_head)
    apart = gradients(drafter, parts, config, toy.lm_head)
    assert set(together) == set(apart) and any(name.startswith("confidence") for name in apart)
    for name in together:
        torch.testing.assert_close(apart[name], together[name], rtol=1e-4, atol=1e-6)


# ---- the confidence loss (pitfall 34)


def test_confidence_loss_is_a_weighted_bce_against_a_detached_label():
    logits, c_star = torch.tensor([0.3, -2.0, 40.0]).requires_grad_(), torch.tensor([0.7, 0.0, 1.0]).requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.25])
    loss = confidence_loss(logits, c_star, weights, 1.75)
    s = logits.detach().double().sigmoid()
    bce = -(c_star * s.log() + (1 - c_star) * torch.log1p(-s.clamp_max(1 - 1e-16)))
    torch.testing.assert_close(loss.double(), (bce * weights).sum().detach() / 1.75, rtol=1e-6, atol=1e-6)
    loss.backward()
    torch.testing.assert_close(logits.grad, ((s - c_star) * weights / 1.75).detach().float())
    assert c_star.grad is None


def test_a_detached_confidence_head_leaves_the_backbone_alone(toy):
    batch = micro_batch(packed_row([14]), 4)
    scored, bare = tiny_drafter(toy), tiny_drafter(toy, confidence_head=False)
    bare.load_state_dict({k: v for k, v in scored.state_dict().items() if not k.startswith("confidence")})
    config = {"ce_weight": 0.1, "l1_weight": 0.9, "kl_weight": 0.0, "dtype": "float32"}
    without = gradients(bare, [batch], TrainConfig(**config), toy.lm_head)
    detached = gradients(scored, [batch], TrainConfig(**config, detach_confidence=True), toy.lm_head)
    attached = gradients(scored, [batch], TrainConfig(**config, detach_confidence=False), toy.lm_head)
    assert all(torch.equal(detached[name], without[name]) for name in without)
    assert detached["confidence_head.proj.weight"].any()
    for name in ("fc.weight", "markov_head.markov_w1.weight"):
        assert not torch.allclose(attached[name], without[name], atol=1e-5)


def test_heads_that_are_off_train_like_the_rest(toy):
    """An ablation with a head off has the same loss otherwise; its log says 0 for what is not there."""
    batch = micro_batch(packed_row([14]), 4)
    config = TrainConfig(dtype="float32")
    drafter = tiny_drafter(toy, markov_rank=0, confidence_head=False)
    loss, log = drafter_loss(drafter, toy.lm_head, batch, float(batch.weights.sum()), config)
    loss.backward()
    assert log["bce"] == 0.0 and drafter.fc.weight.grad.any()
    blocks = (batch.row.features, batch.row.positions, batch.row.tokens, batch.anchors, batch.anchors * 0)
    z = drafter.lm_head(drafter.block_hidden(*blocks, 4)).detach()
    ce = F.cross_entropy(z[batch.supervised], batch.labels[batch.supervised], reduction="none")
    weights = batch.weights[batch.supervised]
    assert log["ce"] == pytest.approx(float((ce * weights).sum() / weights.sum()), rel=1e-5)
    at = (batch.anchors[:, None] + torch.arange(4))[batch.supervised]  # the target's state there predicts the label
    p = toy.logits(batch.row.hidden)[at].softmax(-1)
    l1 = (z[batch.supervised].softmax(-1) - p).abs().sum(-1)
    assert log["l1"] == pytest.approx(float((l1 * weights).sum() / weights.sum()), rel=1e-5)


# ---- accepted length (pitfalls 5, 22)


def runs(*lengths: int, n: int = 3) -> torch.Tensor:
    return torch.arange(n) < torch.tensor(lengths)[:, None]


def test_accepted_length_counts_runs():
    whole = torch.ones(4, 3, dtype=torch.bool)
    assert accepted_length(runs(3, 2, 1, 0), whole) == 2.5
    assert accepted_length(torch.ones(4, 3, dtype=torch.bool), whole) == 4
    late = torch.tensor([[False, True, True]])  # right again after a mistake: never accepted
    assert accepted_length(late, whole[:1]) == 1


def test_accepted_length_of_cut_blocks_is_not_counted():
    supervised = torch.tensor([[True, True, True], [True, False, False]])
    assert accepted_length(runs(2, 1), supervised) == 3
    assert math.isnan(accepted_length(runs(1), supervised[1:]))
