"""A corpus holds real clips with true labels, comes out the same however often it is interrupted."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import DOORKEY, doorkey_corpus, folder_content
from numpy.typing import NDArray

from vlmrb.calibration.collect import MILESTONE, NOTHING, SUCCESS, CollectSettings, choose, play_round, strata_of
from vlmrb.calibration.corpus import Corpus, CorpusWriter, load_corpus
from vlmrb.calibration.policies import RandomPlayer, ScriptedPlayer, make_player
from vlmrb.cli import main
from vlmrb.envs import EnvConfig, make_env
from vlmrb.envs.grid import GOAL, GridLayout
from vlmrb.locks import lock_folder
from vlmrb.scoring.milestones import MilestonesScorer

MILESTONES = str(Path(__file__).parents[2] / "configs/scorer/milestones.yaml")
LAYOUT = GridLayout(5, 5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return doorkey_corpus(tmp_path_factory.mktemp("corpus") / "doorkey", clips=64)


def stands_on_goal(snapshots: NDArray[np.uint8]) -> NDArray[np.bool_]:
    state = LAYOUT.unpack(snapshots)
    return (
        state.grid[tuple(np.indices(snapshots.shape[:-1])) + tuple(np.moveaxis(state.position, -1, 0))][..., 0] == GOAL
    )


def test_labels_are_what_the_states_say(corpus: Corpus) -> None:
    clips = corpus.clips
    on_goal = stands_on_goal(corpus.snapshots())
    np.testing.assert_array_equal(clips.success, on_goal.any(axis=1))
    np.testing.assert_array_equal(clips.success, clips.milestones[:, 2])
    np.testing.assert_array_equal(clips.milestones, MilestonesScorer().events(corpus.batch(np.arange(len(clips)))))
    assert clips.success.any()
    assert not clips.success.all()


def test_clips_are_cut_as_in_training(corpus: Corpus) -> None:
    """The goal shows in a clip's last real frame only, and padding repeats that frame."""
    clips, snapshots = corpus.clips, corpus.snapshots()
    last = clips.lengths - 1
    rows = np.arange(len(clips))
    on_goal = stands_on_goal(snapshots)
    for row in rows:
        assert not on_goal[row, : last[row]].any()
        assert (snapshots[row, last[row] :] == snapshots[row, last[row]]).all()
    assert (clips.lengths[~clips.success] == 16).mean() > 0.9  # others end short only at the horizon
    assert clips.lengths.min() >= 2


def test_consecutive_clips_share_their_boundary_frame() -> None:
    settings = CollectSettings(clips=2000, clip_length=8)
    clips, env_steps = play_round(DOORKEY, make_player("random", DOORKEY), settings, 0, None)
    shared = 0
    for group in np.unique(clips.groups):
        mine = np.flatnonzero(clips.groups == group)
        for before, after in zip(mine[:-1], mine[1:], strict=True):
            assert (clips.snapshots[before, -1] == clips.snapshots[after, 0]).all()
            shared += 1
    assert shared > 100
    assert clips.milestones.shape == (len(clips), 0)
    assert (clips.lengths - 1).sum() <= env_steps


def test_snapshots_are_read_from_any_shards_in_any_order(corpus: Corpus) -> None:
    everything = corpus.snapshots()
    assert len(everything) == 64
    rows = np.random.default_rng(0).integers(0, 64, 100)
    np.testing.assert_array_equal(corpus.snapshots(rows), everything[rows])
    np.testing.assert_array_equal(corpus.batch(rows[:7]).snapshots, everything[rows[:7]])
    assert len({shard["clips"] for shard in corpus.manifest["shards"]}) > 1


