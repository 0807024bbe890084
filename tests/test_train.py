"""Training: it learns what decoding needs, draws its anchors fairly, and a resumed run repeats an uninterrupted one."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, VOCAB, packed_row, tiny_config, tiny_drafter, tiny_target

from dspark import checkpoint, losses, train
from dspark.anchors import micro_batches, sample_anchors, supervision
from dspark.config import PRESETS
from dspark.data import Sample
from dspark.decode import answer
from dspark.initial import new_drafter, trained_drafter
from dspark.losses import drafter_loss, position_weights
from dspark.optim import Float32Muon, lr_scale, orthogonal
from dspark.source import LocalSource
from dspark.train import TrainConfig, Trainer


@pytest.fixture(scope="module")
def lively():
    """A target whose greedy text does not repeat itself."""
    return tiny_target(scale=12.0)


@pytest.fixture(scope="module")
def samples(lively):
    """What the target says to eight prompts of three tokens, 9 to 30 tokens in all."""
    lengths = (30, 20, 9, 25, 30, 14, 30, 11)
    prompts = [[3 + i, 6, 7] for i in range(8)]
    texts = [p + answer(lively, None, p, 0, n - 3, stop_token_ids=frozenset()).tokens
             for p, n in zip(prompts, lengths, strict=True)]  # fmt: skip
    return [Sample(torch.tensor(text), torch.arange(len(text)) >= 3) for text in texts]


QUICK = TrainConfig(
    steps=20, micro_batches=2, row_tokens=40, anchors=12, block_sizes=(4, 2), dtype="float32", save_every=10,
    heldout_every=1000, lr=1e-2, muon_lr=1e-2, warmup_steps=1,
)  # fmt: skip


def trainer(target, samples, folder, config=QUICK, **changes) -> Trainer:
    drafter = new_drafter(tiny_config(**changes), target, samples, config.seed)
    source = LocalSource(target, samples, folder.parent / "hidden")
    return Trainer(drafter, target, source, [], config, folder)


def log_of(folder: Path) -> list[dict]:
    with (folder / "log.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "waited")} for row in csv.DictReader(file)]


# ---- learning what decoding needs (pitfall 6)


@pytest.mark.parametrize("layout", [True, False])
def test_an_overfitted_text_is_accepted_whole(lively, tmp_path, layout):
    """Train on one text of 64 tokens until the loss is gone: decoding it then accepts every draft of every block."""
    K, prompt = (4 if layout else 3), [5, 6, 7]
    text = prompt + answer(lively, None, prompt, 0, 61, stop_token_ids=frozenset()).tokens
    assert len(text) == 64 and len(set(zip(text, text[1:], strict=False))) > 35  # not to be guessed without looking
    sample = Sample(torch.tensor(text), torch.arange(64) >= 3)
    config = TrainConfig(
        steps=180, micro_batches=1, row_tokens=64, anchors=64, block_sizes=(K,), dtype="float32", lr=1e-2,
        muon_lr=1e-2, save_every=1000, heldout_every=1000, ce_weight=1.0, kl_weight=0.0,
    )  # fmt: skip
    run = trainer(lively, [sample], tmp_path / "run", config, sample_from_anchor=layout)
    run.run()
    log = log_of(tmp_path / "run")
    assert float(log[-1]["ce"]) < 0.05 < 1 < float(log[0]["ce"]) and float(log[-1]["tau_teacher"]) == K + 1
    got = answer(lively, run.inference_drafter(), prompt, K, 61, stop_token_ids=frozenset())
    assert got.tokens == text[3:] and got.tau >= K + 1 - 0.2


def test_a_pruned_drafter_learns_too(lively, samples, tmp_path):
    """Labels outside the draft vocabulary and the teacher's restriction to it run through the whole loop."""
    run = trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "steps": 40}), draft_vocab_size=12)
    run.run()
    log = [float(row["loss"]) for row in log_of(tmp_path / "run")]
    assert sum(log[-5:]) < 0.8 * sum(log[:5])
    assert run.target_head.shape == (12, 32) and torch.equal(run.target_head, run.drafter.lm_head.weight)


def test_frozen_tensors_stay_byte_equal(lively, samples, tmp_path):
    """Pitfall 35, and that everything else moves."""
    run = trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "steps": 10}))
    frozen = [lively.embed_tokens, lively.lm_head, lively.final_norm, run.drafter.embed_tokens.weight,
              run.drafter.lm_head.weight]  # fmt: skip
    frozen += [getattr(part, "weight", part) for layer in lively.layers for part in layer if part is not None]
    before = [tensor.clone() for tensor in frozen]
    trained = {name: p.detach().clone() for name, p in run.drafter.named_parameters() if p.requires_grad}
    run.run()
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))
    after = dict(run.drafter.named_parameters())
    assert all(not torch.equal(after[name], tensor) for name, tensor in trained.items())


