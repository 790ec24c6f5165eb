"""Tokenizer of ESM-2, which is published as a list of tokens alone: a letter of a protein is a token."""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors


def esm_tokenizer(tokens: Sequence[str], special_tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with the ids of transformers' `EsmTokenizer`; several unknown letters in a row are one token.

    Args:
        tokens: The lines of its vocab.txt; the id of a token is its place.
        special_tokens: Padding, start, end, mask, unknown.

    Raises:
        ValueError: A special token is not among the tokens, or no letter is.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    _, start, end, _, unknown = special_tokens
    missing = [token for token in special_tokens if token not in vocabulary]
    letters = "".join(f"\\{token}" if not token.isalnum() else token for token in tokens if len(token) == 1)
    if missing or not letters:
        raise ValueError(f"vocab.txt has no {', '.join(missing) or 'letters'}")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(f"[{letters}]|[^{letters}]+"), "isolated")]
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B {end}",
        special_tokens=[(start, vocabulary[start]), (end, vocabulary[end])],
    )
    return backend
