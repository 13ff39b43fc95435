"""`vlmrb score`: sliding clips of a video or an episode, event marks where they belong, and ΔQ as it is defined."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from corpora import square_frames, write_gif, write_mp4
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vlmrb.algorithms import DQN
from vlmrb.calibration.timeline import (
    Recording,
    delta_q,
    film_strip,
    milestone_events,
    record_episode,
    window_starts,
)
from vlmrb.cli import main
from vlmrb.envs import EnvConfig, make_env
from vlmrb.envs.doorkey import make_expert
from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.milestones import MilestonesScorer

ROOT = Path(__file__).parents[2]
SPRITES, MILESTONES = (str(ROOT / f"configs/scorer/{name}.yaml") for name in ("sprites", "milestones"))
DOORKEY = EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=2)
EXPERT = make_expert(DOORKEY)


class ExpertAgent(DQN):
    """Plays by the book, so that episodes succeed without training."""

    def __init__(self) -> None:
        super().__init__(DOORKEY)
        self.configure_model()

    def act(self, observation: Tensor) -> Tensor:
        cells = observation.numpy()
        actions = []
        for cell in cells:
            x, y = np.argwhere(cell[..., 0] == 10)[0]
            holds = not (cell[..., 0] == 5).any()
            direction = cell[x, y, 2]
            grid = cell.copy()
            grid[x, y] = (4, 4, 0) if not (grid[..., 0] == 4).any() else (1, 0, 0)  # an agent in the door hides it
            snapshot = np.concatenate([grid.reshape(-1), [x, y, direction, *((5, 4) if holds else (0, 0))]])
            actions.append(int(EXPERT(snapshot.astype(np.uint8)[None])[0]))
        return torch.tensor(actions)


@pytest.fixture(scope="module")
def episode() -> Recording:
    return record_episode(ExpertAgent(), seed=3, epsilon=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "short"
    settings = ["--training.total_env_steps", "640", "--env.max_steps", "60"]
    assert main(["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--run_dir", str(folder), *settings]) == 0
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    with file.open() as text:
        return list(csv.DictReader(text))


@pytest.mark.parametrize(
    ("frames", "length", "stride", "starts"),
    [
        (10, 4, 1, [0, 1, 2, 3, 4, 5, 6]),
        (10, 4, 3, [0, 3, 6]),
        (10, 4, 4, [0, 4, 6]),  # the end is always seen
        (4, 4, 5, [0]),
        (3, 4, 1, [0]),
    ],
)
def test_windows_slide_to_the_very_end(frames: int, length: int, stride: int, starts: list[int]) -> None:
    assert window_starts(frames, length, stride).tolist() == starts


def test_windows_hold_the_frames_they_say() -> None:
    recording = Recording(np.arange(6, dtype=np.uint8)[:, None], GridRenderer(5, 5), np.arange(6.0), "s")
    batch = recording.clips(np.array([0, 2]), 4)
    assert batch.snapshots[..., 0].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert batch.lengths.tolist() == [4, 4]
    short = recording.clips(np.array([0]), 9)
    assert short.snapshots[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert short.lengths.tolist() == [6]


def test_an_episode_is_played_to_its_end_with_its_milestones(episode: Recording) -> None:
    assert [name for _, name in episode.events] == ["key", "door", "goal"]
    assert episode.events[-1][0] == len(episode) - 1
    assert episode.terminated
    assert episode.unit == "env steps"
    state = episode.renderer.unpack(episode.snapshots)  # type: ignore[attr-defined]
    key_frame = episode.events[0][0]
    assert state.carried[key_frame - 1, 0] == 0
    assert state.carried[key_frame, 0] == 5


def test_events_stand_in_every_window_that_shows_them(episode: Recording) -> None:
    starts = window_starts(len(episode), 4, 1)
    events = MilestonesScorer().events(episode.clips(starts, 4))
    for which, name in enumerate(("key", "door", "goal")):
        (frame,) = [frame for frame, event in milestone_events(episode.snapshots, episode.renderer) if event == name]
        inside = (starts < frame) & (frame <= starts + 3)
        np.testing.assert_array_equal(events[:, which], inside)


class CountingNetwork(nn.Module):
    """Values a state by where the agent stands."""

    def forward(self, observation: Tensor) -> Tensor:
        x = (observation[..., 0] == 10).flatten(1).float().argmax(1).float()
        return torch.stack([x - 7, x, x - 1], dim=-1)


def positions(recording: Recording) -> NDArray[np.float32]:
    state = recording.renderer.unpack(recording.snapshots)  # type: ignore[attr-defined]
    return (state.position[:, 0] * 5 + state.position[:, 1]).astype(np.float32)


def test_delta_q_is_the_difference_of_the_best_actions_values_l_steps_apart(episode: Recording) -> None:
    module = ExpertAgent()
    module.q_network = CountingNetwork()
    starts = window_starts(len(episode), 4, 1)
    found = delta_q(module, episode, starts, 4)
    place, last = positions(episode), len(episode) - 1
    for t, value in zip(starts.tolist(), found.tolist(), strict=True):
        if t + 4 < last:
            assert value == place[t + 4] - place[t]
        else:  # the terminal state, or beyond it
            assert np.isnan(value)
    assert np.isnan(found[-2:]).all()
    assert not np.isnan(found[:-2]).any()


def test_delta_q_of_a_truncated_episode_reaches_its_last_state(episode: Recording) -> None:
    module = ExpertAgent()
    module.q_network = CountingNetwork()
    truncated = Recording(episode.snapshots[:8], episode.renderer, episode.times[:8], "env steps", terminated=False)
    assert np.isnan(delta_q(module, truncated, np.array([0, 3, 4]), 4)).tolist() == [False, False, True]


def test_a_gif_is_scored_in_sliding_clips(tmp_path: Path) -> None:
    """The expert's episode as a video of pixels: the sprites recogniser finds the milestones where they are."""
    env = make_env(DOORKEY, num_envs=1, seed=1)
    data, snapshots = env.reset(), []
    while not snapshots or len(snapshots) < 30:
        snapshots.append(data["snapshot"][0].numpy().copy())
        data.set("action", torch.from_numpy(EXPERT(data["snapshot"].numpy())))
        step, data = env.step_and_maybe_reset(data)
        if step["next", "done"].any():
            snapshots.append(step["next", "snapshot"][0].numpy().copy())
            break
    states = np.stack(snapshots)
    renderer = GridRenderer(5, 5)
    write_gif(tmp_path / "play.gif", renderer.render(states), frame_ms=200)
    assert main(["score", "-c", SPRITES, "--video", str(tmp_path / "play.gif"), "--clip_length", "4"]) == 0
    table = rows(tmp_path / "play_timeline/timeline.csv")
    starts = window_starts(len(states), 4, 1)
    assert [int(row["first_frame"]) for row in table] == starts.tolist()
    assert [int(row["last_frame"]) for row in table] == (starts + 3).tolist()
    assert [float(row["from"]) for row in table] == pytest.approx(starts * 0.2)
    recording = Recording(states, renderer, np.arange(len(states)) * 1.0, "s")
    expected = MilestonesScorer().score(recording.clips(starts, 4))
    assert [float(row["score"]) for row in table] == expected.tolist()
    assert len(set(expected.tolist())) > 2
    with Image.open(tmp_path / "play_timeline/timeline.png") as image:
        assert image.size[0] > 800


