"""How many tokens of an answer are still expected, as it travels from where it is learned to where it is used."""

from __future__ import annotations

# Tokens generated at which the rest is stated: twice as many each time from 16 on, as far as answers commonly go.
GENERATED = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FIRST_STEP = 16  # tokens; each further step ends at twice as many

ExpectedRest = tuple[float, ...]  # E[tokens still to come] at each of GENERATED; empty where nothing is known


def rest_at(rest: ExpectedRest, generated: int) -> float:
    """Return how many tokens are still expected after `generated` of them, between the stated ones on a line.

    0 where nothing is known; beyond the last one stated, what was expected there.
    """
    if not rest:
        return 0.0
    step = (generated // FIRST_STEP).bit_length()
    if step >= len(rest) - 1:
        return rest[-1]
    begin, end = GENERATED[step], GENERATED[step + 1]
    return rest[step] + (rest[step + 1] - rest[step]) * (generated - begin) / (end - begin)
