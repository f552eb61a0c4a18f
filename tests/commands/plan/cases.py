"""What the tests of the plan share."""

from megabert import config as configuration
from megabert.commands.plan.step_time import DEVICES, Constants, Fabric, Software
from megabert.config import Config

H100, FABRIC = DEVICES["h100"], Fabric.of(8, "8x400")
PLAIN = Software(elementwise=166, attention=0, kernels=60, accumulate=27, optimizer=67)
# without losses and latencies
FREE = Constants(memory=1, link=1, network=1, kernel=0, base_latency=0, link_latency=0, network_latency=0)
TINY = ["--config", "tiny"]
BASE = ["data.seq_len=0", "model.vocab_size=30000", "schedule.total_steps=1000", "schedule.warmup_steps=100"]


def base(*overrides: str) -> Config:
    return configuration.load("base", [*BASE, *overrides])
