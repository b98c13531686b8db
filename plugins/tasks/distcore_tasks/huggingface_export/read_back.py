"""Read a Hugging Face folder back as its users will, so that the export is proved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distcore import TrainedModel
from distcore.model import silence_transformers
from distcore_tasks.huggingface_export.card import WEIGHTS, adapter_loader, loading_class

if TYPE_CHECKING:
    from distcore import Proof

ROWS, TOKENS = 2, 8
"""Size of drawn inputs of tokens."""


def prove(to: Path, trained: TrainedModel, is_adapter: bool) -> Proof:
    """Load what is in ``to`` by the code of its card, in fp32, and compare it with the run's model.

    ``is_adapter``: ``to`` has an adapter without its base.
    """
    module: Any = trained.module
    if is_adapter:
        # An adapter whose base was written, too, has been taken out of the module by now.
        drawn = partial(drawn_inputs, module) if hasattr(module, "peft_config") else None
        return trained.prove("peft", partial(_load_adapter, to, trained), drawn=drawn)
    if not hasattr(module, "save_pretrained"):
        return trained.prove("safetensors", partial(_load_weights, to, module))
    return trained.prove(
        "transformers", partial(_load_model, to, module), drawn=partial(drawn_inputs, module)
    )


def drawn_inputs(module: Any) -> Mapping[str, Tensor]:
    """Return inputs of a model of transformers: random tokens or pixels, the same each time."""
    draws = torch.Generator().manual_seed(0)
    config: Any = module.config
    if module.main_input_name == "pixel_values":
        side = getattr(config, "image_size", None) or 64
        height, width = (side, side) if isinstance(side, int) else side
        shape = (ROWS, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=draws)}
    tokens = torch.randint(0, config.get_text_config().vocab_size, (ROWS, TOKENS), generator=draws)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens.flip(0)
    return inputs


def _load_model(to: Path, module: Any) -> nn.Module:
    """Return the model in ``to``, loaded as its card says."""
    import transformers

    loader: Any = getattr(transformers, loading_class(module), type(module))
    return _quietly(lambda: loader.from_pretrained(str(to), dtype=torch.float32))


def _load_adapter(to: Path, trained: TrainedModel) -> nn.Module:
    """Return the adapter in ``to`` on its base, loaded as its card says.

    Raises NotImplementedError if that base is not the one that was trained with.
    """
    if trained.config.lora.base == "nf4":
        raise NotImplementedError(
            "on the base in fp32 it answers otherwise than on that in 4 bits, which was trained"
        )
    import peft

    name, arguments = adapter_loader(to, trained.module)
    loader: Any = getattr(peft, name)
    return _quietly(lambda: loader.from_pretrained(str(to), dtype=torch.float32, **arguments))


def _load_weights(to: Path, module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with the weights in ``to``."""
    from safetensors.torch import load_model

    copied = copy.deepcopy(module)
    load_model(copied, str(to / WEIGHTS))
    return copied.float()


def _quietly(load: Callable[[], nn.Module]) -> nn.Module:
    """Return the loaded model, without the warnings of libraries about heads for other classes."""
    with silence_transformers():
        return load().float()
