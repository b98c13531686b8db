"""Rows of masked language modeling: texts, of which a longer one becomes several rows, or is cut.

They are masked batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore import ConfigError, DataError
from distcore_tasks.masked_lm.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.masked_lm.masking import Masking, count_masked
from distcore_tasks.masked_lm.models import mask_token
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows
from distcore_tasks.rows.texts import TextRows, Texts
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.cache import cut_warning, total
from distcore_tasks.shared.jagged import IGNORED, flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenize_rows import token_lists
from distcore_tasks.shared.tokenized import count_tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MaskedRows(TextRows):
    """Texts with masked tokens."""

    kind: ClassVar = "masked"
    version: ClassVar = 3
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    unit: ClassVar = "texts"
    counts: ClassVar = ("texts_cut",)
    refuses: ClassVar = False
    varies: ClassVar = True

    options: MaskedOptions
    """Options of the task."""
    seed: int
    """Seed of the masks."""

    @property
    def settings(self) -> Sequence[object]:
        """Not ``mask_probability``, because rows are masked batch by batch."""
        return [self.options.max_seq_len, self.options.split_texts]

    @property
    def streamed_settings(self) -> Sequence[object]:
        """A streamed text is one row, which is cut."""
        return [self.options.max_seq_len]

    def make_tokenizer(self, train: Callable[[], Iterable[Texts]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on some texts."""
        if not self.options.from_scratch:
            return load_tokenizer(self.options.model, self.options.model_folder())
        from distcore_tasks.shared.wordpiece import MAX_ROWS, as_transformers, train_wordpiece

        rows: Any = train()
        some = islice(rows, 0, None, -(-len(rows) // MAX_ROWS))
        sample = [text for (text,) in some]
        return as_transformers(train_wordpiece(sample, self.options.tokenizer.vocab_size))

    def describe_tokenizer(self, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Return the mask token, which tokens are ordinary, and the special ones around a text."""
        ordinary = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
        is_ordinary = np.zeros(count_tokens(tokenizer), bool)
        is_ordinary[[*ordinary]] = True
        before, behind = _special_tokens_around(tokenizer)
        return {
            "mask": np.array(mask_token(self.options.model, tokenizer)),
            "is_ordinary": is_ordinary,
            "before": np.array(before, np.int64),
            "behind": np.array(behind, np.int64),
        }

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Texts], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of each row, and the number of its ``ordinary`` ones."""
        before, behind = info["before"].tolist(), info["behind"].tolist()
        room = self._room(len(before) + len(behind))
        rows, owners, cut = list[list[int]](), list[int](), 0
        texts = [text for (text,) in values]
        for place, tokens in enumerate(token_lists(tokenizer, texts, special=False)):
            last = len(tokens) if self.options.split_texts else min(room, len(tokens))
            cut += last < len(tokens)
            # A text without tokens is one row if texts are one row each.
            starts = range(0, last, room) if self.options.split_texts else [0]
            for start in starts:
                rows.append([*before, *tokens[start : min(start + room, last)], *behind])
                owners.append(place)
        flat = flat_rows(rows)
        ordinary_before = np.zeros(len(flat.values) + 1, np.int64)
        np.cumsum(info["is_ordinary"][flat.values], out=ordinary_before[1:])
        ordinary = np.diff(ordinary_before[flat.offsets])
        table = CachedTable({"tokens": flat, "ordinary": ordinary})
        return Encoded(table, np.array(owners, np.int64), {"texts_cut": cut})

    def _room(self, taken: int) -> int:
        """Return the most tokens of a row that are not special.

        Raises ConfigError if there is room for none.
        """
        if self.options.max_seq_len <= taken:
            what = (
                f"the tokenizer puts {taken} special tokens around each row, which leaves no room"
                " for others"
            )
            raise ConfigError(f"max_seq_len = {self.options.max_seq_len}: {what}")
        return self.options.max_seq_len - taken

    def items(self, rows: Rows, info: TokenizerInfo) -> np.ndarray:
        """Return the masked tokens of each row, int64 ``(n,)``."""
        return count_masked(self.options.mask_probability, rows["ordinary"])

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return int64 tensors, padded to the longest of the rows, with the masks of the epoch.

        ``input_ids``, ``attention_mask`` and ``labels`` are ``(n, longest)``. Labels are
        ``IGNORED`` except for masked tokens. If targets are told, ``targets``, ``(targets,)``, has
        the positions of masked tokens among the tokens of all rows, without padding.
        """
        import torch

        masking = Masking(mask=int(info["mask"]), is_ordinary=info["is_ordinary"], seed=self.seed)
        tokens, mask = rows.padded("tokens", info.pad)
        labels = np.full_like(tokens, IGNORED)
        whole_rows, counts = rows.each("tokens"), self.items(rows, info).tolist()
        numbers = batch.numbers.tolist()
        for place, (whole, count, number) in enumerate(
            zip(whole_rows, counts, numbers, strict=True)
        ):
            read, places = masking.masked(whole, count, batch.epoch, number)
            tokens[place, : len(whole)] = read
            labels[place, places] = whole[places]
        arrays = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
        if batch.tells_targets:
            is_target = tensors["labels"][tensors["attention_mask"].bool()] != IGNORED
            tensors["targets"] = is_target.nonzero()[:, 0]
        return tensors

    def facts(
        self, name: str, table: CachedTable, train: CachedTable | None, info: TokenizerInfo
    ) -> Facts:
        """Return the number of tokens and, with stored training rows, baselines of the loss."""
        counts = _count_ordinary(table, info)
        if not counts.any():
            raise DataError(f"{name}: no token can be masked: all of them are special or unknown")
        facts: Facts = {"tokens": len(table.jagged("tokens").values)}
        if train is None:  # nobody knows how often a token is there
            return facts
        common = log_frequencies(counts=_count_ordinary(train, info))
        facts["unigram_perplexity"] = unigram_perplexity(counts=counts, common=common)
        facts["commonest_token"] = round(float(counts[common.argmax()] / counts.sum()), 4)
        return facts

    def facts_of_run(self, rows: PreparedRows) -> Facts:
        """Return the number of masked tokens of stored rows."""
        return {} if rows.is_streamed else {"targets": int(np.asarray(rows.items).sum())}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield a line about texts that are cut, and one about rows without masked tokens."""
        remedy = "--set task_options.split_texts=true makes several rows of each"
        yield from cut_warning(facts, self.options.max_seq_len, "texts", remedy=remedy)
        stored = [np.asarray(rows.items) for rows in sets.values() if not rows.is_streamed]
        if empty := sum(int((items == 0).sum()) for items in stored):
            rows = total(facts, "rows")
            yield (
                f"{empty} of {rows} rows have special or unknown tokens only: they are not masked"
                " and do not count"
            )


def _count_ordinary(table: CachedTable, info: TokenizerInfo) -> np.ndarray:
    """Return how often each ordinary token is there, int64; 0 for others."""
    is_ordinary = info["is_ordinary"]
    counts = count_each(array_blocks(table.jagged("tokens").values), len(is_ordinary))
    return np.where(is_ordinary, counts, 0)


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    [plain] = token_lists(tokenizer, ["a"], special=False)
    [whole] = token_lists(tokenizer, ["a"], special=True)
    begin = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]
