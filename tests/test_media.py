from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlmrb.media import annotate, clip_sheet, encode_gif, enlarge, save_image, write_video


def decode(gif: bytes) -> tuple[np.ndarray, list[int]]:
    image = Image.open(io.BytesIO(gif))
    frames, durations = [], []
    for number in range(image.n_frames):
        image.seek(number)
        frames.append(np.asarray(image.convert("RGB")))
        durations.append(image.info["duration"])
    return np.stack(frames), durations


def grid_world(length: int, seed: int = 0) -> np.ndarray:
    """Few colours, every frame different from the one before."""
    rng = np.random.default_rng(seed)
    colors = rng.integers(0, 256, (200, 3), np.uint8)
    return colors[rng.integers(0, len(colors), (length, 12, 16))]


def test_gif_of_few_colors_reads_back_exactly() -> None:
    frames = grid_world(7)
    assert np.array_equal(decode(encode_gif(frames))[0], frames)


def test_gif_with_all_256_colors_reads_back_exactly() -> None:
    frames = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    assert np.array_equal(decode(encode_gif(frames))[0], frames)


def test_gif_of_many_colors_stays_close_and_shares_one_palette() -> None:
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    frames = np.stack(
        [np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(20 * t)), -1) for t in range(5)]
    )
    decoded, _ = decode(encode_gif(frames))
    assert np.abs(decoded.astype(int) - frames).mean() < 12
    assert len(np.unique(decoded.reshape(-1, 3), axis=0)) <= 256


def test_gif_keeps_time_and_rests_on_the_last_frame() -> None:
    _, durations = decode(encode_gif(grid_world(4), fps=10, last_frame_s=2.0))
    assert durations == [100, 100, 100, 2000]


def test_gif_counts_repeated_frames_in_its_duration() -> None:
    frames = grid_world(2).repeat(5, axis=0)
    assert sum(decode(encode_gif(frames, fps=10, last_frame_s=0.1))[1]) == 1000


def test_gif_scales_by_whole_pixels() -> None:
    frames = grid_world(3)
    decoded, _ = decode(encode_gif(frames, scale=3))
    assert np.array_equal(decoded[:, ::3, ::3], frames)
    assert decoded.shape == (3, 36, 48, 3)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)],
    ids=["dtype", "shape", "empty"],
)
def test_what_is_no_clip_is_refused(frames: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"uint8\[T, H, W, 3\]"):
        encode_gif(frames)


@pytest.mark.parametrize(("fps", "scale"), [(0, 1), (60, 1), (8, 0)])
def test_impossible_speed_or_scale_is_refused(fps: float, scale: int) -> None:
    with pytest.raises(ValueError, match="fps|scale"):
        encode_gif(grid_world(1), fps, scale)


@pytest.mark.parametrize(
    ("height", "width", "factor"), [(54, 64, 4), (252, 252, 1), (300, 400, 1), (128, 100, 2), (1, 16, 16)]
)
def test_small_frames_are_enlarged_by_whole_pixels_up_to_a_size_one_can_look_at(
    height: int, width: int, factor: int
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), np.uint8)
    enlarged = enlarge(frames, 256)
    assert enlarged.shape == (2, factor * height, factor * width, 3)
    for row, column in np.ndindex(factor, factor):
        assert np.array_equal(enlarged[:, row::factor, column::factor], frames)


def test_caption_of_narrow_frames_gets_the_width_it_needs() -> None:
    tall = np.full((2, 200, 8, 3), 90, np.uint8)
    captioned = annotate(tall, "score 0.93 · step 123,456")
    assert captioned.shape == (2, 220, 160, 3)
    assert np.array_equal(captioned[:, 20:, 76:84], tall)
    assert not captioned[:, 20:, :76].any()
    assert not captioned[:, 20:, 84:].any()


def test_caption_stands_above_and_covers_nothing() -> None:
    frames = enlarge(grid_world(3))
    captioned = annotate(frames, "score 0.93")
    strip = captioned[:, : -frames.shape[1]]
    assert np.array_equal(captioned[:, -frames.shape[1] :], frames)
    assert np.array_equal(strip[0], strip[2])
    assert strip.max() > 200  # something is written on the dark strip


def test_long_caption_is_shrunk_to_the_width() -> None:
    frames = np.zeros((1, 64, 160, 3), np.uint8)
    strip = annotate(frames, "score 0.93, step 123,456, clip 789, VLM 1B")[0, :-64]
    ink = np.flatnonzero((strip.max(-1) > 120).any(0))
    assert ink.min() >= 1
    assert ink.max() <= 158


def test_sheet_shows_first_and_last_frame_of_each_clip() -> None:
    clips = [grid_world(9, seed=1), grid_world(3, seed=2)]
    sheet = clip_sheet(clips, ["high", "low"], columns=4, gap=2)
    height, width = 192, 256
    clips = [enlarge(clip) for clip in clips]
    rows = (sheet.shape[0] - 2) // 2
    for row, clip in enumerate(clips):
        bottom = (row + 1) * rows
        strip = sheet[bottom - height : bottom]
        assert np.array_equal(strip[:, 2 : 2 + width], clip[0])
        shown = min(4, len(clip))
        left = 2 + (shown - 1) * (width + 2)
        assert np.array_equal(strip[:, left : left + width], clip[-1])


def test_sheet_refuses_clips_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="caption"):
        clip_sheet([grid_world(2)], [])
    with pytest.raises(ValueError, match="one frame size"):
        clip_sheet([grid_world(2), grid_world(2)[:, 1:]], ["a", "b"])
    with pytest.raises(ValueError, match="columns"):
        clip_sheet([grid_world(2)], ["a"], columns=1)


def test_image_reads_back_as_written(tmp_path: Path) -> None:
    save_image(tmp_path / "new" / "a.png", grid_world(1)[0])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "a.png")), grid_world(1)[0])


def test_video_is_a_file_and_an_animated_image_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[logger])
    frames = grid_world(5)
    path = write_video(trainer, "evaluation", frames, step=1234)
    logger.finalize("success")
    assert path == tmp_path / "clips" / "step_00001234_evaluation.gif"
    (image,) = EventAccumulator(str(tmp_path)).Reload().Images("clips/evaluation")
    assert (image.step, image.width, image.height) == (1234, 256, 192)
    assert image.encoded_image_string == path.read_bytes()
    assert np.array_equal(decode(image.encoded_image_string)[0], enlarge(frames))
