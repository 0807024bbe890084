"""What a public drafter checkpoint is, from its config and the headers of its files alone: layout, layers, heads,
vocabulary, tensors, size, and what is odd about it. Nothing is downloaded but config and headers.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from dspark import checkpoint, formats
from dspark.card import shape_rows
from dspark.config import PRESETS, DSparkConfig
from dspark.drafter import DSparkDrafter
from dspark.eagle3 import LATENT
from dspark.exchange import reaching_hub
from dspark.read_formats import read_config, read_eagle3

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}  # of an element; the others have one
PARTS = {  # in the order of a table; the first that a tensor's name begins with
    "layers.": "draft layers", "midlayer.": "draft layers", "fc": "projection of the target's states",
    "hidden_norm": "norms", "norm": "norms", "input_norm": "norms", "lm_head": "LM head", "embed_tokens": "embedding",
    "markov_head": "Markov head", "confidence_head": "confidence head", "d2t": "vocabulary maps",
    "t2d": "vocabulary maps", "verifier": "copies of the target's", "": "others",
}  # fmt: skip


class Anatomy(NamedTuple):
    """rows: (property, value); parts: (part, tensors, parameters, bytes); tensors: {name: (shape, dtype)}; odd: what a
    reader should know before use. `print` shows all but the single tensors."""

    source: str
    rows: list[tuple[str, str]]
    parts: list[tuple[str, int, int, int]]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    odd: list[str]

    def __str__(self) -> str:
        width = max(len(name) for name, *_ in (*self.rows, *self.parts))
        lines = [self.source, ""] + [f"  {name:{width}}  {value}" for name, value in self.rows]
        lines += ["", f"  {'tensors':{width}}  {'count':>5} {'parameters':>15} {'MB':>10}"]
        total = ("all", *(sum(part[i] for part in self.parts) for i in (1, 2, 3)))
        for name, count, parameters, size in (*self.parts, total):
            lines.append(f"  {name:{width}}  {count:5} {parameters:15,} {size / 1e6:10,.1f}")
        lines += ["", "  odd:" if self.odd else "  nothing odd"] + [f"  - {fact}" for fact in self.odd]
        return "\n".join(lines)


def inspect(source: str | Path) -> Anatomy:
    """Anatomy of a folder, of a checkpoint on the hub (by name), or of a preset of this project, built on `meta`.

    FileNotFoundError or OSError where there is none; ValueError where config.json is no drafter's at all.
    """
    here = Path(source).is_dir()
    if not here and source in PRESETS:
        return _preset(source)
    raw = checkpoint._config_json(Path(source)) if here else formats.read_json(_fetch(str(source), "config.json"))
    kind, odd = formats.kind_of(raw), []
    try:
        tensors = checkpoint.headers(Path(source)) if here else _hub_headers(str(source))
    except (ValueError, FileNotFoundError) as error:
        tensors = {}
        odd.append(str(error))
    rows, config = [("format", kind)], None
    try:
        if kind == "eagle3":
            latent = {name: raw[name] for name in LATENT if raw.get(name) is not None}
            shape = read_eagle3({name: value for name, value in raw.items() if name not in latent})
            shown = dataclasses.asdict(shape) | latent
            rows += [(name.replace("_", " "), str(value)) for name, value in shown.items()]
        else:
            config, notes = read_config(raw)
            odd += notes + (checkpoint.tensor_faults(config, tensors) if tensors else [])
    except ValueError as error:
        odd.append(str(error))
    if config is not None:
        rows += [("target", config.target), *shape_rows(config)]
        odd += _oddities(config, raw, tensors)
    shown = Path(source).resolve().name if Path(source).is_dir() else str(source)  # a notebook keeps no machine's paths
    return Anatomy(shown, rows, _parts(tensors), tensors, odd)


def _preset(name: str) -> Anatomy:
    with torch.device("meta"):
        state = DSparkDrafter(PRESETS[name]).state_dict()
    dtypes = {torch.int64: "I64", torch.bool: "BOOL"}
    tensors = {key: (tuple(tensor.shape), dtypes.get(tensor.dtype, "BF16")) for key, tensor in state.items()}
    config = PRESETS[name]
    rows = [("format", "preset of this project, without weights"), ("target", config.target), *shape_rows(config)]
    return Anatomy(name, rows, _parts(tensors), tensors, formats.vllm_limits(config))


def _fetch(name: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    with reaching_hub(name):
        return Path(hf_hub_download(name, file))


def _hub_headers(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """checkpoint.headers of a checkpoint on the hub, by range requests."""
    from huggingface_hub import list_repo_files, parse_safetensors_file_metadata
    from huggingface_hub.errors import SafetensorsParsingError

    with reaching_hub(name):
        files = list_repo_files(name)
    found = {}
    for file in checkpoint.weight_names(name, files, lambda index: _fetch(name, index)):
        try:
            with reaching_hub(name):
                tensors = parse_safetensors_file_metadata(name, file).tensors
            found |= {key: (tuple(torch.Size(info.shape)), str(info.dtype)) for key, info in tensors.items()}
        except (SafetensorsParsingError, AttributeError, TypeError) as error:  # the parser checks no more than JSON
            raise ValueError(f"{name} is damaged: {file}: {' '.join(str(error).split())}") from error
    return found


def _oddities(config: DSparkConfig, raw: dict, tensors: dict) -> list[str]:
    """What is allowed, and still worth knowing."""
    decided = raw.get("decided_on_reading") or []
    if isinstance(decided, list):
        odd = [f"decided when it was read: {note}" for note in decided]
    else:
        odd = [f"decided_on_reading = {decided!r} is no list of notes"]
    odd += formats.vllm_limits(config)
    if raw.get("markov_head_is_padding"):
        odd.append("its Markov head is all zero: padding, which vLLM needs")
    shared = ["embed_tokens.weight"] + (["lm_head.weight"] if config.draft_vocab_size is None else [])
    for name in shared:
        if name in tensors:
            odd.append(f"{name} is in the file: only the target can tell whether it is a copy")
    kinds = sorted({dtype for _, dtype in tensors.values() if dtype.startswith(("F", "BF"))})
    if len(kinds) > 1:
        odd.append(f"weights of several dtypes: {', '.join(kinds)}")
    elif kinds == ["F32"]:
        odd.append("weights are float32: twice the size that serving needs")
    if "d2t" in tensors and "t2d" not in tensors:
        odd.append("t2d is not in the file (training only; derived from d2t)")
    return odd


def _parts(tensors: dict) -> list[tuple[str, int, int, int]]:
    found = {}
    for name, (shape, dtype) in tensors.items():
        part = next(part for prefix, part in PARTS.items() if name.startswith(prefix))
        size = torch.Size(shape).numel()
        count, parameters, total = found.get(part, (0, 0, 0))
        found[part] = (count + 1, parameters + size, total + size * BYTES.get(dtype, 1))
    return [(part, *found[part]) for part in dict.fromkeys(PARTS.values()) if part in found]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark inspect", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a folder, a hub name, or a preset of this project")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with shape and dtype")
    args = parser.parse_args(argv)
    anatomy = inspect(args.source)
    print(anatomy)
    if args.tensors:
        print()
        for name, (shape, dtype) in anatomy.tensors.items():
            print(f"  {dtype:5} {' x '.join(map(str, shape)):18} {name}")
