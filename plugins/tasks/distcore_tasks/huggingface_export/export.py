"""The exporter ``huggingface``: a folder that ``from_pretrained`` of transformers or of peft
loads, or bare weights.
"""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from safetensors.torch import save_model

from distcore import TrainedModel
from distcore_tasks.huggingface_export.adapter import write_adapter
from distcore_tasks.huggingface_export.card import FILE, WEIGHTS, write_card
from distcore_tasks.huggingface_export.read_back import prove

log = logging.getLogger("distcore")

SHARD = "5GB"
"""Most bytes of a file of weights."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write model, config, card and the task's files, such as a tokenizer, to
    the new folder ``to``.

    Tied weights stay tied. A run with LoRA gives a folder for peft, or, if ``merged``, the whole
    model. Of a model that is not one of transformers only the weights are written. Raises OSError,
    and DistcoreError if what was written is another model than that of the run.
    """
    module: Any = trained.module
    is_adapter = trained.config.lora.rank is not None and not merged
    # transformers imports libraries that print to stdout, and shows a bar on stderr.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if is_adapter:
            write_adapter(to, module, _base(trained))
        elif not hasattr(module, "save_pretrained"):
            to.mkdir(exist_ok=True)
            save_model(module, str(to / WEIGHTS))
        else:
            module.save_pretrained(to, max_shard_size=SHARD)
    trained.save_task_files(to)
    write_card(to, trained, prove(to, trained, is_adapter))
    for file in filter(Path.is_file, to.iterdir()):  # libraries make some that nobody else may read
        file.chmod((to / FILE).stat().st_mode)
    if trained.config.lora.base == "nf4":
        _say_what_differs(merged, str(module.dtype).removeprefix("torch."))
    if not hasattr(module, "save_pretrained"):
        kind, file = type(module).__name__, to / WEIGHTS
        log.warning(
            "%s is not a model of transformers; %s has its weights, and %s how to load them",
            kind,
            file,
            FILE,
        )


def _say_what_differs(merged: bool, dtype: str) -> None:
    if not merged:
        log.warning(
            "lora.base = nf4: on the base as its files have it, the adapter answers otherwise; load"
            " it in 4 bits, by BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'), or"
            " export with --merged"
        )
    elif dtype != "float32":
        log.warning(
            "lora.base = nf4: the merged weights are rounded to %s; fp32 keeps the answers of"
            " the run",
            dtype,
        )


def _base(trained: TrainedModel) -> str | None:
    """Return the base for peft: a name of the hub, or a folder; ``None`` if it has neither."""
    folder = trained.pretrained
    if folder is None:
        return None
    model = str(trained.config.task_options.get("model", folder))
    return str(folder.absolute()) if Path(model).expanduser().exists() else model
