"""What a user of transformers writes to pre-train a BERT or ModernBERT of 1.4 M parameters on a text file.

    python benchmarks/train_with_transformers.py --text FILE --output_dir RUN [options of TrainingArguments]

`bench_against_transformers.py` runs this script. Vocabulary, sequences, masks, batch, optimiser
and validation are those of the recipe `text-small`.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SPECIAL = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "mask_token")}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "bert": {"intermediate_size": 512, "max_position_embeddings": 128, **NO_DROPOUT},
    # a GeGLU has three matrices where BERT's layer has two; the head can leave out what is not masked
    "modernbert": {"intermediate_size": 344, "sparse_prediction": True},
}


@dataclass
class Inputs:
    """What is trained on what."""

    text: str
    model_type: str = "bert"
    tokenizer: str = "tokenizer.json"


parser = HfArgumentParser((Inputs, TrainingArguments))
parser.set_defaults(per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=0.166, max_steps=1200)
parser.set_defaults(adam_beta2=0.98, adam_epsilon=1e-6, weight_decay=0.01, prediction_loss_only=True)
parser.set_defaults(eval_strategy="steps", eval_steps=100, use_cpu=True, dataloader_pin_memory=False)
inputs, training = parser.parse_args_into_dataclasses()
torch.set_num_threads(1)
set_seed(training.seed)

if not Path(inputs.tokenizer).exists():
    bpe = ByteLevelBPETokenizer()
    bpe.train(inputs.text, vocab_size=4096, special_tokens=list(SPECIAL.values()))
    bpe.save(inputs.tokenizer)
tokenizer = PreTrainedTokenizerFast(tokenizer_file=inputs.tokenizer, **SPECIAL)
cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id


def to_sequences(rows):
    """Join texts and cut them into sequences of 128 tokens."""
    ids = list(chain.from_iterable(tokenizer(rows["text"], add_special_tokens=False)["input_ids"]))
    return {"input_ids": [[cls, *ids[start : start + 126], sep] for start in range(0, len(ids) - 125, 126)]}


texts = load_dataset("text", data_files=inputs.text, split="train")
data = texts.map(to_sequences, batched=True, remove_columns="text").train_test_split(256, seed=training.seed)
size = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, **SIZES[inputs.model_type]}
ids = {"pad_token_id": 0, "bos_token_id": cls, "cls_token_id": cls, "eos_token_id": sep, "sep_token_id": sep}
config = AutoConfig.for_model(inputs.model_type, vocab_size=len(tokenizer), **size, **ids, attn_implementation="sdpa")
trainer = Trainer(
    model=AutoModelForMaskedLM.from_config(config),
    args=training,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.387),
    train_dataset=data["train"],
    eval_dataset=data["test"],
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()
