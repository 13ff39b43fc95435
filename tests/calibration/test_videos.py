"""Videos are read frame by frame, and labelled stretches of them become the clips of a corpus."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import folder_content, square_frames, write_gif, write_mp4

from vlmrb.calibration.corpus import load_corpus
from vlmrb.calibration.labelled_videos import collect_videos, read_labels
from vlmrb.calibration.videos import MAX_BYTES, frame_shape, frame_times, pad, read_frames
from vlmrb.cli import main
from vlmrb.media import encode_gif


def make_videos(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(3):
        write_gif(folder / f"good_{number}.gif", square_frames(20 + number, True))
        write_gif(folder / f"bad_{number}.gif", square_frames(20 + number, False))
    write_mp4(folder / "film.mp4", square_frames(40, True, size=64))
    labels = folder.parent / "labels.csv"
    lines = ["file,label,start,end"]
    lines += [f"good_{number}.gif,yes,," for number in range(3)] + [f"bad_{number}.gif,0,," for number in range(3)]
    lines += ["film.mp4,no,0,1.5", "film.mp4,success,2.5,"]
    labels.write_text("\n".join(lines) + "\n")
    return labels


def test_gif_frames_come_back_as_they_were(tmp_path: Path) -> None:
    frames = square_frames(12, True)
    write_gif(tmp_path / "a.gif", frames, frame_ms=200)
    video = read_frames(tmp_path / "a.gif", 512)
    np.testing.assert_array_equal(video.frames, frames)
    np.testing.assert_allclose(video.times, np.arange(12) * 0.2)


def test_equal_frames_that_a_gif_merges_are_taken_apart_again(tmp_path: Path) -> None:
    frames = square_frames(8, False)[[0, 1, 1, 1, 2, 3, 3, 4]]
    (tmp_path / "a.gif").write_bytes(encode_gif(frames, fps=8))
    np.testing.assert_array_equal(read_frames(tmp_path / "a.gif", 512).frames, frames)


def test_mp4_frames_come_back_with_their_times(tmp_path: Path) -> None:
    frames = square_frames(10, True, size=64)
    write_mp4(tmp_path / "a.mp4", frames, fps=5)
    video = read_frames(tmp_path / "a.mp4", 512)
    assert video.frames.shape == frames.shape
    assert np.abs(video.frames.astype(int) - frames).mean() < 8  # lossy
    np.testing.assert_allclose(video.times, np.arange(10) / 5, atol=1e-3)
    green = video.frames[:, :, :, 1].astype(int) - video.frames[:, :, :, 0]
    assert green[:5].max() < 120 < green[5:].max()


def test_mp4_channels_are_in_their_places(tmp_path: Path) -> None:
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    frames[..., 0], frames[..., 2] = 200, 40
    write_mp4(tmp_path / "a.mp4", frames)
    np.testing.assert_allclose(read_frames(tmp_path / "a.mp4", 512).frames.mean((0, 1, 2)), [200, 0, 40], atol=12)


def test_frames_are_scaled_down_chosen_and_padded(tmp_path: Path) -> None:
    write_gif(tmp_path / "a.gif", square_frames(12, False, size=64))
    assert frame_shape(tmp_path / "a.gif", 16) == (16, 16)
    chosen = read_frames(tmp_path / "a.gif", 16, np.array([0, 3, 11]))
    assert chosen.frames.shape == (3, 16, 16, 3)
    np.testing.assert_allclose(chosen.times, [0, 0.3, 1.1])
    np.testing.assert_allclose(read_frames(tmp_path / "a.gif", 16, every=5).times, [0, 0.5, 1.0])
    padded = pad(chosen.frames, 20, 17)
    assert padded.shape == (3, 20, 17, 3)
    np.testing.assert_array_equal(padded[:, 2:18, 0:16], chosen.frames)
    assert padded.sum() == chosen.frames.sum()


def test_videos_too_large_for_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BYTES == 2 << 30
    monkeypatch.setattr("vlmrb.calibration.videos.MAX_BYTES", 5 * 32 * 32 * 3)
    write_gif(tmp_path / "a.gif", square_frames(12, False))
    with pytest.raises(ValueError, match="--every"):
        read_frames(tmp_path / "a.gif", 512)
    assert len(read_frames(tmp_path / "a.gif", 512, every=3).frames) == 4


def test_files_that_are_no_videos_are_refused(tmp_path: Path) -> None:
    for name in ("a.gif", "a.mp4"):
        with pytest.raises(ValueError, match="does not exist"):
            frame_times(tmp_path / name)
        (tmp_path / name).write_bytes(b"this is text")
        with pytest.raises(ValueError, match="cannot be read"):
            frame_times(tmp_path / name)


def test_a_gif_that_claims_to_be_huge_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(b"GIF89a" + b"\xff" * 4 + bytes(3) + b"," + bytes(4) + b"\xff" * 4 + bytes(3) + b";")
    with pytest.raises(ValueError, match=r"a\.gif cannot be read"):
        frame_times(path)


def test_clips_of_no_frames_are_not_clips_of_the_usual_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = make_videos(tmp_path / "videos")
    command = ["corpus", "--videos", str(tmp_path / "videos"), "--labels", str(labels), "--out", str(tmp_path / "out")]
    assert main([*command, "--clip_length", "0"]) == 1
    assert "--clip_length 0" in capsys.readouterr().err


def test_without_pyav_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mp4(tmp_path / "a.mp4", square_frames(4, True))
    importing = builtins.__import__

    def without_av(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "av":
            raise ModuleNotFoundError("No module named 'av'")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(ValueError, match=r"pip install 'vlmrb\[video\]'"):
        frame_times(tmp_path / "a.mp4")


def test_labelled_stretches_become_clips(tmp_path: Path) -> None:
    labels = make_videos(tmp_path / "videos")
    command = ["corpus", "--videos", str(tmp_path / "videos"), "--labels", str(labels), "--out", str(tmp_path / "out")]
    assert main([*command, "--clip_length", "8", "--frame_size", "32"]) == 0
    corpus = load_corpus(tmp_path / "out")
    assert corpus.clips.success.tolist() == [True] * 3 + [False] * 4 + [True]
    assert corpus.clips.lengths.tolist() == [8] * 8
    assert corpus.milestones == []
    assert corpus.clips.groups[-1] == corpus.clips.groups[-2]  # two stretches of one film
    assert len(np.unique(corpus.clips.groups)) == 7
    frames = corpus.batch(np.arange(8)).frames()
    assert frames.shape == (8, 8, 32, 32, 3)
    original = square_frames(20, True)
    np.testing.assert_array_equal(frames[0], original[np.linspace(0, 19, 8).round().astype(int)])
    film = square_frames(40, True, size=64)
    shrunk = film.reshape(40, 32, 2, 32, 2, 3).mean((2, 4))
    early, late = frames[6].astype(float), frames[7].astype(float)
    assert np.abs(early - shrunk[np.linspace(0, 15, 8).round().astype(int)]).mean() < 8
    assert np.abs(late - shrunk[np.linspace(25, 39, 8).round().astype(int)]).mean() < 8


def test_short_stretches_are_padded_with_their_last_frame(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    write_gif(tmp_path / "videos/a.gif", square_frames(5, True))
    write_gif(tmp_path / "videos/b.gif", square_frames(5, False, size=16))
    labels = tmp_path / "labels.csv"
    labels.write_text("file,label\na.gif,1\nb.gif,0\n")
    settings: dict[str, Any] = {"clip_length": 8, "frame_size": 32, "command": "", "progress": False}
    corpus = collect_videos(tmp_path / "out", tmp_path / "videos", labels, **settings)
    frames = corpus.batch(np.arange(2)).frames()
    assert corpus.clips.lengths.tolist() == [5, 5]
    np.testing.assert_array_equal(frames[0, 5:], frames[0, 4:5].repeat(3, 0))
    np.testing.assert_array_equal(frames[1, :5, 8:24, 8:24], square_frames(5, False, size=16))
    assert frames[1].sum() == frames[1, :, 8:24, 8:24].sum()


def test_an_interrupted_corpus_of_videos_is_finished_and_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = make_videos(tmp_path / "videos")
    settings: dict[str, Any] = {"clip_length": 4, "frame_size": 16, "command": "", "progress": False}
    monkeypatch.setattr("vlmrb.calibration.labelled_videos.SHARD_CLIPS", 3)
    whole = collect_videos(tmp_path / "whole", tmp_path / "videos", labels, **settings)
    read, calls = read_frames, []

    def interrupted_read(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return read(*args, **kwargs)

    monkeypatch.setattr("vlmrb.calibration.labelled_videos.read_frames", interrupted_read)
    with pytest.raises(KeyboardInterrupt):
        collect_videos(tmp_path / "out", tmp_path / "videos", labels, **settings)
    with pytest.raises(ValueError, match=r"not finished \(3 of 8 clips\)"):
        load_corpus(tmp_path / "out")
    collect_videos(tmp_path / "out", tmp_path / "videos", labels, **settings)
    assert len(calls) == 5 + 5
    assert folder_content(tmp_path / "out") == folder_content(whole.folder)


def test_unlabelled_videos_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = make_videos(tmp_path / "videos")
    labels.write_text("file,label\ngood_0.gif,yes\nbad_0.gif,no\n")
    collect_videos(
        tmp_path / "out", tmp_path / "videos", labels, clip_length=4, frame_size=16, command="", progress=False
    )
    assert "5 videos have no label" in caplog.text
    lines = [f"good_{number}.gif,yes\nbad_{number}.gif,no" for number in range(3)]
    labels.write_text("\n".join(["file,label", *lines]) + "\n")
    collect_videos(
        tmp_path / "more", tmp_path / "videos", labels, clip_length=4, frame_size=16, command="", progress=False
    )
    assert "1 video has no label" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("file,label\nnone.gif,1\n", "line 2: video"),
        ("file,label\ngood_0.gif,maybe\n", "label 'maybe' is neither yes nor no"),
        ("file,label,start\ngood_0.gif,1,soon\n", "start and end are seconds"),
        ("file,label,start,end\ngood_0.gif,1,2,1\n", "from 2.0 s to 1.0 s is none"),
        ("video,label\n", "needs the columns file and label"),
        ("file,label\n", "holds no labels"),
        ("", "needs the columns"),
        ("file,label\ngood_0.gif,1\nbad_0.gif,0,\ngood_1.gif,\n", "line 4: label ''"),
        ("file,label,start\ngood_0.gif,1,99\n", "too short for a clip, which takes 2 frames: 0 from 99.0 s"),
        ("file,label,start,end\ngood_0.gif,1,0,0.05\n", "too short"),
    ],
)
def test_bad_labels_are_one_line(content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = make_videos(tmp_path / "videos")
    labels.write_text(content)
    command = ["corpus", "--videos", str(tmp_path / "videos"), "--labels", str(labels), "--out", str(tmp_path / "out")]
    assert main(command) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vlmrb corpus: error: ")
    assert says in error


def test_missing_folder_or_labels_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        read_labels(tmp_path / "labels.csv", tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read"):
        read_labels(tmp_path / "labels.csv", tmp_path)


def test_other_labels_make_another_corpus(tmp_path: Path) -> None:
    labels = make_videos(tmp_path / "videos")
    settings: dict[str, Any] = {"clip_length": 4, "frame_size": 16, "command": "", "progress": False}
    collect_videos(tmp_path / "out", tmp_path / "videos", labels, **settings)
    labels.write_text(labels.read_text().replace("good_0.gif,yes", "good_0.gif,no"))
    with pytest.raises(ValueError, match="other settings"):
        collect_videos(tmp_path / "out", tmp_path / "videos", labels, **settings)
