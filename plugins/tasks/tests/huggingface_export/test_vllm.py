"""vLLM's own loader takes the folder of a chat model: its prompt, the tokens that end
an answer, sampling defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from transformers import AutoTokenizer, GenerationConfig

from distcore.cli.main import main

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / "build/vllm/bin/python"
"""Has vLLM, by ``make exports``."""
ASKED = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 2"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    conversations = [
        {"messages": [*ASKED, {"role": "assistant", "content": f"3 {n}"}]} for n in range(40)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return file


def read_with_vllm(folder: Path) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make exports makes it")
    command = [str(PYTHON), str(ROOT / "tests/support/read_with_vllm.py"), str(folder)]
    done = subprocess.run(
        command,
        input=json.dumps(ASKED),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def exported(rows: Path, model: str, *flags: str) -> Path:
    """Train a chat model for two steps, and export it."""
    out, to = str(rows.parent / "run"), str(rows.parent / "chat")
    job = [
        "--task",
        "causal-lm",
        "--data",
        str(rows),
        "--model",
        model,
        "--max-seq-len",
        "64",
        "--max-steps",
        "2",
    ]
    assert main(["train", *job, "--eval-every", "0", "--out", out, *flags]) == 0
    assert main(["checkpoint", "export", out, "--to", to, *(["--merged"] if flags else [])]) == 0
    return Path(to)


@pytest.mark.slow
@pytest.mark.programs
def test_a_built_in_chat_model_is_served_with_the_prompt_it_was_trained_on(rows: Path) -> None:
    folder = exported(rows, "llama-tiny")
    read = read_with_vllm(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read["architecture"] == "LlamaForCausalLM"
    assert read["length"] == 1024
    assert read["ends"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert read["prompt"] == "<|system|>Count.<|end|><|user|>1 2<|end|><|assistant|>"
    assert {"<|end|>", "<|user|>", "<|assistant|>"} <= set(read["special"])


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.parametrize("flags", [(), ("--lora", "2")])
def test_a_pretrained_chat_model_keeps_its_template_and_how_it_answers(
    rows: Path, flags: tuple[str, ...]
) -> None:
    base = gguf_models.make("mistral", rows.parent / "base")
    GenerationConfig(
        eos_token_id=[2, 7], temperature=0.6, top_p=0.9, do_sample=True
    ).save_pretrained(base)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    read = read_with_vllm(exported(rows, str(base), *flags))
    assert read["architecture"] == "MistralForCausalLM"
    assert read["ends"] == [2, 7]
    assert read["sampling"] == {"temperature": 0.6, "top_p": 0.9}
    assert read["prompt"] == "[system] Count.</s>[user] 1 2</s>[assistant] "
