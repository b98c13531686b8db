"""Training or evaluating: the core sets it in the model and in its wrapper, and asks neither."""

from __future__ import annotations

from distcore.plugin.strategy.contract import Run


def set_mode(run: Run, training: bool) -> None:
    """Put the model of ``run`` into the mode of training or of evaluation.

    A wrapper's ``training`` says nothing: some engines leave it at True for ever. A wrapper may
    also keep the call to itself, so the model inside is called as well.
    """
    run.model.train(training)
    if run.module is not run.model:
        run.module.train(training)
