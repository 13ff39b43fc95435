"""Reads videos frame by frame: GIFs with Pillow, everything else with PyAV (the ``video`` extra)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence, UnidentifiedImageError

from vlmrb.envs.gymnasium import FrameRenderer
from vlmrb.envs.instance import shrink

MAX_BYTES = 2 << 30
"""Of the frames of one video held at a time."""


class Video(NamedTuple):
    """Some frames of a video.

    Attributes:
        frames: ``uint8[T, H, W, 3]``, 0–255.
        times: ``float64[T]``, when each is shown, in seconds from the video's start.
    """

    frames: NDArray[np.uint8]
    times: NDArray[np.float64]


def frame_times(path: Path) -> NDArray[np.float64]:
    """Returns when each frame is shown, ``float64[T]``, in seconds.

    Raises:
        ValueError: the file is missing or no video.
    """
    return np.array([time for time, _ in _decode(path)])


def frame_shape(path: Path, frame_size: int) -> tuple[int, int]:
    """Returns height and width in pixels of a video's frames once they are scaled down to ``frame_size``."""
    frames = _decode(path)
    _, image = next(frames)  # belongs to the open file, which closes with the generator
    shape = shrink(_pixels(image)[None], frame_size).shape[1:3]
    frames.close()
    return shape


def read_frames(path: Path, frame_size: int, which: NDArray[np.int64] | None = None, every: int = 1) -> Video:
    """Reads frames, scaled down so that neither side is longer than ``frame_size`` pixels.

    Args:
        path: the video.
        frame_size: pixels.
        which: ``int64[T]``, increasing numbers of the frames to keep; ``None`` keeps every ``every``-th one.
        every: see ``which``.

    Raises:
        ValueError: the file is missing or no video, or its frames need more than 2 GiB.
    """
    wanted = None if which is None else set(which.tolist())
    frames, times, size = [], [], 0
    for number, (time, image) in enumerate(_decode(path)):
        if number in wanted if wanted is not None else number % every == 0:
            frames.append(shrink(_pixels(image)[None], frame_size)[0])
            times.append(time)
            size += frames[-1].nbytes
            if size > MAX_BYTES:
                raise ValueError(
                    f"video {path}: {len(frames)} frames need more than {MAX_BYTES >> 30} GiB; take fewer (--every) or "
                    "smaller ones (--frame_size)"
                )
    if len({frame.shape for frame in frames}) > 1:
        raise ValueError(f"video {path}: its frames change their size")
    return Video(np.stack(frames), np.array(times))


def pad(frames: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Puts frames ``uint8[T, h, w, 3]`` in the middle of black ones of ``height`` × ``width`` pixels."""
    down, right = height - frames.shape[1], width - frames.shape[2]
    return np.pad(frames, ((0, 0), (down // 2, down - down // 2), (right // 2, right - right // 2), (0, 0)))


def as_snapshots(frames: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], FrameRenderer]:
    """Returns frames ``uint8[..., H, W, 3]`` as snapshots ``uint8[..., S]``, and the renderer that gives them back."""
    shape = frames.shape[-3:]
    return frames.reshape(*frames.shape[:-3], -1), FrameRenderer("video", shape, (0,), "|u1")


def _decode(path: Path) -> Generator[tuple[float, Any], None, None]:
    """Yields ``(seconds, image)``."""
    if not path.is_file():
        raise ValueError(f"video {path} does not exist")
    empty = True
    for item in _decode_gif(path) if path.suffix.lower() == ".gif" else _decode_video(path):
        empty = False
        yield item
    if empty:
        raise ValueError(f"video {path} holds no frames")


def _decode_gif(path: Path) -> Generator[tuple[float, Image.Image], None, None]:
    """Takes apart what GIF writers merge: equal frames in a row become one that is shown longer."""
    try:
        with Image.open(path) as file:
            shown = [image.info.get("duration") or 100 for image in ImageSequence.Iterator(file)]  # milliseconds
            repeats = [round(duration / min(shown)) for duration in shown[:-1]] + [1]  # the last one is often held
            number = 0
            for image, count in zip(ImageSequence.Iterator(file), repeats, strict=True):
                for _ in range(count):
                    yield number * min(shown) / 1000, image
                    number += 1
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, EOFError, SyntaxError) as error:
        raise ValueError(f"video {path} cannot be read: {error}") from error


def _decode_video(path: Path) -> Generator[tuple[float, Any], None, None]:
    try:
        import av
    except ModuleNotFoundError as error:
        raise ValueError(f"video {path} needs PyAV: pip install 'vlmrb[video]' (GIFs need nothing)") from error
    try:
        with av.open(str(path)) as file:
            if not file.streams.video:
                raise ValueError(f"video {path} holds no frames")
            rate = float(file.streams.video[0].average_rate or 25)
            for number, frame in enumerate(file.decode(video=0)):
                yield number / rate if frame.time is None else float(frame.time), frame
    except av.error.FFmpegError as error:
        raise ValueError(f"video {path} cannot be read: {error.strerror or error}") from error


def _pixels(image: Any) -> NDArray[np.uint8]:
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    return image.to_ndarray(format="rgb24")
