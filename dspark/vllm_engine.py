"""vLLM as the sweep's other engine: its own OpenAI-compatible server, once plain and once a (drafter, n).

Answers come as token ids, accepted and drafted counts a step with each of them (vLLM's per-request metrics), and the
server's counters, read before and after, must be their sum. Without a GPU vLLM's drafters run by Triton's interpreter:
right for acceptance, meaningless for speed, so that no time is kept.

`python3 -m dspark.vllm_engine ARGS` is that server, with what vLLM 0.32 lacks on a CPU mended first.
"""

import json
import math
import os
import re
import runpy
import shlex
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from dspark.baselines import PROMPT_LOOKUP, PromptLookup
from dspark.decode import Answer
from dspark.formats import kind_of, read_json
from dspark.paths import ROOT
from dspark.records import record_of
from dspark.serve import INTERPRETED, ON_CPU, Command, Fleet, open_url
from dspark.setup import has_gpu
from dspark.target import EMBEDDED, Target, embedded_target, encode_chat, stop_ids

_COUNTERS = "vllm:spec_decode_num_"
_STEPS = "vllm:inter_token_latency_seconds_count"  # one a request and step, prefills apart


def on_cpu() -> None:
    """What vLLM 0.32's DSpark lacks without a GPU; to be called before vLLM is imported."""
    import torch
    import torch.nn.functional as F
    from triton.backends import backends

    # vLLM gives up Triton, and with it DSpark, where Triton names no active backend. The interpreter needs none.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(self, keys):  # [layers, tokens, kv heads, head_dim]
        weights = self._k_norm_weights
        return torch.stack([F.rms_norm(k, w.shape, w, self._rms_norm_eps) for k, w in zip(keys, weights, strict=True)])

    # The CPU's rms_norm takes the first row of stacked weights for all (as XPU's did: vllm-xpu-kernels issue 573), so
    # every draft layer's context keys would get layer 0's k_norm: hidden states 5% off, other drafts, and no error.
    DFlashQwen3Model._normalize_context_k = normalize_context_k


def speculative_config(source: str | None, n: int) -> dict | None:
    """vLLM's configuration for a drafter's folder or `prompt-lookup`; None drafts nothing.

    The method is always named: vLLM would guess it from the path. ValueError where vLLM cannot serve the folder.
    """
    if source is None:
        return None
    if source == PROMPT_LOOKUP:
        ngram = {"prompt_lookup_max": PromptLookup(0).max_ngram, "prompt_lookup_min": 1}
        return {"method": "ngram", "num_speculative_tokens": n, **ngram}
    raw = read_json(Path(source) / "config.json")
    kind = kind_of(raw)
    if kind == "native" and not raw.get("markov_rank"):
        raise ValueError(f"{Path(source).name} has no Markov head, which vLLM needs: export it in the format `vllm`")
    method = {"native": "dspark", "speculators": raw.get("speculators_model_type")}.get(kind, kind)
    return {"method": method, "model": str(source), "num_speculative_tokens": n}


