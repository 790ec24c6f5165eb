"""What a model reads of an input with masks: other words for a mask, and mistakes that people make."""

import pytest
import tokenizers
import torch

from exlm_cli.dag.read import read_masked, read_masked_rows
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import DataError
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import Pretrained
from tests.tiny import tiny_recipe, word_level
from tests.unit.dag.test_build import TEXTS


def _pretrained(tokenizer: Tokenizer) -> Pretrained:
    recipe = tiny_recipe(data={"kind": tokenizer.kind, "sequence_length": 16})
    torch.manual_seed(0)
    return Pretrained(ExlmModel(recipe, tokenizer.vocab_size).eval(), tokenizer, recipe, None, 1, 0, "")


@pytest.fixture(scope="module")
def text_model() -> Pretrained:
    return _pretrained(train_bpe(TEXTS, 320, 2, SilentProgress()))


def _protein_model() -> Pretrained:
    """Return a model whose tokenizer reads one letter a word, as those of antibodies."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"EVQLSG"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.Fuse()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _pretrained(Tokenizer(backend, "text"))


def test_other_words_for_a_mask_are_read_as_masks(text_model):
    wanted = read_masked(text_model, "This is [MASK], and very [MASK].")
    for text in ("This is <mask>, and very <mask>.", "This is <mask>, and very [MASK]."):
        found = read_masked(text_model, text)
        assert (found.text, found.input_ids.tolist()) == (wanted.text, wanted.input_ids.tolist())


@pytest.mark.parametrize("smiles", ["CC([MASK])O", "CC(*)O", "CC([*:1])O", "CC([*])O", "CC(<mask>)O"])
def test_open_places_of_molecules_are_masks_and_other_atoms_in_brackets_are_not(smiles):
    model = _pretrained(word_level(["C", "O", "(", ")", "[CH2]", "[13*]"]))
    assert read_masked(model, smiles).text == "CC([MASK])O"
    assert read_masked(model, f"[CH2][13*]{smiles}").text == "[CH2][13*]CC([MASK])O"


def test_a_star_in_running_text_is_no_mask(text_model):
    with pytest.raises(DataError, match="there is no"):
        read_masked(text_model, "a *star*")


@pytest.mark.parametrize("name", ["masks.csv", "data/words.txt.gz", "rows.parquet"])
def test_the_name_of_a_file_is_noticed(text_model, name):
    with pytest.raises(DataError, match="is the name of a file") as caught:
        read_masked(text_model, name)
    assert "exlm fill FILE" in caught.value.hint


def test_a_text_beyond_the_training_length_says_so(text_model):
    assert read_masked(text_model, "very [MASK]").notes == ()
    (note,) = read_masked(text_model, "see this " * 8 + "[MASK]").notes
    assert "16 tokens that the model was trained on" in note


def test_letters_without_the_blanks_that_the_tokenizer_needs_are_refused():
    model = _protein_model()
    assert read_masked(model, "E V Q [MASK] S G").notes == ()
    with pytest.raises(DataError, match="blanks between them") as caught:
        read_masked(model, "EVQ[MASK]SG")
    assert "'E V Q [MASK] S G'" in caught.value.hint
    (note,) = read_masked(model, "E V Q [MASK] Z").notes
    assert "1 token of the input as [UNK]" in note


def test_a_row_that_cannot_be_read_has_its_problem(text_model):
    found, problems = read_masked_rows(text_model, ["very [MASK]", "no mask", ""])
    assert [one is None for one in found] == [False, True, True]
    assert problems == ("", "there is no [MASK] in 'no mask'", "the sentence is empty")
