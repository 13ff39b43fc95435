"""Frames per second: the tile atlas against MiniGrid's own ``get_frame(highlight=False)``, paired in one run.

Both draw the same states at the same tile size, after every tile has been drawn once on either side. Ours is handed
clips of 32 frames, as a scorer asks for them, MiniGrid one state at a time, which is all it can do.

    python benchmarks/render.py --pairs 5
"""

from __future__ import annotations

import argparse
from functools import partial

import gymnasium
import minigrid  # noqa: F401  (importing it registers its ids)
import numpy as np

from vlmrb.envs.tiles import GridRenderer

from common import add_json_option, paired, rate, report

IDS = (
    "MiniGrid-DoorKey-8x8-v0",
    "MiniGrid-DoorKey-16x16-v0",
    "MiniGrid-KeyCorridorS3R3-v0",
    "MiniGrid-MultiRoom-N6-v0",
)
TILES = (8, 16, 32)
CLIP = 32


def states(env: gymnasium.Env, renderer: GridRenderer, rng: np.random.Generator) -> np.ndarray:
    """Plays at random and returns the snapshots, ``uint8[32, S]``; the environment stays in the last state."""
    world = env.unwrapped
    snapshots = []
    for _ in range(CLIP):
        _, _, terminated, truncated, _ = env.step(int(rng.integers(7)))
        if terminated or truncated:
            env.reset(seed=int(rng.integers(2**31)))
        snapshots.append(renderer.layout.take(world))
    return np.stack(snapshots)


def main() -> None:
    """Measures every id at every tile size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", nargs="+", default=IDS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on one side of a pair")
    add_json_option(parser)
    args = parser.parse_args()

    rows = []
    at_32: list[float] = []
    for env_id in args.ids:
        env = gymnasium.make(env_id, disable_env_checker=True)
        env.reset(seed=0)
        world = env.unwrapped
        renderer = GridRenderer(world.width, world.height)
        clip = states(env, renderer, np.random.default_rng(0))
        for tile in TILES:
            theirs = partial(world.get_frame, highlight=False, tile_size=tile)
            ours = partial(renderer.render, clip, tile * max(world.width, world.height))
            if (ours()[-1] != theirs()).any():  # draws the tiles, and makes sure that it is the same picture
                raise RuntimeError(f"{env_id} at {tile} px: frames differ")
            rates: dict[str, list[float]] = {"ours": [], "minigrid": []}

            def measure(name: str, work: partial, amount: int, rates: dict[str, list[float]] = rates) -> float:
                rates[name].append(rate(work, amount, args.seconds))
                return rates[name][-1]

            ratios = paired(
                partial(measure, "ours", ours, CLIP), partial(measure, "minigrid", theirs, 1), pairs=args.pairs
            )
            row = {"environment": env_id, "grid": f"{world.width}x{world.height}", "tile px": tile}
            row |= {f"{name}, frames/s": float(np.median(values)) for name, values in rates.items()}
            rows.append(row | {"ratio": float(np.median(ratios)), "lowest": min(ratios)})
            if tile == 32:
                at_32.append(float(np.median(ratios)))
    value = round(float(np.median(at_32)), 1)
    report(
        {"name": "ours ÷ MiniGrid's frames/s at 32 px, median of the ids", "value": value, "unit": "ratio"}, rows, args
    )


if __name__ == "__main__":
    main()
