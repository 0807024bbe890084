"""Drafters on disk: the tensors of the formats that `formats` names, read with every check and written whole.

Safetensors only, one file or sharded. A file that does not fit is refused with the tensor and the fault named, never
half-loaded; a save that is cut off leaves the checkpoint that was there before it.
"""

import ctypes
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open

from dspark import card, formats
from dspark.config import DSparkConfig
from dspark.drafter import DSparkDrafter
from dspark.formats import CALIBRATION, check_temperatures, read_json
from dspark.read_formats import read_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MASK_PICKLE = "mask_embedding.pt"  # vLLM puts it in place of the mask's embedding
# How a drafter was made, and the temperatures fitted to its confidences: they go along with an export.
HISTORY = ("recipe.json", "heldout.csv", "log.csv", CALIBRATION)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_OF_THE_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")  # in files of older speculators
_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")
log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """What a folder holds. notes: what it left open and how that was decided."""

    config: DSparkConfig
    tensors: dict[str, torch.Tensor]
    notes: list[str]


# ---- reading


def load(folder: Path, target, dtype=None) -> DSparkDrafter:
    """A drafter ready to draft for `target`, with the target's embedding and LM head where the file has none.

    Any format of `formats`. What the file leaves open is decided as vLLM does, logged and kept in `drafter.notes`.
    FileNotFoundError if a file is missing; ValueError names what is damaged or does not fit the target.
    """
    folder = Path(folder)
    config, tensors, notes = read(folder, target)
    shared = {"embed_tokens.weight": target.embed_tokens}
    if config.draft_vocab_size is None:
        shared["lm_head.weight"] = target.lm_head
    own = {name for name, tensor in shared.items() if name in tensors and not _same(tensor, tensors[name])}
    notes += [f"the file's own {name} differs from the target's and is kept" for name in sorted(own)]
    if "lm_head.weight" not in shared | tensors:
        shared["lm_head.weight"] = target.lm_head[tensors["t2d"].to(target.lm_head.device)]
        notes.append("lm_head.weight is not in the file: the target's rows, which vLLM would need written")
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    drafter.load_state_dict(shared | tensors, assign=True)
    drafter.notes, drafter.own = notes, own
    for note in notes:
        log.warning("%s: %s", folder.name, note)
    return drafter.to(dtype or target.dtype).to(target.device).eval().requires_grad_(False).pack()


