"""Train a WordPiece tokenizer, as in BERT, on the training rows of a built-in model.

``tokenizers.trainers.WordPieceTrainer`` gives a different vocabulary in every process: it numbers
the continuing characters (``##a``) in the order of a randomly seeded hash map, and these numbers
break ties between merges. Here every character form (``a`` at the start of a word, ``##a`` inside
it) is replaced by a code point of its own, in a fixed order, before byte-pair encoding (BPE) is
trained. Ties then break the same way every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from distcore_tasks.shared.lazy_rows import Values

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_ROWS = 200_000
"""Maximum number of rows for training a vocabulary. A larger dataset is sampled at even spaces."""
# Unicode's private planes 15 and 16 have code points that no text uses.
_FIRST_CODE = 0xF0000
_CODES = 2**17


def train_wordpiece(texts: Values[str], vocab_size: int) -> Tokenizer:
    """Train a lower-case WordPiece tokenizer of at most ``vocab_size`` tokens with special ones.

    Chinese characters are split off as words of their own. The same texts give the same
    tokenizer in every process.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    step = max(1, -(-len(texts) // MAX_ROWS))  # ceiling division
    words: Counter[str] = Counter()
    for text in islice(texts, 0, None, step):
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        words.update(word for word, _ in pieces)
    learned = _learn_tokens(words, vocab_size - len(SPECIAL))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *learned))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def as_transformers(tokenizer: Tokenizer, *, pairs: bool = False) -> Any:
    """Wrap the tokenizer for transformers, whose ``save_pretrained`` then works.

    With ``pairs`` the tokenizer returns token types.
    """
    from transformers import PreTrainedTokenizerFast

    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings: dict[str, Any] = dict(zip(names, SPECIAL, strict=True))
    if pairs:
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, **settings)


def _learn_tokens(words: Counter[str], size: int) -> list[str]:
    """Return up to ``size`` tokens.

    These are the character forms, most frequent first, then merges in the order learned.
    """
    forms: Counter[str] = Counter()
    for word, count in words.items():
        for form in _forms(word):
            forms[form] += count
    # Equally frequent forms are ordered by name, so that the order never depends on a hash.
    by_frequency = sorted(forms.items(), key=lambda item: (-item[1], item[0]))
    alphabet = [form for form, _ in by_frequency[: min(size, _CODES)]]
    codes = {form: chr(_FIRST_CODE + number) for number, form in enumerate(alphabet)}
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=list(codes.values()),
        limit_alphabet=len(codes),
        show_progress=False,
    )
    learner.train_from_iterator(_coded(words, codes), trainer)
    tokens = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    return [_decode(token, alphabet) for token, _ in tokens]


def _forms(word: str) -> list[str]:
    """Split a word into its character forms: ``abc`` into ``a``, ``##b``, ``##c``."""
    return [word[0], *(f"##{character}" for character in word[1:])]


def _coded(words: Counter[str], codes: dict[str, str]) -> Iterator[str]:
    """Yield each word in code points, as often as it occurs.

    A word with a form outside the alphabet is left out.
    """
    for word, count in words.items():
        forms = _forms(word)
        if all(form in codes for form in forms):
            coded = "".join(codes[form] for form in forms)
            yield " ".join([coded] * count)


def _decode(token: str, alphabet: list[str]) -> str:
    """Turn code points back into a WordPiece token: ``##`` stays at the start only."""
    first, *rest = (alphabet[ord(code) - _FIRST_CODE] for code in token)
    return first + "".join(form.removeprefix("##") for form in rest)