def test_an_mp4_is_scored_with_a_stride(tmp_path: Path) -> None:
    write_mp4(tmp_path / "film.mp4", square_frames(24, True, size=64), fps=12)
    config = tmp_path / "green.yaml"
    config.write_text(yaml.safe_dump({"scoring": {"scorer": {"class_path": "green_scorer.GreenScorer"}}}))
    arguments = ["--clip_length", "8", "--stride", "4", "--frame_size", "32", "--out", str(tmp_path / "out")]
    assert main(["score", "-c", str(config), "--video", str(tmp_path / "film.mp4"), *arguments]) == 0
    table = rows(tmp_path / "out/timeline.csv")
    assert [int(row["first_frame"]) for row in table] == [0, 4, 8, 12, 16]
    assert float(table[0]["score"]) < 0.2
    assert float(table[-1]["score"]) > 0.9
    assert float(table[-1]["to"]) == pytest.approx(23 / 12, abs=0.01)


@pytest.mark.slow
def test_a_run_is_scored_with_its_own_critic(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "-c", MILESTONES, "--run", str(run), "--stride", "5"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "timeline/timeline.png")
    table = rows(run / "timeline/timeline.csv")
    (critic,) = [name for name in table[0] if name.startswith("delta_q")]
    assert "640 env steps" in critic
    assert all(-2 < float(row[critic]) < 2 for row in table[:-4])
    assert (run / "timeline/episode.gif").read_bytes().startswith(b"GIF8")
    first = (run / "timeline/timeline.csv").read_bytes()
    assert main(["score", "-c", MILESTONES, "--run", str(run), "--stride", "5"]) == 0
    assert (run / "timeline/timeline.csv").read_bytes() == first


