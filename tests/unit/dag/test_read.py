"""What a model reads of an input with masks: other words for a mask, and mistakes that people make."""

import pytest
import tokenizers

from exlm_cli.dag.read import read_masked
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.train.pretrained import Pretrained
from tests.tiny import word_level
from tests.unit.fill.models import pretrained, sentence_tokenizer


def _reading(tokenizer: Tokenizer) -> Pretrained:
    return pretrained(tokenizer, data={"kind": tokenizer.kind, "sequence_length": 16})


def test_other_words_for_a_mask_are_read_as_masks():
    text_model = _reading(sentence_tokenizer())
    wanted = read_masked(text_model, "This is [MASK], and very [MASK].")
    for text in ("This is <mask>, and very <mask>.", "This is <mask>, and very [MASK]."):
        found = read_masked(text_model, text)
        assert (found.text, found.input_ids.tolist()) == (wanted.text, wanted.input_ids.tolist())
    with pytest.raises(DataError, match="there is no"):
        read_masked(text_model, "a *star*")


@pytest.mark.parametrize("smiles", ["CC([MASK])O", "CC(*)O", "CC([*:1])O", "CC([*])O", "CC(<mask>)O"])
def test_open_places_of_molecules_are_masks_and_other_atoms_in_brackets_are_not(smiles):
    model = _reading(word_level(["C", "O", "(", ")", "[CH2]", "[13*]"]))
    assert read_masked(model, smiles).text == "CC([MASK])O"
    assert read_masked(model, f"[CH2][13*]{smiles}").text == "[CH2][13*]CC([MASK])O"


def test_letters_without_the_blanks_that_the_tokenizer_needs_are_refused():
    """Those of antibodies read one letter a word."""
    vocabulary = {name: i for i, name in enumerate((*SPECIAL_TOKENS, *"EVQLSG"))}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    letters.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    model = _reading(Tokenizer(letters, "text"))
    assert read_masked(model, "E V Q [MASK] S G").notes == ()
    with pytest.raises(DataError, match="blanks between them") as caught:
        read_masked(model, "EVQ[MASK]SG")
    assert "'E V Q [MASK] S G'" in caught.value.hint
    (note,) = read_masked(model, "E V Q [MASK] Z").notes
    assert "1 token of the input as [UNK]" in note
