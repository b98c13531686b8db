"""The proof of an export: what was written, read back as its users will, has the loss of the
run on a few rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from distcore.checkpoint.job_state import fingerprint
from distcore.config import RunConfig
from distcore.engine.build import new_run
from distcore.engine.frozen import with_frozen
from distcore.errors import CheckpointError, DistcoreError
from distcore.jobs.logs import at_level
from distcore.launchers.processes.failures import one_line
from distcore.model.lora_base import base_of
from distcore.plugin.batching.columns import read
from distcore.plugin.strategy.contract import World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.datasets import at_epoch, padded_rows
from distcore.plugin.task.task import Batch, Dataset, Datasets
from distcore.strategies.single import SingleStrategy

ROWS = 8
"""Rows whose losses are compared: enough to have short and long ones."""
CONSIDERED = 1000
"""Rows of which they are chosen, so that no more than these are encoded or fetched."""
CLOSE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to a loss above 1 or absolute below, by the dtype in
which a reader computes.
"""
OTHER_DATA = "the data of the run have changed since"
"""Why no rows are compared where other ones lie in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The comparison of an export with the model of the run."""

    reader: str
    """What read the export back."""
    rows: int = 0
    """Evaluation rows that were compared; 0: drawn inputs, or nothing."""
    run_loss: float | None = None
    """Mean loss of the run's model on these rows, in fp32, before any adapter is merged
    or weight is rounded.
    """
    loss: float | None = None
    """Mean loss of what was read back."""
    why_not: str | None = None
    """Why no rows were compared; ``None`` if some were."""
    drawn: bool = False
    """True if answers to drawn inputs were compared instead."""

    def sentence(self) -> str:
        """Return the measurement in words, for a card and for the user."""
        if self.drawn:
            return (
                f"Read back by {self.reader}, it answers drawn inputs as the model of the run does;"
                f" its loss was not measured: {self.why_not}."
            )
        if self.why_not is not None:
            return (
                f"It was not compared with the model of the run by {self.reader}: {self.why_not}."
            )
        return (
            f"Read back by {self.reader}, its loss on {self.rows} evaluation rows is"
            f" {self.loss:.4g}; that of the run is {self.run_loss:.4g}."
        )


@dataclass(frozen=True)
class ProofRows:
    """A few rows of the run, and how its task computes their losses."""

    task: BoundTask
    """The task."""
    batch: Batch
    """The rows, with the answers of frozen models."""
    count: int
    """Their number."""
    items: float
    """Items that the mean loss is over."""

    @torch.no_grad()
    def losses(self, module: nn.Module) -> Tensor:
        """Return the loss of each row, or one loss of all, in float64; ``module`` answers as
        the trained model does.
        """
        with _evaluating(module):
            losses = self.task.losses.row_losses(module, self.batch)
        return losses.detach().double().cpu()

    def mean(self, losses: Tensor) -> float:
        """Return the mean over items."""
        # A loss of the whole batch is a mean already.
        is_of_whole_batch = self.task.losses.whole_batch and len(losses) == 1
        return losses.sum().item() / (1.0 if is_of_whole_batch else self.items)


def proof_rows(
    task: BoundTask, config: RunConfig, job_state: Mapping[str, Any], module: nn.Module
) -> ProofRows | str:
    """Return a few evaluation rows of the run, or training rows if it has none; else
    why there are none.

    An export needs no data. So whatever keeps a task from reading them, often a file that is not
    here, is a reason to tell and no error of the export.
    """
    try:
        with at_level(logging.ERROR):  # what a task says of the data of a run, the run has said
            data = task.prepare(config)
    except Exception as error:
        return _reason("the data of the run cannot be read here", error)
    if job_state.get("data") not in (fingerprint(data.train), None):
        return OTHER_DATA
    dataset = padded_rows(data.evaluation if len(data.evaluation) else at_epoch(data.train, 0))
    if dataset is None:
        return "its rows share sequences"
    numbers = _chosen(dataset)
    items = float(read(dataset.items, numbers).sum())
    if not items:
        return "no row of the run has a loss"
    try:
        batch = _consulted(task, config, data, module, dataset.batch(numbers))
    except (DistcoreError, OSError) as error:
        # a file of a row, or a frozen model, that is not here
        return _reason("rows of the run cannot be computed here", error)
    return ProofRows(task, batch, len(numbers), items)


