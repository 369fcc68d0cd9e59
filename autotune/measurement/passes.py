"""Blocks that make up whole passes over the data: what the end of a pass costs is counted as often as it comes.

At its end workers are stopped and started anew, and nothing is ready. Where a pass is short, some measurements would
hold an end more than others, by chance or, since every process warms up alike, always.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPlan:
    """Blocks that are timed in rounds: as many as `multiples` has, again and again."""

    multiples: tuple[int, ...]
    """Of so many steps each block of a round is a multiple."""
    minimum_seconds: float
    """Of each block."""
    minimum_blocks: int
    maximum_blocks: int

    def ends_round(self, blocks: int) -> bool:
        """Whether so many blocks are whole rounds."""
        return blocks % len(self.multiples) == 0

    def multiple(self, block: int) -> int:
        """Of block number `block`, the first being 0."""
        return self.multiples[block % len(self.multiples)]


def block_plan(
    *,
    steps_in_pass: int | None,
    starts_workers: bool,
    seconds_per_step: float,
    block_seconds: float,
    minimum_blocks: int,
    maximum_blocks: int,
) -> BlockPlan:
    """Blocks of at least `block_seconds`, in whole passes where that takes no longer than the most blocks would.

    Twice as long where each pass starts workers. A pass that is longer than a block is one round, cut into equal blocks.
    """
    most_seconds = maximum_blocks * block_seconds
    pass_seconds = (steps_in_pass or 0) * seconds_per_step
    if not steps_in_pass or pass_seconds > (2 if starts_workers else 1) * most_seconds:
        return BlockPlan((1,), block_seconds, minimum_blocks, maximum_blocks)
    if pass_seconds <= block_seconds:
        return BlockPlan((steps_in_pass,), block_seconds, minimum_blocks, maximum_blocks)
    pieces = min(int(pass_seconds / block_seconds), steps_in_pass)
    cuts = [piece * steps_in_pass // pieces for piece in range(pieces + 1)]
    fewest_rounds = math.ceil(minimum_blocks / pieces)
    return BlockPlan(
        multiples=tuple(end - begin for begin, end in itertools.pairwise(cuts)),
        minimum_seconds=0.0,
        minimum_blocks=fewest_rounds * pieces,
        maximum_blocks=max(fewest_rounds, int(most_seconds / pass_seconds)) * pieces,
    )
