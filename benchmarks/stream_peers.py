"""Measure how fast shuffled rows come, beside mosaicml-streaming, webdataset,
litdata and datasets' streaming.

    make shards; build/shards/bin/python benchmarks/stream_peers.py [--rows 50000] [--workers 0 1 2]

Labeled texts of some 40 words lie in shards of 4,096 rows on the local disk: MDS, tar, chunks
of litdata and Parquet. Each package shuffles the shards that it is made for, in batches of 256
rows, through torch's DataLoader with 0 to 2
workers. ``by distcore``: the same shards, read by number in windows of shards, through the
same DataLoader. Batches are texts and labels, which a run would still tokenize.

Apart from these, batches of tokens, padded, by distcore's own loader: ``from the cache`` that its
first run makes of tar shards (``read``, seconds, once, which no column counts), and ``as
streamed``: texts of the same shards are read, tokenized and masked when their step comes. Wall and
CPU time of an epoch, processes of workers included; of each the best of 3.

Bound: with each number of workers distcore reads each kind of shard in no more CPU time than the
package that it is for, and gives tokens from the cache in less than any package gives texts.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
import tarfile
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SHARD, BATCH, ROUNDS = 4096, 256, 3
Epoch = Callable[[int], Iterable[Any]]
"""Return the batches of an epoch, with so many workers; the length of a batch's last value is
its number of rows.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "DISTCORE_CACHE": f"{folder}/cache",
            "HF_HOME": f"{folder}/hub",
            "TOKENIZERS_PARALLELISM": "false",
        }
        start = time.perf_counter()
        write(Path(folder), asked.rows)
        print(f"{asked.rows} rows written in {time.perf_counter() - start:.0f} s")
        epochs = {name: make(Path(folder), asked.rows) for name, make in MAKERS.items()}
        print(f"{'rows':24} {'workers':>7} {'rows/s':>9} {'us CPU/row':>11}")
        slower = [
            name for workers in asked.workers for name in compared(epochs, workers, asked.rows)
        ]
    raise SystemExit(f"a bound does not hold: {', '.join(slower)}" if slower else 0)


def compared(epochs: dict[str, Epoch], workers: int, rows: int) -> list[str]:
    """Print the rates with so many workers; return where distcore takes more CPU time."""
    costs: dict[str, float] = {}
    for name, epoch in epochs.items():
        walls, cpus = zip(*(measured(epoch, workers, rows) for _ in range(ROUNDS)), strict=True)
        costs[name] = min(cpus)
        print(
            f"{name:24} {workers:7} {rows / min(walls):9.0f} {min(cpus) / rows * 1e6:11.1f}",
            flush=True,
        )
    slow = [name for name in PACKAGES if costs[f"{PACKAGES[name]} by distcore"] > costs[name]]
    slow += [name for name in PACKAGES if costs["from the cache"] > costs[name]]
    return [f"{name} with {workers} workers is faster" for name in dict.fromkeys(slow)]


def measured(epoch: Epoch, workers: int, rows: int) -> tuple[float, float]:
    """Return wall and CPU seconds of an epoch."""
    wall, before = time.perf_counter(), os.times()
    seen = sum(len(batch[-1]) for batch in epoch(workers))
    after = os.times()
    # some drop what does not fill a batch of each worker
    assert seen >= 0.95 * rows, f"{seen} of {rows} rows"
    cpu = sum(after[:4]) - sum(before[:4])
    return time.perf_counter() - wall, cpu


def texts(rows: int) -> Iterator[tuple[str, int]]:
    random = np.random.default_rng(0)
    words = [f"w{number:x}" for number in range(5000)]
    for label in random.integers(0, 4, rows).tolist():
        yield (
            " ".join(words[place] for place in random.zipf(1.3, 40).tolist() if place < 5000)
            or "none",
            label,
        )


