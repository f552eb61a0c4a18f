"""Published BERT-LARGE runs as inputs of the step-time model: what each ran on, how, and how fast it was.

MLPerf Training: the median of a round's logs, samples over run time, evaluations included. How a submission computes is
read in its configuration files (mlcommons/training_results_v*, `config_*.sh`); the rest is named where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megabert.commands.plan.forecast import NATIVE, SCORES, TORCH
from megabert.commands.plan.step_time import DEVICES as KNOWN
from megabert.commands.plan.step_time import Device, MicroBatch, Software
from megabert.config import ModelConfig

# TPU v3, a chip: Jouppi et al. 2020 (CACM 63, 7): 123 TFLOP/s bf16, 900 GB/s; links of 656 Gbit/s, two a ring. Fitted here.
DEVICES = KNOWN | {"tpu-v3": Device("tpu v3", 123e12, 0.3614, 900e9, 164e9, 0, 450, domain=1_024)}
LARGE = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)

# FusedLayerNorm and bias + GELU only: half way (assumed)
PARTLY = (TORCH[0] + NATIVE[0]) / 2
# bytes a pair and head where scores are written: each read and write in 16 bits, counted
EAGER = 44.0
PREDICTED = 0.15
# tokens of a sample of MLPerf's dataset, of 512
REAL = 254.5
# mean of squared lengths over their mean's square (assumed; attention is 5% of the operations)
SQUARES = 1.35
# sequence lengths a mini-batch of DeepLearningExamples' phase 2 shares; it is padded to its longest
BIN = 64

# v2.0 and later fuse bias, dropout + add, and GELU into products; 1.1 less
MLPERF = Software(elementwise=NATIVE[0], attention=0.0, kernels=NATIVE[1])
MLPERF_1_1 = replace(MLPERF, elementwise=PARTLY, kernels=40)
# DeepSpeed's transformer layer
KERNELS = replace(MLPERF, attention=SCORES["fused_softmax"], accumulate=6, optimizer=60, zero=0)
# taken to fuse as well
XLA = replace(KERNELS, accumulate=0)
# NVIDIA DeepLearningExamples: apex's FusedLayerNorm and FusedLAMB, one all-reduce in 16 bits after the accumulation
EXAMPLES = Software(PARTLY, EAGER, kernels=48, accumulate=6, optimizer=60, zero=0)


def sample(tokens: float, pairs: float, predictions: float) -> MicroBatch:
    return MicroBatch(tokens, pairs, predictions, 1.0)


REAL_SAMPLE = sample(REAL, SQUARES * REAL**2, PREDICTED * REAL)
# without --dense_seq_output, as CUDA graphs of whole iterations are run, the vocabulary product is of all positions
ALL_POSITIONS = sample(REAL, SQUARES * REAL**2, REAL)
PADDED_SAMPLE = sample(512, 512**2, 512)
BINNED_512 = sample(REAL + BIN / 2, SQUARES * (REAL + BIN / 2) ** 2, PREDICTED * REAL)
FULL_128, FULL_512 = sample(128, 128**2, 20), sample(512, 512**2, 77)


@dataclass(frozen=True)
class Cluster:
    device: str
    node: int
    network: str


@dataclass(frozen=True)
class Way:
    """How a submission computes: its software, and what a sample is to it."""

    how: str
    software: Software
    sample: MicroBatch


@dataclass(frozen=True)
class Part:
    """Samples of one kind: `batch` an update, at most `micro` a GPU at once (0: its whole share), `samples` in the run."""

    sample: MicroBatch
    batch: int
    micro: int = 0
    samples: float = 1.0


@dataclass(frozen=True)
class Run:
    """A row. `rate` is samples a second; of a run of several parts, runs a second."""

    name: str
    cluster: Cluster
    gpus: int
    rate: float
    how: str
    software: Software
    parts: tuple[Part, ...]
    # MLPerf's evaluations are in the time
    evaluated: bool = False

    @property
    def fitted(self) -> bool:
        return self.name in FITTED


# the smallest system of each generation
FITTED = {
    "V100 DeepLearningExamples, 1 (length 128)",
    "A100 DeepLearningExamples, 1 (length 128)",
    "H100 3.0, 8",
    "B200 5.0, 8",
    "TPU v3 LAMB paper, 16",
}
H100, H200 = Cluster("h100", 8, "8x400"), Cluster("h200", 8, "8x400")
B200, GB200 = Cluster("b200", 8, "8x400"), Cluster("gb200", 4, "4x400")
A100, HPE, DELL = Cluster("a100", 8, "8x200"), Cluster("a100", 8, "4x200"), Cluster("a100-40", 4, "2x200")
PCIE_1, PCIE_2 = Cluster("a100-pcie", 4, "1x100"), Cluster("a100-pcie", 4, "2x100")
DGX_1, DGX_2, TPU = Cluster("v100", 8, ""), Cluster("v100", 16, "8x100"), Cluster("tpu-v3", 16, "")

FP8 = Way("packed, FP8", replace(MLPERF, fp8=True), REAL_SAMPLE)
UNPADDED_FP8 = Way("without padding, FP8", replace(MLPERF, fp8=True), REAL_SAMPLE)
OVERLAP = Way("packed, overlap", replace(MLPERF, overlap=True), ALL_POSITIONS)
UNPADDED = Way("without padding", MLPERF, REAL_SAMPLE)
PACKED = Way("packed", MLPERF, ALL_POSITIONS)
UNPADDED_1_1 = Way("without padding, less fused", MLPERF_1_1, REAL_SAMPLE)
PADDED_1_1 = Way("padded, less fused", MLPERF_1_1, PADDED_SAMPLE)

MLPERF_RUNS = tuple(
    Run(name, cluster, gpus, rate, way.how, way.software, (Part(way.sample, batch),), evaluated=True)
    for name, cluster, gpus, batch, rate, way in (
        ("H100 3.0, 8", H100, 8, 768, 7_760, FP8),
        ("H100 3.0, 64", H100, 64, 4_608, 53_185, UNPADDED_FP8),
        ("H100 3.0, 512", H100, 512, 3_072, 138_634, OVERLAP),
        ("H100 3.0, 768", H100, 768, 4_608, 190_724, OVERLAP),
        ("H100 CoreWeave 3.0, 3072", H100, 3_072, 12_288, 599_077, OVERLAP),
        ("H100 Eos 3.1, 3472", H100, 3_472, 13_888, 758_504, OVERLAP),
        ("H100 Lambda 4.1, 16", H100, 16, 768, 12_378, FP8),
        ("H100 Clemson 4.1, 48", H100, 48, 6_912, 45_903, FP8),
        ("H200 4.0, 8", H200, 8, 768, 7_972, FP8),
        ("H200 Oracle 5.0, 64", H200, 64, 4_608, 56_283, FP8),
        ("B200 5.0, 8", B200, 8, 768, 11_663, FP8),
        ("GB200 5.0, 64", GB200, 64, 4_608, 83_708, FP8),
        ("GB200 5.0, 512", GB200, 512, 8_192, 217_079, FP8),
        ("A100 DGX 2.0, 8", A100, 8, 448, 2_406, UNPADDED),
        ("A100 DGX 2.0, 1024", A100, 1_024, 4_096, 109_963, PACKED),
        ("A100 DGX 2.0, 4096", A100, 4_096, 16_384, 442_483, PACKED),
        ("A100 Azure 1.1, 8", A100, 8, 448, 2_261, UNPADDED_1_1),
        ("A100 Azure 1.1, 64", A100, 64, 3_072, 16_826, UNPADDED_1_1),
        ("A100 Azure 1.1, 1024", A100, 1_024, 3_072, 69_489, PADDED_1_1),
        ("A100 Azure 1.1, 2048", A100, 2_048, 6_144, 133_375, PADDED_1_1),
        ("A100 HPE 2.1, 16", HPE, 16, 448, 3_938, UNPADDED),
        ("A100 HPE 2.1, 128", HPE, 128, 6_144, 32_472, UNPADDED),
        ("A100-40 Dell 2.1, 4", DELL, 4, 256, 1_147, UNPADDED),
        ("A100-40 Dell 2.1, 16", DELL, 16, 448, 2_469, UNPADDED),
        ("A100-40 Dell 2.1, 64", DELL, 64, 3_072, 13_346, UNPADDED),
        ("A100-40 Dell 2.1, 128", DELL, 128, 3_072, 19_561, UNPADDED),
        ("A100-PCIe Dell 3.0, 16 (1 OPA)", PCIE_1, 16, 768, 1_956, UNPADDED),
        ("A100-PCIe Dell 3.0, 16 (2 OPA)", PCIE_2, 16, 768, 2_586, UNPADDED),
    )
)
EXAMPLE_RUNS = tuple(
    Run(f"{name} DeepLearningExamples, {gpus} (length {length})", cluster, gpus, rate, how, EXAMPLES, (part,))
    for name, cluster, gpus, rates, micros in (
        ("A100", A100, 1, (580, 210), (256, 128)),
        ("A100", A100, 8, (4_553, 1_648), (256, 128)),
        ("A100", A100, 64, (35_774, 13_005), (256, 128)),
        ("A100", A100, 256, (138_294, 49_663), (256, 128)),
        ("V100", DGX_1, 1, (224, 75), (64, 8)),
        ("V100", DGX_1, 8, (1_746, 586), (64, 8)),
    )
    for length, rate, how, part in (
        (128, rates[0], "padded to 128", Part(FULL_128, 65_536, micros[0])),
        (512, rates[1], "binned by 64", Part(BINNED_512, 32_768, micros[1])),
    )
)

WHOLE = "hours of the whole run"
# DeepSpeed's BERT tutorial: 403 M samples of 128 and 18-22 M (here 20 M) of 512, 64 and 8 a GPU at once
RECORD = (Part(FULL_128, 65_536, 64, 403e6), Part(FULL_512, 32_768, 8, 20e6))
# You et al. 2020, table 1: 900,000 + 100,000 updates of 512, against 7,037 + 1,562 of 64 Ki and 32 Ki
ADAMW = (Part(FULL_128, 512, 0, 900_000 * 512), Part(FULL_512, 512, 0, 100_000 * 512))
LAMB = (Part(FULL_128, 65_536, 0, 7_037 * 65_536), Part(FULL_512, 32_768, 0, 1_562 * 32_768))
OTHER_RUNS = (
    *(
        Run(f"V100 DeepSpeed, 1 (length {length})", DGX_2, 1, rate, f"padded to {length}", KERNELS, (part,))
        for length, rate, part in ((128, 272, Part(FULL_128, 65_536, 64)), (512, 52, Part(FULL_512, 32_768, 8)))
    ),
    *(
        Run(f"V100 DeepSpeed, {gpus}", DGX_2, gpus, 1 / (hours * 3_600), WHOLE, KERNELS, RECORD)
        for gpus, hours in ((16, 33 + 13 / 60), (64, 8 + 41 / 60), (256, 144 / 60), (1_024, 44 / 60))
    ),
    Run("TPU v3 LAMB paper, 16", TPU, 16, 1 / (81.4 * 3_600), WHOLE, XLA, ADAMW),
    Run("TPU v3 LAMB paper, 1024", TPU, 1_024, 1 / (76.2 * 60), WHOLE, XLA, LAMB),
)
RUNS = (*MLPERF_RUNS, *EXAMPLE_RUNS, *OTHER_RUNS)
