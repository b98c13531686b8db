"""CPU time of dropout: masks by row, masks by rank, and torch's own, in one alternating run.

``python benchmarks/dropout.py [--rows 16] [--length 48]``: forward and backward of a small BERT, hidden and attention
dropout 0.1, one thread. A ratio below 1 is faster than torch.

Bound: at 16 rows of 48 tokens masks by row take at most 1.0 of torch's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from distcore.config import RunConfig
from distcore.model.dropout import draw_cheaply
from distcore.model.row_dropout import use_row_masks

SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
WAYS = ("torch", "rank", "row", "off")


def model_of(way: str) -> Any:
    torch.manual_seed(0)
    rate = 0.0 if way == "off" else 0.1
    shape = AutoConfig.for_model(
        "bert", **SHAPE, vocab_size=2000, hidden_dropout_prob=rate, attention_probs_dropout_prob=rate
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
