"""The cross entropy in chunks is torch's of the whole logits: losses, gradients and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from distcore_tasks.shared.chunked_cross_entropy import function

IGNORED = -100
ROWS, SIZE, WORDS = 300, 32, 1003
Given = tuple[Tensor, Tensor, Tensor, Tensor]
Loss = Callable[..., Tensor]


def given(bias: bool = True) -> Given:
    """Hidden states, weight, bias and labels, of which every seventh is ignored."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, SIZE), torch.randn(WORDS, SIZE) * 0.3
    labels = torch.randint(0, WORDS, (ROWS,))
    labels[::7] = IGNORED
    return hidden, weight, torch.randn(WORDS) if bias else torch.zeros(0), labels


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, _: int
) -> Tensor:
    logits = linear(hidden, weight, bias).float()
    return cross_entropy(
        logits, labels, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
    )


def in_double(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, _: int
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        logits = linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        return cross_entropy(
            logits, labels, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
        )


def computed(loss: Loss, parts: Given, smoothing: float, half: bool = False) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias, scaled as
    a step scales them.
    """
    leaves = [part.clone().requires_grad_() for part in parts[:3]]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        total = loss(
            leaves[0],
            leaves[1],
            leaves[2] if len(leaves[2]) else None,
            parts[3],
            smoothing,
            IGNORED,
        )
    (total / 129).backward()
    return [total.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def distances(
    parts: Given, smoothing: float, half: bool = False, expected: Loss = whole
) -> list[float]:
    """The distance of the loss and of each gradient from the expected one, relative to it."""
    own, other = (
        computed(loss, parts, smoothing, half) for loss in (function.summed_cross_entropy, expected)
    )
    pairs = zip(own, other, strict=True)
    return [((one - two).double().norm() / two.double().norm()).item() for one, two in pairs]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(bias: bool, smoothing: float) -> None:
    assert max(distances(given(bias), smoothing)) < 1e-6


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_over_chunks_are_in_fp32_under_autocast(smoothing: float) -> None:
    parts = given()
    loss, *gradients = distances(parts, smoothing, half=True)
    assert loss < 1e-6
    assert max(gradients) < 8e-3  # products of bf16, in another order
    exact = [distances(parts, smoothing, half, in_double) for half in (False, True)]
    assert exact[0][0] < 1e-6
    assert exact[1][0] < 2e-4  # logits of bf16, but no loss added up in it


def test_the_gradient_of_a_bias_in_half_precision_is_rounded_once() -> None:
    hidden, weight, bias, labels = given()
    half = bias.bfloat16()
    own, exact = (
        computed(function.summed_cross_entropy, (hidden, weight, each, labels), 0.0)[-1]
        for each in (half, half.float())
    )
    assert torch.equal(own, exact.bfloat16())


def test_weights_without_gradient_get_none() -> None:
    hidden, weight, bias, labels = given()
    total = function.summed_cross_entropy(
        hidden.requires_grad_(), weight, bias, labels, 0.0, IGNORED
    )
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is bias.grad is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, ROWS])
def test_scores_of_rows(rows: int, smoothing: float) -> None:
    hidden, weight, bias, labels = given()
    hidden, labels = hidden[:rows], labels[:rows]
    labels[1::5] = linear(hidden, weight, bias).argmax(1)[1::5]
    scores = function.scored(hidden, weight, bias, labels, smoothing, IGNORED)
    logits = linear(hidden, weight, bias)
    settings: Any = {"reduction": "none", "ignore_index": IGNORED}
    assert torch.allclose(
        scores[:, 0],
        cross_entropy(logits, labels, label_smoothing=smoothing, **settings),
        rtol=1e-5,
    )
    assert torch.allclose(scores[:, 1], cross_entropy(logits, labels, **settings), rtol=1e-5)
    assert torch.equal(scores[:, 2], (logits.argmax(1) == labels).float())


def test_backward_works_once() -> None:
    hidden, weight, bias, labels = given()
    total = function.summed_cross_entropy(
        hidden.requires_grad_(), weight, bias, labels, 0.0, IGNORED
    )
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="works once"):
        total.backward()


def forgets_smoothing(logits: Tensor, target: Tensor, smoothing: float) -> Any:
    return RIGHT["_losses"](logits, target, 0.0)


def forgets_smoothing_in_gradients(
    powers: Tensor, totals: Tensor, target: Tensor, smoothing: float
) -> Tensor:
    made: Tensor = RIGHT["_gradient_of_logits"](powers, totals, target, 0.0)
    return made


def adds_up_in_bf16(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.copy_((total.bfloat16() + left.bfloat16() @ right.bfloat16()).float())


def forgets_a_chunk(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Any]:
    chunks = RIGHT["_chunks"](inputs, weight, bias)
    for rows, logits in chunks:
        yield rows, logits if rows.start else logits.zero_()


def rounds_the_scale(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else (gradient * scale.bfloat16().float()).to(dtype)


RIGHT: dict[str, Any] = {
    name: getattr(function, name) for name in ("_losses", "_gradient_of_logits", "_chunks")
}
BROKEN: dict[str, Callable[..., Any]] = {
    "_losses": forgets_smoothing,
    "_gradient_of_logits": forgets_smoothing_in_gradients,
    "_add_product": adds_up_in_bf16,
    "_chunks": forgets_a_chunk,
    "_scaled": rounds_the_scale,
}


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setattr(function, name, BROKEN[name])
        yield


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_implementation_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken(monkeypatch, name):
        assert max(distances(given(), 0.1)) > 1e-5
    assert max(distances(given(), 0.1)) < 1e-6


def test_labels_that_are_to_be_ignored_are_seen() -> None:
    hidden, weight, bias, labels = given()
    counted = function.summed_cross_entropy(hidden, weight, bias, labels.clamp(min=0), 0.0, IGNORED)
    assert abs(counted - whole(hidden, weight, bias, labels, 0.0, IGNORED)) > 0.05 * counted


@pytest.mark.parametrize(
    ("rows", "chunks"),
    [(1, 1), (function.ROWS, 1), (4 * function.ROWS, 4), (10**4, function.CHUNKS)],
)
def test_chunks_are_as_many_as_asked_and_fewer_for_few_rows(rows: int, chunks: int) -> None:
    made = [
        part.stop - part.start
        for part, _ in function._chunks(torch.zeros(rows, 1), torch.zeros(2, 1), None)
    ]
    assert (len(made), sum(made)) == (chunks, rows)
