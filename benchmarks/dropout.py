"""CPU time of dropout: masks by row, masks by rank, and torch's own, in one alternating run.

``python benchmarks/dropout.py [--rows 16] [--length 48]``: forward and backward of a small BERT,
hidden and attention dropout 0.1, one thread. A ratio below 1 is faster than torch.

Bound: at 16 rows of 48 tokens masks by row take at most 1.0 of torch's time.

``python benchmarks/dropout.py --compiled`` compares the pool of masks with the same masks hashed
for each value, in
code that torch.compile makes: nanoseconds per value of dropout alone, and the seconds to
compile. Bound: equal bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from distcore.config import RunConfig
from distcore.model.dropout import BITS, draw_cheaply
from distcore.model.row_dropout import LOW, POOL, RowMasks, _mix, _salts, use_row_masks

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
WAYS = ("torch", "rank", "row", "off")
VALUES = ((16, 48, 256), (16, 48, 1024), (64, 128, 256))
"""Rows, tokens and features of dropout alone."""


def model_of(way: str) -> Any:
    torch.manual_seed(0)
    rate = 0.0 if way == "off" else 0.1
    shape = AutoConfig.for_model(
        "bert",
        **SHAPE,
        vocab_size=2000,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )
    model = AutoModelForSequenceClassification.from_config(shape).train()  # type: ignore[no-untyped-call]
    if way == "rank":
        draw_cheaply(RunConfig.model_validate({"device": "cpu"}), model)
    return model


def seconds_of(way: str, model: Any, tokens: torch.Tensor, mask: torch.Tensor, step: int) -> float:
    run: Any = SimpleNamespace(config=SimpleNamespace(dropout_masks=way))
    with use_row_masks(run) as masks:
        if masks:
            masks.key = step
            masks.begin_rows(np.arange(len(tokens)), tokens.device)
        begun = time.process_time()
        model(input_ids=tokens, attention_mask=mask).logits.square().sum().backward()
    return time.process_time() - begun


def hashed(
    x: torch.Tensor, rows: torch.Tensor, numbers: torch.Tensor, dropped: int
) -> torch.Tensor:
    """Dropout of ``(rows, tokens, features)`` by the masks of the pool, without a pool;
    ``numbers`` as of ``seeds``.
    """
    stride, start, salt = numbers.unbind()
    first = _mix(
        _mix((rows & LOW) ^ salt)[:, None] ^ _salts(torch.arange(x.shape[1], device=x.device))
    )
    place = (first & (POOL - 1))[..., None] + torch.arange(x.shape[2], device=x.device)
    values = (place >> 1).int() * stride.int() + start.int()
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1)):
        values = (values ^ ((values >> shift) & (2 ** (32 - shift) - 1))) * factor
    half = torch.where(place & 1 == 0, values, values >> 16) & (2**BITS - 1)
    signed = half - ((half >> (BITS - 1)) << BITS)
    return torch.where(
        signed >= dropped - 2 ** (BITS - 1), x * (2**BITS / (2**BITS - dropped)), 0.0
    )


def seeds(key: int) -> torch.Tensor:
    """The numbers that the pool and the masks of the first call of a forward pass follow from."""
    stride, start = (part % 2**32 - 2**31 for part in (key | 1, key >> 31))
    return torch.tensor([stride | 1, start, key & LOW])


def compare_values(rounds: int) -> int:
    """Print the time of each way for each of ``VALUES``; return 0 if masks have equal bits."""
    compiled, masks, wrong = torch.compile(hashed, dynamic=False), RowMasks(), 0
    dropped = round(0.1 * 2**BITS)
    for shape in VALUES:
        x, rows = torch.randn(shape), np.arange(shape[0])
        masks.key = 2**62 // 3
        begun = time.perf_counter()
        made = compiled(x, torch.from_numpy(rows), seeds(masks.key), dropped)
        seconds = time.perf_counter() - begun

        def by_pool(x: torch.Tensor = x, rows: np.ndarray = rows) -> torch.Tensor:
            masks.begin_rows(rows, x.device)
            mask = masks.mask(x, x.shape, 0.1)
            assert mask is not None
            return x * mask

        def in_code(x: torch.Tensor = x, rows: np.ndarray = rows) -> torch.Tensor:
            return compiled(x, torch.from_numpy(rows), seeds(masks.key), dropped)

        wrong += not torch.equal(made, by_pool())
        ways: dict[str, Callable[[], object]] = {"pool": by_pool, "compiled": in_code}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, act in ways.items():
                begun = time.perf_counter()
                act()
                times[way].append(time.perf_counter() - begun)
        each = {way: 1e9 * statistics.median(spent) / x.numel() for way, spent in times.items()}
        print(
            f"{shape}: pool {each['pool']:.2f} ns, compiled {each['compiled']:.2f} ns, after"
            f" {seconds:.0f} s"
        )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.compiled:
        return compare_values(arguments.rounds)
    tokens = torch.randint(5, 2000, (arguments.rows, arguments.length))
    mask = torch.ones_like(tokens)
    mask[::2, arguments.length // 2 :] = 0
    models = {way: model_of(way) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds + 1):
        for way in WAYS:
            spent = seconds_of(way, models[way], tokens, mask, number + 1)
            if number:  # the first round warms up
                times[way].append(spent)
    ratios = {}
    for way in WAYS:
        median = statistics.median(times[way])
        ratios[way] = ratio = statistics.median(
            one / other for one, other in zip(times[way], times["torch"], strict=True)
        )
        print(f"{way:6} {1000 * median:8.1f} ms of CPU a step, {ratio:.3f} of torch's")
    return int(arguments.length >= 48 and ratios["row"] > 1.0)


if __name__ == "__main__":
    sys.exit(main())
