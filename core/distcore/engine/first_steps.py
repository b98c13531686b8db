"""What is watched in the first steps of a run beside the proof: what the ranks call, and whose
error ends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from distcore.engine.backend_errors import explain_backend_errors
from distcore.engine.lockstep import compare_ranks
from distcore.engine.proof import STEPS
from distcore.engine.training import Training


@contextmanager
def watch_first_steps(training: Training) -> Iterator[None]:
    """Raise TaskError, one line, if the strategy cannot take what the task does in the first steps.

    With ``prove: off``, as tasks under laws have it by default, ranks are not compared.
    """
    last = training.progress.step + STEPS

    def is_over() -> bool:
        return training.progress.step >= last

    compares = training.run.config.prove != "off"
    comparison = compare_ranks(training.run, training.hooks, is_over) if compares else nullcontext()
    with explain_backend_errors(training, is_over), comparison:
        yield