def test_a_detached_confidence_head_leaves_no_trace_in_the_rest(lively, samples, tmp_path):
    """Not even by its share of the gradient norm: with it and without it, training drafts the same."""
    tight = TrainConfig(**{**vars(QUICK), "clip": 0.05})
    weights = {}
    for has in (True, False):
        run = trainer(lively, samples, tmp_path / str(has), tight, confidence_head=has)
        run.run()
        weights[has] = dict(run.drafter.named_parameters())
    assert all(torch.equal(weights[True][name], p) for name, p in weights[False].items())
    both = TrainConfig(**{**vars(tight), "detach_confidence": False})
    run = trainer(lively, samples, tmp_path / "attached", both)
    run.run()
    assert not torch.equal(run.drafter.fc.weight, weights[True]["fc.weight"])


def test_a_confidence_gradient_that_is_not_finite_stops_the_run(lively, samples, tmp_path):
    """Clipped alone, it must still be looked at."""
    run = trainer(lively, samples, tmp_path / "run", confidence_head=True)
    for parameter in run.parameters:
        parameter.grad = torch.zeros_like(parameter)
    run.judges[0].grad.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="gradient norm"):
        run._update(1.0)


def test_the_inference_drafter_is_a_copy(lively, samples, tmp_path):
    run = trainer(lively, samples, tmp_path / "run", draft_vocab_size=12)
    copy = run.inference_drafter()
    weights = run.drafter.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in copy.state_dict().items())
    copy.fc.weight.data.zero_()
    assert run.drafter.fc.weight.any() and not copy.training


# ---- anchors and labels (pitfalls 20, 21)


def test_anchors_are_drawn_uniformly():
    row, generator = packed_row([701]), torch.Generator().manual_seed(0)
    counts = torch.zeros(701)
    for _ in range(2000):
        anchors = sample_anchors(row, 512, generator)
        assert len(anchors) == 512 and (anchors[1:] > anchors[:-1]).all()
        counts[anchors] += 1
    share = counts[:700] / 2000
    assert counts[700] == 0 and float((share - 512 / 700).abs().max()) < 0.05


def test_enough_anchors_supervise_every_token():
    row = packed_row([10, 6, 1, 9])
    row.loss_mask[12:15] = False
    anchors = sample_anchors(row, 100, torch.Generator())
    labels, supervised = supervision(row, anchors, 1)
    at = (anchors[:, None] + 1)[supervised]
    firsts = {0, 10, 16, 17}  # a document's first token has no anchor before it
    assert at.tolist() == [i for i in range(26) if row.loss_mask[i] and i not in firsts]
    assert torch.equal(labels[supervised], row.tokens[at])


def test_the_first_assistant_token_is_supervised_by_the_last_prompt_token():
    row = packed_row([7])
    row.loss_mask[:3] = False  # 0 0 0 1 1 1 1
    anchors = sample_anchors(row, 100, torch.Generator())
    assert anchors.tolist() == [2, 3, 4, 5]
    labels, supervised = supervision(row, anchors, 4)
    assert labels[0].tolist() == row.tokens[3:7].tolist() and supervised[0].all()
    assert supervised.sum(1).tolist() == [4, 3, 2, 1]


def test_supervision_ends_at_the_first_gap():
    row = packed_row([8])
    row.loss_mask[3] = False
    _, supervised = supervision(row, torch.tensor([0, 1, 2, 3]), 4)
    assert supervised.tolist() == [[True, True, False, False], [True] + [False] * 3, [False] * 4, [True] * 4]


@pytest.mark.parametrize("layout", [True, False])
@pytest.mark.parametrize("lengths", [(3, 2), (1, 1), (3, 1, 1)])
def test_texts_shorter_than_a_block_leave_the_loss_finite(lively, tmp_path, lengths, layout):
    short = [Sample(torch.arange(3, 3 + n), torch.ones(n, dtype=torch.bool)) for n in lengths]
    config = TrainConfig(**{**vars(QUICK), "steps": 2, "row_tokens": 1, "block_sizes": (3,)})
    run = trainer(lively, short, tmp_path / "run", config, sample_from_anchor=layout)
    run.run()
    for row in log_of(tmp_path / "run"):
        assert math.isfinite(float(row["loss"]))
        if set(lengths) == {1}:
            assert float(row["loss"]) == 0 and row["draft_tokens"] == "0" and row["tau_teacher"] == ""
    assert all(torch.isfinite(p).all() for p in run.drafter.parameters())


