"""The format: what ranks write in parallel is one checkpoint, which any number of ranks
reads piece by piece.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint_cases import write
from safetensors.torch import load_file

from distcore import Piece
from distcore.checkpoint import Checkpoint, write_checkpoint
from distcore.checkpoint.manifest import BYTES, CHECKSUM, MANIFEST, checksum_line
from distcore.checkpoint.provenance import environment
from distcore.checkpoint.tensors import DTYPES
from distcore.errors import CheckpointError
from distcore.plugin.strategy.state import State

WEIGHT = torch.arange(30.0).reshape(10, 3)
TENSORS = {
    "model/weight": WEIGHT,
    "model/bias": torch.arange(7, dtype=torch.bfloat16),
    "model/mask": torch.tensor([True, False]),
    "model/scale": torch.tensor(2.5, dtype=torch.float64),
    "model/none": torch.empty(0, 4),
    "optimizer/weight/exp_avg": -WEIGHT,
    "optimizer/weight/step": torch.tensor(3.0),
}
WHOLE: State = {**TENSORS}


def same(checkpoint: Checkpoint, state: State) -> bool:
    return set(checkpoint) == set(state) and all(
        torch.equal(checkpoint[name], value) and checkpoint[name].dtype == value.dtype
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    )


def test_a_single_process_writes_whole_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/step-00000001"
    write_checkpoint(path, TENSORS, {"progress": {"step": 1}})
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    assert same(checkpoint, WHOLE)
    assert checkpoint.job_state() == {"progress": {"step": 1}}


def test_a_save_that_cannot_be_written_is_one_line_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-1 could not be written: .*'weight'"):
        write_checkpoint(tmp_path / "step-1", {"weight": WEIGHT}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step-1 could not be written: .*Not a directory"):
        write_checkpoint(tmp_path / "file/step-1", TENSORS, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_whole_tensors_come_back_whoever_wrote_them(tmp_path: Path, ranks: int) -> None:
    assert same(Checkpoint(write(tmp_path, [WHOLE] * ranks)), WHOLE)


def test_whole_tensors_are_assigned_so_that_each_is_written_once_and_ranks_write_alike(
    tmp_path: Path,
) -> None:
    state: State = {f"model/{index}": torch.ones(100) for index in range(8)}
    path = write(tmp_path, [state] * 4)
    sizes = [file.stat().st_size for file in path.glob("model-*")]
    assert len(sizes) == 4
    assert max(sizes) == min(sizes) < 2 * 400 + 300


def test_pieces_of_uneven_length_make_the_whole(tmp_path: Path) -> None:
    cuts = [0, 12, 12, 30]  # the second rank holds nothing of it
    states: list[State] = [
        {
            "model/weight": Piece(WEIGHT.reshape(-1)[start:end], start, (10, 3)),
            "model/bias": torch.ones(3),
        }
        for start, end in pairwise(cuts)
    ]
    checkpoint = Checkpoint(write(tmp_path, states))
    assert torch.equal(checkpoint["model/weight"], WEIGHT)
    assert checkpoint.piece("model/weight", 10, 5).tolist() == [10, 11, 12, 13, 14]
    assert checkpoint.piece("model/weight", 30, 0).shape == (0,)


def test_replicas_of_a_piece_count_once(tmp_path: Path) -> None:
    halves: list[State] = [
        {"model/w": Piece(WEIGHT.reshape(-1)[at : at + 15], at, (10, 3))} for at in (0, 15)
    ]
    assert torch.equal(Checkpoint(write(tmp_path, halves * 2))["model/w"], WEIGHT)


def test_files_have_a_bounded_size(tmp_path: Path) -> None:
    path = write(
        tmp_path, [{"model/big": torch.arange(1000.0), "model/small": torch.ones(3)}], limit=1024
    )
    assert all(file.stat().st_size < 1024 + 300 for file in path.glob("*.safetensors"))
    assert torch.equal(Checkpoint(path)["model/big"], torch.arange(1000.0))


def test_a_checkpoint_is_read_without_distcore(tmp_path: Path) -> None:
    path = write(tmp_path, [WHOLE])
    manifest = json.loads((path / MANIFEST).read_text())
    for name, tensor in manifest["tensors"].items():
        parts = [
            load_file(path / piece["file"])[piece["key"]].reshape(-1) for piece in tensor["pieces"]
        ]
        assert torch.equal(
            torch.cat(parts).reshape(tensor["shape"]) if parts else TENSORS[name], TENSORS[name]
        )
    for name, file in manifest["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == file["sha256"]


def test_loaded_tensors_are_memory_of_their_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, [WHOLE]))
    checkpoint["model/weight"].add_(1)
    checkpoint.piece("model/weight", 0, 3).add_(1)
    assert torch.equal(checkpoint["model/weight"], WEIGHT)


def test_missing_pieces_are_not_committed(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="tensor 'model/w': pieces hold 10 of its 30 elements"
    ):
        write(tmp_path, [{"model/w": Piece(torch.ones(10), 0, (10, 3))}])
    assert not list(tmp_path.glob("step-*"))


def test_ranks_that_disagree_are_not_committed(tmp_path: Path) -> None:
    ranks: list[State] = [
        {"model/w": Piece(torch.ones(5), 5 * rank, (10 + rank,))} for rank in range(2)
    ]
    with pytest.raises(
        CheckpointError, match=r"tensor 'model/w': ranks disagree on dtype or shape: F32 \[10\] and"
    ):
        write(tmp_path, ranks)


def test_tensors_of_other_names_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"returned 'weights/w' of .*expected model/NAME"):
        write(tmp_path, [{"weights/w": torch.ones(1)}])
    with pytest.raises(CheckpointError, match=r"returned 'model/w' of torch.complex128"):
        write(tmp_path, [{"model/w": torch.ones(1, dtype=torch.complex128)}])


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="holds no tensor 'model/other'; it was saved from another model"
    ):
        Checkpoint(write(tmp_path, [WHOLE]))["model/other"]
    with pytest.raises(CheckpointError, match="'model/weight' has 30 elements, asked for 29 to 31"):
        Checkpoint(tmp_path / "step-00000001").piece("model/weight", 29, 2)


def rewrite(path: Path, **changes: object) -> None:
    """Change the manifest as somebody would who also corrects its checksum."""
    text = json.dumps(json.loads((path / MANIFEST).read_text()) | changes).encode()
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(checksum_line(text))


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [WHOLE])
    rewrite(path, format=99)
    with pytest.raises(CheckpointError, match="checkpoint format 99, this distcore reads 1"):
        Checkpoint(path)


def test_the_bytes_of_a_dtype_are_torchs() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == BYTES


@pytest.mark.needs("distcore-tasks")
def test_the_versions_of_a_run_name_the_distribution_of_its_task() -> None:
    assert "distcore-tasks" in environment("single", "text-classification")