def test_shares_are_kept_and_the_manifest_counts_right(corpus: Corpus) -> None:
    strata = np.bincount(strata_of(corpus.clips), minlength=3)
    assert strata.tolist() == [13, 19, 32]  # 20 % and 30 % of 64
    counts = corpus.manifest["counts"]
    assert (counts["clips"], counts["success"], counts["milestone"]) == (64, 13, 32)
    assert counts["episodes"] == len(np.unique(corpus.clips.groups))
    assert counts["door"] == corpus.clips.milestones[:, 1].sum()
    assert corpus.manifest["notes"] == []
    with (corpus.folder / "labels.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["success"]) for line in lines] == corpus.clips.success.astype(int).tolist()
    assert [int(line["key"]) for line in lines] == corpus.clips.milestones[:, 0].astype(int).tolist()


@pytest.mark.slow
def test_seed_decides_everything(tmp_path: Path, corpus: Corpus) -> None:
    doorkey_corpus(tmp_path / "same", clips=64)
    doorkey_corpus(tmp_path / "other", clips=64, seed=1)
    assert folder_content(tmp_path / "same") == folder_content(corpus.folder)
    assert folder_content(tmp_path / "other")["shard_0000.npz"] != folder_content(corpus.folder)["shard_0000.npz"]


def test_rounds_and_seeds_play_different_levels() -> None:
    player = make_player("random", DOORKEY)
    rounds = [
        play_round(DOORKEY, player, CollectSettings(clips=8, clip_length=8, seed=seed), number, None)[0].snapshots
        for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    first = [{clip.tobytes() for clip in snapshots[:20]} for snapshots in rounds]
    assert first[0] == first[3]
    assert not first[0] & first[1]
    assert not first[0] & first[2]


def test_kinds_that_cannot_be_found_are_filled_up_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EnvConfig("MiniGrid-DoorKey-16x16-v0", num_envs=4)
    corpus = doorkey_corpus(tmp_path / "hard", clips=24, policy="random", config=config, max_env_steps=500)
    assert len(corpus.clips) == 24
    assert "of 5 clips with success were found" in corpus.manifest["notes"][0]
    assert corpus.manifest["notes"][0] in caplog.text


def test_without_strata_clips_come_as_they_are(tmp_path: Path) -> None:
    corpus = doorkey_corpus(tmp_path / "plain", clips=40, policy="random", stratify=False)
    strata = np.bincount(strata_of(corpus.clips), minlength=3)
    assert strata[SUCCESS] < 8
    assert strata[NOTHING] > 20
    assert corpus.manifest["notes"] == []


def test_choice_is_bounded_by_round_and_by_what_is_missing() -> None:
    strata = np.repeat([SUCCESS, MILESTONE, NOTHING], [30, 30, 60])
    wanted, taken = np.array([80, 0, 160]), np.array([78, 0, 0])
    kept = choose(strata, wanted, taken, True, np.random.default_rng(0))
    assert np.bincount(strata[kept], minlength=3).tolist() == [2, 0, 20]
    assert (np.diff(kept) > 0).all()
    anything = choose(strata, wanted, taken, False, np.random.default_rng(0))
    assert len(anything) == 30  # an eighth of 240
    assert set(strata[anything]) == {SUCCESS, MILESTONE, NOTHING}


def test_environments_without_milestones_have_strict_success_only(tmp_path: Path) -> None:
    config = EnvConfig("passing_world:Passing-v0", num_envs=2, frame_size=8, success="passing_world:passes")
    corpus = doorkey_corpus(tmp_path / "passing", clips=8, policy="random", config=config, clip_length=5)
    assert corpus.milestones == []
    assert list(corpus.labels()) == ["success"]
    assert corpus.batch(np.arange(2)).frames().shape == (2, 5, 8, 8, 3)
    assert corpus.clips.success.sum() == 2  # a fifth of 8


def test_success_is_looked_up_step_by_step_not_at_the_end_of_the_episode() -> None:
    """Here the goal is passed in the middle of an episode: only the clip in which that happens succeeds."""
    config = EnvConfig("passing_world:Passing-v0", num_envs=2, frame_size=8, success="passing_world:passes")
    clips, _ = play_round(config, make_player("random", config), CollectSettings(clips=20, clip_length=5), 0, None)
    place = np.array([(clips.groups[:row] == group).sum() for row, group in enumerate(clips.groups)])
    np.testing.assert_array_equal(clips.success, place == 1)  # the goal is passed at step 6; clips hold 4 steps


def test_random_player_of_continuous_actions_stays_within_bounds() -> None:
    env = make_env(EnvConfig("Pendulum-v1", num_envs=3, frame_size=8))
    player = RandomPlayer(env, 0)
    actions = np.stack([player(env.reset()).numpy() for _ in range(40)])
    env.close()
    assert actions.dtype == np.float32
    assert actions.min() >= -2
    assert actions.max() <= 2
    assert np.ptp(actions) > 3


def test_scripted_player_takes_turns_with_chance() -> None:
    env = make_env(DOORKEY, num_envs=50)
    player = ScriptedPlayer(env, 0, lambda snapshots: np.full(len(snapshots), 6))
    data = env.reset()
    expert = np.stack([player(data).numpy() for _ in range(400)]) == 6
    env.close()
    assert 0.4 < expert.mean() < 0.65  # half the time 90 % and a seventh of the slips, otherwise a seventh
    runs = np.flatnonzero(np.diff(expert[:, 0].astype(int)))
    assert len(runs) > 4


def interrupted(folder: Path, *, after_shards: int) -> None:
    """Starts the verb and kills it, without warning, as soon as it has written some shards."""
    command = [sys.executable, "-m", "vlmrb.cli", *arguments(folder)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 240
        while child.poll() is None and time.monotonic() < deadline:
            if len(list(folder.glob("shard_*.npz"))) >= after_shards:
                os.kill(child.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        assert child.wait(60) == -signal.SIGKILL, child.stderr and child.stderr.read()
    finally:
        child.kill()


def arguments(folder: Path) -> list[str]:
    config = folder.parent / "env.yaml"
    config.write_text("env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}\nreplay: {clip_length: 16}\n")
    return ["corpus", "-c", str(config), "--policy", "scripted", "--clips", "48", "--out", str(folder)]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_gives_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    interrupted(folder, after_shards=3)
    assert main(["calibrate", "-c", MILESTONES, "--corpus", str(folder), "--out", "x"]) == 1
    assert "is not finished" in capsys.readouterr().err
    (folder / "shard_0007.npz.part").write_bytes(b"left behind by a kill in the middle of a write")
    known = {name: content for name, content in folder_content(folder).items() if name.startswith("shard_0000")}
    assert main(arguments(folder)) == 0
    whole = tmp_path / "whole"
    assert main(arguments(whole)) == 0
    resumed, expected = folder_content(folder), folder_content(whole)
    assert known["shard_0000.npz"] == resumed["shard_0000.npz"]
    for content in (resumed, expected):
        content["manifest.json"] = json.dumps(
            {key: value for key, value in json.loads(content["manifest.json"]).items() if key != "command"}
        ).encode()
    assert resumed == expected


def test_repeating_a_finished_corpus_changes_nothing(tmp_path: Path) -> None:
    doorkey_corpus(tmp_path / "corpus", clips=16)
    before = folder_content(tmp_path / "corpus")
    again = doorkey_corpus(tmp_path / "corpus", clips=16)
    assert len(again.clips) == 16
    assert folder_content(tmp_path / "corpus") == before


def test_folder_of_other_settings_is_refused_and_left_alone(tmp_path: Path) -> None:
    doorkey_corpus(tmp_path / "corpus", clips=16)
    before = folder_content(tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 there, 1 asked for\)"):
        doorkey_corpus(tmp_path / "corpus", clips=16, seed=1)
    with pytest.raises(ValueError, match=r"other settings \(clip_length: 16 there, 8 asked for\)"):
        doorkey_corpus(tmp_path / "corpus", clips=16, clip_length=8)
    assert folder_content(tmp_path / "corpus") == before


def test_settings_of_the_environment_are_taken_as_fit_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.yaml").write_text("env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4, max_steps: 70}\n")
    command = ["corpus", "--env.max_steps", "40", "-c", str(tmp_path / "env.yaml"), "--env.num_envs=8"]
    command += ["--clips", "16", "--clip_length", "8", "--out", str(tmp_path / "corpus")]
    assert main(command) == 0
    corpus = load_corpus(tmp_path / "corpus")
    env = corpus.manifest["renderer"]["env"]
    assert (env["id"], env["num_envs"], env["max_steps"]) == ("MiniGrid-DoorKey-5x5-v0", 8, 40)
    capsys.readouterr()
    assert main([*command, "--env.max_steps", "50"]) == 1
    assert "other settings (env.max_steps: 40 there, 50 asked for)" in capsys.readouterr().err


def test_an_environment_needs_no_configuration(tmp_path: Path) -> None:
    flags = ["--env.id", "MiniGrid-DoorKey-5x5-v0", "--env.num_envs", "4"]
    assert main(["corpus", *flags, "--clips", "16", "--clip_length", "8", "--out", str(tmp_path / "corpus")]) == 0
    assert load_corpus(tmp_path / "corpus").manifest["renderer"]["env"]["id"] == "MiniGrid-DoorKey-5x5-v0"


def test_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds something else"):
        doorkey_corpus(tmp_path)


def test_a_folder_that_another_process_writes_is_refused_and_left_alone(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "corpus", "--out "),
        pytest.raises(RuntimeError, match="--out .*corpus is in use by another run"),
    ):
        doorkey_corpus(tmp_path / "corpus", clips=16)
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == [".lock"]
    assert len(doorkey_corpus(tmp_path / "corpus", clips=16).clips) == 16


def test_a_full_disk_is_told_with_the_file_and_leaves_a_corpus_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = Path.write_bytes, [2]  # the manifest, and the first shard

    def write_bytes(path: Path, content: bytes) -> int:
        if not room[0]:
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as `write` raises it, without a name
        room[0] -= 1
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match=r"No space left on device: .*manifest\.json"):
        doorkey_corpus(tmp_path / "full", clips=32)
    assert not list((tmp_path / "full").glob("*.part"))
    monkeypatch.undo()
    doorkey_corpus(tmp_path / "full", clips=32)
    doorkey_corpus(tmp_path / "whole", clips=32)
    assert folder_content(tmp_path / "full") == folder_content(tmp_path / "whole")


def test_a_corpus_without_a_clip_yet_may_be_begun_with_other_settings(tmp_path: Path) -> None:
    parts = {"kind": "videos", "renderer": {}, "clip_length": 4, "milestones": [], "command": "c"}
    CorpusWriter(tmp_path, settings={"labels": "wrong"}, **parts)
    assert CorpusWriter(tmp_path, settings={"labels": "right"}, **parts).clips == 0


@pytest.mark.parametrize("shard", [1, {}, {"clips": 3, "file": "shard_0000.npz"}])
def test_a_manifest_with_a_damaged_entry_of_a_shard_is_told_to_be_that(tmp_path: Path, shard: object) -> None:
    CorpusWriter(tmp_path, kind="videos", settings={}, renderer={}, clip_length=4, milestones=[], command="c")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"shards": [shard]}))
    with pytest.raises(ValueError, match=r"is damaged: manifest\.json has no usable shards"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("key", ["kind", "command", "settings", "renderer", "milestones", "complete", "clip_length"])
def test_a_manifest_without_one_of_its_entries_is_damaged(tmp_path: Path, key: str) -> None:
    CorpusWriter(tmp_path, kind="videos", settings={}, renderer={}, clip_length=4, milestones=[], command="c")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest[key]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"is damaged: manifest\.json has no usable {key}; make it anew"):
        load_corpus(tmp_path)


