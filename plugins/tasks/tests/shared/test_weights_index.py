"""The index of a model folder names files of that folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcore import ModelError
from distcore_tasks.shared.pretrained import model_folder


def folder(path: Path, index: object) -> str:
    (path / "config.json").write_text('{"model_type": "bert"}')
    (path / "vocab.txt").write_text("a")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_a_file_elsewhere_is_refused_by_name(file: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=f"index.json names '{file}', which is no file of the folder"
    ):
        model_folder(folder(tmp_path, {"weight_map": {"a": "model-1.safetensors", "b": file}}), [])


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}])
def test_an_index_of_another_form_is_one_line(index: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json cannot be read"):
        model_folder(folder(tmp_path, index), [])


def test_files_of_the_folder_are_taken(tmp_path: Path) -> None:
    assert (
        model_folder(folder(tmp_path, {"weight_map": {"a": "model-1.safetensors"}}), []) == tmp_path
    )
