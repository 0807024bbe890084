"""How one sample's hidden states travel from the verifier to a trainer rank: four ZeroMQ frames, each checked.

    header   JSON: version, sample_id, instance (of the verifier), model, layer_ids, dtype, shape [R, L, H], tokens T
    tokens   int32 [T]
    states   dtype [R, L, H]: block outputs before the final norm, one column a layer of layer_ids; R = T, or T - 1
             where the verifier wrote the last token itself and so never ran it
    digest   xxh3-64 of the three frames before it

On one machine the states may lie in shared memory instead (dspark.shared): their frame is empty then, and a fifth frame
says where they are. The digest is of the states all the same.

`layer_ids` are vLLM's `eagle_aux_hidden_state_layer_ids`: id L is the state after L blocks (DSparkConfig.
aux_hidden_state_layer_ids converts). Nothing is ever unpickled, and every field of the header is checked before use.
"""

import json
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_HEADER = 65536  # bytes
FIELDS = {
    "version": int, "sample_id": str, "instance": str, "model": str, "layer_ids": list, "dtype": str, "shape": list,
    "tokens": int,
}  # fmt: skip


class WireError(ValueError):
    """A message that is not a whole, undamaged sample of this protocol; the text names what is wrong."""


class WireSample(NamedTuple):
    sample_id: str
    instance: str  # of the verifier: a restarted one has another
    model: str
    layer_ids: tuple[int, ...]
    token_ids: Tensor  # [T] int32
    states: Tensor  # [R, L, H]


def encode(sample: WireSample) -> list[bytes | memoryview]:
    """The frames of a sample; tokens and states [contiguous, on the CPU] are not copied."""
    header = {
        "version": VERSION,
        "sample_id": sample.sample_id,
        "instance": sample.instance,
        "model": sample.model,
        "layer_ids": list(sample.layer_ids),
        "dtype": str(sample.states.dtype).removeprefix("torch."),
        "shape": list(sample.states.shape),
        "tokens": len(sample.token_ids),
    }
    frames = [json.dumps(header).encode(), _bytes(sample.token_ids), _bytes(sample.states)]
    return [*frames, _digest(frames)]


def decode(frames: list) -> WireSample:
    """The sample in four frames (bytes-like); its tensors are views of them. WireError names what is wrong."""
    if len(frames) != 4:
        raise WireError(f"{len(frames)} frames, want 4 (header, tokens, states, digest)")
    if len(frames[0]) > MAX_HEADER:
        raise WireError(f"header of {len(frames[0])} bytes, at most {MAX_HEADER}")
    if bytes(frames[3]) != _digest(frames[:3]):
        raise WireError("checksum does not fit: the message was damaged on its way")
    try:
        header = _header(bytes(frames[0]))
    except RecursionError as error:  # of the parser, or of the text that would name what is wrong
        raise WireError("header is nested too deeply") from error
    rows, layers, width = header["shape"]
    dtype, tokens = DTYPES[header["dtype"]], header["tokens"]
    if len(frames[1]) != 4 * tokens or len(frames[2]) != rows * layers * width * dtype.itemsize:
        sizes = f"{len(frames[1])} and {len(frames[2])} bytes of tokens and states"
        raise WireError(f"{sizes} do not fit tokens = {tokens}, shape = {header['shape']}, dtype = {header['dtype']}")
    return WireSample(
        header["sample_id"],
        header["instance"],
        header["model"],
        tuple(header["layer_ids"]),
        torch.frombuffer(frames[1], dtype=torch.int32),
        torch.frombuffer(frames[2], dtype=dtype).view(rows, layers, width),
    )


def frame_limit(tokens: int, layers: int, width: int) -> int:
    """Bytes that no frame of a sample of so many tokens exceeds, whatever its dtype: one of a wrong dtype is to arrive
    and be named. For zmq.MAXMSGSIZE, which looks at each frame for itself."""
    return MAX_HEADER + tokens * layers * width * max(dtype.itemsize for dtype in DTYPES.values())


def _header(data: bytes) -> dict:
    try:
        header = json.loads(data)
    except ValueError as error:
        raise WireError(f"header is not JSON ({error})") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        got = header.get("version") if isinstance(header, dict) else header
        raise WireError(f"protocol version {got!r:.40}, want {VERSION}: run the same dspark on both sides")
    for name, kind in FIELDS.items():
        if type(header.get(name)) is not kind:
            raise WireError(f"header field {name} = {header.get(name)!r:.60}, want {kind.__name__}")
    for name in ("layer_ids", "shape"):
        if not all(type(value) is int and value >= 0 for value in header[name]):
            raise WireError(f"header field {name} = {header[name]!r:.60}, want integers")
    shape, tokens = header["shape"], header["tokens"]
    if header["dtype"] not in DTYPES:
        raise WireError(f"dtype {header['dtype']!r:.40}, want one of {', '.join(DTYPES)}")
    if len(shape) != 3 or min(shape) < 1 or shape[1] != len(header["layer_ids"]):
        raise WireError(f"shape = {shape!r:.60} with {len(header['layer_ids'])} layers, want [rows, layers, hidden]")
    if shape[0] not in (tokens, tokens - 1):
        raise WireError(f"{shape[0]} rows of states for {tokens} tokens")
    return header


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _digest(frames: list) -> bytes:
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.digest()
