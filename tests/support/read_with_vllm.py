"""Print what vLLM makes of a model's folder before it loads weights, as
JSON: ``python read_with_vllm.py FOLDER``.

stdin is a conversation as JSON. It runs in an environment with vLLM; a GPU is not needed.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any


def main(folder: str, conversation: list[dict[str, str]]) -> dict[str, Any]:
    """Return architecture, length, sampling defaults, tokens that end an answer, and the
    conversation as a prompt.
    """
    from vllm.config import ModelConfig
    from vllm.tokenizers import get_tokenizer
    from vllm.transformers_utils.config import try_get_generation_config

    config = ModelConfig(model=folder, dtype="float32")
    generation = try_get_generation_config(folder, trust_remote_code=False)
    tokenizer: Any = get_tokenizer(folder)
    return {
        "architecture": config.architecture,
        "length": config.max_model_len,
        "sampling": config.get_diff_sampling_param(),
        "ends": generation and generation.eos_token_id,
        "prompt": tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        ),
        "special": tokenizer.all_special_tokens,
    }


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        read = main(sys.argv[1], json.load(sys.stdin))
    print(json.dumps(read))
