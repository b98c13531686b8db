"""The model card of an exported model: its task, data, metrics, and how to train it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from distcore import TrainedModel
from distcore_tasks.huggingface_export.settings import shareable_settings, without_folder
from distcore_tasks.shared.generation.settings import settings_of_text

if TYPE_CHECKING:
    from distcore import Proof

WEIGHTS = "model.safetensors"
"""The file of weights, where it is written without the help of transformers."""
ONNX, PROGRAM, GGUF = "model.onnx", "model.pt2", "model.gguf"
"""Files of a model for other programs: onnxruntime, torch.export, llama.cpp."""
LIBRARIES = {ONNX: "onnx", PROGRAM: "pytorch", GGUF: "gguf"}
"""Such a file, to the library that hubs show."""
FILE = "README.md"
"""The file of a model folder that hubs show."""
KINDS = {
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForConditionalGeneration": ("text2text-generation", "AutoModelForSeq2SeqLM"),
}
"""The end of a transformers class name, to its pipeline and its loading class."""
INPUTS = {
    "tokenizer_config.json": "AutoTokenizer",
    "preprocessor_config.json": "AutoImageProcessor",
}
"""Files of a model's preprocessor, to the class of transformers that loads it."""
MODULES = "modules.json"
"""The file of sentence-transformers in the folder of a model of embeddings."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file of peft's settings in the folder of an adapter."""
AUTO_CLASSES = {
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
}
"""peft's name of a task, to its class that loads an adapter with its base."""


