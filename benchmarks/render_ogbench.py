"""Frames per second and CPU time of OGBench's frames, for each quality and size.

Draws the same states of one environment in this process, as a drawing process does, qualities by turns. CPU seconds
tell more than frames per second where other programs run; software OpenGL may use several cores.

    MUJOCO_GL=egl python benchmarks/render_ogbench.py --sizes 64 224 448
"""

from __future__ import annotations

import argparse
import os
import resource
import time

os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported

import mujoco  # noqa: F401  (with OpenGL: the environments import it without)
import numpy as np

from vlmrb.envs.drawing import Look
from vlmrb.envs.drawing_worker import Scene
from vlmrb.envs.ogbench_worlds import World, open_env

from common import add_json_option, report

QUALITIES = ("fast", "shadows", "full")


def states(env_id: str, count: int) -> list[np.ndarray]:
    """Plays at random and returns snapshots, ``float64[S]`` each."""
    world = World(open_env(env_id))
    observation, _ = world.env.reset(seed=0)
    found = []
    for _ in range(count):
        found.append(world.snapshot(np.float32(observation)))
        observation, *_ = world.env.step(world.env.action_space.sample())
    return found


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measures every quality at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", default="scene-play-singletask-task3-v0")
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 224, 448])
    parser.add_argument("--rounds", type=int, default=3, help="how often the qualities take turns")
    parser.add_argument("--frames", type=int, default=8, help="frames of a turn")
    add_json_option(parser)
    args = parser.parse_args()

    snapshots = states(args.id, args.frames)
    rows = []
    fast: list[float] = []
    for size in args.sizes:
        scenes = {quality: Scene(Look(args.id, size, quality)) for quality in QUALITIES}
        for scene in scenes.values():
            scene.draw(snapshots[0])  # compiles shaders
        rates: dict[str, list[float]] = {quality: [] for quality in QUALITIES}
        costs: dict[str, list[float]] = {quality: [] for quality in QUALITIES}
        for _ in range(args.rounds):
            for quality, scene in scenes.items():
                begin, cpu = time.perf_counter(), cpu_s()
                for snapshot in snapshots:
                    scene.draw(snapshot)
                rates[quality].append(len(snapshots) / (time.perf_counter() - begin))
                costs[quality].append(1e3 * (cpu_s() - cpu) / len(snapshots))
        for quality in QUALITIES:
            rows.append(
                {
                    "environment": args.id,
                    "quality": quality,
                    "size px": size,
                    "frames/s": float(np.median(rates[quality])),
                    "CPU ms a frame": float(np.median(costs[quality])),
                }
            )
        fast.append(float(np.median(costs["full"])) / float(np.median(costs["fast"])))
        for scene in scenes.values():
            scene.close()
    report(
        {
            "name": "CPU time of full ÷ fast, median of the sizes",
            "value": round(float(np.median(fast)), 1),
            "unit": "ratio",
        },
        rows,
        args,
    )


if __name__ == "__main__":
    main()