# ---- order of the data


def test_every_epoch_visits_every_sample_once(lively, samples, tmp_path):
    source, visited = LocalSource(lively, samples, tmp_path), []
    row, source.row = source.row, lambda ids: visited.append(ids) or row(ids)
    config = TrainConfig(**{**vars(QUICK), "steps": 12, "micro_batches": 1})
    epochs = [epoch for epoch, _ in micro_batches(source, config, 0)]
    for epoch in range(max(epochs)):
        seen = [i for e, ids in zip(epochs, visited, strict=True) if e == epoch for i in ids]
        assert sorted(seen) == list(range(8))
    orders = [[ids for e, ids in zip(epochs, visited, strict=True) if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_batches_depend_on_seed_and_step_alone(lively, samples, tmp_path):
    """Pitfall 64: batch ids, block sizes and anchors of step 7 are the same however one gets there."""
    source = LocalSource(lively, samples, tmp_path)

    def steps(start, **changes):
        config = TrainConfig(**{**vars(QUICK), **changes})
        return [[(m.row.tokens.tolist(), m.anchors.tolist(), m.labels.shape[1]) for m in batch]
                for _, batch in micro_batches(source, config, start)]  # fmt: skip

    straight = steps(0)
    assert steps(7) == straight[7:] and steps(0) == straight
    assert steps(0, seed=1) != straight
    assert {m[2] for batch in straight for m in batch} == {2, 4}
    assert len({tuple(m[1]) for batch in straight for m in batch}) > 20  # anchors are drawn anew


def test_weights_decay_along_the_block_and_vanish_where_unsupervised(lively, samples, tmp_path):
    for _, batch in micro_batches(LocalSource(lively, samples, tmp_path), QUICK, 17):
        for micro in batch:
            wanted = position_weights(micro.labels.shape[1], QUICK.gamma_decay).expand_as(micro.weights)
            assert torch.equal(micro.weights, torch.where(micro.supervised, wanted, 0.0))


# ---- learning rate (pitfall 32)


@pytest.mark.parametrize("decay", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("steps, warmup", [(1, 40), (2, 1), (20, 0), (100, 4), (1000, 100), (50, 50)])
def test_learning_rate_rises_to_one_and_falls_without_a_jump(steps, warmup, decay):
    scales = [lr_scale(step, steps, warmup, decay) for step in range(steps)]
    rise = max(1, min(warmup, steps))
    fall = max(rise, steps - round(decay * steps))
    assert max(scales) == 1 == scales[rise - 1] and min(scales) > 0
    assert scales[:rise] == pytest.approx([(k + 1) / rise for k in range(rise)])
    assert scales[rise:fall] == [1.0] * (fall - rise)
    assert scales[rise - 1 :] == sorted(scales[rise - 1 :], reverse=True)
    jumps = [abs(b - a) for a, b in zip(scales, scales[1:], strict=False)]
    assert all(jump <= max(1 / rise, 1.6 / (steps + 1 - fall)) + 1e-9 for jump in jumps)
    if steps - fall > 20:
        assert scales[-1] < 0.01


def test_both_optimizers_follow_the_schedule(lively, samples, tmp_path):
    run = trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "steps": 5, "lr": 1e-3}))
    seen, update = [], run._update
    run._update = lambda scale: (update(scale), seen.append([o.param_groups[0]["lr"] for o in run.optimizers]))[0]
    run.run()
    assert seen == [pytest.approx([1e-2 * s, 1e-3 * s]) for s in (lr_scale(k, 5, 1, 1.0) for k in range(5))]
    muon, adamw = ({id(p) for p in o.param_groups[0]["params"]} for o in run.optimizers)
    assert not muon & adamw and muon | adamw == {id(p) for p in run.drafter.parameters() if p.requires_grad}
    assert id(run.drafter.fc.weight) in muon and id(run.drafter.markov_head.markov_w1.weight) in adamw


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_muon_in_float32_makes_the_steps_that_torchs_makes_in_bfloat16(shape):
    begun = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mine, theirs = (torch.nn.Parameter(begun.clone()) for _ in range(2))
    options = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    both = Float32Muon([mine], **options), torch.optim.Muon([theirs], **options)
    for seed in range(1, 4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for p, optimizer in zip((mine, theirs), both, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(*(o.state[p]["momentum_buffer"] for o, p in zip(both, (mine, theirs), strict=True)))
    mine, theirs = mine.detach(), theirs.detach()
    assert float((mine - theirs).norm() / (mine - begun).norm()) < 0.02
    direction = orthogonal(begun, both[0].param_groups[0]["ns_coefficients"], 5, 1e-7)
    assert 0.5 < float(torch.linalg.svdvals(direction).min()) and float(torch.linalg.svdvals(direction).max()) < 1.3


# ---- the log (pitfalls 22, 24)


def test_log_pools_over_micro_batches(lively, samples, tmp_path):
    run = trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "steps": 1, "micro_batches": 4}))
    _, batch = next(micro_batches(run.source, run.config, 0))
    normaliser = float(sum(m.weights.sum() for m in batch))
    run.drafter.load_state_dict(tiny_drafter(lively, seed=4).state_dict())
    logs = [drafter_loss(run.drafter, run.target_head, m, normaliser, run.config)[1] for m in batch]
    assert len({log["whole_blocks"] for log in logs}) > 1 and len({log["tau_teacher"] for log in logs}) > 1
    run.run()
    (row,) = log_of(tmp_path / "run")
    blocks = sum(log["whole_blocks"] for log in logs)
    pooled = sum(log["tau_teacher"] * log["whole_blocks"] for log in logs) / blocks
    assert float(row["tau_teacher"]) == pytest.approx(pooled, abs=1e-4)
    assert float(row["loss"]) == pytest.approx(sum(log["loss"] for log in logs), abs=1e-4)
    hits, tokens = (sum(log[name] for log in logs) for name in ("greedy_hits", "draft_tokens"))
    assert (
        float(row["greedy_acceptance"]) == pytest.approx(hits / tokens, abs=1e-4) and int(row["draft_tokens"]) == tokens
    )
    assert float(row["coverage"]) == 1  # of the whole vocabulary


