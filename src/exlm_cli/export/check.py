"""Script of a fresh process: loads an exported folder with transformers alone, and writes its tokens and logits.

Arguments: the folder, the name of the transformers class, a JSON file with texts and token ids, a file for the logits.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def main(folder: str, class_name: str, inputs: str, outputs: str) -> None:
    """Tokenise the texts, run the model on one padded batch of the token ids, and write both results."""
    given = json.loads(Path(inputs).read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, report = getattr(transformers, class_name).from_pretrained(folder, output_loading_info=True)
    batch = tokenizer.pad({"input_ids": given["token_ids"]}, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    save_file({"logits": logits.contiguous()}, outputs)
    read = [tokenizer(text)["input_ids"] for text in given["texts"]]
    sys.stdout.write(json.dumps({"token_ids": read, "missing": sorted(report["missing_keys"])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
