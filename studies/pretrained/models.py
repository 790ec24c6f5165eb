"""The models of the study, as they are given."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import exlm_cli

MODEL, TWIN, SCRATCH = "ExLM", "MLM twin", "from scratch"
Figures = dict[str, float]
Models = Mapping[str, "Checkpoint"]
"""Models by method; the first is MODEL."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was given, and the first letters of the hash of its weights."""

    given: str
    weights: str


@cache
def load(given: str) -> exlm_cli.Run:
    """Return a pre-trained model; each is read once."""
    return exlm_cli.load(given, device="cpu")


def checkpoint_of(given: str) -> Checkpoint:
    """Return a model with the hash of its encoder's weights, the same for every copy of them."""
    encoder = load(given).encoder.runner.model.state_dict()
    digest = hashlib.sha256()
    for name, weights in sorted(encoder.items()):
        if not name.startswith("head."):
            digest.update(name.encode() + weights.float().numpy().tobytes())
    return Checkpoint(given, digest.hexdigest()[:8])


def exlm(*arguments: str) -> Any:
    """Run a command on one thread and return the JSON that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "exlm_cli", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)