def server_command(config, source: str | None, n: int, longest: int, port: int) -> Command:
    """The server's command for one drafter and n; longest: tokens of the longest prompt. `config`: a SweepConfig."""
    model = str(embedded_target()) if config.target == EMBEDDED else config.target
    argv = [
        sys.executable, "-m", "dspark.vllm_engine", "--model", model, "--served-model-name", config.target,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype, "--seed", str(config.seed),
        "--max-model-len", str(longest + config.max_new_tokens + n + 1), "--max-num-seqs", str(config.concurrency),
        "--no-enable-prefix-caching", "--generation-config", "vllm", "--enable-per-request-metrics",
    ]  # fmt: skip
    drafting = speculative_config(source, n)
    if drafting:
        argv += ["--speculative-config", json.dumps(drafting), "--per-request-spec-decode-metrics", "detailed"]
    environment = {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
    if not has_gpu():
        argv += ["--gpu-memory-utilization", "0.3", "--enforce-eager"]
        native = not drafting or drafting["method"] == "ngram"  # the other runner needs no Triton
        environment |= ON_CPU | ({} if native else INTERPRETED)
    return Command([*argv, *shlex.split(config.vllm_args)], environment)


def cause(log: Path) -> str:
    """The first error that a server's log names (with the line below, where pydantic tells why), or its last line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line, below in zip(lines, [*lines[1:], ""], strict=False):
        found = re.search(r"\b[A-Z]\w*(Error|Exception): \S.*", line)
        if found and "WARNING" not in line:
            return f"{found[0]}: {below.strip()}" if "ValidationError" in found[0] else found[0]
    return lines[-1] if lines else "its log is empty"


@contextmanager
def server(config, source: str | None, n: int, longest: int, folder: Path, name: str):
    """A running server's url. RuntimeError with the log's cause where it does not start, or dies while it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, url, log = (
        server_command(config, source, n, longest, port),
        f"http://127.0.0.1:{port}",
        folder / f"{name}.log",
    )
    log.unlink(missing_ok=True)
    with Fleet(folder, quiet=True) as fleet:
        process = fleet.start(name, command)
        try:
            fleet.wait_healthy(name, url)
        except RuntimeError as error:
            raise RuntimeError(f"vLLM did not start ({name}): {cause(log)}") from error
        try:
            yield url
        except OSError as error:
            died = process.poll() is not None
            raise RuntimeError(f"vLLM {'died' if died else 'failed'} ({name}): {cause(log)}") from error


def counters(url: str) -> dict:
    """The server's counters so far: steps (of each request one, prefills apart), drafts (steps that verified some),
    draft_tokens, accepted_tokens, and accepted_tokens_per_pos [n]."""
    from prometheus_client.parser import text_string_to_metric_families

    with open_url(f"{url}/metrics", timeout=60) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    found = {"steps": 0, "drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_tokens_per_pos": {}}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == _STEPS:
            found["steps"] += int(sample.value)
        name = sample.name.removeprefix(_COUNTERS).removesuffix("_total")
        if not sample.name.startswith(_COUNTERS) or name not in found or sample.name.endswith("_created"):
            continue
        if name == "accepted_tokens_per_pos":
            found[name][int(sample.labels["position"])] = int(sample.value)
        else:
            found[name] += int(sample.value)
    return found | {"accepted_tokens_per_pos": [count for _, count in sorted(found["accepted_tokens_per_pos"].items())]}


def ask(url: str, config, chat: list[int], stop: list[int]) -> tuple[Answer, dict]:
    """One request: the answer and, on a GPU, its latencies in ms. Steps that verified no draft count as steps too;
    `settle` adds those that the cut at an answer's end hides."""
    body = {
        "model": config.target, "prompt": chat, "max_tokens": config.max_new_tokens, "stop_token_ids": stop,
        "temperature": config.temperature, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with open_url(request, timeout=3600) as reply:
        said = json.load(reply)
    seconds = time.perf_counter() - begun
    tokens, metrics = said["choices"][0]["token_ids"], said["metrics"] or {}
    steps = metrics.get("speculative_decoding") or {}
    accepted, drafted = (list(steps.get(name) or []) for name in ("per_step_accepted", "per_step_drafted"))
    plain = max(0, len(tokens) - 1 - sum(accepted) - len(accepted))  # where the drafter had nothing to say
    answer = Answer(tokens, drafted + [0] * plain, accepted + [0] * plain, seconds if has_gpu() else math.nan)
    if not has_gpu():
        return answer, {}
    latency = {"ttft_ms": metrics["time_to_first_token_ms"], "itl_ms": metrics["mean_itl_ms"]}
    return answer, latency | {"e2e_ms": 1e3 * seconds}


def settle(answered: list[Answer], steps: int) -> None:
    """Give answers the steps without a draft that `ask` could not see, `steps` being the server's count of all.

    vLLM tells what a step accepted before it cuts the answer at its stop token or its length. Behind as many tokens as
    were cut off, so many steps of one token can hide. Of several answers at once the server does not tell whose they
    are: the first that can have them get them, and the tau of all is right.
    """
    left = steps - sum(answer.steps for answer in answered)
    for answer in answered:
        drafts = sum(drafted > 0 for drafted in answer.drafted)
        cut = 1 + sum(answer.accepted) + answer.steps - len(answer.tokens)  # tokens, as far as the steps so far tell
        room = answer.accepted[drafts - 1] - cut if drafts else 0  # of the last drafted step one token at least is left
        hidden = max(0, min(left, room))
        answer.drafted += [0] * hidden
        answer.accepted += [0] * hidden
        left -= hidden


def answers(config, source: str | None, n: int, chats: dict, stop: list[int], folder: Path) -> dict:
    """{key: (Answer, latencies)} of every chat, config.concurrency at a time. RuntimeError where the server fails,
    drafts nothing, or counted other drafts than its answers tell."""
    name = "vllm-plain" if source is None else f"vllm-{Path(source).name}-n{n}"
    longest = max(map(len, chats.values()))
    with server(config, source, n, longest, folder, name) as url:
        if has_gpu():
            ask(url, config, next(iter(chats.values())), stop)  # compiles and warms up

        def ask_one(chat: list[int]) -> tuple[Answer, dict]:
            if source is None or config.concurrency > 1:
                return ask(url, config, chat, stop)
            begun = counters(url)["steps"]
            answer, latency = ask(url, config, chat, stop)
            settle([answer], counters(url)["steps"] - begun)  # alone there, it has its steps exactly
            return answer, latency

        before = counters(url)
        with ThreadPoolExecutor(config.concurrency) as pool:
            answered = list(pool.map(ask_one, chats.values()))
        got = dict(zip(chats, answered, strict=True))
        after = counters(url)
        if source is None:
            return got
        counted = {k: after[k] - before[k] for k in ("steps", "drafts", "draft_tokens", "accepted_tokens")}
        settle([answer for answer, _ in answered], counted["steps"])
        told = {
            "steps": sum(a.steps for a, _ in got.values()),
            "drafts": sum(d > 0 for a, _ in got.values() for d in a.drafted),
            "draft_tokens": sum(sum(a.drafted) for a, _ in got.values()),
            "accepted_tokens": sum(sum(a.accepted) for a, _ in got.values()),
        }
        if not counted["draft_tokens"]:
            raise RuntimeError(f"vLLM drafted nothing with {name}: {cause(folder / f'{name}.log')}")
        if counted != told:
            raise RuntimeError(f"{name}: vLLM counted {counted}, its answers tell {told}: is another client there?")
    return got


def measure(config, missing, folder: Path):
    """Yield the missing records of a sweep: (prompts, i, [(drafter, n)]) each. See records.record_of."""
    tokenizer, stop = _tokenizer(config)
    sets = {(prompts.benchmark, i): prompts for prompts, i, _ in missing}
    wanted = {(prompts.benchmark, i): cells for prompts, i, cells in missing if cells}
    chats = {
        key: encode_chat(tokenizer, [{"role": "user", "content": sets[key].prompts[key[1]]}], **config.template)
        for key in wanted
    }
    plain = answers(config, None, 0, chats, stop, folder)
    judge = None
    for name, n in config.cells:
        keys = [key for key, cells in wanted.items() if (name, n) in cells]
        if not keys:
            continue
        got = answers(config, config.drafters[name], n, {key: chats[key] for key in keys}, stop, folder)
        for key in keys:
            (answer, latency), (baseline, _) = got[key], plain[key]
            if judge is None and answer.tokens != baseline.tokens and config.temperature == 0:
                judge = _judge(config)
            yield record_of(
                config, name, n, sets[key], key[1], chats[key], baseline, answer, judge, tokenizer, **latency
            )


def _tokenizer(config):
    """The target's tokenizer, and the ids that end its answers."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source = embedded_target() if config.target == EMBEDDED else config.target
    trust = {"trust_remote_code": "--trust-remote-code" in config.vllm_args}
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:
        generation = None
    model = AutoConfig.from_pretrained(source, **trust).get_text_config()
    return AutoTokenizer.from_pretrained(source, **trust), sorted(stop_ids(model, generation))


def _judge(config) -> Target | None:
    """The target in this engine, to judge near-ties; None for one that is served by several GPUs."""
    import torch

    if "--tensor-parallel-size" in config.vllm_args:
        return None
    device = "cuda" if has_gpu() else "cpu"
    return Target.load(config.target, getattr(torch, config.dtype), device)


if __name__ in ("__main__", "__mp_main__") and os.environ.get("TRITON_INTERPRET") == "1":
    on_cpu()  # in the processes that vLLM spawns as well
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
