"""The program of a drawing process: `python -m vlmrb.envs.drawing_worker`, started by `vlmrb.envs.drawing` only."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any, Final

import mujoco
import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.drawing import Look
from vlmrb.envs.ogbench_worlds import World, open_env

KEPT: Final = 4  # scenes: a run needs one for the scorer's frames and one for its videos
PARENT_CHECK_S: Final = 1.0
_SHADOW_MAP: Final = 256  # texels of a coarse shadow map's side


class Scene:
    """An environment with a context to draw it.

    Args:
        look: what is drawn, and how.
    """

    def __init__(self, look: Look) -> None:
        self._world = World(open_env(look.env_id))
        model = self._world.model
        model.vis.global_.offwidth = model.vis.global_.offheight = look.size
        if look.quality != "full":
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = _SHADOW_MAP
        self._renderer = mujoco.Renderer(model, look.size, look.size)
        flags, kinds = self._renderer.scene.flags, mujoco.mjtRndFlag
        if look.quality != "full":
            flags[kinds.mjRND_REFLECTION] = flags[kinds.mjRND_SKYBOX] = False
        if look.quality == "fast":
            flags[kinds.mjRND_SHADOW] = False

    def draw(self, snapshot: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Returns the frame ``uint8[H, W, 3]`` of a state ``float64[S]``."""
        world = self._world
        world.show(snapshot)
        self._renderer.update_scene(world.data, world.camera, world.scene_option)
        return self._renderer.render()

    def close(self) -> None:
        """Frees the context."""
        self._renderer.close()
        self._world.close()


def main(fd: int, parent: int) -> None:
    """Draws until the pipe closes.

    Args:
        fd: a duplex pipe.
        parent: the id of the process at its other end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(fd)
    _draw_anything()
    pipe.send(("ready", None))
    scenes: OrderedDict[Look, Scene] = OrderedDict()
    while True:
        try:
            look, snapshots = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_answer(scenes, Look(*look), snapshots))


def _answer(scenes: OrderedDict[Look, Scene], look: Look, snapshots: NDArray) -> tuple[str, Any]:
    try:
        if look not in scenes:
            if len(scenes) == KEPT:
                scenes.popitem(last=False)[1].close()
            scenes[look] = Scene(look)
        scenes.move_to_end(look)
        return "frames", np.stack([scenes[look].draw(snapshot) for snapshot in snapshots])
    except Exception as error:  # upstream's and MuJoCo's
        return "failed", f"{look.env_id}: {type(error).__name__}: {error}"


def _draw_anything() -> None:
    """Fails at once, with the back-end's own words, where nothing can be drawn."""
    model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 16, 16)
    renderer.update_scene(data)
    renderer.render()
    renderer.close()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
