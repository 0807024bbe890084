"""The model card that goes with every saved drafter: what it is, how it was made, what was measured, how to serve it.

Numbers come from the checkpoint's config and the files beside it (`recipe.json`, `heldout.csv`), never from memory.
"""

import csv
import json
import shlex
from pathlib import Path

import yaml

from dspark.config import DSparkConfig
from dspark.formats import read_json, vllm_limits
from dspark.target import EMBEDDED

EMBEDDED_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_FOLDER = '"$(python3 -c "from dspark.target import embedded_target as t; print(t())")"'


def model_card(config: DSparkConfig, format: str, history: Path | None, name: str, size: int) -> str:
    """README.md of a checkpoint of `size` bytes; recipe and metrics are those in the folder `history`, if any."""
    front = {
        "base_model": EMBEDDED_ON_HUB if config.target == EMBEDDED else config.target,
        "library_name": "speculators" if format == "speculators" else "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "dspark" if config.markov_rank else "dflash"],
    }
    shared = "the embedding" if config.draft_vocab_size else "embedding and LM head"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}: a DSpark drafter for {config.target}",
        f"It drafts blocks for speculative decoding (arXiv 2607.05147); the target verifies them, so that the output "
        f"stays the target's own. Format: {format}; {size / 1e6:.1f} MB without {shared}, which the target has.",
        _table(("shape", ""), shape_rows(config)),
        "## Recipe\n\n" + _recipe(history),
        "## Measured\n\n" + _metrics(history),
        "## Serve\n\n" + serve(config, name, format),
    ]
    return "\n\n".join(parts) + "\n"


def shape_rows(config: DSparkConfig) -> list[tuple[str, str]]:
    """What a reader asks of a drafter first, as (property, value)."""
    c = config
    layout = "anchor first: slot k predicts the token k + 1 after it" if c.sample_from_anchor else "fill-in: DFlash's"
    markov = f"rank {c.markov_rank}, {c.markov_head_type}" if c.markov_rank else "none (DFlash)"
    confidence = "none"
    if c.confidence_head:
        confidence = "with the Markov embedding" if c.confidence_head_with_markov else "hidden state only"
    seen = {True: "causal", False: "bidirectional", None: "causal in sliding layers only"}[c.is_causal]
    if c.sliding_layers:
        seen += f"; layers {_list(c.sliding_layers)} slide, window {c.sliding_window}"
    pruned = f"{c.draft_vocab_size:,} of {c.vocab_size:,}" if c.draft_vocab_size else f"all {c.vocab_size:,}"
    return [
        ("block, layout", f"{c.block_size}, {layout}; up to {c.max_draft_tokens} drafts"),
        ("draft layers, hidden, FFN", f"{c.num_hidden_layers}, {c.hidden_size:,}, {c.intermediate_size:,}"),
        ("heads, key-value heads, head dim", f"{c.num_attention_heads}, {c.num_key_value_heads}, {c.head_dim}"),
        ("attention in the block", seen),
        ("target layers (block outputs from zero)", _list(c.target_layer_ids)),
        ("the same as aux ids", _list(c.aux_hidden_state_layer_ids)),
        ("draft vocabulary", pruned),
        ("mask token id", str(c.mask_token_id)),
        ("Markov head", markov),
        ("confidence head", confidence),
        ("trained context, rope theta", f"{c.max_position_embeddings:,}, {c.rope_theta:g}"),
    ]


def serve(config: DSparkConfig, drafter: str, format: str) -> str:
    """The vLLM command for this drafter, and what vLLM does otherwise with it. A checkpoint may name its target as it
    likes, so that each name is quoted for the shell."""
    options = {"method": "dspark", "model": drafter, "num_speculative_tokens": config.max_draft_tokens}
    target = _EMBEDDED_FOLDER if config.target == EMBEDDED else shlex.quote(config.target)
    lines = [f"    vllm serve {target} --speculative-config {shlex.quote(json.dumps(options))}"]
    lines += [f"- {limit}." for limit in vllm_limits(config, padded=format == "vllm")]
    return "\n\n".join(lines[:1]) + ("\n\n" + "\n".join(lines[1:]) if lines[1:] else "")


def _recipe(history: Path | None) -> str:
    path = None if history is None else Path(history) / "recipe.json"
    if path is None or not path.is_file():
        return "Not recorded with this checkpoint."
    recipe = read_json(path)
    training = recipe.get("training")
    rows = [(name, value) for name, value in recipe.items() if not isinstance(value, dict)]
    rows += training.items() if isinstance(training, dict) else ()
    return _table(("setting", "value"), [(name.replace("_", " "), _plain(value)) for name, value in rows])


def _metrics(history: Path | None) -> str:
    path = None if history is None else Path(history) / "heldout.csv"
    if path is None or not path.is_file():
        return "Nothing was measured with this checkpoint."
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        shown = [[_plain(float(value)) if "." in value else _plain(int(value)) for value in row] for row in rows]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path.parent.name} is damaged: {path.name} is no table of numbers ({error})") from error
    return f"Held-out greedy accepted length (bonus token included) during training:\n\n{_table(header, shown)}"


def _plain(value) -> str:
    if isinstance(value, list):
        return _list(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _list(values) -> str:
    return ", ".join(map(str, values))


def _table(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
