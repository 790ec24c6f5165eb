"""Model card of an exported folder: recipe, data, budget, scores, licence, caveats, and how to use it."""

import re
from pathlib import Path
from typing import Literal

from exlm_cli.export.source import Source
from exlm_cli.finetune.results import RunResults
from exlm_cli.run_dir import read_run_json

Format = Literal["hf", "onnx"]
PAPER = "https://arxiv.org/abs/2501.13397"
_TASKS = {
    "EsmForMaskedLM": "fill-mask",
    "EsmForSequenceClassification": "text-classification",
    "EsmForTokenClassification": "token-classification",
}
_ANSWER = """\
question = "When was the clock built?"
paragraph = "The tower clock was built in 1424. It shows the moon and two small knights."
batch = tokenizer(
    [question], [paragraph], truncation="only_second", return_offsets_mapping=True, return_tensors="{tensors}"
)
offsets = batch.pop("offset_mapping")[0].tolist()
{run}

# an answer begins and ends at a token of the paragraph that is not blank
parts = zip(batch.sequence_ids(0), offsets)
is_text = [part == 1 and paragraph[i:j].strip() != "" for part, (i, j) in parts]
is_answer = np.tril(np.triu(np.outer(is_text, is_text)), {max_answer_tokens} - 1)  # so many tokens at most
scores = np.where(is_answer, np.add.outer(start, end), -np.inf)
first, last = np.unravel_index(scores.argmax(), scores.shape)
no_answer_score = start[0] + end[0] - scores[first, last]
threshold = {threshold!r}  # with it F1 is best in validation
answer = paragraph[offsets[first][0] : offsets[last][1]].strip()
print(answer if no_answer_score <= threshold else "no answer")"""
"""Code that finds an answer as `tasks.squad.windows.best_answer` does in the first window."""
_CANONICAL = """\
def canonical(smiles):
    return CanonSmiles(re.sub(r":\\d+]", "]", smiles))  # without atom-map numbers
"""
_PARENT = """\
def canonical(smiles):
    molecule = MolFromSmiles(re.sub(r":\\d+]", "]", smiles))  # without atom-map numbers
    parameters = rdMolStandardize.CleanupParameters()
    parameters.preferOrganic = True
    fragment = rdMolStandardize.FragmentParent(molecule, parameters, skipStandardize=True)
    return MolToSmiles(rdMolStandardize.Uncharger().uncharge(fragment))  # the parent of a salt
"""
"""Code that writes SMILES as `data.molecules` does, metals with odd valences apart."""


def model_card(
    source: Source, difference: float, *, form: Format = "hf", licence: str | None = None, repo: str | None = None
) -> str:
    """Return the content of `README.md`.

    Args:
        source: The model.
        difference: The largest one from the outputs of the run.
        form: Format of the folder.
        licence: As the Hub names it; None: none is stated.
        repo: OWNER/NAME on the Hub; None: a folder.
    """
    on_task = "" if source.results is None else f", {_trained_on(source.results, source.table)}"
    loaded = "run by ONNX Runtime" if form == "onnx" else "loaded with transformers in a fresh process"
    usage = _usage(source, form)
    if repo is not None:
        command = "inspect-dag INPUT --checkpoint" if source.results is None else "predict"
        usage += f"\n\nWith exlm itself: `exlm {command} hub:{repo}`."
    parts = [
        _front_matter(source, form, licence),
        f"# {source.recipe.name}{on_task}",
        _summary(source),
        f"## How to use it\n\n{usage.replace('FOLDER', repo or 'FOLDER')}",
        f"## Training\n\n{_table(_training(source))}",
        _scores(source),
        "## Caveats\n\n" + "\n".join(f"- {caveat}" for caveat in _caveats(source, form)),
        f"## Licence\n\n{licence or 'None is stated: ask the author. The training data have their own.'}",
        f"## Export\n\nWritten by `exlm export`. When {loaded}, the largest difference from the outputs of the run is "
        f"{difference:.1e}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(source: Source, form: Format, licence: str | None) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=licence,
        library_name="onnx" if form == "onnx" else "transformers",
        # an ONNX model cannot expand [MASK]s
        pipeline_tag=None if form == "onnx" and source.is_masked_exlm else _TASKS[source.class_name],
        tags=["exlm", "esm", source.recipe.data.kind],
    )
    return f"---\n{data.to_yaml()}\n---"


