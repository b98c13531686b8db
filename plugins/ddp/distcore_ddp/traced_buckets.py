"""A stand-in for torch's gradient reducer, which cannot run on the tensors of a traced step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from distcore import Capabilities, OptimizerFactory, PreparedModel, Run, hookimpl


class TracedBuckets:
    """Holds gradients in permanent buckets, into which each new gradient is copied.

    ``traced()`` may return it for a strategy with torch's reducer, which keeps gradients as
    views of its buckets.
    """

    capabilities: ClassVar = Capabilities(spec_version=3)

    def __init__(self, bucket_mb: int, sent_in: torch.dtype | None = None) -> None:
        """``bucket_mb``: size of a bucket in MiB. ``sent_in``: the dtype of the copy of each
        bucket that is sent.
        """
        self._size = bucket_mb * 2**20
        self._sent_in = sent_in
        self._sends = True
        self.on_the_wire: list[Tensor] = []
        """The copies of buckets that are being sent."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Make the buckets, and have each gradient copied into its own when it is complete."""
        buckets = self._buckets([p for p in model.parameters() if p.requires_grad])
        flats: list[Tensor] = []
        views: dict[nn.Parameter, Tensor] = {}
        number_of: dict[nn.Parameter, int] = {}
        missing = [len(bucket) for bucket in buckets]
        for number, bucket in enumerate(buckets):
            sizes = [parameter.numel() for parameter in bucket]
            flat = torch.empty(sum(sizes), dtype=bucket[0].dtype)
            flats.append(flat)
            for parameter, part in zip(bucket, torch.split(flat, sizes), strict=True):
                views[parameter] = part.view_as(parameter)
                number_of[parameter] = number

        def send(number: int, dtype: torch.dtype) -> None:
            """Copy a bucket that is complete.

            All copies stay until the last one: the network may be that slow.
            """
            missing[number] -= 1
            if missing[number] == 0:
                self.on_the_wire.append(flats[number].to(dtype))
            if not any(missing):
                self.on_the_wire.clear()
                missing[:] = [len(bucket) for bucket in buckets]

        def move(parameter: Tensor) -> None:
            if self._sends and isinstance(parameter, nn.Parameter) and parameter.grad is not None:
                # It lives until this hook returns, as in a backward pass of torch.
                gradient = parameter.grad
                views[parameter].copy_(gradient)
                parameter.grad = views[parameter]
                if self._sent_in is not None:
                    send(number_of[parameter], self._sent_in)

        for parameter in views:
            parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        optimizer = make_optimizer(model) if make_optimizer else None
        return PreparedModel(model=model, optimizer=optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Leave gradients where they are but after the last micro-batch."""
        return nullcontext() if last else self._no_sync()

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._sends = False
        yield
        self._sends = True

    def _buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters in buckets of one dtype, from the last to the
        first as gradients come.
        """
        buckets: list[list[nn.Parameter]] = []
        size = self._size
        for parameter in reversed(parameters):
            if size >= self._size or parameter.dtype != buckets[-1][0].dtype:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
        return buckets
