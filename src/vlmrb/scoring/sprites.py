"""The embedded scorer: a hand-made recogniser for MiniGrid's sprites.

A stand-in for a vision-language model on a laptop, and no such model itself. It sees pixels only, yet in a way no
learned model does: a tile either equals a sprite it knows, byte for byte, or means nothing. So it is right on
MiniGrid's standard looks and at a loss on any other.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.grades import Grades
from vlmrb.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

MIN_TILE_SIZE = 8  # pixels; below it sprites look alike


class SpritesScorer(Scorer):
    """Reads milestones off the pixels of MiniGrid clips: a key taken, a door opened, a goal reached.

    Any of MiniGrid's colours counts, and any tile size from 8 pixels on. What the agent carries is not drawn, so
    nothing but the change in front of the agent tells of it.

    Args:
        grades: what each milestone is worth.
        tile_size: pixels of a cell's side, at least 8; ``None`` finds it in the frames.
        frame_size: pixels, upper bound of a frame's sides to ask of the renderer; ``None`` is the environment's
            default. Higher → slower frames, the same answers.

    Attributes:
        unrecognised: clips, so far, in which not even the floor looked like MiniGrid's. They count as showing nothing.

    Raises:
        ValueError: ``tile_size`` is below 8.
    """

    name = "sprites"
    needs = "frames"
    every_frame = True

    def __init__(
        self, grades: Grades | None = None, tile_size: int | None = None, frame_size: int | None = None
    ) -> None:
        if tile_size is not None and tile_size < MIN_TILE_SIZE:
            raise ValueError(f"sprites can be told apart from {MIN_TILE_SIZE} pixels on, got tile_size={tile_size}")
        self.grades = grades or Grades()
        self.tile_size = tile_size
        self.frame_size = frame_size
        self.version = f"1:{self.grades.version}:{tile_size or 'auto'}"
        self.unrecognised = 0
        self._found: dict[tuple[object, ...], int] = {}  # tile sizes by looks and frame shape

    def setup(self) -> None:
        """Draws the sprites, if their size is known; else the first clips have them drawn."""
        if self.tile_size is not None:
            from vlmrb.scoring.sprite_reader import sprite_reader

            sprite_reader(self.tile_size)

    def objection(self, clips: ClipBatch) -> str | None:
        """Objects to frames in which no floor of MiniGrid's is to be seen in tiles of the right size."""
        from vlmrb.scoring.sprite_reader import find_tile_size

        frames = clips.frames(self.frame_size)
        height, width = frames.shape[2:4]
        sizes = {find_tile_size(frame, MIN_TILE_SIZE) for frame in frames.reshape(-1, *frames.shape[2:])} - {None}
        if sizes if self.tile_size is None else self.tile_size in sizes:
            return None
        wanted = f"{MIN_TILE_SIZE} or more" if self.tile_size is None else self.tile_size
        return (
            f"it knows MiniGrid's standard tiles of {wanted} pixels, and sees no floor of them in frames of "
            f"{height} × {width} pixels"
        )

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Grades clips by the milestones seen in them.

        Args:
            clips: B clips with a renderer.

        Returns:
            ``float32[B]`` in [0, 1], above 0.5 where a milestone happens.

        Raises:
            ValueError: the frames do not divide into tiles of the size given to the constructor.
        """
        return self.grades.score(self.events(clips))

    def events(self, clips: ClipBatch) -> NDArray[np.bool_]:
        """Returns which milestones happen: ``bool[B, 3]``, key taken, door opened, goal reached."""
        from vlmrb.scoring.sprite_reader import sprite_reader  # here, so that MiniGrid is loaded where scoring happens

        frames = clips.frames(self.frame_size)
        tile_size = self.tile_size or self._find_tile_size(clips, frames)
        if tile_size is None:
            return np.zeros((len(clips), 3), dtype=bool)
        return sprite_reader(tile_size).events(frames, clips.lengths)

    def _find_tile_size(self, clips: ClipBatch, frames: NDArray[np.uint8]) -> int | None:
        from vlmrb.scoring.sprite_reader import find_tile_size

        looks = (getattr(clips.renderer, "name", ""), *frames.shape[2:4])
        if looks not in self._found:
            found = find_tile_size(frames[0, 0], MIN_TILE_SIZE)
            if found is None:
                if self.unrecognised == 0:
                    logger.warning(
                        "sprites scorer: no MiniGrid floor of %d or more pixels a tile in frames of %s "
                        "(%d x %d pixels); such clips count as showing nothing",
                        MIN_TILE_SIZE,
                        *looks,
                    )
                self.unrecognised += len(clips)
                return None
            self._found[looks] = found
        return self._found[looks]
