"""ONNX model of an export: batch and length of any size."""

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

from exlm_cli.export.source import Source

MODEL_FILE = "model.onnx"
LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights that fit into the one file, which protobuf limits to 2 GiB; larger ones lie beside it."""


def write_onnx(source: Source, folder: Path) -> None:
    """Write `model.onnx` with the axes `batch` and `length`."""
    network = source.network
    example = torch.full((2, 5), source.tokenizer.sep_id)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=source.recipe.model.max_length)}
    names = ["logits"] if source.has_head else []
    names += ["last_hidden_state"] if source.results is None else []
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter's own making
        torch.onnx.export(
            network,
            (example, torch.ones_like(example)),
            folder / MODEL_FILE,
            input_names=["input_ids", "attention_mask"],
            output_names=names,
            dynamic_shapes=(axes, axes),
            dynamo=True,
            external_data=num_bytes > LARGEST_FILE,
            verbose=False,
        )


def run_onnx(folder: Path, token_ids: list[list[int]], pad_id: int) -> Tensor:
    """Return the first output for one padded batch, as ONNX Runtime computes it from the file."""
    import onnxruntime

    longest = max(map(len, token_ids))
    batch = torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in token_ids])
    is_token = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids])
    session = onnxruntime.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"input_ids": batch.numpy(), "attention_mask": is_token.numpy()})
    return torch.from_numpy(outputs[0])
