"""Search of the fastest settings among those that each library documents for speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Flags = Mapping[str, Any]
GAIN = 0.02
"""Smallest relative gain for which a flag is kept."""
GROUPED: Flags = {"train_sampling_strategy": "group_by_length"}
HF: list[Flags] = [
    GROUPED,
    {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    {"torch_compile": True},
    {"pad_to_multiple_of": 8},
    {"attn_implementation": "eager"},
    {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    {"dataloader_pin_memory": False},
    {"logging_steps": 500},
    {"optim": "adamw_torch"},
]
"""https://huggingface.co/docs/transformers/perf_train_gpu_one and trainer, as far as
they concern a CPU.
"""
FLAGS: dict[str, list[Flags]] = {
    "by-hand": [
        {"accumulate": 2},
        {"accumulate": 4},
        {"compile": True},
        {"channels_last": True},
        {"pad_to_multiple_of": 8},
        {"attn_implementation": "eager"},
        {"num_workers": 1},
    ],  # https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    "trainer": HF,
    "trl": [
        GROUPED,
        {"packing": True},
        {"packing": True, "packing_strategy": "wrapped"},
        *HF[1:4],
        *HF[5:],
    ],  # https://huggingface.co/docs/trl/speeding_up_training and reducing_memory_usage
    "accelerate": [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 4},
        {"dynamo_backend": "inductor"},
        {"pad_to_multiple_of": 8},
        {"attn_implementation": "eager"},
        {"num_workers": 1},
    ],  # https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation and compilation
    "lightning": [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 4},
        {"compile": True},
        {"barebones": True},
        {"pad_to_multiple_of": 8},
        {"attn_implementation": "eager"},
        {"num_workers": 1},
    ],  # https://lightning.ai/docs/pytorch/stable/advanced/speed.html
}


def fits(job: str, flags: Flags) -> bool:
    """Return True if the flags concern the job: images have no length and no
    attention, texts no channels.
    """
    of_texts = {"train_sampling_strategy", "pad_to_multiple_of", "attn_implementation"}
    if job == "images":
        return not of_texts & set(flags)
    return "channels_last" not in flags and not (job == "lm" and "pad_to_multiple_of" in flags)


def search(
    job: str,
    libraries: list[str],
    minutes: float,
    run: Callable[[str, Flags], float | str],
) -> tuple[str, Flags]:
    """Return the fastest library with its fastest flags, after at most ``minutes``.

    ``run`` returns the cost of a library with flags, or why there is none. Each library is run with
    its defaults. Then one of them tries its next flag beside those that it has kept: in
    every second trial the cheapest one that has a flag left, in the others each in turn.
    """
    deadline = time.monotonic() + 60 * minutes
    kept: dict[str, Flags] = {name: {} for name in libraries}
    cost = {name: _tell(name, {}, run(name, {})) for name in libraries}
    left = {name: [flags for flags in FLAGS[name] if fits(job, flags)] for name in libraries}
    turn = 0
    while time.monotonic() < deadline and any(left.values()):
        order = sorted((name for name in libraries if left[name]), key=lambda name: cost[name])
        # every second trial goes to the others in turn
        name = order[turn % len(order)] if turn % 2 else order[0]
        turn += 1
        flags = {**kept[name], **left[name].pop(0)}
        spent = _tell(name, flags, run(name, flags))
        if spent < (1 - GAIN) * cost[name]:
            kept[name], cost[name] = flags, spent
    tried = sum(
        len([flags for flags in FLAGS[name] if fits(job, flags)]) - len(left[name])
        for name in libraries
    )
    print(f"{tried} flags tried, {sum(map(len, left.values()))} left")
    best = min(libraries, key=lambda name: cost[name])
    return best, kept[best]


def _tell(name: str, flags: Flags, spent: float | str) -> float:
    said = spent.strip().splitlines()[-1] if isinstance(spent, str) else f"{spent:.2f}"
    print(f"  {name} {dict(flags)}: {said}", file=sys.stderr, flush=True)
    return float("inf") if isinstance(spent, str) else spent
