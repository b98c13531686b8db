"""Model folders that bring Python code of their own, which is not run: one line says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore.errors import ModelError
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.seq2seq.rows import ended_targets
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer, one_line_errors, own_code_warning
from distcore_tasks.shared.sources import data_warnings
from distcore_tasks.shared.tokenize_rows import ended

CODE = {
    "AutoConfig": "configuration_mine.MineConfig",
    "AutoModelForCausalLM": "modeling_mine.MineModel",
}


def folder_of(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (folder / name).touch()
    return str(folder)


@pytest.mark.parametrize("task", [CausalLM, MaskedLM, ImageClassification])
def test_a_type_that_only_the_folder_knows_is_refused_in_one_line(
    task: Any, tmp_path: Path
) -> None:
    model = folder_of(tmp_path, model_type="mine", auto_map=CODE)
    with pytest.raises(ModelError) as raised:
        task(model=model).model_folder()
    assert (
        str(raised.value) == f"model {model}: config.json names code of its own (AutoConfig:"
        " configuration_mine.MineConfig), which is not run; take a folder of a type that"
        " transformers has, or build the model in a task of your own: --task FILE.py:CLASS"
    )


def test_code_beside_a_known_type_is_said_since_it_may_be_another_model(tmp_path: Path) -> None:
    model = folder_of(tmp_path, model_type="llama", auto_map=CODE)
    line = (
        f"model {model}: config.json names code of its own (AutoModelForCausalLM:"
        " modeling_mine.MineModel), which is not run: the model is the llama of transformers"
    )
    assert line in data_warnings(CausalLM(model=model, data="rows.jsonl", eval_data="others.jsonl"))
    assert not [*own_code_warning("m", Path(folder_of(tmp_path, model_type="llama")))]


@pytest.mark.parametrize(
    "code", [{"AutoTokenizer": ["tokenization_mine.Mine", None]}, ["tokenization_mine.Mine", None]]
)
def test_a_tokenizer_of_its_own_code_is_refused_without_a_question(
    code: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    tree = {"tokenizer_class": "Mine", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tree))
    with pytest.raises(
        ModelError,
        match=r"^model m: tokenizer_config.json names code of its own \(AutoTokenizer: tok",
    ):
        load_tokenizer("m", tmp_path)


def test_texts_that_end_with_their_own_end_token_have_one() -> None:
    assert ended([1, 2], [2]) == ended([1], [2]) == [1, 2]
    assert ended([1], []) == [1]
    rows = flat_rows([np.asarray(row, np.int32) for row in ([5, 2, 2], [5, 2], [5], [2], [2, 2])])
    targets = ended_targets(rows, 2, 8, behind=0)
    assert [targets.row(place).tolist() for place in range(5)] == [[5, 2], [5, 2], [5, 2], [2], [2]]
    before_language = flat_rows(
        [np.asarray(row, np.int32) for row in ([5, 2, 2, 9], [5, 2, 9], [5, 9])]
    )
    targets = ended_targets(before_language, 2, 8, behind=1)
    assert [targets.row(place).tolist() for place in range(3)] == [[5, 2, 9]] * 3


def test_a_package_that_does_not_import_is_named_where_transformers_names_its_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speedup.py").write_text('raise RuntimeError("operator nms does not exist")\n')
    monkeypatch.syspath_prepend(tmp_path)

    load = (
        "try:\n    import speedup\nexcept Exception as error: raise ModuleNotFoundError('Could not"
        " import module BertModel') from error\n"
    )
    with pytest.raises(ModelError) as raised, one_line_errors("model bert: cannot be loaded"):
        exec(load, {"__name__": "transformers.utils.import_utils"})
    assert (
        "the installed package speedup does not import (RuntimeError: operator nms does not exist)"
        in str(raised.value)
    )
