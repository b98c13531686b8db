"""A checkpoint that is damaged, or that somebody made to do harm, is refused in one line
that names the file.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import state, value_in, write
from safetensors.torch import load_file, save_file
from watch import watched

from distcore.checkpoint import Checkpoint
from distcore.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line
from distcore.errors import CheckpointError

FILES = [f"{part}-{rank:05d}-000.safetensors" for part, rank in (("model", 0), ("optimizer", 1))]
EVERY_FILE = [*FILES, STATE, MANIFEST, CHECKSUM]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, [state(1.0)] * 2)


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_flipped_bit_is_refused_with_the_name_of_its_file(path: Path, name: str) -> None:
    clean = (path / name).read_bytes()
    positions = random.Random(0)
    for _ in range(25):
        bit = positions.randrange(8 * len(clean))
        damaged = bytearray(clean)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"({name}|{CHECKSUM})"):
            value_in(path)
    (path / name).write_bytes(clean)
    assert value_in(path) == 1.0


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_truncated_or_missing_file_is_refused_with_its_name(path: Path, name: str) -> None:
    clean = (path / name).read_bytes()
    for size in {0, 1, 8, len(clean) // 2, len(clean) - 1}:
        (path / name).write_bytes(clean[:size])
        with pytest.raises(CheckpointError, match=rf"({name}|{CHECKSUM})"):
            Checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read"):
        Checkpoint(path)


Change = Callable[[Path, dict[str, Any]], object]


def put(*keys: Any, value: object) -> Change:
    """Set one value in the manifest."""

    def change(path: Path, manifest: dict[str, Any]) -> None:
        tree: Any = manifest
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


def file_named(name: str) -> Change:
    """List a file by another name, and keep the tensors in it."""

    def change(path: Path, manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"][FILES[0]]
        manifest["tensors"]["model/weight"]["pieces"][0]["file"] = name

    return change


def content(name: str, data: bytes) -> Change:
    """Put other bytes into a file, and list their size and hash as they are."""

    def change(path: Path, manifest: dict[str, Any]) -> None:
        import hashlib

        (path / name).write_bytes(data)
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return change


class Harm:
    """A pickle that calls when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/distcore-was-here",)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def linked(name: str, target: str) -> Change:
    def change(path: Path, manifest: dict[str, Any]) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return change


def pipe(path: Path, manifest: dict[str, Any]) -> None:
    (path / FILES[0]).unlink()
    os.mkfifo(path / FILES[0])


def other_tensor(path: Path, manifest: dict[str, Any]) -> None:
    save_file({"other": torch.ones(40)}, path / "other")
    content(FILES[0], (path / "other").read_bytes())(path, manifest)


def other_dtype(path: Path, manifest: dict[str, Any]) -> None:
    save_file({"weight": torch.ones(40, dtype=torch.int32)}, path / "other")
    content(FILES[0], (path / "other").read_bytes())(path, manifest)


def values_of(name: str, value: float) -> Change:
    """Put other values into a file, and list it as it is."""

    def change(path: Path, manifest: dict[str, Any]) -> None:
        (key,) = load_file(path / name)
        save_file({key: torch.full((40,), value)}, path / "other")
        content(name, (path / "other").read_bytes())(path, manifest)

    return change


def swap_pieces(path: Path, manifest: dict[str, Any]) -> None:
    weight, moment = (
        manifest["tensors"][name] for name in ("model/weight", "optimizer/weight/exp_avg")
    )
    weight["pieces"], moment["pieces"] = moment["pieces"], weight["pieces"]


def move_and_link(path: Path, manifest: dict[str, Any]) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def nest_state(path: Path, manifest: dict[str, Any]) -> None:
    content(STATE, b"[" * 200_000)(path, manifest)


