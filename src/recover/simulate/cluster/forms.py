"""Closed forms: what the engine is tested against, and where checkpoint intervals come from. Seconds everywhere."""
from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def young_daly(save: float, mtbf: float) -> float:
    """The best time between two checkpoints: Young's sqrt(2 c M) with Daly's first correction; at most M."""
    if save <= 0:
        return 0.0
    if save >= mtbf / 2:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def checkpointed(work: float, save: float, restart: float, mtbf: float) -> float:
    """Share of time that counts when failures are exponential, also those in a restart (Daly 2006, exact).

    A piece of `work` and its save take M e^(R/M) (e^((work+save)/M) - 1) on average.
    """
    return work / (mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf))


def lost_when_it_fails(segment: float, mtbf: float) -> float:
    """Mean work lost by a failure that falls into a segment of this length, exponential failures."""
    return mtbf - segment / math.expm1(segment / mtbf)


def stalled(mtbf: float, stall: float, below: float = 0.0, missing: float = 0.0) -> float:
    """Share of capacity with a failure every `mtbf`: a stall, then `below` seconds without `missing` of the capacity."""
    return 1 - (stall + below * missing) / mtbf


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and half the width of its confidence interval (Student's t, by Cornish and Fisher's expansion)."""
    if len(values) < 2:
        return fmean(values), math.inf
    z, n = NormalDist().inv_cdf((1 + confidence) / 2), len(values) - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return fmean(values), t * stdev(values) / math.sqrt(len(values))
