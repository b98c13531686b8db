"""Print what llama.cpp makes of a model, as JSON: ``python read_gguf.py
MODEL.gguf TOKENS < texts.json``.

It runs in an environment with llama-cpp-python, and needs nothing else.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llama_cpp import Llama


def main(file: str, count: int) -> list[dict[str, Any]]:
    """Of each text: its tokens, the best next token after each of them, and its
    continuation of ``count`` tokens.
    """
    model: Any = Llama(file, n_ctx=0, n_threads=1, logits_all=True, verbose=False)
    read = []
    for text in json.load(sys.stdin):
        tokens = model.tokenize(text.encode(), add_bos=True, special=True)
        model.reset()
        model.eval(tokens)
        best = model.scores[: len(tokens)].argmax(1).tolist()
        answer = model(text, max_tokens=count, temperature=0)["choices"][0]["text"] if count else ""
        read.append({"tokens": tokens, "best": best, "answer": answer})
    return read


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
