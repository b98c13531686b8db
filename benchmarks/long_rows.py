"""Measure memory and time of a step on one long packed row, by what ranks of ``cp`` exchange.

The model is a Llama of two layers, hidden size 128 and two heads, with a vocabulary of 2,048. Its
loss is computed in chunks of 4,096 tokens, so that attention is what memory is for. A cell is the
largest growth of a rank's resident memory in one step above what it held before, and the seconds of
that step, on shared cores. The losses of all rows of one length and document must agree.

Bounds: with documents of 2,048 tokens 450 MiB per rank at 16,384 tokens, and 2,200 at 131,072.

    python benchmarks/long_rows.py [--tokens 16384] [--documents 2048] [--only blocks,keys]
                                   [--nproc 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from distcore import RankInfo, Run, RunConfig, defaults, launch
from distcore_mesh.strategy import MeshStrategy

SINGLE = "single"
EXCHANGES = (SINGLE, "heads", "blocks", "keys")
VOCABULARY, CHUNK = 2048, 4096
BOUNDS = {(16_384, 2_048): 450.0, (131_072, 2_048): 2_200.0}
"""MiB of a rank by tokens and tokens of a document, of what makes no mask."""
WITHOUT_MASK = {"blocks", "keys"}


def main() -> int:
    """Measure, print a row for each exchange, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of the row")
    parser.add_argument("--documents", type=int, default=2_048, help="tokens of a document")
    parser.add_argument("--only", default="", help="such as blocks,keys; default: all")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name] or list(EXCHANGES)
    length, document = arguments.tokens, arguments.documents
    rows: list[dict[str, Any]] = []
    for exchange in only:
        ranks = 1 if exchange == SINGLE else arguments.nproc
        measured = launch(step_of_a_rank, exchange, length, document, nproc=ranks)
        rows.append(
            {
                "exchange": exchange,
                "ranks": ranks,
                "mib": max(mib for mib, *_ in measured),
                "seconds": max(seconds for _, seconds, _ in measured),
                "loss": measured[0][2],
            }
        )
        print(
            "{exchange:8} ranks {ranks}  {mib:7.0f} MiB  {seconds:6.1f} s  loss {loss:.6f}".format(
                **rows[-1]
            ),
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    bound = BOUNDS.get((length, document), float("inf"))
    too_large = [row for row in rows if row["exchange"] in WITHOUT_MASK and row["mib"] > bound]
    losses = [row["loss"] for row in rows]
    spread = (max(losses) - min(losses)) / max(losses)
    print(f"losses differ by {spread:.1e}; bound {bound:g} MiB: {'no' if too_large else 'held'}")
    return 1 if too_large or spread > 1e-6 else 0


def step_of_a_rank(exchange: str, length: int, document: int) -> tuple[float, float, float]:
    """Return the MiB and the seconds of a step, and its loss."""
    size = int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {}
    if exchange != SINGLE:
        options = {"cp": size, "cp_exchange": exchange}
    strategy = MeshStrategy(**options)
    config = RunConfig(device="cpu", nproc=size)
    world = strategy.setup(config, RankInfo(rank=int(os.environ["RANK"]), size=size))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=384,
            max_position_embeddings=2**18,
        )
    )
    run = Run(
        config=config, world=world, capabilities=strategy.capabilities, module=model, model=model
    )
    strategy.wrap_model(run, model, None)
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(0, VOCABULARY, (1, length), generator=generator)
    positions = (torch.arange(length) % document)[None]
    mean_loss(model, row[:, :256], positions[:, :256])  # kernels and threads are there then
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory counts from now on
    before = _memory("VmRSS")
    began = perf_counter()
    loss = mean_loss(model, row, positions)
    result = _memory("VmHWM") - before, perf_counter() - began, loss
    defaults.teardown(world)
    return result


def mean_loss(model: Any, row: Tensor, positions: Tensor) -> float:
    """Run forward and backward, and return the mean loss of the next tokens."""
    hidden = model.model(input_ids=row, position_ids=positions, use_cache=False)[0][0, :-1]
    targets = row[0, 1:]

    def loss_of(states: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.lm_head(states), labels, reduction="sum")

    chunks = zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True)
    losses = [checkpoint(loss_of, *chunk, use_reentrant=False) for chunk in chunks]
    loss = torch.stack(losses).sum() / len(targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _memory(key: str) -> float:
    """Return a number of the process's memory in MiB, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
