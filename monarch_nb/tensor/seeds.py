"""Seeds of random operations, derived from the seed of the mesh and the number of earlier ones."""

_SEED, _DRAWN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = (1 << 62) - 1
_WORD = (1 << 64) - 1


def seed_number(seed: int, drawn: int) -> int:
    """Seed of the random operation number `drawn` since the seed was set."""
    return (seed * _SEED + drawn * _DRAWN) & _MASK


def later(number: int, drawn: int) -> int:
    """Seed of the random operation `drawn` later."""
    return (number + drawn * _DRAWN) & _MASK


def mixed(seed: int, index: int) -> int:
    """A different 63-bit seed for each index, such as that of a shard (one step of splitmix64)."""
    value = (seed + (index + 1) * _SEED) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return (value ^ (value >> 31)) >> 1
