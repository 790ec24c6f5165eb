"""Tiny masked LMs of each family of transformers, with random weights, saved as their publishers save them."""

import json

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from tokenizers.models import WordLevel

from exlm_cli.model.backbones import FAMILIES, require_transformers

WORDS = "the a dog cat fox man sees likes hears big small red old runs sleeps and not very . ,".split()  # noqa: SIM905
AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWCXBUZO.-"
ESM_TOKENS = ["<cls>", "<pad>", "<eos>", "<unk>", *AMINO_ACIDS, "<null_1>", "<mask>"]
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}


def config_of(family, vocab_size, **changes):
    """Return the config of a tiny model."""
    own = FAMILIES[family]
    values = {**SIZES.get(family, SIZES["bert"]), "vocab_size": vocab_size, "max_position_embeddings": 66}
    if family in ("roberta", "esm"):
        values["pad_token_id"] = 1
    if family == "roberta":
        values["type_vocab_size"] = 1
    if family == "esm":
        values |= {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": vocab_size - 1}
    if family == "modernbert":
        values |= {"pad_token_id": 0, "local_attention": 8, "bos_token_id": 1, "cls_token_id": 1}
        values |= {"eos_token_id": 2, "sep_token_id": 2, "num_hidden_layers": 4}
    return getattr(require_transformers(), f"{own.classes}Config")(**{**values, **changes})


def tokenizer_of(family):
    """Return a tokenizer as the family has it: a word for each token, special tokens, and how a pair is framed."""
    pad, cls, sep, mask, unk = FAMILIES[family].special_tokens
    first = [cls, pad, sep, unk] if family == "roberta" else [pad, cls, sep, unk]
    vocabulary = {token: index for index, token in enumerate([*first, mask, *WORDS])}
    if family == "bert":
        model = models.WordPiece(vocabulary | {"##s": len(vocabulary)}, unk_token=unk)
    else:
        model = WordLevel(vocabulary, unk_token=unk)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in (pad, cls, sep, mask, unk)])
    if family == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing((sep, 2), (cls, 0))
    else:
        tokenizer.post_processor = processors.BertProcessing((sep, 2), (cls, 1))
    return tokenizer


def save_masked_lm(family, folder, *, seed=0, **changes):
    """Save a model with its tokenizer in a folder, and return transformers' model in evaluation mode."""
    folder.mkdir(parents=True, exist_ok=True)
    pad, cls, sep, mask, unk = FAMILIES[family].special_tokens
    names = {"pad_token": pad, "cls_token": cls, "sep_token": sep, "mask_token": mask, "unk_token": unk}
    if family == "esm":
        (folder / "vocab.txt").write_text("\n".join(ESM_TOKENS))
        names["eos_token"] = names.pop("sep_token")
        vocab_size = len(ESM_TOKENS)
    else:
        tokenizer = tokenizer_of(family)
        tokenizer.save(str(folder / "tokenizer.json"))
        vocab_size = tokenizer.get_vocab_size()
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(seed)
    model = getattr(require_transformers(), f"{FAMILIES[family].classes}ForMaskedLM")(
        config_of(family, **{"vocab_size": vocab_size, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():  # no bias or norm stays at zero or one, where an error would not show
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()
