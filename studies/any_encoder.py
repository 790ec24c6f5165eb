"""Study of an encoder of others: an ExLM made of a BERT beside the same BERT trained on as an MLM, at equal steps.

A BERT of transformers with random weights (2 layers of width 64) is trained as an MLM on the bundled grammar at 15 %
and saved by `save_pretrained`. From this folder, `hf:FOLDER`, both models begin and train at 38.7 % on the sentences
of `quickstart-text`, with its learning rate: the ExLM with k = 4, and the MLM. Each seed gives one row of
`results/any_encoder.csv`; a row that exists is not trained again.

    taskset -c 0 python studies/any_encoder.py --seeds 1 2 3
    python studies/any_encoder.py --table
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from tokenizers import processors

from exlm_cli.config.load import load_recipe
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, train_bpe
from exlm_cli.export.folder import export_folder
from exlm_cli.export.intake import take_in
from exlm_cli.export.source import pretrained_source
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from rows import append_row, mean_and_half, read_rows, surroundings

NAME = "any_encoder"
WORK = Path("runs/study_any_encoder")
LOSS = "loss_given_length"
FIRST_STEPS, STEPS = 1500, 2000


def random_bert(folder: Path, seed: int) -> None:
    """Save a BERT with random weights and a tokenizer of the grammar."""
    tokenizer = train_bpe(sample_sentences(20_000, seed=0), 1024, 2, SilentProgress())
    folder.mkdir(parents=True)
    tokenizer.save(folder / "tokenizer.json")
    backend = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).backend_tokenizer
    backend.post_processor = processors.BertProcessing(("[SEP]", tokenizer.sep_id), ("[CLS]", tokenizer.cls_id))
    backend.save(str(folder / "tokenizer.json"))
    names = zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), SPECIAL_TOKENS, strict=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(names)))
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_id,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def train(
    start: Path, out: Path, corpus: str, objective: str, mask_ratio: float, steps: int, seed: int
) -> dict[str, float]:
    """Train on from a folder of transformers; return the figures of the last validation."""
    settings = {
        "objective": objective,
        "seed": seed,
        "device": "cpu",
        "data.train": f"bundled:{corpus}",
        "data.bundled_rows": 20_000,
        "masking.mask_ratio": mask_ratio,
        "masking.num_states_per_mask": 4 if objective == "exlm" else 1,
        "train.max_steps": steps,
        "train.validate_every_steps": 250,
        "train.validation_sequences": 512,
        "train.num_threads": 1,
    }
    recipe = load_recipe("quickstart-text", [f"{key}={value}" for key, value in settings.items()])
    checkpoint = take_in(f"hf:{start}", SilentProgress())
    return run_pretraining(recipe, out=out, checkpoint=checkpoint).metrics


def measure(seed: int) -> dict[str, str]:
    """Return the row of a seed."""
    work = WORK / f"seed-{seed}"
    random, trained = work / "random", work / "trained"
    random_bert(random, seed)
    train(random, work / "first", "grammar", "mlm", 0.15, FIRST_STEPS, seed)
    first = load_pretrained(work / "first", device="cpu")
    export_folder(pretrained_source(first), trained, SilentProgress())
    found = {
        objective: train(trained, work / objective, "feelings", objective, 0.387, STEPS, seed)
        for objective in ("mlm", "exlm")
    }
    exlm = found["exlm"]
    return {
        "seed": str(seed),
        "steps": str(STEPS),
        "mlm": f"{found['mlm']['loss']:.4f}",
        "exlm": f"{exlm['loss']:.4f}",
        "exlm_given_length": f"{exlm[LOSS]:.4f}",
        "effective_states": f"{exlm['effective_states']:.3f}",
    }


def main() -> None:
    """Measure the seeds that have no row yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = read_rows(NAME)
    for seed in args.seeds if not args.table else []:
        if not any(row["seed"] == str(seed) for row in rows):
            append_row(NAME, {**measure(seed), **surroundings(torch.device("cpu"))})
    for key in ("mlm", "exlm", "exlm_given_length", "effective_states"):
        print(key, [row[key] for row in read_rows(NAME)])
    less = [float(row["exlm"]) - float(row["mlm"]) for row in read_rows(NAME)]
    print("exlm less mlm, 95 %: {:+.4f} ± {:.4f}".format(*mean_and_half(less)))


if __name__ == "__main__":
    main()
