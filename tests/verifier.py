"""A real vLLM for tests: started once a module, on free ports of this machine."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dspark.serve import PROFILES, Fleet, free_ports, verifier_command
from dspark.stream import Verifier
from dspark.target import embedded_target

PROFILE = replace(PROFILES["cpu"], dtype="float32", max_model_len=512, max_num_seqs=4, budget=1 << 20)
CHUNK = ("--max-num-batched-tokens", "64", "--block-size", "32")  # so that prompts are chunked and prefixes shared


class Running:
    """url, endpoints [one a trainer rank], and the fleet whose process `verifier` it is."""

    def __init__(self, fleet: Fleet, command, url: str, endpoints: list[str]):
        self.fleet, self.command, self.url, self.endpoints = fleet, command, url, endpoints

    def client(self, timeout: float = 30.0) -> Verifier:
        return Verifier(self.url, "smollm2-135m", timeout)


@contextmanager
def running(folder: Path, profile=PROFILE, extra=CHUNK, model: Path | None = None):
    http_port, *ports = free_ports(1 + profile.trainers)
    endpoints, url = [f"tcp://127.0.0.1:{port}" for port in ports], f"http://127.0.0.1:{http_port}"
    command = verifier_command(profile, endpoints, port=http_port, model=str(model or embedded_target()), extra=extra)
    with Fleet(folder) as fleet:
        fleet.start("verifier", command)
        fleet.wait_healthy("verifier", url, 300)
        yield Running(fleet, command, url, endpoints)
