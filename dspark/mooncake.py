"""The other transport, for machines with RDMA between them: the Mooncake store, through `hs-connectors`.

Optional: `pip install --no-deps hs-connectors==0.9.0 mooncake-transfer-engine-cuda13`, and a running `mooncake_master`.
The verifier then runs hs-connectors' own connector (it needs an accelerator, and refuses MLA targets, Kimi among them);
this source reads what that puts. The store says neither which layers it holds nor who wrote them: the comparison with
the verifier's logprobs at start vouches for the last layer, the count of layers for the others.
"""

import os
import socket

import torch

from dspark.stream import Away, StreamSource
from dspark.wire import WireSample, encode

MASTER = "127.0.0.1:50051"


def settings(master: str, protocol: str) -> dict:
    """hs-connectors' MooncakeStoreConfig of this machine; protocol `tcp` or `rdma`."""
    host = os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or socket.gethostbyname(socket.gethostname())
    return {"local_hostname": host, "master_server_address": master, "protocol": protocol}


def transfer_config(master: str = MASTER, protocol: str = "tcp") -> dict:
    """vLLM's --kv-transfer-config for this transport."""
    return {
        "kv_connector": "MooncakeHiddenStatesConnector",
        "kv_connector_module_path": "hs_connectors.mooncake_hidden_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"mooncake": settings(master, protocol)},
    }


class MooncakeSource(StreamSource):
    """StreamSource whose states come out of a Mooncake store; takes its arguments but for `endpoint`."""

    def __init__(self, target, samples, verifier, rank=0, master=MASTER, protocol="tcp", **options):
        try:
            from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
        except ImportError as error:
            raise ValueError(
                "--transport mooncake needs hs-connectors: pip install --no-deps hs-connectors==0.9.0"
            ) from error
        self.store = MooncakeHiddenStatesStore(MooncakeStoreConfig(**settings(master, protocol)))
        self.store.setup()
        super().__init__(target, samples, verifier, None, rank, **options)

    def _ask(self, prompt, response_tokens, times, **extra):
        body = {"prompt": prompt, "max_tokens": response_tokens or 1, "temperature": self.temperature, **extra}
        wanted = {"include_output_tokens": response_tokens > 0}
        answer = self.verifier.post("/v1/completions", kv_transfer_params=wanted, return_token_ids=True, **body)
        manifest = answer.get("kv_transfer_params") or {}
        if "handle" not in manifest:
            raise ValueError("the verifier put nothing into a Mooncake store: start it with --transport mooncake")
        try:
            tensors = self.store.get_sample(manifest, timeout=self.verifier.timeout)
            self.store.delete_sample(manifest["handle"])
        except (RuntimeError, TimeoutError) as error:  # hs-connectors' integrity errors among them
            raise Away(f"Mooncake: {error}") from error
        states, ids = tensors["hidden_states"], prompt + (answer["choices"][0]["token_ids"] if response_tokens else [])
        if states.shape[1] != len(self.layer_ids) or tensors["token_ids"].tolist() != ids[: len(states)]:
            layers = f"{states.shape[1]} layers, want {len(self.layer_ids)}"
            raise ValueError(f"verifier {self.verifier.url} put {layers}, or other tokens: start it with this profile")
        ids = torch.tensor(ids, dtype=torch.int32)
        got = WireSample(manifest["handle"], "mooncake", self.verifier.model, self.layer_ids, ids, states)
        self._count("received")
        self._count("bytes", states.nbytes)
        return answer, got, [bytes(frame) for frame in encode(got)] if self.cache else []
