"""What notebook 01 says about a drafter's blocks, held against the drafter and the target themselves."""

import numpy as np
import pytest
import torch
from tiny import tiny_config, tiny_drafter, tiny_target

from dspark import anatomy
from dspark.decode import answer

PROMPT, N = [5, 6, 7, 8], 4
ALL = (0, 1, 2, 3)


def study(draft_ids=None, **changes):
    """(target tapped everywhere, drafter, the reading of its own greedy answer)."""
    target = tiny_target(ALL)
    drafter = tiny_drafter(target, draft_ids=draft_ids, **changes)
    got = answer(target, None, PROMPT, 0, 60, stop_token_ids=frozenset()).tokens
    return target, drafter, anatomy.read(target, drafter, PROMPT, got)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "rnn"},
        {"sample_from_anchor": False, "block_size": 5},
        {"draft_ids": torch.arange(0, 40, 3)},
    ],
)
def test_blocks_are_those_that_decoding_drafts(changes):
    target, drafter, reading = study(**changes)
    blocks = anatomy.draft_blocks(drafter, reading, N)
    assert len(blocks.truth) == 60 - N
    for block in (0, 17, 60 - N - 1):
        at = reading.start + block
        context = drafter.new_cache(at)
        drafter.extend(context, reading.features[:at])
        with torch.no_grad():
            draft = drafter.draft(reading.tokens[at : at + 1], context, N)
        assert draft.tokens.tolist() == blocks.head_ids[block, :, 0].tolist()
        torch.testing.assert_close(draft.confidence, blocks.confidence[block])
        assert blocks.truth[block].tolist() == reading.tokens[at + 1 : at + 1 + N].tolist()


def test_overlap_is_what_sampling_accepts():
    """Of the first slot: sum over the whole vocabulary of min(p, q), q from `draft` at temperature 1."""
    target, drafter, reading = study(draft_ids=torch.arange(0, 40, 3))
    blocks = anatomy.draft_blocks(drafter, reading, N)
    at = reading.start + 9
    context = drafter.new_cache(at)
    drafter.extend(context, reading.features[:at])
    with torch.no_grad():
        q = drafter.draft(reading.tokens[at : at + 1], context, N, 1.0, torch.Generator().manual_seed(0)).q[0]
        out = target.forward(reading.tokens[None, : at + 1], target.new_cache(1, at + 1), 0)
    p = target.logits(out.hidden[0, -1]).softmax(-1)
    wide = torch.zeros_like(p)
    wide[torch.arange(0, 40, 3)] = q
    assert float(blocks.overlap[9, 0]) == pytest.approx(float(torch.minimum(p, wide).sum()), abs=1e-5)


def test_run_lengths_stop_at_the_first_wrong_token():
    truth = torch.tensor([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3]])
    ids = torch.tensor([1, 2, 3]).repeat(4, 1)[..., None]
    blocks = anatomy.Blocks(*[None] * 4, truth, None, None)
    assert blocks.run_lengths(ids).tolist() == [3, 3, 0, 1]


def test_collisions_are_all_those_that_the_target_confirms(monkeypatch):
    """Against a slow search that asks the target about every rival from scratch, with the backbone's favourites set so
    that collisions occur: at random, a third of the blocks follow the truth and name true continuations of rivals."""
    monkeypatch.setattr(anatomy, "LIKELY", 0.0)
    target, drafter, reading = study()
    blocks = anatomy.draft_blocks(drafter, reading, N)
    generator = torch.Generator().manual_seed(1)

    def continued(block, k, rival):
        text = [*reading.tokens[: reading.start + block + k].tolist(), rival]
        out = target.forward(torch.tensor([text]), target.new_cache(1, len(text)), 0)
        return int(target.logits(out.hidden[0, -1]).argmax())

    fake = blocks.base_ids.clone()
    for block in range(len(fake)):
        k = int(torch.randint(0, N + 1, (1,), generator=generator))
        fake[block, :k, 0] = blocks.truth[block, :k]
        if 0 < k < N and block % 3:
            fake[block, k, 0] = continued(block, k, int(fake[block, k - 1, 1 + block % 2]))
    blocks = blocks._replace(base_ids=fake)
    expected = []
    for block, k in enumerate(blocks.run_lengths(fake).tolist()):
        rivals = fake[block, k - 1, 1:].tolist() if 0 < k < N else []
        right = [rival for rival in rivals if continued(block, k, rival) == int(fake[block, k, 0])]
        expected += [(block, k, right[0])] if right else []
    found = anatomy.collisions(target, reading, blocks)
    assert len(expected) > 5 and [(c.block, c.k, c.rival) for c in found] == expected
    for c in found:
        assert [c.first, c.wanted] == blocks.truth[c.block, c.k - 1 : c.k + 1].tolist() and c.second != c.wanted


def test_unlikely_rivals_are_no_collision(monkeypatch):
    target, drafter, reading = study()
    blocks = anatomy.draft_blocks(drafter, reading, N)
    monkeypatch.setattr(anatomy, "LIKELY", 1.1)
    assert anatomy.collisions(target, reading, blocks) == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("anchor_first", [False, True])
def test_the_mask_is_the_one_that_the_paper_states(causal, anchor_first):
    config = tiny_config(is_causal=causal, sample_from_anchor=anchor_first)
    slots = 3 if anchor_first else 4
    mask = anatomy.visible(config, context=5, later=2, n=3)
    own = np.tril(np.ones((slots, slots), bool)) if causal else np.ones((slots, slots), bool)
    assert mask[:, :5].all() and not mask[:, 5:7].any() and (mask[:, 7:] == own).all()


def test_a_sliding_layer_has_a_mask_of_its_own():
    """is_causal left open, as speculators does: the sliding layer is causal in the block, the full one is not."""
    config = tiny_config(is_causal=None, sliding_layers=(1,), sliding_window=4)
    full, sliding = (anatomy.visible(config, context=5, later=2, n=3, layer=layer) for layer in (0, 1))
    assert full[:, :5].all() and not full[:, 5:7].any() and full[:, 7:].all()
    # slot i, of row 5 + i, sees context less than 4 rows back
    assert sliding[:, :5].astype(int).tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert not sliding[:, 5:7].any() and (sliding[:, 7:] == np.tril(np.ones((3, 3), bool))).all()
    assert (anatomy.visible(config, context=5, later=2, n=3) == full).all()
    with pytest.raises(ValueError, match=r"layer = 2: draft layers are 0..1"):
        anatomy.visible(config, context=5, later=2, n=3, layer=2)