def _summary(source: Source) -> str:
    what = "SMILES" if source.recipe.data.kind == "smiles" else "text"
    model = "ExLM" if source.recipe.objective == "exlm" else "masked language model (MLM)"
    if source.results is None:
        done = f"Pre-trained {model} of {what}."
    else:
        done = f"{model} of {what}, {_trained_on(source.results, source.table)} (loss: {source.results.loss})."
    return f"{done[0].upper()}{done[1:]} The method is that of [ExLM (ICML 2025)]({PAPER})."


def _trained_on(results: RunResults, table: str | None) -> str:
    how = "trained from random weights" if results.init.objective == "scratch" else "fine-tuned"
    return f"{how} on {_data(results, table)}"


def _data(results: RunResults, table: str | None) -> str:
    return results.task if table is None else _data_name(table)


def _usage(source: Source, form: Format) -> str:
    if source.max_answer_tokens is not None:
        return _answer(source, source.max_answer_tokens, form)
    if form == "onnx":
        return _usage_onnx(source)
    masked = source.texts()[-1][0]
    if source.predicts_masks:
        return _python(
            "from transformers import pipeline",
            "",
            f'print(pipeline("fill-mask", model="FOLDER")({masked!r}))',
        )
    if source.results is not None:
        return _batch(source, source.class_name, "logits")
    fill = _python(
        "from transformers import AutoModelForMaskedLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER", mask_token="[MASK]")',
        'model = AutoModelForMaskedLM.from_pretrained("FOLDER", trust_remote_code=True).eval()',
        f'batch = tokenizer({masked!r}, return_tensors="pt")',
        'for tokens, probability in model.fill_masks(batch["input_ids"], n=5)[0]:',
        "    print(tokenizer.decode(tokens), probability)",
        "dag = model(**batch, output_dag=True)  # logits, node_states, node_log_probs, log_transitions",
    )
    vectors = _batch(source, "EsmModel", "last_hidden_state", ", add_pooling_layer=False")
    return f"Masks, with the code of the folder:\n\n{fill}\n\nVectors, without it:\n\n{vectors}"


def _answer(source: Source, max_answer_tokens: int, form: Format) -> str:
    if form == "onnx":
        imports = ["import onnxruntime", "from transformers import AutoTokenizer"]
        model = 'session = onnxruntime.InferenceSession("FOLDER/model.onnx")'
        run = ['start, end = session.run(["logits"], dict(batch))[0][0].T']
    else:
        imports = ["import torch", f"from transformers import AutoTokenizer, {source.class_name}"]
        model = f'model = {source.class_name}.from_pretrained("FOLDER").eval()'
        run = ["with torch.no_grad():", "    start, end = model(**batch).logits[0].numpy().T"]
    code = _ANSWER.format(
        tensors="np" if form == "onnx" else "pt",
        run="\n".join(run),
        max_answer_tokens=max_answer_tokens,
        threshold=source.scores.get("f1_threshold", 0.0),
    )
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    return _python("import numpy as np", *imports, "", tokenizer, model, code)


def _batch(source: Source, class_name: str, result: str, options: str = "") -> str:
    before, imports, functions, example = _example(source)
    return _python(
        *before,
        "import torch",
        *imports,
        f"from transformers import AutoTokenizer, {class_name}",
        "",
        *functions,
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {class_name}.from_pretrained("FOLDER"{options}).eval()',
        f'batch = tokenizer({example}, truncation=True, padding=True, return_tensors="pt")',
        "with torch.no_grad():",
        f"    print(model(**batch).{result})",
    )


def _example(source: Source) -> tuple[list[str], list[str], list[str], str]:
    """Return what an input needs imported, first and later, its functions, and a batch of one for the tokenizer."""
    texts = [repr(text) for text in source.texts()[0]]
    before: list[str] = []
    imports: list[str] = []
    functions: list[str] = []
    if source.has_canonical_smiles:
        before, texts = ["import re"], [f"canonical({text})" for text in texts]
        imports, functions = ["from rdkit.Chem import CanonSmiles"], ["", *_CANONICAL.split("\n"), ""]
    if source.reads_parents:
        imports = [
            "from rdkit.Chem import MolFromSmiles, MolToSmiles",
            "from rdkit.Chem.MolStandardize import rdMolStandardize",
        ]
        functions = ["", *_PARENT.split("\n"), ""]
    return before, imports, functions, ", ".join(f"[{text}]" for text in texts)


