"""The exporter ``huggingface``: a folder that ``from_pretrained`` of transformers or of peft loads."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from distcore import ModelError, TrainedModel
from distcore_tasks.huggingface_export.adapter import take_out, write_adapter
from distcore_tasks.huggingface_export.card import FILE, write_card

SHARD = "5GB"
"""Most bytes of a file of weights."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write model, config, card and the task's files, such as a tokenizer, to the new folder ``to``.

    Tied weights stay tied. A run with LoRA gives a folder for peft, or, if ``merged``, the whole model. Raises
    ModelError for a model of another library, and OSError.
    """
    module: Any = trained.module
    if not hasattr(module, "save_pretrained"):
        raise ModelError(f"{trained.checkpoint}: its model is a {type(module).__name__}, not one of transformers")
    has_adapter = trained.config.lora.rank is not None
    # transformers imports libraries that print to stdout, and shows a bar on stderr.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if has_adapter and not merged:
            write_adapter(to, module, _base(trained))
        else:
            whole = take_out(module, merge=True) if has_adapter else module
            whole.save_pretrained(to, max_shard_size=SHARD)
    trained.save_task_files(to)
    write_card(to, trained)
    for file in filter(Path.is_file, to.iterdir()):  # libraries make some that nobody else may read
        file.chmod((to / FILE).stat().st_mode)


def _base(trained: TrainedModel) -> str | None:
    """Return the base for peft: a name of the hub, or a folder; ``None`` if it has neither."""
    folder = trained.pretrained
    if folder is None:
        return None
    model = str(trained.config.task_options.get("model", folder))
    return str(folder.absolute()) if Path(model).expanduser().exists() else model