def test_a_token_outside_the_draft_vocabulary_is_never_accepted(lively, samples, tmp_path, monkeypatch):
    """A draft that equals the target's best of the kept ids at every slot: decoding would still reject it wherever the
    target says another token, and the log counts it so."""
    loss = losses.acceptance_loss

    def agreeing(*args):
        terms = loss(*args)
        return terms._replace(greedy=torch.ones_like(terms.greedy))

    monkeypatch.setattr(losses, "acceptance_loss", agreeing)
    once = TrainConfig(**{**vars(QUICK), "steps": 1})
    run = trainer(lively, samples, tmp_path / "run", once, draft_vocab_size=12)
    _, batch = next(micro_batches(run.source, run.config, 0))
    run.run()
    (row,) = log_of(tmp_path / "run")
    known = [run.drafter.t2d[micro.labels] for micro in batch]
    hits = sum(int((k & micro.supervised).sum()) for k, micro in zip(known, batch, strict=True))
    tokens = sum(int(micro.supervised.sum()) for micro in batch)
    assert 0 < hits < tokens
    for column in ("greedy_acceptance", "coverage"):
        assert float(row[column]) == pytest.approx(hits / tokens, abs=1e-4), column
    whole = [k[micro.supervised.all(1)] for k, micro in zip(known, batch, strict=True)]
    lengths = [length for k in whole for length in (1 + k.int().cumprod(1).sum(1)).tolist()]
    assert 1 < sum(lengths) / len(lengths) < 1 + max(QUICK.block_sizes)
    assert float(row["tau_teacher"]) == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)


# ---- checkpoints and resumption (pitfalls 63, 64)


class Killed(BaseException):
    """Nothing may catch it, as nothing catches SIGKILL."""


def stop_at(run: Trainer, step: int) -> None:
    """Run until step `step` has been logged, then die."""
    log = run._log

    def dying(*args):
        log(*args)
        if run.step == step:
            raise Killed

    run._log = dying
    with pytest.raises(Killed):
        run.run()


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "step-000020" / "trained.safetensors")


