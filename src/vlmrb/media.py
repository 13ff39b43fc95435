"""Pictures of clips: animated GIFs, captions, and sheets of sampled frames."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from vlmrb.loggers import tensorboard_writers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Frames = NDArray[np.uint8]
"""``uint8[T, H, W, 3]``, 0–255."""

LEGIBLE = 256
"""Frames are shown at most this many pixels tall and wide when they have to be enlarged at all."""

_LETTER, _LINE = 7, 18  # pixels of a paragraph's letters, on average, and of its lines
_CAPTION_WIDTH = 160  # pixels; a score and a step count in letters one can read
_INK = (245, 245, 245)
_PAPER = (32, 32, 36)
_COLORS = 1 << 24


def encode_gif(frames: Frames, fps: float = 8.0, scale: int = 1, last_frame_s: float = 1.0) -> bytes:
    """Encodes an endless animation with one palette for all frames.

    Up to 256 different colours (grid worlds always) are kept exactly; more are reduced to the best 256 of a sample of
    frames, without dithering, which would flicker.

    Args:
        frames: ``uint8[T, H, W, 3]``, 0–255.
        fps: frames per second; GIF counts in hundredths of a second, and browsers slow down what is faster than 50.
        scale: each pixel becomes ``scale`` × ``scale`` pixels.
        last_frame_s: how long the last frame stays before the animation starts again, in seconds, at least a frame's
            time: the goal is only visible there.

    Returns:
        The GIF file.

    Raises:
        ValueError: wrong shape or dtype, no frame, or an ``fps`` or ``scale`` that cannot be.
    """
    check_frames(frames)
    if not 0 < fps <= 50:
        raise ValueError(f"fps={fps} must lie in (0, 50]")
    if scale < 1:
        raise ValueError(f"scale={scale} must be at least 1")
    if scale > 1:
        frames = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    images = _with_one_palette(frames)
    frame_ms = 10 * max(round(100 / fps), 2)
    durations = [frame_ms] * (len(images) - 1) + [max(frame_ms, round(1000 * last_frame_s))]
    file = io.BytesIO()
    images[0].save(
        file, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False, disposal=1
    )
    return file.getvalue()


def _with_one_palette(frames: Frames) -> list[Image.Image]:
    """Returns palette images for ``uint8[T, H, W, 3]``, exact if 256 colours suffice."""
    packed = (frames[..., 0].astype(np.int32) << 16) | (frames[..., 1].astype(np.int32) << 8) | frames[..., 2]
    # A table of all 2^24 colours takes a tenth of the time that sorting a million pixels does.
    table = np.zeros(_COLORS, np.uint8)
    table[packed.reshape(-1)] = 1
    colors = np.flatnonzero(table.view(np.bool_))
    if len(colors) > 256:
        sample = frames[np.unique(np.linspace(0, len(frames) - 1, 8).round().astype(int))]
        palette = Image.fromarray(sample.reshape(-1, *sample.shape[2:])).quantize(256, dither=Image.Dither.NONE)
        return [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    table[colors] = np.arange(len(colors), dtype=np.uint8)
    entries = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1).astype(np.uint8)
    images = []
    for index in table[packed]:
        image = Image.fromarray(index, mode="P")
        image.putpalette(entries.tobytes())
        images.append(image)
    return images


def enlarge(frames: Frames, size: int = LEGIBLE) -> Frames:
    """Makes each pixel k × k pixels, for the largest whole k with which frames are at most ``size`` tall and wide.

    Stored frames (plain Gymnasium environments) are often small: too small to look at. Larger frames stay as they are.

    Args:
        frames: ``uint8[T, H, W, 3]``, 0–255.
        size: pixels.

    Returns:
        ``uint8[T, k·H, k·W, 3]``, ``frames`` itself if k is 1.
    """
    check_frames(frames)
    factor = size // max(frames.shape[1:3])
    return frames.repeat(factor, axis=1).repeat(factor, axis=2) if factor > 1 else frames


def annotate(frames: Frames, text: str) -> Frames:
    """Writes a caption above frames, enlarged if they are small, on a strip of its own so that nothing is covered.

    Args:
        frames: ``uint8[T, H, W, 3]``, 0–255.
        text: one line; set smaller until it fits the width.

    Returns:
        ``uint8[T, H' + h, W', 3]``: the enlarged frames (see `enlarge`), in the middle if a caption needs more width
        than they have, below a strip whose height ``h`` is about an eighth of the width.
    """
    frames = enlarge(frames)
    missing = max(0, _CAPTION_WIDTH - frames.shape[2])
    frames = np.pad(frames, ((0, 0), (0, 0), (missing // 2, missing - missing // 2), (0, 0)))
    width = frames.shape[2]
    strip = _strip(text, width, width // 8)
    return np.concatenate([np.broadcast_to(strip, (len(frames), *strip.shape)), frames], axis=1)


def below_text(frames: Frames, text: str) -> Frames:
    """Writes a text of any length above frames.

    Args:
        frames: ``uint8[T, H, W, 3]``, 0–255.
        text: is broken into lines.

    Returns:
        ``uint8[T, H + h, W, 3]``.
    """
    width = frames.shape[2]
    lines = textwrap.wrap(text, width // _LETTER)
    page = Image.new("RGB", (width, _LINE * len(lines)), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(2 * _LETTER - 1)
    for number, line in enumerate(lines):
        draw.text((4, _LINE * (number + 0.5)), line, _INK, font, anchor="lm")
    block = np.asarray(page)
    return np.concatenate([np.broadcast_to(block, (len(frames), *block.shape)), frames], axis=1)


def _strip(text: str, width: int, height: int) -> NDArray[np.uint8]:
    image = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(image)
    size = height * 0.72
    while (font := ImageFont.load_default(size)).getlength(text) > width - 4 and size > 5:
        size *= 0.9
    draw.text((width / 2, height / 2), text, _INK, font, anchor="mm")
    return np.asarray(image)


def clip_sheet(clips: Sequence[Frames], captions: Sequence[str], columns: int = 8, gap: int = 4) -> NDArray[np.uint8]:
    """Lays clips out as rows of evenly spaced frames, the first and the last among them, each row under its caption.

    Small frames are enlarged, see `enlarge`.

    Args:
        clips: one ``uint8[T_i, H, W, 3]`` per row, all of one frame size; a shorter clip fills fewer columns.
        captions: one per clip.
        columns: frames per row, at least 2.
        gap: pixels between frames.

    Returns:
        ``uint8[H', W', 3]``, 0–255.

    Raises:
        ValueError: no clips, different frame sizes, captions missing, or fewer than 2 columns.
    """
    if not clips or len(clips) != len(captions):
        raise ValueError(f"a clip sheet needs one caption per clip, got {len(clips)} clips, {len(captions)} captions")
    if columns < 2:
        raise ValueError(f"columns={columns} must be at least 2: a clip's first and last frame")
    clips = [enlarge(clip) for clip in clips]
    sizes = {clip.shape[1:] for clip in clips}
    if len(sizes) > 1:
        raise ValueError(f"all clips of a sheet must have one frame size, got {sorted(sizes)}")
    height, width, _ = sizes.pop()
    strip_height = max(14, height // 6)
    row_height = strip_height + height + 2 * gap
    sheet = np.full((gap + row_height * len(clips), gap + columns * (width + gap), 3), 255, np.uint8)
    for row, (clip, caption) in enumerate(zip(clips, captions, strict=True)):
        top = gap + row * row_height
        shown = clip[np.unique(np.linspace(0, len(clip) - 1, columns).round().astype(int))]
        sheet[top : top + strip_height, gap : gap + columns * (width + gap) - gap] = _strip(
            caption, columns * (width + gap) - gap, strip_height
        )
        for column, frame in enumerate(shown):
            left = gap + column * (width + gap)
            sheet[top + strip_height + gap : top + strip_height + gap + height, left : left + width] = frame
    return sheet


def save_image(path: str | os.PathLike[str], image: NDArray[np.uint8]) -> None:
    """Writes ``uint8[H, W, 3]`` as a picture of the kind that the file's name says, creating its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def write_video(trainer: Trainer, name: str, frames: Frames, step: int, fps: float = 8.0) -> Path:
    """Writes a GIF, of small frames enlarged, into the run's folder ``clips`` and shows it in TensorBoard.

    `SummaryWriter.add_video` needs a module that moviepy 2 no longer has; TensorBoard shows GIFs as they are.

    Args:
        trainer: its ``default_root_dir`` is the run's folder; its TensorBoard loggers are written to.
        name: what is shown: ``high``, ``low``, ``evaluation``.
        frames: ``uint8[T, H, W, 3]``, 0–255.
        step: env steps.
        fps: frames per second.

    Returns:
        The file's path.
    """
    frames = enlarge(frames)
    gif = encode_gif(frames, fps)
    path = Path(trainer.default_root_dir) / "clips" / f"step_{step:08d}_{name}.gif"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gif)
    image = Summary.Image(height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif)
    for writer in tensorboard_writers(trainer.loggers):
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=f"clips/{name}", image=image)]), step)
    return path


def check_frames(frames: Frames) -> None:
    """Raises ``ValueError`` unless ``frames`` is ``uint8[T, H, W, 3]`` with at least one frame."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be uint8[T, H, W, 3] with T ≥ 1, got {frames.dtype}{list(frames.shape)}")