def _usage_onnx(source: Source) -> str:
    before, imports, functions, example = _example(source)
    return _python(
        *before,
        "import onnxruntime",
        *imports,
        "from transformers import AutoTokenizer",
        "",
        *functions,
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'session = onnxruntime.InferenceSession("FOLDER/model.onnx")',
        f'batch = tokenizer({example}, truncation=True, padding=True, return_tensors="np")',
        'print(session.run(["logits"], dict(batch))[0])',
    )


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _training(source: Source) -> dict[str, object]:
    recipe, info = source.recipe, read_run_json(source.run)
    model, masking, train = recipe.model, recipe.masking, recipe.train
    batch = f"{train.batch_sequences} sequences" if train.batch_sequences else f"{train.batch_tokens} tokens"
    results = source.results
    budget = f"{source.num_steps:,} steps, {source.num_tokens:,} input tokens"
    before: dict[str, object] = {
        "recipe of pre-training": recipe.name,
        "data of pre-training": ", ".join(map(_data_name, recipe.data.train)),
        "budget of pre-training": budget,
    }
    if results is not None and results.init.objective == "scratch":
        before = {"recipe of the encoder": recipe.name, "pre-training": "none"}
    rows: dict[str, object] = {
        **before,
        "encoder": f"layers {model.num_layers}, width {model.width}, heads {model.num_heads}, positions `{model.rope}`",
        "objective": f"{recipe.objective}, mask ratio {masking.mask_ratio:g}",
        "states of a mask": masking.num_states_per_mask,
        "optimiser": f"AdamW, learning rate {recipe.optim.lr:g}, {batch} a step",
        "longest sequence": f"{source.sequence_length} tokens",
    }
    if results is not None:
        sizes = ", ".join(f"{size:,} {split}" for split, size in results.split_sizes.items())
        rows["fine-tuning"] = (
            f"{results.recipe} on {_data(results, source.table)}; rows: {sizes}; split: {results.split}"
        )
        rows["seed"] = f"{source.seed}, the best in validation of {', '.join(map(str, results.seeds))}"
    commit = f", commit {info.git_commit}" if info.git_commit else ""
    rows["versions"] = f"exlm {info.exlm_version}, torch {info.torch_version}{commit}"
    return rows


def _data_name(given: str) -> str:
    """Return an input without the folders of the machine that it was read on."""
    return f"`{given}`" if given.startswith(("hub:", "bundled:")) else f"`{Path(given).name}`"


def _scores(source: Source) -> str:
    if not source.scores:
        return "## Scores\n\nThe run has no validation scores."
    shown = {name: f"{value:.4g}" for name, value in source.scores.items()}
    notes = [] if source.results is None else [n for n in source.results.notes if _is_of_seed(n, source.seed)]
    return "\n\n".join([f"## Scores\n\nMeasured {source.scores_are}.", _table(shown), *(f"Note: {n}." for n in notes)])


def _is_of_seed(note: str, seed: int | None) -> bool:
    """Return whether a note of a run is about a seed, or about no seed in particular."""
    named = re.search(r" \(seeds? ([\d, ]+)\)$", note)
    return named is None or str(seed) in named[1].split(", ")


def _caveats(source: Source, form: Format) -> list[str]:
    caveats = []
    if source.is_masked_exlm:
        instead = (
            "`exlm inspect-dag` on the run fills masks" if form == "onnx" else "`ExlmForMaskedLM` of the folder does it"
        )
        caveats.append(
            f"A [MASK] expands into {source.recipe.masking.num_states_per_mask} states, which ESM classes and ONNX "
            f"models cannot do: {instead}. The tokenizer declares no mask token, so that no other class fills masks."
        )
    if source.has_canonical_smiles:
        what = "parents of molecules, as RDKit's" if source.reads_parents else "RDKit's"
        caveats.append(f"It was trained on {what} canonical SMILES without atom-map numbers, which `canonical` writes.")
    if source.results is not None and source.results.loss == "regression":
        caveats.append("Outputs are in the units of the table; they have no uncertainty.")
    if source.results is not None and source.results.loss == "span":
        caveats.append("Output 0 scores a token as the first one of an answer, output 1 as the last one.")
    if source.max_answer_tokens is not None:
        caveats.append(
            f"The code above reads {source.sequence_length} tokens, the question and the beginning of the paragraph; "
            "`exlm predict` reads the rest of a long paragraph in further windows, and cuts a long question."
        )
    if source.results is not None and len(source.results.seeds) > 1:
        caveats.append("It is one seed; `exlm predict` averages the seeds of the run.")
    caveats.append("Special tokens such as [SEP] in the input are read as such; `exlm` reads them as plain text.")
    if form == "hf":
        caveats.append("The contact head that every ESM model has is not trained.")
    return caveats


def _table(rows: dict[str, object] | dict[str, str]) -> str:
    cells = {name: str(value).replace("|", r"\|") for name, value in rows.items()}
    lines = [f"| {name} | {value} |" for name, value in cells.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
