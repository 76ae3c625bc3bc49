"""The random number of one draw: a hash of (seed, sample index, position), not the state of a generator.

A stateful generator would tie a draw to how many draws came before it. Here a row's number depends on what the row IS,
so the same request gives the same tokens whatever the verify window, whatever else is in the batch, and after a restart
in the middle. A numpy Philox made for every row would do the same for 20 us; this takes about 1 us.

The hash is the SplitMix64 finalizer (OOPSLA 2014, "Fast splittable pseudorandom number generators") applied once per
coordinate. For a fixed seed and sample, successive positions are exactly a SplitMix64 stream.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step between successive states


def _mix(state: int) -> int:
    """Scramble 64 bits: every input bit flips every output bit with probability close to one half."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same three arguments on every machine.

    `seed` 0..2**64-1; `sample_index` numbers the answers of one request (0 for the first); `position` is the place of
    the drawn token in its sequence.
    """
    stream = _mix(_mix(seed + _GOLDEN) + (sample_index + 1) * _GOLDEN)
    return (_mix(stream + (position + 1) * _GOLDEN) >> 11) * 2.0**-53
