"""The option ``chunked_cross_entropy``, and whether a run computes its loss in chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from distcore import ConfigError, Datasets, OnResume
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from torch import nn

    from distcore import RunConfig

MODEL_TYPES = (
    "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "gemma", "olmo2", "smollm3",
    "bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert", "t5", "mt5",
)  # fmt: skip
"""Model types whose logits are the output of the head, a linear layer, as it is. A test
builds each of them.
"""
VOCABULARY = 30_000
"""Words from which ``auto`` computes in chunks: from there on it is faster, too."""
D = TypeVar("D", bound=Datasets)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions(TaskOptions):
    """Options of a task that predicts words of a vocabulary."""

    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "chunked_cross_entropy": "free"
    }

    chunked_cross_entropy: Literal["auto", "on", "off"] = "auto"
    """Compute the loss in chunks of positions, without all logits in memory; auto: with
    30,000 words or more.
    """

    def with_cross_entropy(self, config: RunConfig, data: D, family: str) -> D:
        """Return ``data`` with how the loss is computed among its facts, for the report.

        ``family`` is the type of a built-in model. Raises ConfigError if it should be
        in chunks, but cannot.
        """
        why_not = self.why_whole(config, data, family)
        if self.chunked_cross_entropy == "on" and why_not:
            raise ConfigError(f"task_options.chunked_cross_entropy = 'on': {why_not}; leave it out")
        way = f"whole logits: {why_not}" if why_not else "in chunks"
        return replace(data, facts={**data.facts, "cross_entropy": way})

    def with_chunked_head(
        self,
        config: RunConfig,
        data: Datasets,
        family: str,
        model: nn.Module,
        smoothing: float = 0.0,
    ) -> nn.Module:
        """Return ``model``, whose head computes the loss in chunks from now on, if the run does."""
        if not self.why_whole(config, data, family):
            from distcore_tasks.shared.chunked_cross_entropy.head import chunk_head

            chunk_head(model, smoothing)
        return model

    def why_whole(self, config: RunConfig, data: Any, family: str) -> str:
        """Return why the loss is computed from whole logits; empty if it is computed in chunks."""
        kind, words = family, data.vocab_size
        if not self.from_scratch:
            tree = read_config(self.model, self.model_folder())
            kind, words = tree["model_type"], tree.get("vocab_size", words)
        if self.chunked_cross_entropy == "off":
            return "chunked_cross_entropy is off"
        if kind not in MODEL_TYPES:
            return f"the model type {kind} is none of {', '.join(MODEL_TYPES)}"
        if config.precision == "fp16":
            return (
                "the loss scale of fp16 comes too late for gradients that are computed with the"
                " loss"
            )
        if config.compile == "on":
            return "--compile on compiles the head with the model"
        # With tp the vocabulary may be split, with loss_parallel its logits are; stages of pp
        # were not compared.
        if split := next(
            (name for name in ("tp", "pp") if config.strategy_options.get(name, 1) > 1), None
        ):
            return (
                f"strategy_options.{split} = {config.strategy_options[split]} splits the model over"
                " ranks"
            )
        if getattr(self, "whole_batch", False):
            return "the loss of a router is over the global batch"
        if self.chunked_cross_entropy == "auto" and words < VOCABULARY:
            return f"the vocabulary has {words:,} of {VOCABULARY:,} words"
        return ""
