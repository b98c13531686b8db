"""Format 2: boxes of a tensor make one checkpoint, a regular grid is one entry, and any
part is read back.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import write
from torch import Tensor

from distcore import Box, Piece
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.boxes import BoxEntry, problem_of_boxes
from distcore.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FileEntry,
    RankManifest,
    TensorEntry,
    _check_place,
    checksum_line,
    merge_tensors,
    parse,
    text_of,
)
from distcore.errors import CheckpointError
from distcore.plugin.strategy.state import State

WHOLE = torch.arange(7 * 10 * 3, dtype=torch.float32).reshape(7, 10, 3)


def cut(tensor: Tensor, *parts: int) -> list[Box]:
    """The boxes of a mesh that splits each dimension as ``torch.chunk`` does,
    empty ones left out.
    """
    ranges = []
    for length, number in zip(tensor.shape, parts, strict=True):
        step = -(-length // number)
        ranges.append([(at, min(step, length - at)) for at in range(0, length, step)])
    boxes = []
    for corner in itertools.product(*ranges):
        values = tensor[tuple(slice(at, at + n) for at, n in corner)]
        boxes.append(Box(values, tuple(at for at, _ in corner), tuple(tensor.shape)))
    return boxes


def saved(folder: Path, boxes: list[Box]) -> Checkpoint:
    return Checkpoint(
        write(folder, [{"model/weight": box, "model/bias": torch.ones(3)} for box in boxes])
    )


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (3, 2, 1), (2, 3, 3), (7, 10, 1)]
)
def test_a_mesh_of_boxes_is_one_entry_and_comes_back(
    tmp_path: Path, mesh: tuple[int, int, int]
) -> None:
    checkpoint = saved(tmp_path, cut(WHOLE, *mesh))
    entry = checkpoint.entry("model/weight")
    assert entry.grid is not None
    assert entry.boxes is None
    assert torch.equal(checkpoint["model/weight"], WHOLE)
    assert torch.equal(checkpoint.piece("model/weight", 17, 101), WHOLE.reshape(-1)[17:118])
    assert torch.equal(checkpoint.box("model/weight", (1, 2, 1), (5, 7, 2)), WHOLE[1:6, 2:9, 1:3])
    assert checkpoint.box("model/weight", (0, 3, 0), (0, 2, 3)).shape == (0, 2, 3)


def test_boxes_that_make_no_grid_are_listed_and_come_back(tmp_path: Path) -> None:
    shape = (7, 10, 3)
    boxes = [
        Box(WHOLE[:3], (0, 0, 0), shape),
        Box(WHOLE[3:, :4], (3, 0, 0), shape),
        Box(WHOLE[3:, 4:], (3, 4, 0), shape),
    ]
    checkpoint = saved(tmp_path, boxes)
    assert checkpoint.entry("model/weight").grid is None
    assert torch.equal(checkpoint["model/weight"], WHOLE)
    assert torch.equal(checkpoint.box("model/weight", (2, 3, 0), (3, 4, 3)), WHOLE[2:5, 3:7])


@pytest.mark.parametrize("limit", [4, 24, 100])
def test_a_box_larger_than_a_file_is_cut_along_a_dimension_that_can_be(
    tmp_path: Path, limit: int
) -> None:
    thin = WHOLE[:, 3:4]
    boxes: list[State] = [
        {"model/weight": Box(thin[:1], (0, 0, 0), (7, 1, 3))},
        {
            "model/weight": Box(thin[1:], (1, 0, 0), (7, 1, 3)),
            "model/bias": Box(torch.ones(1), (0,), (1,)),
        },
    ]
    checkpoint = Checkpoint(write(tmp_path, boxes, limit=limit))
    assert torch.equal(checkpoint["model/weight"], thin)
    sizes = [file.stat().st_size for file in checkpoint.path.glob("model-*.safetensors")]
    assert len(sizes) >= 4 * thin.numel() // limit


def test_a_rank_may_hold_several_boxes(tmp_path: Path) -> None:
    every = cut(WHOLE, 4, 2, 1)
    states: list[State] = [{"model/weight": tuple(every[rank::2])} for rank in range(2)]
    assert torch.equal(Checkpoint(write(tmp_path, states))["model/weight"], WHOLE)


def test_a_box_is_read_from_pieces_too(tmp_path: Path) -> None:
    flat = WHOLE.reshape(-1)
    states: list[State] = [
        {"model/weight": Piece(flat[a:b], a, (7, 10, 3))} for a, b in ((0, 44), (44, 210))
    ]
    checkpoint = Checkpoint(write(tmp_path, states))
    assert torch.equal(checkpoint.box("model/weight", (1, 2, 1), (5, 7, 2)), WHOLE[1:6, 2:9, 1:3])


def test_a_replica_of_a_box_is_kept_once(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [*cut(WHOLE, 2, 2, 1), *cut(WHOLE, 2, 2, 1)])
    assert torch.equal(checkpoint["model/weight"], WHOLE)


def test_a_box_that_says_that_it_is_a_replica_is_not_even_written(tmp_path: Path) -> None:
    first = cut(WHOLE, 1, 2, 1)
    path = write(
        tmp_path,
        [{"model/weight": box} for box in (*first, *(replace(box, replica=True) for box in first))],
    )
    assert torch.equal(Checkpoint(path)["model/weight"], WHOLE)
    assert sorted(file.name for file in path.glob("model-*")) == [
        f"model-0000{rank}-000.safetensors" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("leave_out", "message"), [(slice(1, None), "leave a gap at"), (slice(0, 3), "leave a gap at")]
)
def test_boxes_with_a_gap_are_no_checkpoint(tmp_path: Path, leave_out: slice, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"'model/weight': boxes {message}"):
        saved(tmp_path, cut(WHOLE, 2, 2, 1)[leave_out])


def as_format_1(path: Path) -> Path:
    """Rewrite the manifest of a checkpoint as format 1 had it, with its checksum."""
    manifest = json.loads((path / MANIFEST).read_text()) | {"format": 1}
    text = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(checksum_line(text))
    return path


def test_format_1_is_read_and_has_no_boxes(tmp_path: Path) -> None:
    flat = WHOLE.reshape(-1)
    pieces: list[State] = [
        {"model/weight": Piece(flat[a:b], a, (7, 10, 3))} for a, b in ((0, 44), (44, 210))
    ]
    checkpoint = Checkpoint(as_format_1(write(tmp_path / "pieces", pieces)))
    checkpoint.verify()
    assert torch.equal(checkpoint["model/weight"], WHOLE)
    boxes: list[State] = [{"model/weight": box} for box in cut(WHOLE, 2, 1, 1)]
    with pytest.raises(CheckpointError, match="expected pieces, boxes or a grid"):
        Checkpoint(as_format_1(write(tmp_path / "boxes", boxes)))


def entry(offset: list[int], size: list[int]) -> BoxEntry:
    return BoxEntry(file="model-00000-000.safetensors", key="weight@0", offset=offset, size=size)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([([0, 0], [2, 3]), ([1, 0], [3, 3])], r"boxes overlap at \[1, 0\]"),
        ([([0, 0], [4, 2])], r"boxes leave a gap at \[0, 2\]"),
        ([([0, 0], [4, 4])], r"does not lie inside \[4, 3\]"),
        ([([0], [4])], "a box of 1 dimensions in a tensor of 2"),
        ([([0, 0], [0, 3]), ([0, 0], [4, 3])], "does not lie inside"),
    ],
)
def test_boxes_that_do_not_fit_are_one_line(
    boxes: list[tuple[list[int], list[int]]], message: str
) -> None:
    problem = problem_of_boxes([entry(offset, size) for offset, size in boxes], [4, 3])
    assert problem is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


LAYER = {
    "self_attn.q_proj": (8192, 8192),
    "self_attn.k_proj": (1024, 8192),
    "self_attn.v_proj": (1024, 8192),
    "self_attn.o_proj": (8192, 8192),
    "mlp.gate_proj": (28672, 8192),
    "mlp.up_proj": (28672, 8192),
    "mlp.down_proj": (8192, 28672),
    "input_layernorm": (8192,),
    "post_attention_layernorm": (8192,),
}
LLAMA_70B = {
    f"layers.{layer}.{name}.weight": shape for layer in range(80) for name, shape in LAYER.items()
}
LLAMA_70B |= {
    "embed_tokens.weight": (128256, 8192),
    "norm.weight": (8192,),
    "lm_head.weight": (128256, 8192),
}


def share_of(rank: int, replicate: int = 128, shard: int = 8) -> RankManifest:
    """The share of one of 1,024 ranks: blocks of rows over 128 ranks, blocks of columns over 8."""
    row, column = divmod(rank, shard)
    tensors = {}
    for bare, shape in LLAMA_70B.items():
        for name in (f"model/{bare}", f"optimizer/{bare}/exp_avg", f"optimizer/{bare}/exp_avg_sq"):
            part, _, rest = name.partition("/")
            if len(shape) == 1:
                size, offset = (
                    [shape[0] // (replicate * shard)],
                    [rank * shape[0] // (replicate * shard)],
                )
            else:
                size = [shape[0] // replicate, shape[1] // shard]
                offset = [row * size[0], column * size[1]]
            key = f"{rest}@{','.join(map(str, offset))}"
            box = BoxEntry.model_construct(
                file=f"{part}-{rank:05d}-000.safetensors", key=key, offset=offset, size=size
            )
            tensors[name] = TensorEntry.model_construct(dtype="F32", shape=list(shape), boxes=[box])
    digest = FileEntry(size=2**30, sha256="0" * 64)
    return RankManifest(
        files={f"{part}-{rank:05d}-000.safetensors": digest for part in ("model", "optimizer")},
        tensors=tensors,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_manifest_of_70_billion_parameters_over_1024_ranks_is_small_and_read_soon(
    tmp_path: Path,
) -> None:
    shares = [share_of(rank) for rank in range(1024)]
    files = {name: one for share in shares for name, one in share.files.items()}
    files["state.json"] = FileEntry(size=1, sha256="0" * 64)
    text = text_of(RankManifest(files=files, tensors=merge_tensors(shares)))
    assert all("grid" in one for one in json.loads(text)["tensors"].values())
    assert len(text) < 50e6
    started = time.process_time()
    parse(text, tmp_path / "manifest.json")
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("file", "key"),
    [("model-00000-000.safetensors", "other@0"), ("optimizer-00000-000.safetensors", "weight@0")],
)
def test_a_part_under_another_name_or_in_a_file_of_another_kind_is_refused(
    file: str, key: str
) -> None:
    box = BoxEntry(file=file, key=key, offset=[0, 0], size=[4, 3])
    with pytest.raises(
        ValueError, match=r"tensor 'model/weight': expected under 'weight@0' in a file model-…"
    ):
        _check_place("model/weight", box, "weight@0", "model")
    _check_place("model/weight", entry([0, 0], [4, 3]), "weight@0", "model")