@pytest.fixture(scope="module")
def straight(lively, samples, tmp_path_factory):
    """Folder of 20 steps without interruption."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    trainer(lively, samples, folder).run()
    return folder


def test_a_resumed_run_repeats_an_uninterrupted_one(lively, samples, straight, tmp_path):
    stop_at(trainer(lively, samples, tmp_path / "run"), 13)
    assert [row["step"] for row in log_of(tmp_path / "run")] == [str(k) for k in range(1, 14)]
    second = trainer(lively, samples, tmp_path / "run")
    assert second.step == 10 and len(log_of(tmp_path / "run")) == 10  # steps 11 to 13 will be logged again
    second.run()
    assert log_of(tmp_path / "run") == log_of(straight)
    mine, theirs = final_weights(tmp_path / "run"), final_weights(straight)
    assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_its_logs_anew(lively, samples, straight, tmp_path):
    stop_at(trainer(lively, samples, tmp_path / "run"), 3)
    assert [row["step"] for row in log_of(tmp_path / "run")] == ["1", "2", "3"]
    (tmp_path / "run" / "heldout.csv").write_text("step,tau_n3\n2,1.5\n")
    trainer(lively, samples, tmp_path / "run").run()
    assert log_of(tmp_path / "run") == log_of(straight)  # every step once
    assert not (tmp_path / "run" / "heldout.csv").exists()  # nothing was held out here


def test_seconds_waited_are_counted_on(lively, samples, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-000020")
    path = tmp_path / "run" / "step-000010" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"waited": 1000.0}))
    trainer(lively, samples, tmp_path / "run").run()
    with (tmp_path / "run" / "log.csv").open() as file:
        waited = [float(row["waited"]) for row in csv.DictReader(file)]
    assert max(waited[:10]) < 1000 <= min(waited[10:])
    assert json.loads((tmp_path / "run" / "step-000020" / "state.json").read_text())["waited"] >= 1000


def test_a_run_of_an_older_version_is_resumed(lively, samples, straight, tmp_path):
    """It did not keep what it waited, began with and read, and its log has no coverage."""
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-000020")
    path = tmp_path / "run" / "step-000010" / "state.json"
    state = json.loads(path.read_text())
    del state["waited"], state["config"]["init"], state["config"]["data"]
    path.write_text(json.dumps(state))
    with (tmp_path / "run" / "log.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k != "coverage"} for row in csv.DictReader(file)]
    with (tmp_path / "run" / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    run = trainer(lively, samples, tmp_path / "run")
    assert (run.step, run.waited) == (10, 0.0)
    run.run()
    wanted = [{k: v for k, v in row.items() if k != "coverage"} for row in log_of(straight)]
    assert log_of(tmp_path / "run") == wanted  # each value under its own column


def test_optimizer_states_are_read_whatever_device_they_were_saved_on(lively, samples, tmp_path, monkeypatch):
    """On a machine without it, and by every rank, not onto rank 0's device: here they say to be of an eighth GPU."""
    short = TrainConfig(**{**vars(QUICK), "steps": 12, "decay": 0.0})
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    stop_at(trainer(lively, samples, tmp_path / "run", short), 11)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="(?i)cuda"):  # or nothing would be tested
        torch.load(tmp_path / "run" / "step-000010" / "optimizers.pt", weights_only=True)
    run = trainer(lively, samples, tmp_path / "run", short)
    states = [value for optimizer in run.optimizers for state in optimizer.state.values() for value in state.values()]
    assert run.step == 10 and states and all(value.device == lively.device for value in states)


def test_the_end_may_be_moved_before_the_rate_falls_and_not_after(lively, samples, tmp_path):
    """Prolonged while the rate is constant, a run equals one that was meant to be long from the start."""
    long = TrainConfig(**{**vars(QUICK), "steps": 24, "decay": 0.25})
    trainer(lively, samples, tmp_path / "long", long).run()
    short = TrainConfig(**{**vars(QUICK), "steps": 14, "decay": 0.25})
    stop_at(trainer(lively, samples, tmp_path / "run", short), 11)  # saved at 10; the rate falls from 10 on
    trainer(lively, samples, tmp_path / "run", long).run()
    assert log_of(tmp_path / "run") == log_of(tmp_path / "long")
    with pytest.raises(ValueError, match=r"trained with other \['steps'\]"):
        trainer(lively, samples, tmp_path / "run", short)


def test_a_finished_run_only_loads(lively, samples, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    run = trainer(lively, samples, tmp_path / "run")
    run.run()
    assert run.step == 20 and log_of(tmp_path / "run") == log_of(straight)
    assert torch.equal(run.drafter.fc.weight, final_weights(straight)["fc.weight"])


POINTS = {
    "before anything": (train, "save_file", False),
    "in the weights": (train, "save_file", True),
    "before the optimisers": (torch, "save", False),
    "in the optimisers": (torch, "save", True),
    "in the state": (Path, "write_text", True),
    "before the name": (Path, "rename", False),
}


@pytest.mark.parametrize("owner, name, half", POINTS.values(), ids=POINTS)
def test_a_save_that_is_killed_costs_only_the_steps_since_the_last(
    lively, samples, straight, tmp_path, monkeypatch, owner, name, half
):
    """Killed in the second save, before or in the middle of each of its writes."""
    run, calls, real = trainer(lively, samples, tmp_path / "run"), [], getattr(owner, name)

    def dying(*args, **kwargs):
        if run.step < 20:
            return real(*args, **kwargs)
        if half:
            next(a for a in args if isinstance(a, Path)).write_bytes(b"half a file")
        calls.append(name)
        raise Killed

    monkeypatch.setattr(owner, name, dying)
    with pytest.raises(Killed):
        run.run()
    monkeypatch.undo()
    assert calls and [p.name for p in (tmp_path / "run").glob("step-*")] == ["step-000010"]
    second = trainer(lively, samples, tmp_path / "run")
    assert second.step == 10
    second.run()
    mine, theirs = final_weights(tmp_path / "run"), final_weights(straight)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert not list((tmp_path / "run").glob(".saving*")) and log_of(tmp_path / "run") == log_of(straight)


def test_two_checkpoints_are_kept(lively, samples, tmp_path):
    trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "steps": 7, "save_every": 2})).run()
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-000006", "step-000007"]


