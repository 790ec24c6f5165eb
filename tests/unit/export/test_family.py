"""Models with an encoder of transformers go back to their family, and come in again as they were."""

from dataclasses import replace

import pytest
import tokenizers
import torch

from exlm_cli.errors import ConfigError
from exlm_cli.export.folder import compare_outputs, export_folder, write_model
from exlm_cli.export.intake import take_in
from exlm_cli.export.source import finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import adopt_architecture, begin_with, load_pretrained
from tests.foreign import WORDS, save_masked_lm
from tests.tiny import CHAIN, tiny_recipe
from tests.unit.finetune.finetuned_runs import finetune, glue_run, squad_run, words_run, write_rows

transformers = pytest.importorskip("transformers")

# in version 4, ESM's token dropout counts padding, so a padded batch has other outputs than its rows
_COUNTS_PADDING = pytest.mark.skipif(transformers.__version__ < "5", reason="ESM's token dropout counts padding")
ESM = pytest.param("esm", marks=_COUNTS_PADDING)
QUIET = SilentProgress()


pytestmark = pytest.mark.usefixtures("own_cache")  # what is taken in


def foreign_run(folder, family):
    """Return a random model of a family, taken in as a run."""
    save_masked_lm(family, folder / family)
    return take_in(f"hf:{folder / family}", QUIET)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", ESM, "modernbert"])
def test_a_model_that_was_taken_in_goes_out_as_it_was(tmp_path, family):
    before = load_pretrained(foreign_run(tmp_path, family), device="cpu")
    export_folder(pretrained_source(before), tmp_path / "out", QUIET)
    after = load_pretrained(take_in(f"hf:{tmp_path / 'out'}", QUIET), device="cpu")
    state = after.model.state_dict()
    assert state.keys() == before.model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.model.state_dict().items())
    text = f"the dog {before.tokenizer.special_tokens[3]} a cat"
    assert after.tokenizer.encode_with_masks(text) == before.tokenizer.encode_with_masks(text)
    assert after.tokenizer.pair_ids == before.tokenizer.pair_ids
    assert after.tokenizer.has_segments == before.tokenizer.has_segments


def test_a_model_whose_tokenizer_leaves_the_blank_before_a_mask_goes_out(tmp_path):
    """A byte-level BPE as its library trains it: the mask of `a <mask>` stands after a token of the blank."""
    special_tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(["It was a day."] * 3, special_tokens=special_tokens, show_progress=False)
    backend.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    save_masked_lm("roberta", tmp_path / "roberta", vocab_size=backend.get_vocab_size())
    backend.save(str(tmp_path / "roberta/tokenizer.json"))
    before = load_pretrained(take_in(f"hf:{tmp_path / 'roberta'}", QUIET), device="cpu")
    tokenizer = before.tokenizer
    assert tokenizer.encode_with_masks("a [MASK]") == [*tokenizer.encode("a "), tokenizer.mask_id]
    assert export_folder(pretrained_source(before), tmp_path / "out", QUIET).comparison.difference <= 1e-5


@pytest.mark.parametrize("family", ["bert", ESM])
def test_an_exlm_of_a_family_goes_out(tmp_path, family):
    start = load_pretrained(foreign_run(tmp_path, family), device="cpu")
    recipe = adopt_architecture(tiny_recipe(model=CHAIN, data={"sequence_length": 24}), start, QUIET)
    model = ExlmModel(recipe, start.tokenizer.vocab_size).eval()
    begin_with(model, start)
    done = export_folder(pretrained_source(replace(start, recipe=recipe, model=model)), tmp_path / "out", QUIET)
    assert done.loaded_with.lower() == f"{family}formaskedlm"
    assert done.comparison.difference <= 1e-5


@pytest.mark.parametrize("family", ["bert", "roberta", "esm"])
def test_a_fine_tuned_model_of_a_family_goes_out(tmp_path, family):
    """Pairs, one of them too long, with the segments of a BERT; and a value in its units."""
    run = foreign_run(tmp_path, family)
    for kind in ("pair", "length"):
        folder = tmp_path / kind
        folder.mkdir()
        tuned = glue_run(folder, run, "rte") if kind == "pair" else words_run(folder, run, "length")
        source = finetuned_source(load_finetuned(tuned, device="cpu"))
        (folder / "out").mkdir()
        write_model(source, folder / "out")
        assert compare_outputs(source, folder / "out").difference <= 1e-5 * max(
            float(source.outputs(ids).abs().max()) for ids in source.examples()
        )


def test_a_span_head_of_a_family_goes_out(tmp_path):
    tuned = squad_run(tmp_path, foreign_run(tmp_path, "distilbert"))
    source = finetuned_source(load_finetuned(tuned, device="cpu"))
    assert export_folder(source, tmp_path / "out", QUIET).loaded_with == "DistilBertForTokenClassification"


def test_a_head_that_the_family_lacks_or_that_reads_a_mean_is_refused_and_goes_to_onnx(tmp_path):
    """A value in its units; in batches and lengths that were not traced."""
    pytest.importorskip("onnxruntime")
    table = write_rows(tmp_path / "rows.csv", ["text", "y"], [[f"the {word}", str(len(word))] for word in WORDS])
    task = {"name": "csv", "files": {"train": str(table)}, "text_column": "text", "label_columns": ["y"]}
    for family, pooling, finding in (
        ("distilbert", "cls", "a fine-tuned distilbert cannot be exported"),
        ("bert", "mean", "the mean of a text's states"),
    ):
        (tmp_path / pooling).mkdir()
        tuned = finetune(tmp_path / pooling, foreign_run(tmp_path, family), (1,), **task, pooling=pooling)
        source = finetuned_source(load_finetuned(tuned, device="cpu"))
        with pytest.raises(ConfigError, match=finding):
            export_folder(source, tmp_path / "out", QUIET)
        assert not (tmp_path / "out").exists()
    assert export_folder(source, tmp_path / "out", QUIET, form="onnx").comparison.num_sequences == 4
