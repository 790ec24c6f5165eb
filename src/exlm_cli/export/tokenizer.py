"""Tokenizer files of an exported model: `tokenizer.json` that adds [CLS] and [SEP], and `tokenizer_config.json`."""

import json
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from exlm_cli.data.tokenizer import CLS, MASK, PAD, SEP, UNK, Tokenizer


def tokenizer_files(tokenizer: Tokenizer, *, max_length: int, has_mask: bool) -> dict[str, str]:
    """Return the content of the files by name.

    Args:
        tokenizer: Of the run.
        max_length: Tokens of the longest sequence, [CLS] and [SEP] included.
        has_mask: Whether the exported model predicts [MASK]s; `fill-mask` refuses a tokenizer without a mask token.
    """
    definition = json.loads(tokenizer.to_json())
    for token in definition["added_tokens"]:
        if token["content"] == MASK:
            # a masked word of text includes the blank before it, as in `Tokenizer.encode_with_masks`
            token["lstrip"] = tokenizer.kind == "bpe"
    backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    backend.post_processor = TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B {SEP}",
        special_tokens=[(CLS, tokenizer.cls_id), (SEP, tokenizer.sep_id)],
    )
    names = {"pad_token": PAD, "cls_token": CLS, "sep_token": SEP, "unk_token": UNK}
    if has_mask:
        names["mask_token"] = MASK
    config: dict[str, Any] = {
        # a class that transformers 4 and 5 both have
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    written = json.dumps(json.loads(backend.to_str()), ensure_ascii=False, indent=1)
    return {"tokenizer.json": f"{written}\n", "tokenizer_config.json": f"{json.dumps(config, indent=1)}\n"}