CHANGED = {
    "learning rate": ({"lr": 5e-3}, {}, r"\['lr'\]"),
    "steps": ({"steps": 30}, {}, r"\['steps'\]"),
    "block sizes": ({"block_sizes": (4,)}, {}, r"\['block_sizes'\]"),
    "causal blocks": ({}, {"is_causal": True}, r"\['is_causal'\]"),
    "layout": ({"block_sizes": (3,)}, {"sample_from_anchor": False}, r"\['block_sizes', 'sample_from_anchor'\]"),
    "draft vocabulary": ({}, {"draft_vocab_size": 12}, "draft_vocab_size"),
}


@pytest.mark.parametrize("training, shape, named", CHANGED.values(), ids=CHANGED)
def test_a_changed_run_is_not_resumed(lively, samples, straight, tmp_path, training, shape, named):
    shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(ValueError, match=f"run was trained with other .*{named}: use another --out|other .*{named}"):
        trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), **training}), **shape)
    assert log_of(tmp_path / "run") == log_of(straight)  # and nothing is lost


def test_changed_data_are_not_resumed(lively, samples, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(ValueError, match=r"other \['data', 'sample_lengths'\]"):
        trainer(lively, samples[1:], tmp_path / "run")
    pruned = {"draft_vocab_size": 12}
    trainer(lively, samples, tmp_path / "pruned", TrainConfig(**{**vars(QUICK), "steps": 1}), **pruned).run()
    renamed = [Sample((s.token_ids - 3 + 1) % (VOCAB - 3) + 3, s.loss_mask) for s in samples]
    with pytest.raises(ValueError, match=r"other \['data', 'draft_ids'\]"):  # W2's rows would mean other tokens
        trainer(lively, renamed, tmp_path / "pruned", TrainConfig(**{**vars(QUICK), "steps": 1}), **pruned)
    unmasked = [Sample(s.token_ids, torch.ones_like(s.loss_mask)) for s in samples]
    for others in (renamed, unmasked, samples[:1] + samples[1:][::-1]):  # of the same lengths, or in another order
        with pytest.raises(ValueError, match=r"other \['data'"):
            trainer(lively, others, tmp_path / "run")


def test_another_beginning_is_not_resumed(lively, samples, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    source = LocalSource(lively, samples, tmp_path / "hidden")
    begun = new_drafter(tiny_config(), lively, samples, QUICK.seed)
    with pytest.raises(ValueError, match=r"other \['init'\]"):
        Trainer(begun, lively, source, [], QUICK, tmp_path / "run", init="of another drafter")


# ---- what is refused

BAD = {"steps": 0, "micro_batches": 0, "row_tokens": 0, "anchors": 0, "save_every": 0, "heldout_every": 0}


@pytest.mark.parametrize("name, value", BAD.items())
def test_settings_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=f"TrainConfig.{name} = {value}: must be at least 1"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [("dtype", "float16"), ("gamma_decay", 0.0), ("gamma_decay", -4.0), ("clip", 0.0), ("clip", math.nan)],
)
def test_settings_that_cannot_train_are_refused(name, value):
    with pytest.raises(ValueError, match=f"TrainConfig.{name} = {value!r}: (must be positive|auto, float32 or)"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("text", ["yes", "off", ""])
def test_a_switch_takes_true_or_false_and_nothing_else(text, capsys):
    with pytest.raises(SystemExit):
        train.main(["--out", "x", "--detach-confidence", text])
    assert f"argument --detach-confidence: {text!r}: true or false" in capsys.readouterr().err


# ---- block sizes


def test_blocks_are_the_shapes_longest_unless_others_are_asked_for(lively, samples, tmp_path):
    for preset, most in {"smollm2-135m": 8, "qwen3-0.6b": 7, "kimi-k2.6": 7}.items():
        assert TrainConfig().fitted(PRESETS[preset]).block_sizes == (most,)
    unsaid, said = (TrainConfig(**{**vars(QUICK), "steps": 2, "block_sizes": sizes}) for sizes in (None, (4,)))
    run = trainer(lively, samples, tmp_path / "run", unsaid)
    assert {micro.labels.shape[1] for _, batch in micro_batches(run.source, run.config, 0) for micro in batch} == {4}
    run.run()
    assert trainer(lively, samples, tmp_path / "run", said).step == 2  # the same run, and so is the other way round:
    trainer(lively, samples, tmp_path / "said", said).run()
    assert trainer(lively, samples, tmp_path / "said", unsaid).step == 2


def test_blocks_longer_than_the_layout_allows_are_refused(lively, samples, tmp_path):
    message = r"block_sizes = \(4, 5\): num_speculative_tokens = 5: a block of 4 .* drafts 1..4"
    with pytest.raises(ValueError, match=message):
        trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "block_sizes": (4, 5)}))


