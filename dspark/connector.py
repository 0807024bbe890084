"""The verifier's half of hidden-state streaming: a vLLM KV connector that sends finished requests to trainer ranks.

vLLM's `extract_hidden_states` leaves the chosen layers' states of every token in a KV cache group of their own, so
chunked prefill and prefix caching keep them as they keep keys and values. When a request with
`kv_transfer_params = {"rank": r, "sample_id": ..., "response": ...}` ends, the connector copies the rows of its prompt
(and of its response, if asked) out and sends them to endpoint r. The endpoints are those that the verifier was
started with: a request names an index, never an address.

Backpressure: copies wait in an outbox of `budget` bytes. While it is full a finished request keeps its cache blocks,
so that vLLM runs out of blocks and schedules no more. Nothing is dropped.
"""

import re
import secrets
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, iter_layer_specs
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

from dspark.outbox import Outbox
from dspark.wire import WireSample

logger = init_logger(f"vllm.{__name__}")
SAMPLE_ID = re.compile(r"[0-9a-f]{8,64}")


class Finished(NamedTuple):
    """One request whose states are to be sent, as the scheduler tells the worker."""

    request_id: str
    rank: int
    sample_id: str
    token_ids: list[int]
    rows: int
    block_ids: list[int]


class FinishedRequests(KVConnectorMetadata):
    def __init__(self, requests: list[Finished]):
        self.requests = requests


class HiddenStateConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config`: endpoints (one a trainer rank), budget (bytes that the outbox may hold) and
    shared_memory (the ranks are on this machine: on a CPU, states are left in memory that they can read)."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError("HiddenStateConnector needs --speculative-config with method extract_hidden_states")
        self.layer_ids = tuple(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        names = vllm_config.model_config.served_model_name
        self.model = names if isinstance(names, str) else names[0]
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.endpoints, self.budget = options["endpoints"], int(options["budget"])
        self.shared_memory = options.get("shared_memory", False)
        self.group, self.block_size = hidden_state_group(kv_cache_config)
        self._finished: list[Finished] = []  # scheduler: since the last step
        self._cache: Tensor | None = None  # worker: [blocks, L, block_size, H]
        self._outbox: Outbox | None = None
        self._instance = secrets.token_hex(8)
        self._stream = None  # side stream of an accelerator
        self._waiting: deque[Finished] = deque()  # worker: no room in the outbox yet
        self._copying: dict[str, Any] = {}  # worker: request id -> event of its copy

    # ---- scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        finished, self._finished = self._finished, []
        return FinishedRequests(finished)

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, dict | None]:
        """Whether the blocks must stay until the worker has copied them, and what the client is told."""
        params = request.kv_transfer_params or {}
        if "sample_id" not in params:
            return False, None  # an ordinary request
        tokens = list(request.all_token_ids)
        if not params.get("response"):
            tokens = tokens[: request.num_prompt_tokens]
        rows = len(tokens) - bool(params.get("response"))  # the last token of a response has not been run
        if fault := self._fault(request, params, rows, block_ids):
            return False, {"error": fault}
        ids = list(block_ids[self.group])
        self._finished.append(Finished(request.request_id, params["rank"], params["sample_id"], tokens, rows, ids))
        return True, {"sent": rows}

    def _fault(self, request, params: dict, rows: int, block_ids) -> str | None:
        rank, sample_id = params.get("rank"), params["sample_id"]
        if type(rank) is not int or not 0 <= rank < len(self.endpoints):
            return f"rank = {rank!r}: this verifier was started with {len(self.endpoints)} endpoints"
        if not isinstance(sample_id, str) or not SAMPLE_ID.fullmatch(sample_id):
            return "sample_id must be 8 to 64 hexadecimal digits"
        computed = request.num_computed_tokens
        held = len(block_ids[self.group]) * self.block_size if self.group < len(block_ids) else 0
        if not 0 < rows <= min(computed, held):
            return f"{min(computed, held)} of {rows} rows were computed: the request was cut off"
        return None

    def get_finished_count(self) -> int:
        return 1  # rank 0 of the tensor-parallel group alone sends

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        if get_tensor_model_parallel_rank() != 0:
            return
        (name,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self._cache = kv_caches[name]
        if tuple(self._cache.shape[1:3]) != (len(self.layer_ids), self.block_size):
            shape = tuple(self._cache.shape)
            raise ValueError(
                f"hidden-state cache is {shape}, want [blocks, {len(self.layer_ids)}, {self.block_size}, H]"
            )
        on_cpu = self._cache.device.type == "cpu"
        if on_cpu:
            draft_nothing()
        else:
            self._stream = torch.Stream(self._cache.device)  # into pinned memory, from which ZeroMQ sends
        self._outbox = Outbox(self.endpoints, self.budget, self.shared_memory and on_cpu)
        logger.info("streaming layers %s to %s", self.layer_ids, ", ".join(self.endpoints))

    def start_load_kv(self, forward_context, **kwargs) -> None:
        pass

    def wait_for_layer_load(self, layer_name) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Copy out what the outbox has room for, in order; name the requests whose blocks may now be freed."""
        if self._outbox is None:
            return None, None
        if self.has_connector_metadata():
            self._waiting.extend(self._get_connector_metadata().requests)
        token_bytes = self._cache.shape[1] * self._cache.shape[3] * self._cache.element_size()
        while self._waiting and self._outbox.has_room(self._waiting[0].rows * token_bytes):
            request = self._waiting.popleft()
            states, copied = self._copy(request.block_ids, request.rows)
            token_ids = torch.tensor(request.token_ids, dtype=torch.int32)
            sample = WireSample(request.sample_id, self._instance, self.model, self.layer_ids, token_ids, states)
            self._outbox.put(request.rank, sample, copied)
            self._copying[request.request_id] = copied
        done = {name for name, copied in self._copying.items() if copied is None or copied.query()}
        for name in done:
            del self._copying[name]
        return done or None, None

    def _copy(self, block_ids: list[int], rows: int) -> tuple[Tensor, Any]:
        """(states [rows, L, H] on the CPU, the event after which they are there; None on a CPU, where they are)."""
        by_token = self._cache.transpose(1, 2)  # [blocks, block_size, L, H], as it lies in memory
        if self._stream is None:
            shape = (len(block_ids), *by_token.shape[1:])
            states = self._outbox.empty(shape, by_token.dtype)
            torch.index_select(by_token, 0, torch.tensor(block_ids), out=states)
            return states.flatten(0, 1)[:rows], None
        self._stream.wait_stream(torch.accelerator.current_stream())  # the states are written there
        with self._stream:
            index = torch.tensor(block_ids, pin_memory=True).to(self._cache.device, non_blocking=True)
            states = by_token[index].flatten(0, 1)[:rows]
            pinned = torch.empty_like(states, device="cpu", pin_memory=True)
            pinned.copy_(states, non_blocking=True)
            return pinned, self._stream.record_event()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config) -> str:
        return "LBNHC"  # a token's layers side by side, so that rows are copied whole


def draft_nothing() -> None:
    """vLLM 0.32 extracts states as a drafter that proposes each sampled token again, only to be refused: a row more a
    request and step. A GPU hides that row. A CPU pays for it, and samples wrongly while it refuses (vLLM issue 55005).
    To be called in the worker, on a CPU: there vLLM schedules drafts once they are known, and none is as good as one.
    """
    propose = ExtractHiddenStatesProposer.propose

    def without_drafts(self, *args, **kwargs) -> Tensor:  # [B, 0] in place of [B, 1]
        return propose(self, *args, **kwargs)[:, :0]

    ExtractHiddenStatesProposer.propose = without_drafts


def hidden_state_group(kv_cache_config) -> tuple[int, int]:
    """(index, block size in tokens) of the KV cache group that holds the extracted states, found by its spec.

    The block size is the layer's own: where the target's cache is hybrid, cache_config.block_size is another. Where
    the states share a group with the target's layers, the scheduler is shown the spec of any one of those (all have
    one block size), so there the layer's name decides.
    """
    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        own = [s for s in iter_layer_specs(group.kv_cache_spec) if isinstance(s, HiddenStateCacheSpec)]
        if own or any("cache_only_layers." in name for name in group.layer_names):
            found.append((index, (own or [group.kv_cache_spec])[0].block_size))
    if len(found) != 1:
        groups = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        raise ValueError(f"{len(found)} hidden-state caches among the KV cache groups {groups}, want 1")
    return found[0]
