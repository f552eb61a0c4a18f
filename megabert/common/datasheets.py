"""Peaks of GPUs by their datasheets."""

from __future__ import annotations

import re

# Dense 16-bit tensor-core TFLOP/s with fp32 accumulation, from NVIDIA's datasheets (from A100 on these print sparse figures,
# twice as high), for the first pattern in `torch.cuda.get_device_name()`. V100 has only fp16.
DATASHEET_TFLOPS = {
    r"\bGB200\b": 2500.0,  # GB200 NVL72 datasheet, a GPU
    r"\bB200\b": 2250.0,  # HGX B200 datasheet
    r"\bH100 PCIe\b": 756.0,  # H100 datasheet, 2022
    r"\b(H100|H200) NVL\b": 835.5,  # H100 and H200 datasheets, 2024
    r"\b(H100|H200|GH200)\b": 989.0,  # H100 SXM, H200 and GH200 datasheets
    r"\bA100\b": 312.0,  # A100 datasheet, SXM and PCIe
    r"\bA30\b": 165.0,  # A30 datasheet
    r"\bRTX A5000\b": 111.1,  # RTX A5000 datasheet
    r"\bL40S\b": 362.0,  # L40S datasheet
    r"\bL40\b": 181.0,  # L40 datasheet
    r"\bL4\b": 121.0,  # L4 datasheet
    r"\bRTX 4090\b": 165.2,  # NVIDIA Ada GPU architecture, appendix A
    r"\bV100-PCIE\b": 112.0,  # V100 datasheet
    r"\bV100\b": 125.0,  # V100 datasheet, SXM2
}


def datasheet_tflops(device_name: str) -> float | None:
    """Dense bf16 (V100: fp16) peak of a GPU in TFLOP/s by its datasheet; None if it is not in the table."""
    return next((peak for name, peak in DATASHEET_TFLOPS.items() if re.search(name, device_name)), None)