def test_too_long_blocks_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """And the documented command, which says no block sizes, is not refused."""
    command = ["--preset", "qwen3-0.6b", "--target", "Qwen/Qwen3-0.6B", "--data", "none.jsonl", "--out", str(tmp_path)]
    monkeypatch.setattr(train.Target, "load", lambda *args: pytest.fail("a target was loaded"))
    with pytest.raises(ValueError, match=r"block_sizes = \(8,\): num_speculative_tokens = 8: a block of 7"):
        train.main([*command, "--block-sizes", "8"])
    asked = []
    monkeypatch.setattr(train, "train", lambda *args: asked.append(args))
    train.main(command)
    _, shape, config, *_ = asked[0]
    assert config.fitted(shape).block_sizes == (7,)


def test_other_taps_than_the_drafters_are_refused(samples, tmp_path):
    with pytest.raises(ValueError, match=r"taps layers \(1, 2\), the drafter reads \(0, 2\)"):
        trainer(tiny_target(layer_ids=(1, 2)), samples, tmp_path / "run")


def test_a_gradient_that_is_not_finite_stops_the_run_before_a_save(lively, samples, tmp_path):
    run = trainer(lively, samples, tmp_path / "run", TrainConfig(**{**vars(QUICK), "save_every": 1}))
    run.drafter.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="gradient norm nan at step 0: lower lr or muon_lr"):
        run.run()
    assert not list((tmp_path / "run").glob("step-*"))


# ---- the command line, on the embedded target


def test_the_command_trains_resumes_and_exports(target, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "cache_dir", lambda: tmp_path)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, how are you today, my friend?"}]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": talk, "split": "train"}) + "\n")
    small = {"num_hidden_layers": 1, "intermediate_size": 32, "draft_vocab_size": 64, "markov_rank": 4, "block_size": 4}
    command = [
        "--data", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "run"), "--config", json.dumps(small),
        "--dtype", "float32", "--steps", "2", "--micro-batches", "1", "--block-sizes", "4", "2", "--anchors", "8",
        "--detach-confidence", "false",
    ]  # fmt: skip
    for _ in range(2):  # the second finds the run finished
        train.main(command)
    assert [row["step"] for row in log_of(tmp_path / "run")] == ["1", "2"]
    drafter = checkpoint.load(tmp_path / "run" / "drafter", target)
    assert drafter.config.block_size == 4 and drafter.d2t.shape == (64,)
    kept = set(drafter.to_target_ids(torch.arange(64)).tolist())
    assert set(target.tokenizer("Hello, how are you today, my friend?<|im_end|>")["input_ids"]) <= kept
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["training"]["block_sizes"] == [4, 2] and recipe["training"]["detach_confidence"] is False
    assert recipe["conversations"] == 1 and recipe["draft_tokens"] > 0
    further = ["--data", command[1], "--out", str(tmp_path / "more"), "--init", str(tmp_path / "run" / "drafter")]
    begun = [*further, "--dtype", "float32", "--steps", "1", "--anchors", "8", "--lr", "0"]
    train.main(begun)
    assert json.loads((tmp_path / "more" / "recipe.json").read_text())["training"]["block_sizes"] == [4]  # the shape's
    more = checkpoint.load(tmp_path / "more" / "drafter", target)
    assert torch.equal(more.d2t, drafter.d2t)
    w1 = "markov_head.markov_w1.weight"  # under lr 0 what AdamW holds stays as it was, what Muon holds does not
    assert torch.equal(more.state_dict()[w1], drafter.state_dict()[w1])
    assert not torch.equal(more.fc.weight, drafter.fc.weight)
    assert "| init | drafter |" in (tmp_path / "more" / "drafter" / "README.md").read_text()
    with pytest.raises(ValueError, match="no beginning of this shape: .*layers.1"):
        train.main([*further, "--config", '{"num_hidden_layers": 2}'])
    shutil.copytree(tmp_path / "run" / "drafter", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    save_file(weights | {"norm.weight": 2 * weights["norm.weight"]}, tmp_path / "other" / "model.safetensors")
    begun[begun.index("--init") + 1] = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"more was trained with other \['init'\]"):
        train.main(begun)


