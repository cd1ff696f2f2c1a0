"""The numbers that random operations follow from: the seed of their mesh, and how many came before."""

_SEED, _DRAWN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = (1 << 62) - 1
_WORD = (1 << 64) - 1


def seed_number(seed: int, drawn: int) -> int:
    """That of the random operation number `drawn` since the seed was set."""
    return (seed * _SEED + drawn * _DRAWN) & _MASK


def later(number: int, drawn: int) -> int:
    """That of a random operation `drawn` further."""
    return (number + drawn * _DRAWN) & _MASK


def mixed(seed: int, index: int) -> int:
    """Another seed for each index, such as that of a shard (the step of splitmix64), in 63 bits."""
    value = (seed + (index + 1) * _SEED) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return (value ^ (value >> 31)) >> 1
