"""Read a GGUF file back: by llama.cpp where it is installed, else by transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distcore import TrainedModel
from distcore.model import silence_transformers
from distcore.registry import is_installed
from distcore_tasks.gguf_export.families import rope_factors
from distcore_tasks.huggingface_export.read_back import drawn_inputs

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput

    from distcore import Proof


def prove(file: Path, trained: TrainedModel) -> Proof:
    """Compare the answers of ``file`` with those of the model of the run."""
    module: Any = trained.module
    drawn = partial(drawn_inputs, module)
    if is_installed("llama_cpp"):
        # llama.cpp keeps keys and values in half precision.
        return trained.prove("llama.cpp", partial(LlamaCpp, file), torch.float16, drawn)
    return trained.prove("transformers", partial(_by_transformers, file, module), drawn=drawn)


class LlamaCpp(nn.Module):
    """A file as llama.cpp computes it, called as the model of transformers that it was made of."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        from llama_cpp import Llama

        self._model: Any = Llama(str(file), n_ctx=0, logits_all=True, verbose=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: object) -> CausalLMOutput:
        """Return the logits of rows that are padded at their end; those of padding are 0."""
        from transformers.modeling_outputs import CausalLMOutput

        logits = torch.zeros(*input_ids.shape, self._model.n_vocab())
        masks = attention_mask.bool()
        for row, tokens in enumerate(input_ids):
            mask = masks[row]
            self._model.reset()
            self._model.eval(tokens[mask].tolist())
            # The rest of the scores is that of earlier, longer rows.
            scores = self._model.scores[: int(mask.sum())]
            logits[row, mask] = torch.from_numpy(scores).float()
        return CausalLMOutput(logits=logits)


def _by_transformers(file: Path, module: Any) -> nn.Module:
    """Return the model that transformers makes of ``file``; raises NotImplementedError where it
    reads less than all.
    """
    if rope_factors(module) is not None:
        raise NotImplementedError(
            "transformers does not read the factors of rotary positions; with llama-cpp-python they"
            " are read"
        )
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with silence_transformers():
        model: nn.Module = auto.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    return model
