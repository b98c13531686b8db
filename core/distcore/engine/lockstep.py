"""Compare, in a run's first steps, what the ranks compute, where a strategy shards weights.

Such a strategy gathers the weights of a module when it is called, from all ranks at once, and sums
the gradients of all parameters that got one. Where forward follows from the rows of a rank, such
as a branch that some rows take, ranks would wait for each other in different collectives: until
the watchdog ends them, or a backend aborts the process. So the ranks compare each such call before
it gathers, and the parameters of each loss before they send. After the first steps nothing is
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distcore.errors import TaskError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

WAY_OUT = (
    "what forward calls must not follow from the rows of a rank; call each module on every rank, "
    "also for no rows, or take a strategy that has whole weights on each rank, such as "
    "--strategy single"
)


@contextmanager
def compare_ranks(run: Run, hooks: Hooks, is_over: Callable[[], bool]) -> Iterator[None]:
    """Raise TaskError on all ranks if they call different modules that gather weights, or have
    gradients of different parameters.

    They are compared until ``is_over()``, which answers alike on all ranks, or the end of the
    ``with`` block.
    """
    # A hook inside of a compiled region would have it compiled once more, without the hook.
    is_plain = run.world.size > 1 and run.config.compile == "off"
    modules = hooks.gathering_modules(run) if is_plain else {}
    if not modules:
        yield
        return
    comparison = _Comparison(run, hooks, modules, is_over)
    try:
        yield
    finally:
        comparison.stop()


class _Comparison:
    """Compares calls by the numbers of their modules; the number after the last is the end of the
    model's forward pass.
    """

    def __init__(
        self, run: Run, hooks: Hooks, modules: Mapping[str, nn.Module], is_over: Callable[[], bool]
    ) -> None:
        self._run, self._hooks, self._is_over = run, hooks, is_over
        self._places = [f"the module {name!r}" if name else "the model itself" for name in modules]
        self._places.append("the end of the forward pass")
        self._reached: dict[int, Tensor] = {}
        # Before the strategy's own hooks, which gather.
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before(number), prepend=True)
            for number, module in enumerate(modules.values())
        ]
        # A rank may come to the end where another one still calls a module.
        end = run.module.register_forward_hook(lambda *_: self._compare_calls(len(modules)))
        self._handles.append(end)
        hooks.before_backward = self._compare_parameters

    def stop(self) -> None:
        """Compare nothing more."""
        self._hooks.before_backward = None
        while self._handles:
            self._handles.pop().remove()

    def _before(self, number: int) -> Callable[[nn.Module, object], None]:
        return lambda _module, _inputs: self._compare_calls(number)

    def _compare_calls(self, number: int) -> None:
        """Raise TaskError on all ranks unless all of them come to module ``number`` now."""
        if self._is_over():
            self.stop()
            return
        told = self._gather([number])[:, 0].tolist()
        differing = [rank for rank, theirs in enumerate(told) if theirs != told[0]]
        if not differing:
            return
        other = differing[0]
        raise TaskError(
            f"task: strategy {self._hooks.name!r} gathers weights from all ranks where a module "
            f"is called, and rank 0 comes to {self._places[told[0]]} where rank {other} comes to "
            f"{self._places[told[other]]}: {WAY_OUT}"
        )

    def _compare_parameters(self, loss: Tensor, is_last: bool) -> None:
        """Note the parameters that a loss follows from; compare them before they are sent."""
        if self._is_over():
            self.stop()
            return
        self._reached |= {id(leaf): leaf for leaf in leaves_of(loss)}
        if not is_last:
            return
        named = dict(self._run.module.named_parameters())
        flags = [int(id(parameter) in self._reached) for parameter in named.values()]
        others = len(self._reached) - sum(flags)  # gathered weights of units that have no names now
        self._reached.clear()
        told = self._gather([*flags, others])
        odd = (told != told[0]).nonzero()
        if not len(odd):
            return
        rank, place = odd[0].tolist()
        if place < len(named):
            which = f"that of {[*named][place]!r}"
            has, lacks = (rank, 0) if told[rank, place] else (0, rank)
            what = f"rank {has} has {which}, and rank {lacks} has not"
        else:
            what = f"rank 0 has those of {told[0].sum()} parameters, rank {rank} those of "
            what += f"{told[rank].sum()}"
        raise TaskError(
            f"task: strategy {self._hooks.name!r} sums gradients of the same parameters on all "
            f"ranks, and {what}: {WAY_OUT}"
        )

    def _gather(self, numbers: list[int]) -> Tensor:
        """Return the numbers of all ranks, ``(ranks, numbers)``, on the CPU."""
        mine = torch.tensor([numbers], device=self._run.world.device)
        return self._hooks.gather_outputs(self._run, {"numbers": mine})["numbers"].cpu()


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the parameters that the graph of ``loss`` ends in."""
    waiting = [loss.grad_fn]
    seen = set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [before for before, _ in node.next_functions]
