"""Command lines that bring drafters in (`load`) and out (`export`)."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from dspark import checkpoint
from dspark.formats import FORMATS, vllm_limits
from dspark.target import EMBEDDED, Target

DTYPES = ("bfloat16", "float32", "float16")


def find(source: str) -> Path:
    """The folder of a checkpoint: one that is here, or a hub name, whose files are fetched. OSError if unreachable,
    ValueError if it holds a pickle that counts."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HTTPError

    with reaching_hub(source):
        # Pickles are not fetched, so their names are looked for first. Without a network the cache has to do, or the
        # second call says what is wrong.
        with suppress(OSError, HTTPError):
            checkpoint.refuse_pickles(source, list_repo_files(source))
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.md", "*.csv"]))


@contextmanager
def reaching_hub(source: str) -> Iterator[None]:
    """OSError in one line where the hub has no `source` or cannot be reached."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # the latter is not always an OSError

    try:
        yield
    except (OSError, HTTPError, HFValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"drafter {source!r}: no folder here and not reachable on the hub ({reason})") from error


def load(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dspark load",
        description="Load a drafter for its target with every check, say how open questions were decided, and, with "
        "--out, write it in the native format with nothing left open.",
    )
    _common(parser)
    parser.add_argument("--target", default=EMBEDDED, help="embedded default, hub name or folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write it here, in the native format")
    args = parser.parse_args(argv)
    folder = find(args.source)
    drafter = checkpoint.load(folder, Target.load(args.target, dtype=getattr(torch, args.dtype)))
    parameters = sum(p.numel() for p in checkpoint.own_tensors(drafter).values() if p.is_floating_point())
    print(f"{args.source} fits {args.target}: {parameters / 1e6:.1f} million parameters of its own, all checks passed")
    if args.out:
        checkpoint.save(drafter, args.out, getattr(torch, args.dtype), history=folder)
        print(f"written to {args.out}")


def export(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dspark export",
        description="Write a drafter in a public format, with its model card. `native` is DeepSpec's and vLLM's, "
        "`vllm` the same held to what vLLM serves, `speculators` that of speculators 0.9.0, which vLLM reads too.",
    )
    _common(parser)
    parser.add_argument("--format", choices=FORMATS, default="vllm", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new checkpoint's folder")
    parser.add_argument("--target", help="check against this target, and leave out what it shares (default: do not)")
    parser.add_argument("--shard-size", default="5GB", help="largest file (default: %(default)s)")
    args = parser.parse_args(argv)
    folder, dtype = find(args.source), getattr(torch, args.dtype)
    options = {"format": args.format, "shard_size": args.shard_size, "history": folder}
    if args.target:
        drafter = checkpoint.load(folder, Target.load(args.target, dtype=dtype))
        config = drafter.config
        checkpoint.save(drafter, args.out, dtype, **options)
    else:
        found = checkpoint.read(folder)
        config = found.config
        checkpoint.write(found, args.out, dtype, **options)
    print(f"written to {args.out} in the {args.format} format")
    if args.format != "vllm":
        for limit in vllm_limits(config):
            print(f"note: {limit}")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a folder or a hub name, in any format that can be read")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (default: %(default)s)")
