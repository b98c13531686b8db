"""Compiled layers compute without padding: the same outputs, and no code is made
again for other lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import padding_free_models
import pytest
import torch
from padding_free_models import CASES, FEW, answers, model_of

from distcore import RunConfig
from distcore.model.compiling import compile_model
from distcore_tasks.padding_free.layer_hooks import enable_padding_free
from distcore_tasks.padding_free.supported_models import HEADS, HeadName

IN_CI = (("row classifier", "bert"),)
OTHER_LENGTHS = [7, 2, 31, 30], [40, 3, 3], [5, 5, 5, 6, 7, 8, 20, 33, 31]


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace layers and their gradients, and write no C++, which is slow."""
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield


@pytest.mark.programs
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("head", "kind"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.slow)
        for case in CASES
        if case[1] in FEW
    ],
)
def test_outputs_and_gradients_are_those_of_eager_padded_rows_and_lengths_compile_nothing_again(
    head: HeadName, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(head, kind)
    logits, gradient = answers(head, model)
    counts = compile_model(RunConfig(compile="regions"), model)
    enable_padding_free(model, read=HEADS[head].reads)
    answer, padding_free = answers(head, model)
    assert (answer - logits).abs().max() < 2e-6 * logits.abs().max()
    assert (padding_free - gradient).norm() < 2e-6 * gradient.norm()
    monkeypatch.setattr(padding_free_models, "LENGTHS", OTHER_LENGTHS[0])
    answers(head, model)
    warm = counts.compilations
    assert warm > 0
    for lengths in OTHER_LENGTHS[1:]:
        monkeypatch.setattr(padding_free_models, "LENGTHS", lengths)
        answers(head, model)
    assert counts.compilations == warm
    # its first layer, its others, and its decoder differ
    assert counts.recompilations == 0 or kind == "t5"


@pytest.mark.programs
def test_a_run_goes_back_to_compiled_layers_with_padding(traced: None) -> None:
    model = model_of("row classifier", "bert")
    compile_model(RunConfig(compile="regions"), model)
    before = [vars(module).get("forward") for module in model.modules()]
    enable_padding_free(model, read="first")()
    assert [vars(module).get("forward") for module in model.modules()] == before