def _same(target: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a file's tensor is the target's, as far as the coarser of their dtypes can tell."""
    here = target.to(stored.device)
    # Both ways, for neither float16 nor bfloat16 holds all of the other's values: a target in float16 has lost the
    # smallest ones of a bfloat16 file, and equals it only when the file is rounded as the target was. What that hides
    # is below the rounding of the target's dtype: a drafter of that dtype computes the same with either tensor.
    return torch.equal(here.to(stored.dtype), stored) or torch.equal(here, stored.to(here.dtype))


def read(folder: Path, target=None) -> Checkpoint:
    """Config and tensors of a block drafter, checked against each other and, if given, against the target."""
    folder = Path(folder)
    raw = _config_json(folder)
    try:
        config, notes = read_config(raw, target)
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from error
    try:
        if target is not None:
            config.check_target(target)
    except ValueError as error:
        whose = "" if config.target == target.name else f", it drafts for {config.target!r}"
        raise ValueError(f"{folder.name} does not fit {target.name!r}{whose}: {error}") from error
    found = headers(folder)
    faults = tensor_faults(config, found)
    if faults:
        raise ValueError(f"{folder.name}: {faults[0]}")
    tensors = _tensors(folder)
    for name in sorted(set(_OF_THE_TARGET) & set(tensors)):
        tensors.pop(name)
        notes.append(f"{name} is the target's and left aside")
    _check_vocabulary(config, tensors, notes, folder.name)
    if raw.get("markov_head_is_padding") is True:
        if bool(tensors.pop("markov_head.markov_w2.weight").any()):
            raise ValueError(f"{folder.name}: markov_head.markov_w2.weight is called padding, but is not zero")
        tensors.pop("markov_head.markov_w1.weight")
        config = config.replace(markov_rank=0)
    return Checkpoint(config, tensors, notes)


def _config_json(folder: Path) -> dict:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no drafter in {folder.name}: config.json is missing")
    return read_json(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, as of `weight_names`."""
    names = weight_names(folder.name, {file.name for file in folder.glob("*")}, folder.joinpath)
    return [folder / name for name in names]


def weight_names(source: str, files: Collection[str], fetch: Callable[[str], Path]) -> list[str]:
    """Which of a checkpoint's files are its weights: one safetensors file, or the shards of the index, which `fetch`
    brings. Refuses pickles and paths out of the folder."""
    refuse_pickles(source, files)
    if INDEX not in files:
        if SINGLE not in files:
            raise FileNotFoundError(f"no drafter in {source}: {SINGLE} is missing")
        return [SINGLE]
    places = read_json(fetch(INDEX)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{source} is damaged: {INDEX} has no weight_map")
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{source}: {INDEX} puts {tensor!r} into {name!r}, which is no file of the folder")
        if name not in files:
            raise FileNotFoundError(f"no drafter in {source}: {name} is missing")
    if SINGLE in files and SINGLE not in places.values():
        raise ValueError(f"{source} holds two sets of weights, {SINGLE} and the shards of {INDEX}: remove one")
    return sorted(set(places.values()))


def refuse_pickles(source: str, files: Collection[str]) -> None:
    """ValueError if one of a checkpoint's files is a pickle that counts: the mask's, or the only weights there are."""
    if MASK_PICKLE in files:
        raise ValueError(f"{source}: {MASK_PICKLE} is a pickle and would override the mask's embedding")
    pickles = sorted(name for name in files if name.endswith(_PICKLES))
    if pickles and SINGLE not in files and INDEX not in files:
        raise ValueError(f"{source} holds a pickle ({pickles[0]}), which can run code: convert it to safetensors")


@contextmanager
def _opened(file: Path):
    """A safetensors file, whose header is checked on opening against the file's size."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())  # it quotes names of tensors as they are, line breaks and all
        raise ValueError(f"{file.parent.name} is damaged: {file.name}: {reason}") from error


def headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """{tensor: (shape, safetensors' dtype)} without reading the weights."""
    found, places = {}, {}
    for file in weight_files(folder):
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                if name in found:
                    raise ValueError(f"{folder.name}: {name!r} is in {places[name]} and in {file.name}")
                part = opened.get_slice(name)
                found[name], places[name] = (tuple(part.get_shape()), part.get_dtype()), file.name
    if (folder / INDEX).is_file():
        stated = read_json(folder / INDEX)["weight_map"]
        wrong = sorted(name for name in {*stated, *places} if stated.get(name) != places.get(name))
        if wrong:
            raise ValueError(f"{folder.name}: {INDEX} and its shards disagree on where {wrong[:3]} lies")
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in weight_files(folder):
        with _opened(file) as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if not _finite(tensor):
            raise ValueError(f"{folder.name}: {name} holds NaN or Inf")
    return tensors


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def tensor_faults(config: DSparkConfig, found: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """What is missing, unexpected, of another shape or dtype than a drafter of `config` has. Empty: all fits."""
    if config.num_hidden_layers > len(found):  # before a module of a billion layers is built
        layers = {name.split(".")[1] for name in found if name.startswith("layers.")}
        return [f"config.json says num_hidden_layers = {config.num_hidden_layers}, the file has {len(layers)}"]
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in DSparkDrafter(config).state_dict().items()}
    optional = {"embed_tokens.weight", "lm_head.weight", "t2d"}
    aside = {*_OF_THE_TARGET} | ({"d2t", "t2d"} if config.draft_vocab_size is None else set())
    return misfits(found, wanted, optional, aside)


def misfits(found: dict, wanted: dict, optional: set[str], aside: Collection[str] = ()) -> list[str]:
    """What of `wanted` {tensor: shape} the headers `found` lack, unless it is `optional`, what they hold beyond it and
    what is left `aside`, and what has another shape, or a dtype that is not read."""
    missing = sorted(set(wanted) - optional - set(found))
    unexpected = sorted(set(found) - set(wanted) - set(aside))
    faults = []
    if missing or unexpected:
        faults = [f"missing tensors {missing[:4]}, unexpected {unexpected[:4]}: not this config's weights"]
    for name in sorted(set(found) & {*wanted, *aside}):
        shape, dtype = found[name]
        if shape != wanted.get(name, shape):
            faults.append(f"{name} is {shape}, config.json says {tuple(wanted[name])}")
        fits = {"d2t": _INTEGERS, "t2d": ("BOOL",)}.get(name, _FLOATS)
        if dtype not in fits:
            faults.append(f"{name} has dtype {dtype}, not {' or '.join(fits)}")
    return faults


def _check_vocabulary(config: DSparkConfig, tensors: dict, notes: list[str], name: str) -> None:
    """d2t of a pruned vocabulary must hold offsets; t2d may be left out, and both where nothing is pruned."""
    if config.draft_vocab_size is None:
        d2t, t2d = tensors.pop("d2t", torch.zeros(1)), tensors.pop("t2d", torch.ones(1))
        if bool(d2t.any()) or not bool(t2d.all()):
            raise ValueError(f"{name}: d2t or t2d prune the vocabulary, config.json does not: set draft_vocab_size")
        return
    ids = _check_d2t(tensors["d2t"], tensors.get("t2d"), config.vocab_size, name)
    tensors["d2t"] = tensors["d2t"].long()
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        notes.append("t2d is not in the file: derived from d2t")


def _check_d2t(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, name: str) -> torch.Tensor:
    """Target ids of a draft vocabulary. d2t must be OFFSETS (target id - draft id) that land, rising, within the
    vocabulary, exactly on the ids that t2d marks."""
    ids = d2t.long() + torch.arange(len(d2t))
    rising = bool((ids[1:] > ids[:-1]).all())
    if t2d is not None and not torch.equal(ids, t2d.nonzero().squeeze(1)):
        raise ValueError(
            f"{name}: d2t does not hold the offsets of the ids in t2d (absolute ids, or another vocabulary)"
        )
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(f"{name}: d2t does not hold offsets to rising ids within 0..{vocab_size - 1}")
    return ids


# ---- writing


def save(drafter: DSparkDrafter, folder: Path, dtype=torch.bfloat16, **options) -> None:
    """Write a drafter; `options` as of `write`."""
    write(Checkpoint(drafter.config, own_tensors(drafter), drafter.notes), folder, dtype, **options)


def own_tensors(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: all but the embedding and LM head that are the target's."""
    whole = drafter.config.vocab_size_out == drafter.config.vocab_size
    left_out = {"embed_tokens.weight"} | ({"lm_head.weight", "d2t", "t2d"} if whole else set())
    return {k: v.detach() for k, v in drafter.state_dict().items() if k not in left_out - drafter.own}


def write(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype | None = None,
    format: str = "native",
    shard_size: str = "5GB",
    history: Path | None = None,
) -> None:
    """Write config, weights and model card; the folder is the new checkpoint or still the old one, never a mixture.

    dtype: of the weights, None as they are. format: one of formats.FORMATS. history: a folder whose HISTORY files go
    along and into the card. Other files of an old folder stay. ValueError where the format or dtype cannot hold the
    drafter, before anything is written.
    """
    config_json, tensors = _encode(checkpoint, format)
    tensors = cast(tensors, dtype)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = card.model_card(checkpoint.config, format, history, Path(folder).name, size)
    config_json["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    if checkpoint.notes:
        config_json["decided_on_reading"] = checkpoint.notes
    with replacing(folder, history) as new:
        save_torch_state_dict(tensors, new, max_shard_size=shard_size, metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
        (new / "README.md").write_text(text)


def cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Tensors as they are written: on the CPU, floats in `dtype` (None: as they are). ValueError where that leaves a
    value which is refused on reading."""
    out = {k: v.detach().to("cpu", dtype if v.is_floating_point() else v.dtype) for k, v in tensors.items()}
    for name, tensor in out.items():
        if not _finite(tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            cause = f"is too large for {kind}: take another dtype" if _finite(tensors[name]) else "holds NaN or Inf"
            raise ValueError(f"nothing is written: {name} {cause}")
    return out


def _encode(checkpoint: Checkpoint, format: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and tensors of one of the formats."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if format not in formats.FORMATS:
        raise ValueError(f"format = {format!r}: one of {formats.FORMATS}")
    if format != "native" and config.draft_vocab_size is not None and "lm_head.weight" not in tensors:
        raise ValueError(f"{format} needs the LM head of the draft vocabulary, which the file lacks: name the target")
    if format == "speculators":
        whole = config.vocab_size_out == config.vocab_size
        if "embed_tokens.weight" in tensors or (whole and "lm_head.weight" in tensors):
            raise ValueError(
                "speculators takes the embedding and a whole LM head from the target, and this drafter has its own; "
                "name the target: what equals the target's is left out"
            )
        return formats.to_speculators(config), tensors
    if format == "vllm" and config.markov_rank and config.markov_head_type != "vanilla":
        raise ValueError(f"{formats.vllm_limits(config)[0]}: export it as native or speculators")
    if format == "vllm" and not config.markov_rank:
        rank = formats.PADDING_RANK
        widths = {"markov_w1": config.vocab_size, "markov_w2": config.vocab_size_out}
        tensors = tensors | {f"markov_head.{name}.weight": torch.zeros(V, rank) for name, V in widths.items()}
        padded = config.replace(markov_rank=rank, markov_head_type="vanilla")  # at rank 0 any type may be stated
        return formats.to_native(padded) | {"markov_head_is_padding": True}, tensors
    return formats.to_native(config), tensors


@contextmanager
def replacing(folder: Path, history: Path | None) -> Iterator[Path]:
    """A folder to fill, with `history`'s HISTORY files and the old folder's others in it; on leaving it takes the old
    one's place in one step. Nothing stays that tells of the old drafter or changes the new one. ValueError, before
    anything is written, where the history's temperatures could not be read back."""
    folder = Path(folder).resolve()
    new, aside = (folder.with_name(f".{folder.name}.{state}") for state in ("saving", "old"))
    shutil.rmtree(new, ignore_errors=True)  # of a save that was cut off
    if aside.exists() and not folder.exists():  # cut off between the two steps of an exchange: this is the checkpoint
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if history is not None and (calibration := Path(history) / CALIBRATION).is_file():
        check_temperatures(calibration)
    if folder.exists():
        old = shutil.ignore_patterns("*.safetensors", INDEX, "config.json", "README.md", MASK_PICKLE, *HISTORY)
        shutil.copytree(folder, new, ignore=lambda at, names: old(at, names) if Path(at) == folder else ())
    else:
        new.mkdir(parents=True)
    try:
        for name in HISTORY:
            if history is not None and (Path(history) / name).is_file():
                shutil.copy(Path(history) / name, new / name)
        yield new
        for path in (*new.iterdir(), new):
            _flush(path)
        if folder.exists():
            _exchange(new, folder, aside)
        else:
            new.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap two folders, on Linux in one step. Where the kernel or file system cannot, `old` is missing for a moment and
    lies `aside`; a kill in that moment leaves it there, where `replacing` finds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renameat2") and not libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), swap):
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)
