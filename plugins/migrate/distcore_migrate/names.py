"""Names of the hub without an owner, as the scripts take them: here they would be
built-in models, or nothing.
"""

from __future__ import annotations

from pathlib import Path

OWNERS = {
    "bert-": "google-bert",
    "gpt2": "openai-community",
    "openai-gpt": "openai-community",
    "roberta-": "FacebookAI",
    "xlm-roberta-": "FacebookAI",
    "xlm-mlm-": "FacebookAI",
    "xlm-clm-": "FacebookAI",
    "distilbert-": "distilbert",
    "distilroberta-": "distilbert",
    "distilgpt2": "distilbert",
    "albert-": "albert",
    "xlnet-": "xlnet",
    "t5-": "google-t5",
    "camembert-": "almanach",
    "ctrl": "Salesforce",
    "transfo-xl-": "transfo-xl",
}
"""How a name without an owner begins, to the owner that the hub has put before it."""
DATA_SETS = {
    "glue": "nyu-mll/glue",
    "wikitext": "Salesforce/wikitext",
    "imdb": "stanfordnlp/imdb",
    "ag_news": "fancyzhx/ag_news",
    "conll2003": "eriktks/conll2003",
    "wnut_17": "leondz/wnut_17",
    "cnn_dailymail": "abisee/cnn_dailymail",
    "xsum": "EdinburghNLP/xsum",
    "samsum": "Samsung/samsum",
    "wmt14": "wmt/wmt14",
    "wmt16": "wmt/wmt16",
    "beans": "AI-Lab-Makerere/beans",
    "cifar10": "uoft-cs/cifar10",
    "cats_vs_dogs": "microsoft/cats_vs_dogs",
    "food101": "ethz/food101",
}
"""Datasets by the name that they had before the hub put an owner before it."""
FROM_SCRATCH = {"gpt2": "gpt2-base", "llama": "llama-base", "bert": "bert-base", "t5": "t5-medium"}
"""``model_type`` of a model with random weights to a built-in model of that architecture."""


def full_name(name: str) -> str:
    """Return the name with its owner, unless it has one or is a folder here."""
    if "/" in name or Path(name).exists():
        return name
    return next(
        (f"{owner}/{name}" for start, owner in OWNERS.items() if name.startswith(start)), name
    )