def write(folder: Path, rows: int) -> None:
    """Write the rows in the form of each package, by its own writer."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from litdata import optimize

    spec = importlib.util.find_spec("streaming")
    assert spec is not None
    # its own imports torchvision
    sys.modules["streaming"] = package = types.ModuleType("streaming")
    package.__path__ = list(spec.submodule_search_locations or [])
    from streaming.base import MDSWriter

    (folder / "tar").mkdir()
    (folder / "parquet").mkdir()
    with MDSWriter(
        out=str(folder / "mds"), columns={"text": "str", "label": "int"}, size_limit=2**20
    ) as mds:
        for text, label in texts(rows):
            mds.write({"text": text, "label": label})
    numbered = list(enumerate(texts(rows)))
    for shard, first in enumerate(range(0, rows, SHARD)):
        some = numbered[first : first + SHARD]
        with tarfile.open(folder / "tar" / f"{shard:05}.tar", "w") as tar:
            for number, (text, label) in some:
                for extension, content in (("txt", text.encode()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:08}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        table = pa.table(
            {"text": [text for _, (text, _) in some], "label": [label for _, (_, label) in some]}
        )
        pq.write_table(table, folder / "parquet" / f"{shard:05}.parquet")
    optimize(
        fn=as_row,
        inputs=[row for _, row in numbered],
        output_dir=str(folder / "lit"),
        chunk_size=SHARD,
        num_workers=1,
        start_method="fork",
    )


def as_row(row: tuple[str, int]) -> dict[str, Any]:
    return {"text": row[0], "label": row[1]}


def collated(rows: list[dict[str, Any]]) -> tuple[list[str], Any]:
    import torch

    return [row["text"] for row in rows], torch.tensor([row["label"] for row in rows])


def loader(kind: Any, dataset: Any, workers: int) -> Any:
    return kind(dataset, batch_size=BATCH, num_workers=workers, collate_fn=collated)


def of_streaming(folder: Path, rows: int) -> Epoch:
    from streaming.base import StreamingDataset
    from torch.utils.data import DataLoader

    def epoch(workers: int) -> Any:
        dataset = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1
        )
        return loader(DataLoader, dataset, workers)

    return epoch


def of_webdataset(folder: Path, rows: int) -> Epoch:
    import webdataset
    from torch.utils.data import DataLoader

    def epoch(workers: int) -> Any:
        shards = sorted(map(str, (folder / "tar").iterdir()))
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        dataset = dataset.shuffle(8 * SHARD).decode().rename(text="txt", label="cls")
        return loader(DataLoader, dataset, workers)

    return epoch


def of_litdata(folder: Path, rows: int) -> Epoch:
    from litdata import StreamingDataLoader, StreamingDataset

    return lambda workers: loader(
        StreamingDataLoader, StreamingDataset(str(folder / "lit"), shuffle=True), workers
    )


def of_datasets(folder: Path, rows: int) -> Epoch:
    import datasets
    from torch.utils.data import DataLoader

    files = sorted(map(str, (folder / "parquet").iterdir()))
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return lambda workers: loader(
        DataLoader, stream.shuffle(seed=0, buffer_size=8 * SHARD), workers
    )


class NumberedBatches:
    """Batches of rows that are read by number; a dataset of torch."""

    def __init__(self, source: Path, rows: int) -> None:
        from distcore_data import IndexedRows, WindowedRows

        self.rows = IndexedRows(source, {"columns.text": "text", "columns.label": "label"})
        bounds = self.rows.pieces(1024)  # as of a run that streams
        self.order = WindowedRows(bounds=bounds, window=8 * SHARD // 1024)(0, 0)

    def __len__(self) -> int:
        return -(-len(self.rows) // BATCH)

    def __getitem__(self, batch: int) -> tuple[list[str], Any]:
        places = np.arange(batch * BATCH, min((batch + 1) * BATCH, len(self.rows)))
        records: Any = self.rows[self.order[places]]
        return collated([{"text": text, "label": label} for text, label in records])


def of_numbered(kind: str, folder: Path, rows: int) -> Epoch:
    from torch.utils.data import DataLoader

    batches: Any = NumberedBatches(folder / kind, rows)
    return lambda workers: DataLoader(
        batches, batch_size=None, num_workers=workers, collate_fn=as_they_are
    )


def as_they_are(batch: Any) -> Any:
    """Return a batch that is collated already, without the loader's look at each text."""
    return batch


def of_distcore(folder: Path, rows: int) -> Epoch:
    from distcore_tasks.shared.options import Order
    from distcore_tasks.text_classification.task import TextClassification

    return epochs_of(
        TextClassification(
            data=str(folder / "tar"), model="bert-tiny", eval_fraction=BATCH / rows,
            order=Order(kind="windows", window_shards=8 * SHARD // 64),
        )
    )  # fmt: skip


def of_streamed(folder: Path, rows: int) -> Epoch:
    from distcore_tasks.masked_lm.task import MaskedLM
    from distcore_tasks.shared.options import Order

    return epochs_of(
        MaskedLM(
            data=str(folder / "tar"), stream=True, split_texts=False, eval_fraction=BATCH / rows,
            order=Order(kind="windows", window_shards=8 * SHARD // 64),
        )
    )  # fmt: skip


def epochs_of(task: Any) -> Epoch:
    from distcore import RunConfig
    from distcore.engine.loader import MicroBatches
    from distcore.plugin.batching.sampling import rank_sampler, training_plan
    from distcore_tasks.rows.dataset import RowDataset

    start = time.perf_counter()
    config = RunConfig(
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        loader={"length_grouping": "batch"},
        device="cpu",
    )
    data = task.prepare(config).train
    print(f"distcore: read in {time.perf_counter() - start:.0f} s")
    plan = training_plan(config, data)

    def epoch(workers: int) -> Iterator[tuple[Any, Any]]:
        own = config.model_copy(
            update={"loader": config.loader.model_copy(update={"workers": workers})}
        )
        # a copy is without the rows of the epoch before
        rows = replace(data, table=copy(data.table)) if isinstance(data, RowDataset) else data
        batches = MicroBatches(rows, rank_sampler(plan, 0, 1), own)
        for micro, batch in batches.stream(0, range(plan.steps)):
            yield batch, micro.indices

    return epoch


PACKAGES = {"streaming": "MDS", "webdataset": "tar", "litdata": "chunks", "datasets": "Parquet"}
"""Each package, and the shards that it is for."""
MAKERS: dict[str, Callable[[Path, int], Epoch]] = {
    "streaming": of_streaming,
    "MDS by distcore": partial(of_numbered, "mds"),
    "webdataset": of_webdataset,
    "tar by distcore": partial(of_numbered, "tar"),
    "litdata": of_litdata,
    "chunks by distcore": partial(of_numbered, "lit"),
    "datasets": of_datasets,
    "Parquet by distcore": partial(of_numbered, "parquet"),
    "from the cache": of_distcore,
    "as streamed": of_streamed,
}
if __name__ == "__main__":
    main()
