"""The hash behind masks and orders, in whole numbers of Python."""

_MODULUS = 2**64


def splitmix64(state: int, number: int) -> int:
    """Output `number`, counted from 0, of SplitMix64 with the given seed."""
    bits = (state + (number + 1) * 0x9E3779B97F4A7C15) % _MODULUS
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % _MODULUS
    return bits ^ (bits >> 31)


def plain_hash(*words: int) -> int:
    """The hash of words: each is the number of an output of the stream that the words before it seed."""
    bits = 0
    for word in words:
        bits = splitmix64(bits, word)
    return bits
