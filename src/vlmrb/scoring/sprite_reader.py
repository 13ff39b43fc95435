"""Reading milestones off MiniGrid frames of one tile size, by looking tiles up among sprites drawn beforehand.

A few bytes of each tile, the *probes*, tell whether it changed and which sprite it can be at most. So a clip costs
about a thousandth of its pixels; only tiles whose probes suggest a milestone are compared in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from minigrid.core.constants import COLORS
from minigrid.core.world_object import Door, Floor, Goal, Key, Wall, WorldObj
from minigrid.utils.rendering import downsample, fill_coords, point_in_rect, point_in_triangle, rotate_fn
from numpy.typing import NDArray

from vlmrb.scoring.grades import DOOR, GOAL, KEY

PROBES = 8  # bytes, so that they fit one uint64
_SUBPIXELS = 3  # per pixel and axis, MiniGrid's anti-aliasing

# What a tile shows, as far as it matters. AGENT + d: the agent facing direction d, anywhere but on a goal.
_UNKNOWN, _FLOOR, _KEY, _DOOR_SHUT, _DOOR_OPEN, _ON_GOAL, _AGENT = range(7)
_AHEAD = ((0, 1), (1, 0), (0, -1), (-1, 0))  # (row, column) in front of an agent facing right, down, left, up


class SpriteReader:
    """Finds milestones in frames made of MiniGrid's tiles.

    A milestone is a change between two consecutive frames: a cell shows a key and then bare floor, or a shut door
    and then an open one, with the agent facing it; or the agent stands on a goal where it did not before.

    Args:
        tile_size: t, pixels of a cell's side.

    Raises:
        ValueError: sprites cannot be told apart by few bytes at this size.
    """

    def __init__(self, tile_size: int) -> None:
        self.tile_size = tile_size
        meanings: dict[bytes, int] = {}
        for shows, tile in _draw_tiles(tile_size):
            # What two things look like means neither: an agent on a red goal is a plain red tile, like a red wall.
            meanings[tile] = shows if meanings.get(tile, shows) == shows else _UNKNOWN
        tiles = np.frombuffer(b"".join(meanings), np.uint8).reshape(len(meanings), tile_size, 3 * tile_size)
        self._probes = _tell_apart(tiles)
        prints = self._read_probes(tiles[:, None, None, :, None]).reshape(-1)
        order = np.argsort(prints)
        self._prints = prints[order]  # uint64[K], ascending
        self._tiles = tiles[order]  # uint8[K, t, 3 t]
        self._shows = np.array(list(meanings.values()))[order]  # int64[K]

    def events(self, frames: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Finds which milestones happen in clips.

        Args:
            frames: ``uint8[B, L, H, W, 3]``, 0–255.
            lengths: ``int64[B]``, frames of each clip that count.

        Returns:
            ``bool[B, 3]``: key taken, door opened, goal reached.

        Raises:
            ValueError: the frames do not divide into tiles.
        """
        count, length, height, width, _ = frames.shape
        size = self.tile_size
        if height % size or width % size:
            raise ValueError(f"frames of {height} x {width} pixels do not divide into tiles of {size}")
        tiled = frames.reshape(count, length, height // size, size, width // size, size * 3)
        prints = self._read_probes(tiled)  # [B, L, rows, columns]

        clip, step, row, column = np.nonzero(prints[:, 1:] != prints[:, :-1])
        before, showed = self._look_up(prints[clip, step, row, column])
        after, shows = self._look_up(prints[clip, step + 1, row, column])
        kind = np.full(len(clip), -1)
        kind[(showed == _KEY) & (shows == _FLOOR)] = KEY
        kind[(showed == _DOOR_SHUT) & (shows == _DOOR_OPEN)] = DOOR
        kind[(showed != _ON_GOAL) & (shows == _ON_GOAL)] = GOAL
        maybe = np.flatnonzero((kind >= 0) & (step + 1 < lengths[clip]))  # a frame beyond the clip is padding
        clip, step, row, column, before, after, kind = (
            a[maybe] for a in (clip, step, row, column, before, after, kind)
        )

        real = self._equal(tiled, (clip, step + 1, row, column), after)
        by_hand = self._equal(tiled, (clip, step, row, column), before)
        by_hand &= self._faced(tiled, prints, clip, step, row, column)
        real &= by_hand | (kind == GOAL)
        events = np.zeros((count, 3), dtype=bool)
        events[clip[real], kind[real]] = True
        return events

    def _faced(
        self,
        tiled: NDArray[np.uint8],
        prints: NDArray[np.uint64],
        clip: NDArray[np.int64],
        step: NDArray[np.int64],
        row: NDArray[np.int64],
        column: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Says of each cell ``int64[n]`` whether the agent stands beside it and looks at it: ``bool[n]``."""
        faced = np.zeros(len(clip), dtype=bool)
        rows, columns = prints.shape[2:]
        for direction, (down, right) in enumerate(_AHEAD):
            y, x = row - down, column - right
            inside = np.flatnonzero((y >= 0) & (y < rows) & (x >= 0) & (x < columns))
            cell = clip[inside], step[inside], y[inside], x[inside]
            sprite, shows = self._look_up(prints[cell])
            faced[inside] |= (shows == _AGENT + direction) & self._equal(tiled, cell, sprite)
        return faced

    def _look_up(self, prints: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the only sprite each of ``uint64[n]`` can be, ``int64[n]``, and what it shows, ``int64[n]``."""
        sprite = np.searchsorted(self._prints, prints).clip(max=len(self._prints) - 1)
        return sprite, np.where(self._prints[sprite] == prints, self._shows[sprite], _UNKNOWN)

    def _equal(
        self, tiled: NDArray[np.uint8], cell: tuple[NDArray[np.int64], ...], sprite: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Compares cells (clip, step, row and column, ``int64[n]`` each) with sprites ``int64[n]`` in full."""
        clip, step, row, column = cell
        return (tiled[clip, step, row, :, column] == self._tiles[sprite]).all(axis=(1, 2))

    def _read_probes(self, tiled: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Reads tiles' probes as numbers: ``uint8[B, L, rows, t, columns, 3 t]`` → ``uint64[B, L, rows, columns]``."""
        read = np.zeros((*tiled.shape[:3], tiled.shape[4], PROBES), dtype=np.uint8)
        for place, (row, byte) in enumerate(self._probes):
            read[..., place] = tiled[:, :, :, row, :, byte]
        return read.view(np.uint64)[..., 0]


@cache
def sprite_reader(tile_size: int) -> SpriteReader:
    """Returns the reader of a tile size, made once in a process: drawing takes 0.1 s at 8 pixels, 2 s at 32."""
    return SpriteReader(tile_size)


def find_tile_size(frame: NDArray[np.uint8], at_least: int) -> int | None:
    """Finds the tile size at which most of a frame is MiniGrid's bare floor or wall, and some of it floor.

    Args:
        frame: ``uint8[H, W, 3]``, 0–255.
        at_least: pixels.

    Returns:
        Pixels, a divisor of both sides; ``None`` if floor of no such size is to be seen.
    """
    height, width, _ = frame.shape
    best, best_share = None, 0.0
    common = math.gcd(height, width)
    for size in (size for size in range(at_least, common + 1) if common % size == 0):
        tiles = frame.reshape(height // size, size, width // size, size * 3).swapaxes(1, 2)
        floor, wall = ((tiles == _paint(thing, size)).all(axis=(2, 3)) for thing in (None, Wall()))
        share = float((floor | wall).mean())
        if floor.any() and share > best_share:
            best, best_share = size, share
    return best


def _tell_apart(tiles: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Chooses bytes, greedily, so that no two of the tiles ``uint8[K, t, 3 t]`` agree in all: rows and places in them.

    Raises:
        ValueError: that takes too many.
    """
    count, _, row_bytes = tiles.shape
    flat = tiles.reshape(count, -1).astype(np.int64)
    group = np.zeros((count, 1), dtype=np.int64)  # tiles in one group look alike so far
    probes: list[int] = []
    while group.max() + 1 < count:
        if len(probes) == PROBES:
            raise ValueError(f"{PROBES} bytes do not tell MiniGrid's sprites of {tiles.shape[1]} pixels apart")
        split = np.sort(group * 256 + flat, axis=0)
        probes.append(int((np.diff(split, axis=0) != 0).sum(axis=0).argmax()))
        group = np.unique(group * 256 + flat[:, probes[-1:]], return_inverse=True)[1].reshape(count, 1)
    return [divmod(probe, row_bytes) for probe in probes]


def _draw_tiles(tile_size: int) -> Iterator[tuple[int, bytes]]:
    """Draws all tiles that matter with MiniGrid's own brushes: what each shows, and its pixels."""
    yield _FLOOR, _paint(None, tile_size).tobytes()
    for colour in COLORS:
        yield _UNKNOWN, _paint(Wall(colour), tile_size).tobytes()
        yield _KEY, _paint(Key(colour), tile_size).tobytes()
        yield _DOOR_SHUT, _paint(Door(colour), tile_size).tobytes()
        yield _DOOR_SHUT, _paint(Door(colour, is_locked=True), tile_size).tobytes()
        yield _DOOR_OPEN, _paint(Door(colour, is_open=True), tile_size).tobytes()
    for direction in range(4):
        agent = _agent_mask(direction, tile_size * _SUBPIXELS)
        yield _AGENT + direction, _paint(None, tile_size, agent).tobytes()
        for colour in COLORS:
            yield _AGENT + direction, _paint(Floor(colour), tile_size, agent).tobytes()
            yield _AGENT + direction, _paint(Door(colour, is_open=True), tile_size, agent).tobytes()
            yield _ON_GOAL, _paint(Goal(colour), tile_size, agent).tobytes()


def _paint(thing: WorldObj | None, tile_size: int, agent: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
    """Draws a cell as ``Grid.render_tile`` does, which would work out the agent's triangle anew for every cell.

    Args:
        thing: what the cell holds.
        tile_size: t, pixels.
        agent: ``bool[3 t, 3 t]``, the sub-pixels that the agent covers.

    Returns:
        ``uint8[t, 3 t]``, 0–255.
    """
    canvas = np.zeros((tile_size * _SUBPIXELS, tile_size * _SUBPIXELS, 3), dtype=np.uint8)
    for line in (point_in_rect(0, 0.031, 0, 1), point_in_rect(0, 1, 0, 0.031)):
        fill_coords(canvas, line, (100, 100, 100))
    if thing is not None:
        thing.render(canvas)
    if agent is not None:
        canvas[agent] = COLORS["red"]
    return downsample(canvas, _SUBPIXELS).astype(np.uint8).reshape(tile_size, 3 * tile_size)


def _agent_mask(direction: int, size: int) -> NDArray[np.bool_]:
    """Returns the sub-pixels under the agent, ``bool[size, size]``; direction 0 right, 1 down, 2 left, 3 up."""
    triangle = point_in_triangle((0.12, 0.19), (0.87, 0.50), (0.12, 0.81))
    canvas = np.zeros((size, size), dtype=bool)
    return fill_coords(canvas, rotate_fn(triangle, cx=0.5, cy=0.5, theta=0.5 * math.pi * direction), True)
