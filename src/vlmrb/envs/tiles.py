"""Frames of grid worlds out of a cached tile atlas: pixel for pixel MiniGrid's own, without its per-frame cost.

Tiles are drawn by MiniGrid itself, once each, through ``Grid.render_tile``; a frame is one gather. The other two looks
hand ``render_tile`` another object to draw and leave the rest alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Floor, Goal, Key, Lava, Wall, WorldObj
from numpy.typing import NDArray

from vlmrb.envs.config import Visuals
from vlmrb.envs.grid import (
    BALL,
    BOX,
    CLOSED,
    DOOR,
    EMPTY,
    FLOOR,
    GOAL,
    KEY,
    LAVA,
    LOCKED,
    OPEN,
    UNSEEN,
    GridLayout,
    MiniGridState,
)

_VERSION: Final = 1  # part of the renderer's name: raise it when any pixel changes
_TYPES, _COLOURS, _STATES, _AGENTS = 10, 6, 3, 5  # agents: absent, or looking in one of four directions
_CHUNK_BYTES: Final = 1 << 21  # frames drawn at a time, so that what is gathered stays in the cache

# Which sprite is drawn for which content under `misleading`: a permutation, so as much can be told apart as before,
# and without fixed points, so that nothing looks like itself.
_MISLEADING: Final = {
    (KEY, 0): (BALL, 0),
    (BALL, 0): (KEY, 0),
    (GOAL, 0): (BOX, 0),
    (BOX, 0): (GOAL, 0),
    (DOOR, LOCKED): (LAVA, 0),
    (LAVA, 0): (DOOR, LOCKED),
    (DOOR, OPEN): (FLOOR, 0),
    (FLOOR, 0): (DOOR, CLOSED),
    (DOOR, CLOSED): (DOOR, OPEN),
}


class _Texture(WorldObj):
    """A pattern of two colours that depends on what it stands for and resembles nothing."""

    def __init__(self, kind: int, colour: int, state: int) -> None:
        super().__init__(IDX_TO_OBJECT[kind], IDX_TO_COLOR[colour])
        self._key = (100 + kind, colour, state)
        rng = np.random.default_rng(self._key)
        self._palette = rng.integers(40, 256, (2, 3))
        self._pattern = rng.permutation(np.arange(36) % 2).reshape(6, 6)

    def encode(self) -> tuple[int, int, int]:
        """Returns the key of the tile cache, apart from all of MiniGrid's own."""
        return self._key

    def render(self, img: NDArray) -> None:
        """Paints the pattern over the whole tile ``uint8[P, P, 3]``."""
        cell = np.arange(len(img)) * 6 // len(img)
        img[:] = self._palette[self._pattern[cell[:, None], cell]]


def _content(kind: int, colour: int, state: int) -> WorldObj | None:
    """Builds what a cell holds; unlike ``WorldObj.decode`` it keeps every object's colour."""
    name = IDX_TO_COLOR[colour]
    if kind in (UNSEEN, EMPTY):
        return None
    if kind == DOOR:
        return Door(name, is_open=state == OPEN, is_locked=state == LOCKED)
    if kind == LAVA:
        return Lava()
    plain: dict[str, Any] = {"wall": Wall, "floor": Floor, "key": Key, "ball": Ball, "box": Box, "goal": Goal}
    return plain[IDX_TO_OBJECT[kind]](name)


def _sprite(visuals: Visuals, kind: int, colour: int, state: int) -> WorldObj | None:
    """Returns the object that is drawn for a cell's content under one of the looks."""
    if visuals == "abstract" and kind not in (UNSEEN, EMPTY):
        return _Texture(kind, colour, state)
    if visuals == "misleading":
        kind, state = _MISLEADING.get((kind, state), (kind, state))
    return _content(kind, colour, state)


class _Sheet(Grid):
    """Draws tiles into a cache of its own: a texture must not turn up in frames that MiniGrid draws by itself."""

    tile_cache: dict[tuple[Any, ...], Any] = {}


class _Atlas:
    """Tiles of one size, drawn when first needed.

    Attributes:
        place: ``int64[contents]``, where a content's tile lies in ``rows``, −1 if it was not drawn yet.
        rows: ``uint8[K·t, 3·t]``, the pixel rows of the K tiles drawn so far, one tile below the other.
    """

    def __init__(self, tile_size: int) -> None:
        self.place = np.full(_TYPES * _COLOURS * _STATES * _AGENTS, -1, np.int64)
        self.rows = np.empty((0, 3 * tile_size), np.uint8)