def _reason(what: str, error: Exception) -> str:
    """Return ``what`` and the error of it in one line that begins no sentence and ends none."""
    kind = "" if isinstance(error, DistcoreError) else f"{type(error).__name__}: "
    return one_line(f"{what}: {kind}{error}", 200).rstrip(".")


class Prover:
    """Compares exports with the model of a run. It holds the losses of that model,
    and not the model.
    """

    def __init__(self, rows: ProofRows | str, module: nn.Module) -> None:
        """Measure ``module`` as it was trained. ``rows``: those to compare on, or
        why there are none.
        """
        self.inputs: dict[str, Tensor] = {}
        self.proofs: list[Proof] = []
        self._rows = rows
        self._run: Tensor | None = None
        self._expected: Tensor | None = None
        if isinstance(rows, ProofRows):
            try:
                with _recorded(module, self.inputs):
                    self._run = self._expected = rows.losses(module)
            except Exception as error:  # of a task that computes on its own device only, say
                self._rows = _reason("its loss cannot be computed here", error)

    def expect(self, module: nn.Module) -> None:
        """Measure ``module`` again, after an adapter was merged or weights were rounded."""
        if isinstance(self._rows, ProofRows):
            self._expected = self._rows.losses(module)

    def check_merged(self, module: nn.Module) -> None:
        """Raise CheckpointError if ``module``, whose adapter was merged in fp32, is
        another model than before.
        """
        self.expect(module)
        self._compare("the merged model", self._run, self._expected, CLOSE[torch.float32])

    def prove(
        self,
        module: nn.Module,
        reader: str,
        read_back: Callable[[], nn.Module],
        computes: torch.dtype = torch.float32,
        drawn: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> Proof:
        """Implement ``TrainedModel.prove`` for the exported ``module``."""
        try:
            with torch.random.fork_rng(devices=[]):
                proof = self._proof(module, reader, read_back, CLOSE[computes], drawn)
        except DistcoreError:
            raise
        except Exception as error:  # whatever a library says of a file that it cannot use
            problem = one_line(f"{type(error).__name__}: {error}")
            raise CheckpointError(
                f"the export cannot be used by {reader}: {problem}; nothing of it was kept; please"
                " report this with the model's config.json"
            ) from error
        self.proofs.append(proof)
        return proof

    def _proof(
        self,
        module: nn.Module,
        reader: str,
        read_back: Callable[[], nn.Module],
        close: float,
        drawn: Callable[[], Mapping[str, Tensor]] | None,
    ) -> Proof:
        """Read the export back and compare it; the result says why if that cannot be done here."""
        if _bytes_in_fp32(module) > psutil.virtual_memory().available:
            return Proof(
                reader=reader,
                why_not="a second copy of the model does not fit into the memory of this machine",
            )
        try:
            again = read_back()
        except (ImportError, NotImplementedError) as error:
            return Proof(reader=reader, why_not=one_line(str(error)).rstrip("."))
        return self._measured(module, reader, again, close, drawn)

    def _measured(
        self,
        module: nn.Module,
        reader: str,
        again: nn.Module,
        close: float,
        drawn: Callable[[], Mapping[str, Tensor]] | None,
    ) -> Proof:
        """Compare the losses of rows of the run, or without rows the answers to drawn inputs."""
        if not isinstance(self._rows, ProofRows):
            if drawn is None:
                return Proof(reader=reader, why_not=self._rows)
            inputs = drawn()
            expected = _answer(module, inputs)
            answers = _answer(again, inputs)
            close = max(close, CLOSE[_dtype_of(module)])
            self._compare(
                f"what {reader} reads back", expected, answers, close, "answers to drawn inputs"
            )
            return Proof(reader=reader, why_not=self._rows, drawn=True)
        assert self._run is not None
        rows = self._rows
        losses = rows.losses(again)
        self._compare(f"what {reader} reads back", self._expected, losses, close)
        loss_of_run = rows.mean(self._run)
        loss = rows.mean(losses)
        return Proof(reader=reader, rows=rows.count, run_loss=loss_of_run, loss=loss)

    def _compare(
        self,
        what: str,
        expected: Tensor | None,
        measured: Tensor | None,
        close: float,
        of: str = "losses of a few rows",
    ) -> None:
        """Raise CheckpointError unless ``measured`` is near what was ``expected``; both not
        a number is near.
        """
        if expected is None or measured is None:
            return
        if expected.shape == measured.shape:
            # A loss below 1 has no more digits than one of 1: both are made of logits of that size.
            scale = expected.abs().clamp(min=1)
            if torch.allclose(measured / scale, expected / scale, 0, close, equal_nan=True):
                return
            size = f"a difference of {(measured / scale - expected / scale).abs().max().item():.2g}"
        else:
            size = f"shape {list(measured.shape)}, not {list(expected.shape)}"
        raise CheckpointError(
            f"the export is not the model of the run: {what} has other {of} ({size}, at most"
            f" {close:g} is rounding); nothing of it was kept; please report this with the model's"
            " config.json"
        )


def _chosen(dataset: Dataset) -> np.ndarray:
    """Return the numbers of a few rows, int64, from the shortest to the longest, so
    that some are padded.
    """
    first_rows = np.arange(min(len(dataset), CONSIDERED))
    lengths = read(dataset.lengths, first_rows)
    by_length = first_rows[np.argsort(lengths, kind="stable")]
    count = min(ROWS, len(by_length))
    positions = np.linspace(0, len(by_length) - 1, count).astype(np.int64)
    evenly_spaced: np.ndarray = by_length[np.unique(positions)]
    return evenly_spaced


def _consulted(
    task: BoundTask, config: RunConfig, data: Datasets, module: nn.Module, batch: Batch
) -> Batch:
    """Return ``batch`` with the answers of the task's frozen models, which are
    built for this alone.
    """
    if not task.has("frozen"):
        return batch
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    hooks = Hooks("single", SingleStrategy())
    run = new_run(config, hooks, world, task, module)
    run = replace(run, base=base_of(config, task, module))
    consult = with_frozen(run, hooks, task, data).consult
    with _evaluating(module):
        return consult(batch) if consult else batch


def _bytes_in_fp32(module: nn.Module) -> int:
    """Return the bytes of a copy of ``module`` whose weights are in fp32."""
    return sum(weight.numel() * torch.float32.itemsize for weight in module.parameters())


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the weights; fp32 for a module that has none."""
    floats = (weight.dtype for weight in module.parameters() if weight.dtype in CLOSE)
    return next(floats, torch.float32)


def _answer(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the first output of ``module``, which is an object or a tuple, in float64."""
    dtype = _dtype_of(module)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with _evaluating(module), torch.no_grad():
        answer: Any = module(**inputs)
    first = answer if isinstance(answer, Tensor) else answer[0]
    assert isinstance(first, Tensor)
    return first.double()


@contextmanager
def _recorded(module: nn.Module, inputs: dict[str, Tensor]) -> Iterator[None]:
    """Add to ``inputs`` the tensors of the first call of ``module``, by argument."""

    def record(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not inputs:
            inputs.update(
                {name: value for name, value in named.items() if isinstance(value, Tensor)}
            )

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into the mode for evaluation, and each of its parts back into its own."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
