"""ONNX model of an export: inputs without expansion, batch and length of any size."""

import logging
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exlm_cli.export.source import Source
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel

MODEL_FILE = "model.onnx"
LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights that fit into the one file, which protobuf limits to 2 GiB; larger ones lie beside it."""


class _Network(nn.Module):
    """The forward pass of a model over (B, L) `input_ids` and `attention_mask`."""

    def __init__(self, model: ExlmModel | TaskModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and of a pre-trained model the (B, L, D) last hidden states too."""
        model = self.model
        hidden = model.encoder(input_ids, attention_mask.bool())
        if isinstance(model, TaskModel):
            return (model.in_units(model.head(hidden, attention_mask.sum(1))).float(),)
        logits = F.linear(model.lm_head(hidden), model.decoder_weight, model.lm_head.bias)
        return logits, hidden


def write_onnx(source: Source, folder: Path) -> None:
    """Write `model.onnx` with the axes `batch` and `length`."""
    network = _Network(source.model).eval()
    example = torch.full((2, 5), source.tokenizer.sep_id)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=source.recipe.model.max_length)}
    names = ["logits"] if source.results is not None else ["logits", "last_hidden_state"]
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
    """Return the logits of one padded batch, as ONNX Runtime computes them from the file."""
    import onnxruntime

    longest = max(map(len, token_ids))
    batch = torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in token_ids])
    is_token = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids])
    session = onnxruntime.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], {"input_ids": batch.numpy(), "attention_mask": is_token.numpy()})[0]
    return torch.from_numpy(logits)