class GridRenderer:
    """Draws snapshots of grid worlds (see :class:`~vlmrb.envs.grid.GridLayout`).

    Args:
        width: W in cells, border walls included.
        height: H in cells.
        tile_size: edge of a tile in pixels where ``render`` is given no frame size.
        visuals: ``standard`` equals ``get_frame(highlight=False, tile_size=…)`` of MiniGrid pixel for pixel;
            ``misleading`` and ``abstract`` change sprites alone, never the agent.

    Raises:
        ValueError: unknown visuals or a tile size below 1.
    """

    def __init__(self, width: int, height: int, tile_size: int = 8, visuals: Visuals = "standard") -> None:
        if visuals not in ("standard", "misleading", "abstract"):
            raise ValueError(f"visuals must be standard, misleading or abstract, got {visuals!r}")
        if tile_size < 1:
            raise ValueError(f"tile_size must be at least 1 pixel, got {tile_size}")
        self.layout = GridLayout(width, height)
        self.tile_size = tile_size
        self.visuals: Visuals = visuals
        self.name = f"minigrid-{width}x{height}-{visuals}-tile{tile_size}-v{_VERSION}"
        self._atlases: dict[int, _Atlas] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leaves the atlases behind when the renderer travels to another process."""
        return {**self.__dict__, "_atlases": {}}

    def render(self, snapshots: NDArray[np.uint8], frame_size: int | None = None) -> NDArray[np.uint8]:
        """Draws frames.

        Args:
            snapshots: ``uint8[..., S]``.
            frame_size: upper bound of height and width in pixels; tiles get the largest whole number of pixels that
                fits. ``None`` takes ``tile_size``.

        Returns:
            ``uint8[..., H·t, W·t, 3]``, 0–255, with t pixels a tile.

        Raises:
            ValueError: the frame is too small for the grid, or the snapshots are of another layout.
        """
        width, height = self.layout
        tile = self.tile_size if frame_size is None else frame_size // max(width, height)
        if tile < 1:
            raise ValueError(f"a {width}x{height} grid needs frames of {max(width, height)} pixels or more")
        contents = self._contents(snapshots)  # [B, H, W]
        atlas = self._atlas(tile, contents)
        frames = np.empty((len(contents), height, tile, width, 3 * tile), np.uint8)
        offset = np.arange(tile)[:, None]
        chunk = max(1, _CHUNK_BYTES // math.prod(frames.shape[1:]))
        for start in range(0, len(contents), chunk):
            place = atlas.place.take(contents[start : start + chunk])
            rows = place[:, :, None, :] * tile + offset  # [b, H, t, W]
            atlas.rows.take(rows, axis=0, out=frames[start : start + chunk], mode="clip")  # places are all drawn
        return frames.reshape(*snapshots.shape[:-1], height * tile, width * tile, 3)

    def observe(self, snapshots: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns what the agent saw: ``uint8[..., W, H, 3]``, the symbolic grid with the agent in it."""
        return self.layout.observe(snapshots)

    def unpack(self, snapshots: NDArray[np.uint8]) -> MiniGridState:
        """Takes snapshots ``uint8[..., S]`` apart into grid, position, direction and carried object."""
        return self.layout.unpack(snapshots)

    def _contents(self, snapshots: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Numbers what each cell shows, ``int64[B, H, W]``: object, colour, state and the agent on top of it."""
        state = self.layout.unpack(snapshots)
        width, height = self.layout
        kind, colour, status = np.moveaxis(state.grid.reshape(-1, width, height, 3).astype(np.int64), 3, 0)
        contents = ((kind * _COLOURS + colour) * _STATES + status) * _AGENTS  # [B, W, H]
        x, y = state.position.reshape(-1, 2).T
        contents[np.arange(len(contents)), x, y] += state.direction.reshape(-1) + 1
        return np.ascontiguousarray(contents.swapaxes(1, 2))

    def _atlas(self, tile: int, contents: NDArray[np.int64]) -> _Atlas:
        """Returns the atlas of a tile size, with all these contents drawn."""
        atlas = self._atlases.get(tile) or _Atlas(tile)
        missing = np.unique(contents[atlas.place[contents] < 0])
        if len(missing):
            # A new atlas takes the old one's place: another thread may be reading that.
            grown = _Atlas(tile)
            grown.place[:] = atlas.place
            grown.place[missing] = len(atlas.rows) // tile + np.arange(len(missing))
            grown.rows = np.concatenate((atlas.rows, *(self._draw(tile, int(content)) for content in missing)))
            self._atlases[tile] = atlas = grown
        return atlas

    def _draw(self, tile: int, content: int) -> NDArray[np.uint8]:
        """Draws one tile, ``uint8[t, 3·t]``."""
        content, agent = divmod(content, _AGENTS)
        content, status = divmod(content, _STATES)
        kind, colour = divmod(content, _COLOURS)
        image = _Sheet.render_tile(
            _sprite(self.visuals, kind, colour, status), agent - 1 if agent else None, highlight=False, tile_size=tile
        )
        return image.astype(np.uint8).reshape(tile, 3 * tile)  # truncated, as MiniGrid does when it fills its frame
