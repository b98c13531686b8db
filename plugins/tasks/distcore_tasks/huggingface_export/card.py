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

    The card uses the metrics of the run folder, if they exist, and ``proof``, which has the
    measurements of the export itself. ``inputs``: those of a graph.
    """
    module = trained.module
    model = type(module).__name__
    pipeline = _pipeline_of(model)
    library = "transformers"
    tags = ["distcore"]
    if (to / ADAPTER_CONFIG).is_file():
        library = "peft"
        tags.append("lora")
        use = _how_to_use(to, module)
    elif (to / MODULES).is_file():
        library = "sentence-transformers"
        pipeline = "sentence-similarity"
        use = _how_to_embed(to)
    else:
        use = _how_to_load(to, loading_class(module))
    head: dict[str, object] = {"library_name": library}
    if pipeline:
        head["pipeline_tag"] = pipeline
    head["tags"] = tags
    if library != "peft" and not hasattr(module, "save_pretrained"):
        # No library loads a module of the user's own.
        head = {"tags": tags}
        use = _how_to_fill(to, model)
    # A file for another program comes before whatever else is in the folder.
    file = next((file for file in LIBRARIES if (to / file).is_file()), None)
    if file is not None:
        head["library_name"] = LIBRARIES[file]
        use = _how_to_complete(to, module) if file == GGUF else _how_to_run(to, file, inputs)
    front_matter = yaml.safe_dump(head, sort_keys=False).strip()
    lines = ["---", front_matter, "---", "", *_body(to.name, trained, use, proof)]
    (to / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pipeline_of(model: str) -> str | None:
    """Return the pipeline of a class of transformers; ``None`` if it has none."""
    for end, (pipeline, _) in KINDS.items():
        if model.endswith(end):
            return pipeline
    return None


def loading_class(module: Any) -> str:
    """Return the class of transformers that loads a whole model: an Auto class, or its own."""
    import transformers

    model = type(module).__name__
    for end, (_, auto) in KINDS.items():
        if model.endswith(end):
            return auto
    if hasattr(transformers, model) and not model.endswith("Model"):
        return model
    return "AutoModel"


def adapter_loader(to: Path, module: Any) -> tuple[str, dict[str, object]]:
    """Return the class of peft that loads the adapter in ``to`` with its base, and its arguments.

    The base of a classifier may have a head for other classes.
    """
    settings = json.loads((to / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    auto = AUTO_CLASSES.get(settings["task_type"], "AutoPeftModel")
    if module.get_output_embeddings() is not None:
        return auto, {}
    return auto, {"num_labels": module.config.num_labels, "ignore_mismatched_sizes": True}


def _body(name: str, trained: TrainedModel, use: Iterable[str], proof: Proof) -> Iterator[str]:
    """Yield the lines of the card after its head; ``use``: those about how to load the model."""
    origin = trained.provenance
    yield f"# {name}"
    yield ""
    yield (
        f"A {origin['model']} of the task {origin['task']}, trained with distcore for"
        f" {origin['steps']} optimizer steps."
    )
    if trained.is_average:
        yield (
            "Its weights are an exponential moving average of those that were trained, of decay"
            f" {trained.config.ema.decay}."
        )
    yield from use
    yield from ("", "## Evaluation", "")
    run_folder = trained.checkpoint.absolute().parent.parent
    metrics = _evaluation(run_folder, int(origin["steps"]))
    if metrics:
        yield from ("The model of the run:", "", "| metric | value |", "|---|---|")
        for metric, value in metrics.items():
            yield f"| {metric} | {value:.4g} |"
        yield ""
    yield f"This export: {proof.sentence()}"
    yield from ("", "## Data", "")
    yield f"- training: {origin['data']}, {origin['rows']}"
    yield f"- SHA-256 of the training rows: `{origin['data_sha256']}`"
    yield from ("", "## Training", "")
    ranks = f"{origin['ranks']} rank{'s' * (origin['ranks'] != '1')}"
    yield (
        f"- strategy {origin['strategy']}, {ranks}, device {origin['device']}, precision"
        f" {origin['precision']}"
    )
    yield f"- {origin['environment']}"
    yield from (
        "",
        "What differs from the defaults; as a file, `distcore train config.yaml` trains it again:",
        "",
        "```yaml",
    )
    settings = shareable_settings(trained.config)
    yield yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip()
    yield "```"


def _how_to_load(to: Path, auto: str) -> Iterator[str]:
    """Yield code that loads a whole model and, if there is one, its preprocessor."""
    preprocessors = [name for file, name in INPUTS.items() if (to / file).is_file()]
    classes = ", ".join([auto, *preprocessors])
    yield from ("", "```python", f"from transformers import {classes}", "")
    yield f'model = {auto}.from_pretrained("{to.name}")'
    for name in preprocessors:
        variable = "tokenizer" if name == "AutoTokenizer" else "processor"
        yield f'{variable} = {name}.from_pretrained("{to.name}")'
    yield "```"


def _how_to_run(to: Path, graph: str, inputs: Sequence[str]) -> Iterator[str]:
    """Yield code that computes the scores of inputs by a graph, or the embeddings of texts."""
    loaders = [loader for file, loader in INPUTS.items() if (to / file).is_file()]
    loader = loaders[0] if loaders else "AutoTokenizer"
    call = "prepare([image]"
    if "Tokenizer" in loader:
        texts = '["a text"], ["its pair"]' if "token_type_ids" in inputs else '["a text"]'
        call = f"prepare({texts}, truncation=True, padding=True"
    library, arrays = ("onnxruntime", "np") if graph == ONNX else ("torch", "pt")
    embeds = (to / MODULES).is_file()
    answer = "states" if embeds else "scores"
    yield from ("", "```python", f"import {library}", f"from transformers import {loader}", "")
    yield f'prepare = {loader}.from_pretrained("{to.name}")'
    yield f'inputs = {call}, return_tensors="{arrays}")'
    if graph == ONNX:
        yield f'session = onnxruntime.InferenceSession("{to.name}/{ONNX}")'
        yield (
            f"({answer},) = session.run(None, {{one.name: inputs[one.name] for one in"
            " session.get_inputs()})"
        )
    else:
        yield f'model = torch.export.load("{to.name}/{PROGRAM}").module()'
        arguments = ", ".join(f"{name}=inputs[{name!r}]" for name in inputs)
        yield f"{answer} = model({arguments})"
    if embeds:
        yield from _how_to_pool(to)
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
    yield f'model = Llama("{to.name}/{GGUF}", n_ctx=0)'
    yield 'answer = model("a text", temperature=0)'
    yield 'print(answer["choices"][0]["text"])'
    yield "```"
    if lost := settings_of_text(vars(module.generation_config)):
        listed = ", ".join(f"`{key} = {value!r}`" for key, value in lost.items())
        yield ""
        yield f"Texts of the run follow {listed}, too, for which a file has no place."


def _how_to_embed(to: Path) -> Iterator[str]:
    """Yield code that loads a model of embeddings."""
    yield from ("", "```python", "from sentence_transformers import SentenceTransformer", "")
    yield f'model = SentenceTransformer("{to.name}")'
    yield 'embeddings = model.encode(["a text"])'
    yield "```"


def _how_to_fill(to: Path, model: str) -> Iterator[str]:
    """Yield code that loads the weights into a model that its own code has built."""
    yield from ("", f"`{WEIGHTS}` has its weights; its own code builds the model:", "", "```python")
    yield from ("from safetensors.torch import load_model", "")
    yield f'load_model(model, "{to.name}/{WEIGHTS}")  # model: a {model}, as the task makes it'
    yield "```"


def _how_to_use(to: Path, module: Any) -> Iterator[str]:
    """Yield code that loads an adapter."""
    settings = json.loads((to / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = settings["base_model_name_or_path"]
    auto, needed = adapter_loader(to, module)
    arguments = "".join(f", {name}={value!r}" for name, value in needed.items())
    rank, alpha = settings["r"], settings["lora_alpha"]
    yield ""
    yield (
        f"It is a LoRA adapter, of rank {rank} and alpha {alpha:g}; `{without_folder(base)}` is"
        " its base:"
    )
    yield from ("", "```python", f"from peft import {auto}", "")
    yield from (f'model = {auto}.from_pretrained("{to.name}"{arguments})', "```", "")
    yield "Where the base is elsewhere, load it by itself, and put the adapter into it:"
    yield f"`PeftModel.from_pretrained(base, {to.name!r})`."


def _evaluation(run: Path, step: int) -> dict[str, float]:
    """Return the metrics of the evaluation after ``step``; none if there was no such one."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        return {}
    metrics: dict[str, object] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, LookupError, TypeError):  # a killed run may have cut a line off
            values = json.loads(line)
            if values["step"] != step:
                continue
            for key, value in values.items():
                if key.startswith("eval/"):
                    metrics[key.removeprefix("eval/")] = value
    numbers = {}
    for name, value in metrics.items():
        # These two are ``evaluated`` again.
        is_repeated = name in ("unique", "dataset_size")
        if isinstance(value, float | int) and not is_repeated:
            numbers[name] = value
    return numbers
