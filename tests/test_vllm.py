"""The drafter in a real vLLM: on the real target, vLLM must accept what this engine accepts, step for step.

A checkpoint that is read by other conventions (layer ids, positions, rope, block layout, d2t) loads without a word
and only loses acceptance, so nothing short of drafting shows the fault. In float32 greedy both engines compute the
same drafts but for rounding of about 1e-6, hence no tolerance: one other argmax is one other convention. A GPU runs
vLLM as it is; without one, vLLM's DSpark needs what `vllm_engine.on_cpu` mends and is too slow to measure speed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import serve
from dspark.paths import DATA, ROOT
from dspark.vllm_engine import INTERPRETED, on_cpu

DRAFTER = DATA / "drafters" / "smollm2-135m-dspark"
SETS = ("own-gsm8k", "own-humaneval")  # the first prompt of each, both in one batch
N, NEW_TOKENS, TIME_LIMIT = 4, 24, 480  # drafts a step, tokens an answer, seconds
ON_CPU = serve.ON_CPU | INTERPRETED | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a spawned engine would import vLLM without the stand-in
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM is published for Linux only")
@pytest.mark.parametrize("conventions", ["committed", "otherwise"])
def test_vllm_accepts_what_this_engine_accepts(target, tmp_path, conventions):
    from dspark import checkpoint
    from dspark.data import load_prompts
    from dspark.decode import answer, pooled_tau
    from dspark.target import embedded_target

    folder = DRAFTER
    if conventions == "otherwise":
        folder = tmp_path / "drafter"
        checkpoint.save(otherwise(checkpoint.load(DRAFTER, target), target), folder)
    drafter = checkpoint.load(folder, target)
    texts = [load_prompts(name, 1).prompts[0] for name in SETS]
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in texts]
    plain = [answer(target, None, prompt, 0, NEW_TOKENS) for prompt in prompts]
    ours = [answer(target, drafter, prompt, N, NEW_TOKENS) for prompt in prompts]

    job = {"target": str(embedded_target()), "drafter": str(folder), "prompts": prompts}
    theirs = run_vllm(job, tmp_path)

    assert theirs["tokens"] == [a.tokens for a in plain]
    assert sum(sum(a.accepted) for a in ours) > 4, "nothing to compare"
    assert theirs["accepted"] == [a.accepted for a in ours]  # every step, the last one before its cut
    counters = {name.removeprefix("vllm:spec_decode_num_"): value for name, value in theirs["counters"].items()}
    assert counters["drafts"] == sum(a.steps for a in ours)
    assert counters["draft_tokens"] == N * counters["drafts"]
    assert counters["accepted_tokens_per_pos"] == [sum(k < x for a in ours for x in a.accepted) for k in range(N)]
    assert 1 + counters["accepted_tokens"] / counters["drafts"] == pytest.approx(pooled_tau(ours))


def otherwise(drafter, target):
    """The same weights under what else the format knows: fill-in blocks, the whole vocabulary, one sliding layer.

    It was not trained so and drafts badly, but no less exactly. vLLM takes the LM head from the target, not the file.
    """
    import torch

    from dspark.drafter import DSparkDrafter

    changes = {"sample_from_anchor": False, "draft_vocab_size": None, "sliding_window": 16, "sliding_layers": (0,)}
    config = drafter.config.replace(**changes)
    weights, kept = drafter.state_dict(), drafter.t2d
    bias = torch.zeros(config.vocab_size, config.markov_rank)
    bias[kept] = weights["markov_head.markov_w2.weight"]
    weights |= {"markov_head.markov_w2.weight": bias, "lm_head.weight": target.lm_head}
    whole = DSparkDrafter(config)
    whole.load_state_dict({name: weights[name] for name in whole.state_dict()})
    return whole


def run_vllm(job: dict, folder: Path) -> dict:
    """What `main` answers to `job`, in a process of its own: its environment must be set before vLLM is imported."""
    from dspark.setup import has_gpu

    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"} | ({} if has_gpu() else ON_CPU)
    command = [sys.executable, __file__, str(folder / "job.json"), str(folder / "answers.json")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"vLLM took more than {TIME_LIMIT} s; its last words:\n{(late.stdout or b'').decode()[-3000:]}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return json.loads((folder / "answers.json").read_text())


def main(job_file: str, answers_file: str) -> None:
    """Answer the job's prompts with vLLM, greedily, and write tokens, accepted drafts a step and vLLM's counters."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        on_cpu()
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    llm = LLM(
        model=job["target"],
        dtype="float32",
        speculative_config={"method": "dspark", "model": job["drafter"], "num_speculative_tokens": N},
        max_model_len=512,
        max_num_seqs=len(job["prompts"]),
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = [o.outputs[0] for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))]
    metrics = [metric for metric in llm.get_metrics() if "spec_decode" in metric.name]
    answers = {
        "tokens": [list(output.token_ids) for output in outputs],
        "accepted": [list(output.spec_decode_metrics.per_step_accepted) for output in outputs],
        "counters": {m.name: m.values if m.name.endswith("per_pos") else m.value for m in metrics},
    }
    Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