def test_heads_are_added_to_a_bare_backbone(lively, samples, tmp_path):
    """What two arms of an ablation begin from: the same backbone, bit for bit."""
    bare = trainer(lively, samples, tmp_path / "bare", markov_rank=0, confidence_head=False, draft_vocab_size=12)
    checkpoint.save(bare.inference_drafter(), tmp_path / "drafter", torch.float32)
    whole = bare.drafter.config.replace(markov_rank=4, confidence_head=True)
    drafter = trained_drafter(tmp_path / "drafter", lively, whole, seed=1)
    new = dict(drafter.named_parameters())
    assert all(torch.equal(new[name], tensor) for name, tensor in bare.drafter.named_parameters())
    assert new["markov_head.markov_w1.weight"].requires_grad and not new["lm_head.weight"].requires_grad


def test_another_draft_vocabulary_keeps_what_was_learnt_of_the_ids_in_both(lively, samples, tmp_path):
    first = trainer(lively, samples, tmp_path / "first", draft_vocab_size=12)
    first.drafter.markov_head.markov_w2.weight.data.normal_()
    checkpoint.save(first.inference_drafter(), tmp_path / "drafter", torch.float32)
    old = first.drafter.t2d.nonzero().squeeze(1)
    kept = torch.cat([old[2:], (~first.drafter.t2d).nonzero().squeeze(1)[:3]]).sort().values  # 10 of 12, and 3 others
    shape = first.drafter.config.replace(draft_vocab_size=len(kept))
    drafter = trained_drafter(tmp_path / "drafter", lively, shape, 1, kept)
    assert torch.equal(drafter.to_target_ids(torch.arange(13)), kept)
    assert torch.equal(drafter.lm_head.weight, lively.lm_head[kept].float())
    for row, token in zip(drafter.markov_head.markov_w2.weight, kept.tolist(), strict=True):
        before = first.drafter.markov_head.markov_w2.weight[old == token]
        assert torch.equal(row, before[0]) if len(before) else not row.any()
    names = {
        name for name, p in first.drafter.named_parameters() if "markov_w2" not in name and name != "lm_head.weight"
    }
    new = dict(drafter.named_parameters())
    assert all(torch.equal(new[name], dict(first.drafter.named_parameters())[name]) for name in names)


def with_ends_of_its_own(target, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A checkpoint whose embedding and whole LM head are not the target's: these two, [V, H] each."""
    drafter = tiny_drafter(target)
    embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    drafter.embed_tokens.weight.data, drafter.lm_head.weight.data = embedding, head
    drafter.own = {"embed_tokens.weight", "lm_head.weight"}
    checkpoint.save(drafter, folder, torch.float32)
    return embedding, head


def test_an_embedding_and_a_head_of_its_own_go_through_training_into_the_export(lively, samples, tmp_path):
    """Else the exported drafter would run on the target's, with which it was not trained."""
    embedding, head = with_ends_of_its_own(lively, tmp_path / "own")
    drafter = trained_drafter(tmp_path / "own", lively, tiny_config(), seed=1)
    source = LocalSource(lively, samples, tmp_path / "hidden")
    run = Trainer(drafter, lively, source, [], TrainConfig(**{**vars(QUICK), "steps": 2}), tmp_path / "run")
    run.run()
    exported = run.inference_drafter()
    assert sum("own" in note for note in exported.notes) == 2
    checkpoint.save(exported, tmp_path / "drafter", torch.float32)
    back = checkpoint.load(tmp_path / "drafter", lively)
    assert torch.equal(back.embed_tokens.weight, embedding) and torch.equal(back.lm_head.weight, head)


def test_another_draft_vocabulary_changes_nothing_of_the_target(tmp_path):
    """The checkpoint's own embedding must not be copied into the target's storage."""
    target = tiny_target()  # no other test's: a fault would change it
    embedding, head = with_ends_of_its_own(target, tmp_path / "own")
    theirs, kept = (target.embed_tokens.clone(), target.lm_head.clone()), torch.arange(0, VOCAB, 3)
    drafter = trained_drafter(tmp_path / "own", target, tiny_config(draft_vocab_size=len(kept)), 1, kept)
    assert torch.equal(target.embed_tokens, theirs[0]) and torch.equal(target.lm_head, theirs[1])
    assert torch.equal(drafter.embed_tokens.weight, embedding) and torch.equal(drafter.lm_head.weight, head[kept])
    assert "embed_tokens.weight" in drafter.own