def write_card(to: Path, trained: TrainedModel, proof: Proof, inputs: Sequence[str] = ()) -> None:
    """Write ``FILE`` into the folder ``to`` of a model or an adapter.

    The card uses the metrics of the run folder, if they exist, and ``proof``, what was measured
    of the export itself.
    ``inputs``: those of a graph.
    """
    model = type(trained.module).__name__
    kind = next((kind for end, (kind, _) in KINDS.items() if model.endswith(end)), None)
    is_adapter, embeds = (to / ADAPTER_CONFIG).is_file(), (to / MODULES).is_file()
    library, tags = ("peft", ["distcore", "lora"]) if is_adapter else ("transformers", ["distcore"])
    if embeds and not is_adapter:
        kind, library = "sentence-similarity", "sentence-transformers"
    head = {"library_name": library} | ({"pipeline_tag": kind} if kind else {}) | {"tags": tags}
    if is_adapter:
        use = _how_to_use(to, trained.module)
    else:
        use = _how_to_embed(to) if embeds else _how_to_load(to, loading_class(trained.module))
    if not is_adapter and not hasattr(trained.module, "save_pretrained"):
        head, use = {"tags": tags}, _how_to_fill(to, model)
    if file := next((file for file in LIBRARIES if (to / file).is_file()), None):
        head |= {"library_name": LIBRARIES[file]}
        use = (
            _how_to_complete(to, trained.module) if file == GGUF else _how_to_run(to, file, inputs)
        )
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        *_body(to.name, trained, use, proof),
    ]
    (to / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def loading_class(module: Any) -> str:
    """Return the class of transformers by which users load a whole model: an Auto
    class, or the model's own.
    """
    import transformers

    model = type(module).__name__
    own = model if hasattr(transformers, model) and not model.endswith("Model") else "AutoModel"
    return next((auto for end, (_, auto) in KINDS.items() if model.endswith(end)), own)


def adapter_loader(to: Path, module: Any) -> tuple[str, dict[str, object]]:
    """Return the class of peft that loads the adapter in ``to`` with its base, and the
    arguments that it needs.

    The base of a classifier may have a head for other classes.
    """
    settings = json.loads((to / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    auto = AUTO_CLASSES.get(settings["task_type"], "AutoPeftModel")
    if module.get_output_embeddings() is not None:
        return auto, {}
    return auto, {"num_labels": module.config.num_labels, "ignore_mismatched_sizes": True}


def _body(name: str, trained: TrainedModel, use: Iterable[str], proof: Proof) -> Iterator[str]:
    known, decay = trained.provenance, trained.config.ema.decay
    yield f"# {name}"
    yield ""
    yield (
        f"A {known['model']} of the task {known['task']}, trained with distcore for"
        f" {known['steps']} optimizer steps."
    )
    if trained.is_average:
        yield (
            "Its weights are an exponential moving average of those that were trained, of decay"
            f" {decay}."
        )
    yield from use
    yield from ("", "## Evaluation", "")
    if metrics := _evaluation(trained.checkpoint.absolute().parent.parent, int(known["steps"])):
        yield from ("The model of the run:", "", "| metric | value |", "|---|---|")
        yield from (f"| {metric} | {value:.4g} |" for metric, value in metrics.items())
        yield ""
    yield f"This export: {proof.sentence()}"
    yield from ("", "## Data", "")
    yield f"- training: {known['data']}, {known['rows']}"
    yield f"- SHA-256 of the training rows: `{known['data_sha256']}`"
    yield from ("", "## Training", "")
    ranks = f"{known['ranks']} rank{'s' * (known['ranks'] != '1')}"
    yield (
        f"- strategy {known['strategy']}, {ranks}, device {known['device']}, precision"
        f" {known['precision']}"
    )
    yield f"- {known['environment']}"
    yield from (
        "",
        "What differs from the defaults; as a file, `distcore train config.yaml` trains it again:",
        "",
        "```yaml",
    )
    yield yaml.safe_dump(
        shareable_settings(trained.config), sort_keys=False, allow_unicode=True
    ).strip()
    yield "```"


def _how_to_load(to: Path, auto: str) -> Iterator[str]:
    """Yield code that loads a whole model and, if there is one, its preprocessor."""
    others = {file: name for file, name in INPUTS.items() if (to / file).is_file()}
    yield from (
        "",
        "```python",
        f"from transformers import {', '.join([auto, *others.values()])}",
        "",
    )
    yield f'model = {auto}.from_pretrained("{to.name}")'
    for name in others.values():
        variable = "tokenizer" if name == "AutoTokenizer" else "processor"
        yield f'{variable} = {name}.from_pretrained("{to.name}")'
    yield "```"


def _how_to_run(to: Path, graph: str, inputs: Sequence[str]) -> Iterator[str]:
    """Yield code that computes the scores of inputs by a graph, or the embeddings of texts."""
    name = next((loads for file, loads in INPUTS.items() if (to / file).is_file()), "AutoTokenizer")
    texts = '["a text"], ["its pair"]' if "token_type_ids" in inputs else '["a text"]'
    reads = (
        f"prepare({texts}, truncation=True, padding=True"
        if "Tokenizer" in name
        else "prepare([image]"
    )
    library, arrays = ("onnxruntime", "np") if graph == ONNX else ("torch", "pt")
    embeds = (to / MODULES).is_file()
    answer = "states" if embeds else "scores"
    yield from ("", "```python", f"import {library}", f"from transformers import {name}", "")
    yield f'prepare = {name}.from_pretrained("{to.name}")'
    yield f'inputs = {reads}, return_tensors="{arrays}")'
    if graph == ONNX:
        yield f'session = onnxruntime.InferenceSession("{to.name}/{ONNX}")'
        yield (
            f"({answer},) = session.run(None, {{one.name: inputs[one.name] for one in"
            " session.get_inputs()})"
        )
    else:
        yield f'model = torch.export.load("{to.name}/{PROGRAM}").module()'
        yield f"{answer} = model({', '.join(f'{each}=inputs[{each!r}]' for each in inputs)})"
    yield from _how_to_pool(to) if embeds else ()
    yield "```"


def _how_to_pool(to: Path) -> Iterator[str]:
    """Yield code that makes embeddings of the states of tokens, as the run does."""
    modes = json.loads((to / "1_Pooling/config.json").read_text(encoding="utf-8"))
    if modes["pooling_mode_cls_token"]:
        yield "embeddings = states[:, 0]"
    else:
        yield 'mask = inputs["attention_mask"][..., None]'
        yield "embeddings = (states * mask).sum(1) / mask.sum(1)"
    yield "embeddings = embeddings / (embeddings**2).sum(1)[:, None] ** 0.5"


def _how_to_complete(to: Path, module: Any) -> Iterator[str]:
    """Yield code that completes a text by llama.cpp, and what it does not read."""
    yield from ("", "```python", "from llama_cpp import Llama", "")
    yield from (
        f'model = Llama("{to.name}/{GGUF}", n_ctx=0)',
        'answer = model("a text", temperature=0)',
    )
    yield from ('print(answer["choices"][0]["text"])', "```")
    if lost := settings_of_text(vars(module.generation_config)):
        listed = ", ".join(f"`{key} = {value!r}`" for key, value in lost.items())
        yield ""
        yield f"Texts of the run follow {listed}, too, for which a file has no place."


def _how_to_embed(to: Path) -> Iterator[str]:
    """Yield code that loads a model of embeddings."""
    yield from ("", "```python", "from sentence_transformers import SentenceTransformer", "")
    yield from (
        f'model = SentenceTransformer("{to.name}")',
        'embeddings = model.encode(["a text"])',
        "```",
    )


def _how_to_fill(to: Path, model: str) -> Iterator[str]:
    """Yield code that loads the weights into a model that its own code has built."""
    yield from ("", f"`{WEIGHTS}` has its weights; its own code builds the model:", "", "```python")
    yield from ("from safetensors.torch import load_model", "")
    yield from (
        f'load_model(model, "{to.name}/{WEIGHTS}")  # model: a {model}, as the task makes it',
        "```",
    )


def _how_to_use(to: Path, module: Any) -> Iterator[str]:
    """Yield code that loads an adapter."""
    settings = json.loads((to / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings["base_model_name_or_path"]
    auto, needed = adapter_loader(to, module)
    arguments = "".join(f", {name}={value!r}" for name, value in needed.items())
    rank, alpha = settings["r"], settings["lora_alpha"]
    yield from (
        "",
        (
            f"It is a LoRA adapter, of rank {rank} and alpha {alpha:g}; `{without_folder(base)}` is"
            " its base:"
        ),
    )
    yield from ("", "```python", f"from peft import {auto}", "")
    yield from (f'model = {auto}.from_pretrained("{to.name}"{arguments})', "```", "")
    yield "Where the base is elsewhere, load it by itself, and put the adapter into it:"
    yield f"`PeftModel.from_pretrained(base, {to.name!r})`."


def _evaluation(run: Path, step: int) -> dict[str, float]:
    """Return the metrics of the evaluation after ``step``, as metrics.jsonl has them; none if there
    was no such one.
    """
    file = run / "metrics.jsonl"
    metrics: dict[str, object] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError, LookupError, TypeError):  # a killed run may have cut a line off
            values = json.loads(line)
            if values["step"] == step:
                metrics |= {
                    key[5:]: value for key, value in values.items() if key.startswith("eval/")
                }
    counts = ("unique", "dataset_size")  # the same as ``evaluated``
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, float | int) and name not in counts
    }
