"""Writer of safetensors files: byte for byte what the library writes, with the SHA-256 of what went to the disk.

The library itself makes a file that its owner alone may read, copies every tensor once more while it holds Python's lock,
and leaves the hashing to a second reading. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
CHUNK = 16 << 20  # bytes that are hashed and written in turn


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write tensors durably, as the process's umask says; the file's "bytes" and "sha256". Raises OSError naming it."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name in ordered:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with path.open("wb", buffering=1 << 20) as file:
            for part in (len(text).to_bytes(8, "little"), text):
                file.write(part)
                digest.update(part)
            for name in ordered:
                flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                for first in range(0, len(flat), CHUNK):
                    file.write(flat[first : first + CHUNK])
                    digest.update(flat[first : first + CHUNK])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return {"bytes": 8 + len(text) + position, "sha256": digest.hexdigest()}