@pytest.mark.slow
def test_critics_of_another_environment_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    arguments = ["--env.id", "MiniGrid-DoorKey-5x5-v0", "--training.total_env_steps", "320"]
    assert main(["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--run_dir", str(other), *arguments]) == 0
    own, foreign = str(run / "checkpoints/last.ckpt"), str(other / "checkpoints/last.ckpt")
    assert main(["score", "-c", MILESTONES, "--run", str(run), "--ckpt", own, foreign]) == 1
    assert "was trained on MiniGrid-DoorKey-5x5-v0" in capsys.readouterr().err
    assert main(["score", "-c", MILESTONES, "--run", str(run), "--ckpt", own, own]) == 1
    assert "checkpoints that are the same" in capsys.readouterr().err


@pytest.mark.slow
def test_an_agent_from_a_checkpoint_collects_a_corpus(run: Path, tmp_path: Path) -> None:
    """Without a configuration, the environment and the clip length of the checkpoint's run are taken."""
    command = ["corpus", "--policy", "checkpoint", "--ckpt", str(run / "checkpoints/last.ckpt"), "--clips", "16"]
    assert main([*command, "--successes", "0", "--milestones", "0", "--out", str(tmp_path / "out")]) == 0
    manifest = yaml.safe_load((tmp_path / "out/manifest.json").read_text())
    assert manifest["renderer"]["env"]["id"] == "MiniGrid-DoorKey-6x6-v0"
    assert manifest["settings"]["policy"] == "checkpoint"
    assert manifest["settings"]["epsilon"] == 0.05
    assert manifest["clip_length"] == 16
    config = tmp_path / "env.yaml"
    config.write_text("env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}\n")
    assert main([*command, "-c", str(config), "--out", str(tmp_path / "other")]) == 1


def test_film_strip_is_spread_over_time(episode: Recording) -> None:
    strip = film_strip(episode, count=3)
    frames = episode.renderer.render(episode.snapshots)
    last = len(episode) - 1
    for place, at in enumerate((1 / 6, 3 / 6, 5 / 6)):
        tile = strip[:, place * 42 + 1 : place * 42 + 41]
        assert any((tile == frames[t]).all() for t in range(int(at * last) - 1, int(at * last) + 3))


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("-c {sprites}", "either --video FILE or --run DIR"),
        ("-c {sprites} --video {gif} --run .", "either --video FILE or --run DIR"),
        ("-c {sprites} --video none.gif", "none.gif does not exist"),
        ("-c {sprites} --video {text}", "cannot be read"),
        ("-c {sprites} --video {one}", "too short for a clip"),
        ("-c {milestones} --video {gif}", "scorer 'milestones' reads snapshots"),
        ("-c {sprites} --video {gif} --ckpt x.ckpt", "which a video does not hold"),
        ("-c {sprites} --run {folder}", "holds no checkpoints/last.ckpt"),
        ("-c {sprites} --video {gif} --stride 0", "--stride 0 must be at least 1"),
        ("-c {sprites} --video {gif} --clip_length 1", "--clip_length 1 is too small"),
        ("-c {sprites} --video {gif} --every 0", "--every 0 is too small"),
        ("-c {sprites} --video {gif} --epsilon 7", "--epsilon 7.0 must lie in [0, 1]"),
        ("-c {sprites} --run {folder} --seed -1", "--seed -1 must not be negative"),
        ("-c {sprites} --video {gif} --out {gif}", "a.gif cannot be written (File exists): choose another folder"),
        ("--video {gif}", "no scorer named"),
    ],
)
def test_bad_input_is_one_line(typed: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gif(tmp_path / "a.gif", square_frames(6, True))
    write_gif(tmp_path / "one.gif", square_frames(1, True))
    (tmp_path / "text.mp4").write_text("no film")
    names = {"sprites": SPRITES, "milestones": MILESTONES, "folder": tmp_path}
    names |= {"gif": tmp_path / "a.gif", "one": tmp_path / "one.gif", "text": tmp_path / "text.mp4"}
    assert main(["score", *(part.format(**names) for part in typed.split())]) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vlmrb score: error: ")
    assert says in error