WEIGHT = ("tensors", "model/weight")
PIECE = (*WEIGHT, "pieces", 0)
PICKLES = [pickle.dumps(Harm(), protocol) for protocol in range(5)]
HOSTILE: dict[str, Change] = {
    **{
        f"path {name!r}": file_named(name)
        for name in (
            "/etc/passwd",
            "../other.safetensors",
            "../../x",
            "a/b.safetensors",
            "model-00000-000.safetensors/..",
            "",
            ".",
            "~/x",
            "C:\\x",
            "model-00000-000.safetensors\n",
            "model-0000٣-000.safetensors",
            "model-00000-000.pt",
            "http://x/y",
            "model-00000-000.safetensors\0",
        )
    },
    **{
        f"pickle {protocol} as tensors": content(FILES[0], data)
        for protocol, data in enumerate(PICKLES)
    },
    **{
        f"pickle {protocol} as state": content(STATE, data) for protocol, data in enumerate(PICKLES)
    },
    "state is a list": content(STATE, b"[]"),
    "state is deep": nest_state,
    "state is text": content(STATE, b"import os"),
    "huge shape": put(*WEIGHT, "shape", value=[2**40, 2**40]),
    "huge count": put(*PIECE, "count", value=2**60),
    "large count": put(*PIECE, "count", value=2**40),
    "huge integer": put(*PIECE, "count", value=10**400),
    "many dimensions": put(*WEIGHT, "shape", value=[1] * 10**5),
    "negative shape": put(*WEIGHT, "shape", value=[-40]),
    "negative start": put(*PIECE, "start", value=-1),
    "fractional count": put(*PIECE, "count", value=40.5),
    "count is text": put(*PIECE, "count", value="40"),
    "true as start": put(*PIECE, "start", value=True),
    "no pieces": put(*WEIGHT, "pieces", value=[]),
    "gap": put(*PIECE, "start", value=1),
    "zero count": put(*PIECE, "count", value=0),
    "overlap": put(
        *WEIGHT, "pieces", value=[{"file": FILES[0], "key": "weight", "start": 0, "count": 40}] * 2
    ),
    "dtype to import": put(*WEIGHT, "dtype", value="antigravity.geohash"),
    "smaller dtype": put(*WEIGHT, "dtype", value="I8"),
    "key of no tensor": put(*PIECE, "key", value="__class__"),
    "huge file": put("files", FILES[0], "size", value=2**47),
    "negative size": put("files", FILES[0], "size", value=-1),
    "hash of nothing": put("files", FILES[0], "sha256", value=""),
    "class to import": put("__class__", value="antigravity.geohash"),
    "extra in tensor": put(*WEIGHT, "module", value="os"),
    "no files": put("files", value={}),
    "files is a list": put("files", value=[]),
    "no format": put("format", value=None),
    "true as format": put("format", value="1"),
    "tensors is null": put("tensors", value=None),
    "link to a file": linked(FILES[0], "/etc/passwd"),
    "link to a device": linked(FILES[0], "/dev/zero"),
    "link as state": linked(STATE, "/dev/zero"),
    "a pipe": pipe,
    "pieces swapped": swap_pieces,
    "link to a checkpoint": move_and_link,
    "a key of the state twice": content(STATE, b'{"best": null, "progress": {}, "best": null}'),
    "weights that are no numbers": values_of(FILES[0], float("nan")),
    "moments that are no numbers": values_of(FILES[1], float("nan")),
    "other tensor": other_tensor,
    "other dtype": other_dtype,
    "header of 2**60 bytes": content(FILES[0], (2**60).to_bytes(8, "little") + b"{}"),
    "header beyond the end": content(
        FILES[0],
        header(weight={"dtype": "F32", "shape": [40], "data_offsets": [0, 2**50]}) + bytes(160),
    ),
}


def load_all(path: Path) -> None:
    """Read all that a resume reads."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    checkpoint.job_state()
    for name in checkpoint:
        checkpoint[name]


def test_hostile_checkpoints_are_fifty_or_more() -> None:
    assert len(HOSTILE) >= 50


def test_a_key_of_the_manifest_that_stands_twice_is_named(path: Path) -> None:
    text = (path / MANIFEST).read_bytes().rstrip()[:-1] + b', "format": 2}'
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(checksum_line(text))
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: one object has the key 'format' twice"):
        load_all(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_one_line_and_runs_nothing(path: Path, name: str) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    HOSTILE[name](path, manifest)
    text = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(checksum_line(text))
    before = sorted(path.parent.rglob("*"))
    with watched() as seen, pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert not seen
    assert sorted(path.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert path.name in str(caught.value)
    assert not Path("/tmp/distcore-was-here").exists()


def test_a_good_checkpoint_runs_no_pickle_and_imports_no_name_of_its_own(path: Path) -> None:
    load_all(path)
    with watched() as seen:
        load_all(path)
    assert not seen


def test_files_that_the_manifest_does_not_list_are_left_alone(path: Path) -> None:
    (path / "model.pt").write_bytes(PICKLES[0])
    assert value_in(path) == 1.0
    shutil.rmtree(path)
