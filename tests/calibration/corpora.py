"""Small corpora for tests: real DoorKey-5x5 play, and made-up videos of a square that turns green."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlmrb.calibration.collect import CollectSettings, collect
from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.policies import PolicyName, make_player
from vlmrb.envs import EnvConfig

DOORKEY = EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=4)


def doorkey_corpus(
    folder: Path, clips: int = 32, policy: PolicyName = "scripted", config: EnvConfig = DOORKEY, **settings: object
) -> Corpus:
    chosen = CollectSettings(clips=clips, **({"clip_length": 16} | settings))  # type: ignore[arg-type]
    return collect(folder, config, make_player(policy, config), {"policy": policy}, chosen, "vlmrb corpus …", False)


def square_frames(count: int, success: bool, size: int = 32) -> NDArray[np.uint8]:
    """A white square that wanders over black; with success it is green from the middle on."""
    frames = np.zeros((count, size, size, 3), np.uint8)
    for t in range(count):
        place = t % (size - 8)
        color = (0, 255, 0) if success and t >= count // 2 else (255, 255, 255)
        frames[t, place : place + 8, place : place + 8] = color
    return frames


def write_gif(path: Path, frames: NDArray[np.uint8], frame_ms: int = 100) -> None:
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=frame_ms, loop=0)


def write_mp4(path: Path, frames: NDArray[np.uint8], fps: int = 10) -> None:
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)


def folder_content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
