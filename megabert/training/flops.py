"""Floating-point operations of training, counted from shapes, and the peaks that GPUs are sold with."""

from __future__ import annotations

import re

from megabert.config import ModelConfig

# Dense 16-bit tensor-core TFLOP/s with fp32 accumulation, of NVIDIA's datasheets (which print sparse figures, twice these,
# from A100 on); the first pattern that is in `torch.cuda.get_device_name()` counts. V100 has fp16 only.
DATASHEET_TFLOPS = {
    r"\bGB200\b": 2500.0,  # GB200 NVL72 datasheet, a GPU
    r"\bB200\b": 2250.0,  # HGX B200 datasheet
    r"\bH100 PCIe\b": 756.0,  # H100 datasheet, 2022
    r"\bH100 NVL\b": 835.5,  # H100 datasheet, 2024
    r"\b(H100|H200|GH200)\b": 989.0,  # H100 SXM, H200 and GH200 datasheets
    r"\bA100\b": 312.0,  # A100 datasheet, SXM and PCIe
    r"\bL40S\b": 362.0,  # L40S datasheet
    r"\bRTX 4090\b": 165.2,  # NVIDIA Ada GPU architecture, appendix A
    r"\bV100-PCIE\b": 112.0,  # V100 datasheet
    r"\bV100\b": 125.0,  # V100 datasheet, SXM2
}


def datasheet_tflops(device_name: str) -> float | None:
    """Dense bf16 (V100: fp16) peak of a GPU in TFLOP/s by its datasheet, None where it is not in the table."""
    return next((peak for name, peak in DATASHEET_TFLOPS.items() if re.search(name, device_name)), None)


def attending_pairs(squares: float, tokens: float, causal: bool) -> float:
    """How many (query, key) pairs sequences have whose lengths sum to `tokens` and their squares to `squares`."""
    return (squares + tokens) / 2 if causal else squares


def training_flops(model: ModelConfig, tokens: int, pairs: int, predictions: int, sequences: int) -> float:
    """FLOPs of forward and backward over `tokens` real tokens in `sequences`, with `pairs` of a query and a key.

    6 per weight and token for the matrix products, 12·d a layer for each pair of attending tokens, and the vocabulary
    product on predicted positions only (Kaplan et al. 2020, section 2.1, without embeddings).
    """
    d, ffn = model.hidden, model.ffn
    encoder = 6 * model.layers * (4 * d * d + d * (model.ffn_inputs + ffn)) * tokens
    attention = 12 * model.layers * d * pairs
    heads = 6 * (model.vocab_size * d + d * d) * predictions + (6 * d * d * sequences if model.nsp else 0)
    return float(encoder + attention + heads)
