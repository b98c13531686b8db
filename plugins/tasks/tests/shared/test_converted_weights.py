"""A folder that has ``pytorch_model.bin`` alone is read in slices, from files that are
made of it once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from distcore import MetaModelError, RunConfig
from distcore.model.model_source import build_in_parts, source_of
from distcore_tasks.shared.converted_weights import safetensors_folder
from distcore_tasks.shared.pretrained import load_model

pytestmark = pytest.mark.programs

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-2, whose head is its embedding, as files that ``torch.save`` wrote."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    model.config.save_pretrained(tmp_path / "model")
    tensors = model.state_dict()
    names = list(tensors)
    for number, some in enumerate((names[:9], names[9:])):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        torch.save({name: tensors[name] for name in some}, tmp_path / "model" / file)
    index = {
        "metadata": {},
        "weight_map": {
            name: f"pytorch_model-0000{1 + (name in names[9:])}-of-00002.bin" for name in names
        },
    }
    (tmp_path / "model/pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tmp_path / "model"


def test_slices_of_them_are_those_of_a_whole_load(folder: Path) -> None:
    before = sorted(folder.iterdir())
    make = partial(load_model, "AutoModelForCausalLM", "model", folder, None)
    source = source_of(RunConfig(seed=0), make, folder)
    assert source.replay is not None
    model, values = source.replay()
    whole = dict(make().named_parameters())
    read = dict(values(lambda name: (5, whole[name].numel() - 7)))
    assert read.keys() == whole.keys() == dict(model.named_parameters()).keys()
    assert all(
        torch.equal(value, whole[name].detach().flatten()[5:-2]) for name, value in read.items()
    )
    assert sorted(folder.iterdir()) == before, "the folder stays as it is"


def test_converted_files_are_made_once_and_again_for_other_weights(folder: Path) -> None:
    code = (
        "from pathlib import Path; from distcore_tasks.shared.converted_weights import"
        " safetensors_folder as f\n"
    )
    code += f"print(f(Path({str(folder)!r})))"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    made = {process.communicate(timeout=100)[0].strip() for process in both}
    (one,) = made
    files = {file: file.stat().st_mtime_ns for file in Path(one).glob("*.safetensors")}
    assert len(files) == 2
    assert str(safetensors_folder(folder)) == one
    assert {file: file.stat().st_mtime_ns for file in files} == files
    first = min(folder.glob("*.bin"))
    torch.save({"other": torch.ones(3)}, first)
    other = safetensors_folder(folder)
    assert str(other) != one
    assert load_file(other / f"{first.stem}.safetensors")["other"].tolist() == [1, 1, 1]


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_hostile_weights_execute_nothing_and_are_loaded_whole(folder: Path, tmp_path: Path) -> None:
    torch.save(
        {"weight": torch.ones(1), "more": Hostile(tmp_path / "executed")}, min(folder.glob("*.bin"))
    )
    with pytest.raises(
        MetaModelError,
        match=r"^\S+ has no safetensors files, and none could be made: UnpicklingError",
    ):
        safetensors_folder(folder)
    assert not (tmp_path / "executed").exists()


def test_a_cache_that_cannot_be_written_costs_slices_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(folder / "config.json"))
    make = partial(load_model, "AutoModelForCausalLM", "model", folder, None)
    source = source_of(RunConfig(seed=0), make, folder)
    built = build_in_parts(source, "some", source.replay)
    assert not any(parameter.is_meta for parameter in built.model.parameters())


def test_a_square_weight_and_its_transpose_in_one_storage_are_two(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    weight = torch.arange(9.0).view(3, 3)
    torch.save({"first": weight, "turned": weight.T}, tmp_path / "pytorch_model.bin")
    read = load_file(safetensors_folder(tmp_path) / "pytorch_model.safetensors")
    assert torch.equal(read["first"], weight)
    assert torch.equal(read["turned"], weight.T)