def test_damaged_or_foreign_corpora_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    with pytest.raises(ValueError, match="does not exist"):
        load_corpus(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"holds no manifest\.json"):
        load_corpus(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_corpus(folder)
    (folder / "manifest.json").unlink()
    doorkey_corpus(folder, clips=16)
    shard = folder / "shard_0000.npz"
    shard.write_bytes(shard.read_bytes()[:-7] + b"tampered")
    with pytest.raises(ValueError, match=r"damaged: shard_0000\.npz"):
        load_corpus(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"damaged: shard_0000\.npz"):
        load_corpus(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    with pytest.raises(ValueError, match="schema 99, this version reads 1"):
        load_corpus(folder)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--out {out}", "no environment named"),
        ("-c {env} --out {out} --clips 1", "--clips 1 must be at least 2"),
        ("-c {env} --out {out} --clip_length 1", "--clip_length 1"),
        ("-c {env} --out {out} --successes 0.8", "more than 1 together"),
        ("-c {env} --out {out} --successes -1", "--successes -1.0 must lie in [0, 1]"),
        ("-c {env} --out {out} --max_env_steps 0", "--max_env_steps 0"),
        ("-c {env} --out {out} --seed -3", "--seed -3"),
        ("-c {env} --out {out} --policy checkpoint", "needs --ckpt"),
        ("-c {env} --out {out} --policy checkpoint --ckpt none.ckpt", "none.ckpt does not exist"),
        ("-c {env} --out {out} --ckpt none.ckpt", "goes with --policy checkpoint"),
        ("-c {env} --out {out} --policy greedy", "policy"),
        ("-c {env} --out {out} --epsilon 7", "--epsilon 7.0 must lie in [0, 1]"),
        ("-c {env} --out {out} --clip_length 1000000000", "1000000000 with 4 environments takes at least"),
        ("-c {empty} --out {out} --policy scripted", "nobody has written a player for MiniGrid-Empty-5x5-v0"),
        ("-c none.yaml --out {out}", "none.yaml cannot be read"),
        ("-c {env} --videos . --labels x.csv --out {out}", "leave out -c"),
        ("--env.max_steps 9 --videos . --labels x.csv --out {out}", "leave out -c, --ckpt and --env"),
        ("-c {env} --out {out} --env.max_steps 0", "env.max_steps must be at least 1, got 0"),
        ("-c {env} --out {out} --env.max_steps soon", "env.max_steps: Expected a <class 'int'>"),
        ("-c {env} --out {out} --env.max_steps", "--env.max_steps: expected one argument"),
        ("-c {env} --out {out} --env.bogus 1", "unrecognized arguments: --env.bogus=1"),
        ("-c {env} --out {out} --env.id MiniGrid-DorKey-6x6-v0", "did you mean MiniGrid-DoorKey-6x6-v0"),
        ("--videos . --out {out}", "--videos and --labels go together"),
    ],
)
def test_bad_input_is_one_line(typed: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"env": tmp_path / "env.yaml", "empty": tmp_path / "empty.yaml", "out": tmp_path / "out"}
    names["env"].write_text("env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}\n")
    names["empty"].write_text("env: {id: MiniGrid-Empty-5x5-v0, num_envs: 4}\n")
    assert main(["corpus", *(part.format(**names) for part in typed.split())]) != 0
    error = capsys.readouterr().err.strip()
    assert error.startswith("vlmrb corpus: error: ")
    assert "\n" not in error
    assert says in error
    assert not names["out"].exists()
