"""The drafter that a training begins with: drawn at random, or one that was trained before."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from dspark import baselines, checkpoint
from dspark.config import DSparkConfig
from dspark.data import Sample, frequent_ids
from dspark.drafter import DSparkDrafter, vocabulary_maps
from dspark.target import Target


def new_drafter(config: DSparkConfig, target: Target, samples: list[Sample], seed: int) -> DSparkDrafter:
    """A freshly initialised float32 drafter on the target's frozen embedding and LM head."""
    config.check_target(target)
    torch.manual_seed(seed)
    drafter = baselines.build(config).to(target.device)
    return drafter.adopt_target(target.embed_tokens, target.lm_head, draft_vocabulary(config, target, samples))


def draft_vocabulary(config: DSparkConfig, target: Target, samples: list[Sample]) -> Tensor | None:
    """The draft vocabulary [D] that the data suggest, None where it is the target's whole."""
    if config.draft_vocab_size is None:
        return None
    return frequent_ids(samples, config.draft_vocab_size, target.eos_token_ids).to(target.device)


def trained_drafter(
    folder: Path, target: Target, shape: DSparkConfig, seed: int, kept: Tensor | None = None
) -> DSparkDrafter:
    """A float32 drafter of `shape` to go on training from the one in `folder`; heads that it lacks begin at random.

    kept [D], target ids, rising: another draft vocabulary than its own. Ids new to it begin with the target's LM head
    row and no Markov bias. An embedding or LM head of its own stays its own; the target's tensors are copied, never
    written to. ValueError where the shapes do not fit.
    """
    before = checkpoint.load(folder, target, torch.float32)
    learnt = before.state_dict()
    torch.manual_seed(seed)
    drafter = baselines.build(shape).to(target.device)
    if kept is not None:
        at = before.to_draft_ids(kept)
        for name, new in (("lm_head.weight", target.lm_head[kept]), ("markov_head.markov_w2.weight", 0.0)):
            if name in learnt:
                learnt[name] = torch.where((at >= 0)[:, None], learnt[name][at.clamp_min(0)], new)
        learnt["d2t"], learnt["t2d"] = vocabulary_maps(kept, shape.vocab_size)
    missing, unexpected = drafter.load_state_dict(learnt, strict=False)
    strange = [name for name in missing if not name.startswith(("markov_head.", "confidence_head."))] + unexpected
    if strange:
        raise ValueError(f"{Path(folder).name} is no beginning of this shape: {strange[:4]}")
    drafter.notes, drafter.own = before.notes, before.own
    return drafter


def weights_digest(folder: Path) -> str:
    """Names the weights of the drafter in `folder` by the bytes of their files."""
    digest = hashlib.sha256()
    for path in checkpoint.weight_files(Path(folder)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
