"""Defaults for the cut of steps into micro-batches, and a description of the cut."""

from __future__ import annotations

from distcore.config import RunConfig
from distcore.plugin.batching.columns import common_value
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.task.task import Datasets, Task
from distcore.resolve import padding_free

TOKENS, CPU_TOKENS = 8192, 4096
"""Most padded tokens of a micro-batch, on an accelerator and on a CPU: they keep it busy,
and fit into memory.
"""
FORWARD, CPU_FORWARD = 4096, 96
"""Fixed cost of a micro-batch, in tokens, on an accelerator and on a CPU. Both are
estimates without a benchmark.
"""


def micro_batch_tokens(config: RunConfig) -> int | None:
    """Return the most tokens of a micro-batch; ``None`` if the user gave its rows alone."""
    if config.micro_batch_tokens is not None or config.micro_batch_size != "auto":
        return config.micro_batch_tokens
    return CPU_TOKENS if config.device == "cpu" else TOKENS


def length_grouping(config: RunConfig, task: Task) -> str:
    """Return ``loader.length_grouping``; 'auto' has no windows where they were
    measured to save nothing.

    It depends on device, precision and model alone. Strategy, compilation and padding may change
    on a resume or in a trial of ``tune``, and must not change the order of rows.
    """
    if config.loader.length_grouping != "auto":
        return config.loader.length_grouping
    slow = config.device == "cpu" and config.precision == "fp32"  # matrix products dominate
    return "batch" if slow and padding_free.is_supported(task) else "window"


def forward_tokens(config: RunConfig, declared: Capabilities) -> int:
    """Return the overhead of one extra forward pass, in tokens."""
    if config.loader.forward_tokens != "auto":
        return config.loader.forward_tokens
    # Under ``exact`` no strategy has a part in how rows are computed.
    factor = declared.forward_cost if config.exact is None else 1.0
    return round((CPU_FORWARD if config.device == "cpu" else FORWARD) * factor)


def most_micro_batches(config: RunConfig, shards: int) -> int:
    """Return the most micro-batches of a rank in a step, for a resolved config."""
    rows = 1 if config.micro_batch_tokens is not None else int(config.micro_batch_size)
    if config.exact is not None:
        blocks = max(config.exact, -(-config.global_batch_size // rows))
        return -(-blocks // shards)
    return max(1, config.global_batch_size // (rows * shards))


def cut(config: RunConfig) -> dict[str, int | None]:
    """Return how a resolved config cuts its steps, for the report."""
    size = config.micro_batch_size
    cost = config.loader.forward_tokens
    return {
        "rows": None if size == "auto" else size,
        "tokens": config.micro_batch_tokens,
        "forward_tokens": None if cost == "auto" else cost,
    }


def description(config: RunConfig, data: Datasets) -> str:
    """Return one line that says how a resolved config cuts its steps."""
    size, tokens = config.micro_batch_size, config.micro_batch_tokens
    if tokens is None:
        return f"micro-batches: at most {size} rows, equally many in each"
    if common_value(data.train.lengths) == 1:  # rows without tokens
        return f"micro-batches: at most {tokens if size == 'auto' else min(size, tokens)} rows"
    bounds = " and ".join([*([] if size == "auto" else [f"{size} rows"]), f"{tokens} tokens"])
    padding = "padding included" if config.pads_rows else "without padding"
    return f"micro-batches: at most {bounds}, {padding}"
