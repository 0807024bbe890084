"""Drafters out and in, across formats and implementations. Every cell of format x layout x vocabulary x heads goes
round through the files bit for bit, and speculators 0.9.0 and vLLM 0.32 compute from our files what we compute.

The peers are optional: where one is not installed its cells are skipped. `DSPARK_RECORD=1` writes the matrix to
data/results/interop.csv; otherwise the committed one must have the same rows.
"""

import csv
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import our_block, speculators_block, speculators_eagle3
from test_formats import PUBLIC
from test_vllm import ON_CPU
from tiny import VOCAB, packed_row, tiny_drafter, tiny_model, tiny_target

from dspark import baselines, checkpoint
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.inspect_checkpoint import inspect
from dspark.paths import DATA, ROOT
from dspark.read_formats import read_config
from dspark.setup import has_gpu
from dspark.source import PackedRow
from dspark.target import embedded_target

TABLE = DATA / "results" / "interop.csv"
COLUMNS = ("format", "layout", "vocabulary", "heads", "peer", "check", "max_abs_diff", "ok")
TOLERANCE = 1e-4  # float32, sums of different order
KEPT = torch.arange(1, VOCAB, 3)
FORMATS = ("native", "vllm", "speculators")
LAYOUTS = {"anchor-first": {}, "fill-in": {"sample_from_anchor": False}}
VOCABULARIES = {"full": {}, "pruned": {"draft_ids": KEPT}}
HEADS = {
    "none": {"markov_rank": 0, "confidence_head": False},
    "markov": {"confidence_head": False},
    "confidence": {"markov_rank": 0, "confidence_head_with_markov": False},
    "both": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
CELLS = list(itertools.product(LAYOUTS, VOCABULARIES, HEADS))
SHARDED = ("fill-in", "pruned", "both")  # the cell whose files the peers read in shards, too
CONTEXT = 20  # tokens before the anchor that vLLM drafts from
SPECULATORS = importlib.util.find_spec("speculators") is not None
needs_speculators = pytest.mark.skipif(not SPECULATORS, reason="speculators 0.9.0 is not installed")
VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A target that the peers can load, too: its name is its folder."""
    folder = tmp_path_factory.mktemp("interop") / "target"
    tiny_model().save_pretrained(folder)
    target = tiny_target()
    target.name = str(folder)
    return target


@pytest.fixture(scope="module")
def matrix():
    """(format, layout, vocabulary, heads, peer, check) -> (max_abs_diff, ok), filled by the tests of this module."""
    return {}


def make(toy, layout: str, vocabulary: str, heads: str):
    """A float32 drafter of one cell, all its parts far from zero. vLLM's attention wants a head of at least 32."""
    options = LAYOUTS[layout] | VOCABULARIES[vocabulary] | HEADS[heads]
    drafter = tiny_drafter(toy, head_dim=32, **options)
    drafter.config = drafter.config.replace(target=toy.name)
    return drafter


def save(drafter, folder: Path, format: str, sharded: bool) -> None:
    checkpoint.save(drafter, folder, torch.float32, format=format, shard_size="20KB" if sharded else "5GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (folder / checkpoint.INDEX).exists() == sharded


def refusal(format: str, layout: str, heads: str) -> str | None:
    """Why a format cannot hold a cell."""
    if format == "vllm" and heads in ("gated", "rnn"):
        return f"vLLM serves only vanilla Markov heads.*{heads}.*export it as native or speculators"
    if format == "speculators" and (layout, heads) == ("fill-in", "rnn"):
        return "rnn head in the fill-in layout.*its state runs through the anchor's slot"
    return None


def inputs():
    """One document with its features, and last hidden states before the target's final norm [T, H]."""
    row = packed_row([CONTEXT + 4])
    return row, 3 * row.hidden + 1


def assert_same_weights(back, drafter) -> None:
    kept, returned = drafter.state_dict(), back.state_dict()
    assert set(kept) == set(returned) and all(torch.equal(kept[name], returned[name]) for name in kept)


def differences(ours: dict, theirs: dict) -> dict[str, float]:
    assert set(ours) == set(theirs)
    return {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}


# ---- through the files and back


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout, vocabulary, heads", CELLS)
def test_a_round_trip_is_bit_identical(toy, matrix, tmp_path, format, layout, vocabulary, heads):
    drafter = make(toy, layout, vocabulary, heads)
    if refused := refusal(format, layout, heads):
        with pytest.raises(ValueError, match=refused):
            checkpoint.save(drafter, tmp_path / "drafter", torch.float32, format=format)
        assert not list(tmp_path.iterdir())
        matrix[format, layout, vocabulary, heads, "dspark", "refused"] = (0.0, True)
        return
    for sharded in (False, True):
        save(drafter, tmp_path / "drafter", format, sharded)
        back = checkpoint.load(tmp_path / "drafter", toy)
        assert back.config == drafter.config and not back.own
        assert_same_weights(back, drafter)
        matrix[format, layout, vocabulary, heads, "dspark", "round trip" + ", sharded" * sharded] = (0.0, True)


# ---- speculators


@needs_speculators
@pytest.mark.parametrize(
    "layout, vocabulary, heads, sharded",
    [(*c, False) for c in CELLS if not refusal("speculators", c[0], c[2])] + [(*SHARDED, True)],
)
def test_speculators_computes_the_same_block_and_losses(toy, matrix, tmp_path, layout, vocabulary, heads, sharded):
    """Its class on our file, and we on its save of that: logits, confidence, CE, TV, KL and BCE."""
    drafter, (row, before_norm) = make(toy, layout, vocabulary, heads), inputs()
    save(drafter, tmp_path / "ours", "speculators", sharded)
    ours = our_block(drafter, toy, row, before_norm)
    theirs = speculators_block(tmp_path / "ours", row, before_norm, tmp_path / "theirs")
    back = checkpoint.load(tmp_path / "theirs", toy)
    assert_same_weights(back, drafter)
    returned = our_block(back, toy, row, before_norm)
    assert float(ours["logits"].std()) > 0.1 and float(ours["ce"]) > 0.1
    found = differences(ours, theirs) | {"its save, " + k: d for k, d in differences(ours, returned).items()}
    for check, difference in found.items():
        cell = ("speculators", layout, vocabulary, heads, "speculators 0.9.0", check + ", sharded" * sharded)
        matrix[cell] = (difference, difference < TOLERANCE)
    assert max(found.values()) < TOLERANCE, found


@needs_speculators
def test_speculators_drafts_the_same_with_the_committed_drafter(target, tmp_path):
    """Real weights on the real target's states; the losses' states are the same stand-in on both sides."""
    drafter = checkpoint.load(COMMITTED_DRAFTER, target)
    drafter.config = drafter.config.replace(target=str(embedded_target()))
    checkpoint.save(drafter, tmp_path / "ours", torch.float32, format="speculators")
    tokens = torch.tensor(target.encode_chat([{"role": "user", "content": "Count from 1 to 10, then back."}]))
    out, rows = target.forward(tokens[None], target.new_cache(1, len(tokens)), 0), torch.arange(len(tokens))
    starts, ends = torch.zeros_like(rows), torch.full_like(rows, len(rows))
    row = PackedRow(tokens, torch.ones(len(rows), dtype=torch.bool), rows, starts, ends, out.features[0], out.hidden[0])
    ours = our_block(drafter, target, row, out.hidden[0])
    found = differences(ours, speculators_block(tmp_path / "ours", row, out.hidden[0]))
    assert ours["logits"].shape == (len(rows) - 8, 8, drafter.config.draft_vocab_size)
    assert max(found.values()) < TOLERANCE, found


@needs_speculators
def test_speculators_own_eagle3_head_opens_as_a_baseline(toy, tmp_path):
    tensors = speculators_eagle3(tmp_path / "head", toy, KEPT)
    drafter = baselines.load(tmp_path / "head", toy)
    assert drafter.config.aux_hidden_state_layer_ids == (1, 2, 3) and torch.equal(drafter.d2t, tensors["d2t"])
    stored = drafter.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    anatomy = inspect(tmp_path / "head")
    assert not anatomy.odd and dict(anatomy.rows)["aux hidden state layer ids"] == "(1, 2, 3)"


# ---- vLLM


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed (it is published for Linux only)")
def test_vllm_loads_our_files_and_drafts_the_same(toy, matrix, tmp_path):
    """One process for all cells: vLLM's model class, its weight loader and its sequential sampling."""
    row, _ = inputs()
    job, ours = {"target": toy.name, "cells": {}, "configs": PUBLIC}, {}
    cells = [(*cell, "") for cell in itertools.product(("vllm", "speculators"), CELLS)]
    for format, (layout, vocabulary, heads), shards in [*cells, ("vllm", SHARDED, ", sharded")]:
        if refusal("vllm", layout, heads) or (format == "speculators" and HEADS[heads].get("markov_rank") == 0):
            continue
        drafter, name = make(toy, layout, vocabulary, heads), "/".join((format, layout, vocabulary, heads)) + shards
        save(drafter, tmp_path / name, format, bool(shards))
        n = drafter.config.max_draft_tokens
        cell = {"n": n, "anchor": int(row.tokens[CONTEXT]), "features": row.features[:CONTEXT].tolist()}
        job["cells"][name] = cell | {"folder": str(tmp_path / name)}
        ours[name] = our_drafts(drafter, row, n)
    answers = run_peer(job, tmp_path)
    for name, raw in PUBLIC.items():
        assert answers["configs"][name] == decisions(raw), name
    theirs = answers["cells"]
    assert set(theirs) == set(ours) and len(ours) == 25
    for name, mine in ours.items():
        answer = theirs[name]
        close = float((torch.tensor(answer["logits"]) - mine["logits"]).abs().max())
        same = answer["tokens"] == mine["tokens"]
        cell, *shards = name.split(", ")
        key = (*cell.split("/"), "vllm 0.32.0")
        matrix[*key, ", ".join(["greedy drafts", *shards])] = (close, same and close < TOLERANCE)
        assert same and close < TOLERANCE, (name, close, answer["tokens"], mine["tokens"])
        assert (answer["confidence"] is None) == (mine["confidence"] is None)
        if answer["confidence"] is not None:
            close = float((torch.tensor(answer["confidence"]) - mine["confidence"]).abs().max())
            matrix[*key, ", ".join(["confidence", *shards])] = (close, close < TOLERANCE)
            assert close < TOLERANCE, name
    assert len({tuple(mine["tokens"]) for mine in ours.values()}) > 6, "the drafts do not tell the cells apart"


def decisions(raw: dict) -> dict:
    """What peers.vllm_decisions asks of vLLM, by our reading."""
    config, _ = read_config(raw)
    return {
        "sample_from_anchor": config.sample_from_anchor,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "causal": [config.causal(layer) for layer in range(config.num_hidden_layers)],
        "mask_token_id": config.mask_token_id,
        "rope_theta": config.rope_theta,
        "confidence": config.confidence_head and ("with Markov" if config.confidence_head_with_markov else "alone"),
    }


@torch.no_grad()
def our_drafts(drafter, row, n: int) -> dict:
    cache = drafter.new_cache(CONTEXT)
    drafter.extend(cache, row.features[:CONTEXT])
    draft = drafter.draft(row.tokens[CONTEXT : CONTEXT + 1], cache, n)
    # the logits of these drafts: a block at the same anchor, each slot after the draft before it
    anchor = torch.tensor([CONTEXT])
    hidden = drafter.block_hidden(row.features, row.positions, row.tokens, anchor, torch.zeros_like(anchor), n)[0]
    logits = drafter.lm_head(hidden)
    if drafter.markov_head:
        previous = torch.cat([row.tokens[CONTEXT : CONTEXT + 1], draft.tokens[:-1]])
        logits = logits + drafter.markov_head.bias(drafter.markov_head(previous[None], hidden[None])[0])
    return {"tokens": draft.tokens.tolist(), "logits": logits, "confidence": draft.confidence}


def run_peer(job: dict, folder: Path) -> dict:
    (folder / "job.json").write_text(json.dumps(job))
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = os.environ | {"PYTHONPATH": paths, "VLLM_NO_USAGE_STATS": "1"} | ({} if has_gpu() else ON_CPU)
    command = [sys.executable, ROOT / "tests" / "peers.py", str(folder / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return json.loads((folder / "answers.json").read_text())


# ---- the matrix


def test_the_matrix_is_green_and_the_committed_one(matrix, capsys):
    """Runs last: prints the matrix a line a cell, and compares or records it."""
    if not (SPECULATORS and VLLM):
        pytest.skip("a peer is missing, and its rows with it")
    if not matrix:
        pytest.skip("the other tests of this file fill the matrix")
    rows = [(*key, f"{difference:.1e}", str(ok)) for key, (difference, ok) in sorted(matrix.items())]
    with capsys.disabled():
        print("\n" + summary(rows))
    if os.environ.get("DSPARK_RECORD") == "1":
        with TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    with TABLE.open(newline="") as file:
        header, *committed = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert [tuple(row[:6]) for row in committed] == [row[:6] for row in rows]
    assert all(row[7] == "True" for row in [*committed, *rows])


def summary(rows) -> str:
    """One line for each format, layout, vocabulary and peer: the checks, and the largest difference."""
    lines = {}
    for *where, heads, peer, _, difference, ok in rows:
        lines.setdefault((*where, peer), []).append((heads, float(difference), ok == "True"))
    text = []
    for (format, layout, vocabulary, peer), cells in lines.items():
        heads, differences, ok = zip(*cells, strict=True)
        text.append(
            f"{format:12} {layout:13} {vocabulary:7} {peer:18} {len(set(heads))} heads, {len(cells):3} checks, "
            f"max |diff| {max(differences):.1e} {'ok' if all(ok) else 'FAILED'}"
        )
    return "\n".join(text)
