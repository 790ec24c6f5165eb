"""Script that loads an exported folder with transformers alone and writes its tokens and logits.

It runs in a fresh process. Arguments: the folder; a JSON file with rows of one or two texts, and with token ids by name
of a transformers class; a file for the logits. Classes whose name begins with Auto run the code of the folder.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def main(folder: str, inputs: str, outputs: str) -> None:
    """Tokenise the rows, run each class on one padded batch of its token ids, and write the results."""
    given = json.loads(Path(inputs).read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logits, missing = {}, set()
    for name, token_ids in given["token_ids"].items():
        model, report = getattr(transformers, name).from_pretrained(
            folder, trust_remote_code=name.startswith("Auto"), output_loading_info=True
        )
        batch = tokenizer.pad({"input_ids": token_ids}, return_tensors="pt")
        with torch.no_grad():
            logits[name] = model.eval()(**batch).logits.contiguous()
        missing |= set(report["missing_keys"])
    save_file(logits, outputs)
    read = [tokenizer(*texts, truncation=True)["input_ids"] for texts in given["texts"]]
    sys.stdout.write(json.dumps({"token_ids": read, "missing": sorted(missing)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
