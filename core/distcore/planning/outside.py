"""What a GPU needs beside the tensors of torch's allocator, and where each figure is from."""

from __future__ import annotations

OTHER = {
    "CUDA context": "not known: it depends on GPU, driver and the kernels that are loaded; nvidia-smi shows it",
    "NCCL buffers": "not known in all: NCCL_BUFFSIZE, 4 MiB by default, for each pair of GPUs (NCCL's documentation)",
    "fragmentation": "not known: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lessens it (torch's notes on CUDA)",
}
"""Each as a line of its own: name, and what is known of it."""
