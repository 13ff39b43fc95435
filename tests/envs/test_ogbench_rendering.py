"""Frames of OGBench: drawn later, in another process, and yet the live environment's to the last pixel.

They need EGL or OSMesa (Debian: libegl1, libgl1-mesa-dri, libopengl0); without them these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from tests.frame_scorers import BrightnessScorer

from vlmrb.envs import EnvConfig, drawing, make_renderer
from vlmrb.envs.drawing import DRAWING, Drawing, DrawingError, Look
from vlmrb.envs.ogbench_renderer import OGBenchRenderer
from vlmrb.envs.ogbench_worlds import World, open_env
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.process import ProcessBackend

SCENE, POINT = "scene-play-singletask-task3-v0", "pointmaze-medium-navigate-singletask-v0"

pytestmark = pytest.mark.slow

# Plays upstream's own environment and draws it live, in a process that may load OpenGL.
_LIVE = """
import sys
import mujoco, numpy as np, ogbench
env_id, size, lagging, path = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4]
from vlmrb.envs.ogbench_worlds import World, open_env
world = World(open_env(env_id))
base = world.base
base.width = base.height = base._render_width = base._render_height = size
world.model.vis.global_.offwidth = world.model.vis.global_.offheight = size
rng, frames, snapshots = np.random.default_rng(0), [], []
observation, _ = world.env.reset(seed=1)
for step in range(31):
    if step % 10 == 0:
        if lagging:
            mujoco.mj_forward(world.model, world.data)
        frames.append(base.render().copy())
        snapshots.append(world.snapshot(np.float32(observation)))
    push = rng.uniform(-1, 1, world.env.action_space.shape).astype(np.float32)
    if step > 10 and len(push) == 5:
        push[2] = -1  # down, to where objects and buttons are
    observation, *_ = world.env.step(push)
np.savez(path, frames=np.stack(frames), snapshots=np.stack(snapshots))
"""


@pytest.fixture(scope="module", autouse=True)
def _end_drawing() -> Iterator[None]:
    yield
    DRAWING.close()


def _states(env_id: str = POINT, count: int = 3) -> NDArray[np.float64]:
    world = World(open_env(env_id))
    observation, _ = world.env.reset(seed=1)
    snapshots = []
    for _ in range(count):
        snapshots.append(world.snapshot(np.float32(observation)))
        observation, *_ = world.env.step(world.env.action_space.sample())
    return np.stack(snapshots)


@pytest.mark.parametrize(
    ("env_id", "lagging"),
    [
        (SCENE, False),
        ("puzzle-3x3-play-singletask-v0", False),
        # Upstream draws these as they were a physics step of 2 ms (mazes: more) before the state it returns.
        ("cube-double-play-singletask-v0", True),
        (POINT, True),
    ],
)
def test_frames_are_upstreams_live_ones_to_the_last_pixel(env_id: str, lagging: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "live.npz")
    gl = _working_backend()
    command = [sys.executable, "-c", _LIVE, env_id, "96", str(int(lagging)), path]
    subprocess.run(command, env=os.environ | {"MUJOCO_GL": gl}, check=True, capture_output=True)
    live = np.load(path)
    renderer = make_renderer(EnvConfig(id=env_id, frame_size=96, render_quality="full"))
    frames = renderer.render(live["snapshots"])
    assert frames.shape == (4, 96, 96, 3)
    assert frames.dtype == np.uint8
    assert frames.std() > 10  # not black, not blank
    assert (frames != live["frames"]).any(axis=-1).sum() == 0
    assert (frames[0] != frames[-1]).any()


def _working_backend() -> str:
    """Draws a frame, and returns with which back-end."""
    DRAWING.draw(Look(POINT, 16, "fast"), _states(count=1))
    return next(name for name in drawing._backends() if name not in DRAWING._reasons)


def test_every_quality_shows_the_same_scene_at_the_size_asked_for() -> None:
    states = _states(SCENE, 1)
    pictures = {
        quality: make_renderer(EnvConfig(id=SCENE, frame_size=96, render_quality=quality)).render(states)[0]
        for quality in ("fast", "shadows", "full")
    }
    for quality, picture in pictures.items():
        assert picture.shape == (96, 96, 3)
        red = (picture[..., 0] > 150) & (picture[..., 1] < 110) & (picture[..., 2] < 130)
        assert red.sum() > 8, f"{quality}: the red cube and the locks can be seen"
    assert (pictures["fast"] != pictures["shadows"]).any()
    assert (pictures["shadows"] != pictures["full"]).any()
    renderer = make_renderer(EnvConfig(id=SCENE, frame_size=96))
    assert renderer.render(states, frame_size=48).shape == (1, 48, 48, 3)
    assert renderer.quality == "fast"


def test_renderers_travel_and_their_names_tell_looks_apart() -> None:
    states = _states(count=4)[None]
    renderer = make_renderer(EnvConfig(id=POINT, frame_size=32))
    frames = renderer.render(states)
    assert frames.shape == (1, 4, 32, 32, 3)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(renderer)).render(states), frames)
    assert renderer.render(states[:, :0]).shape == (1, 0, 32, 32, 3)
    names = {
        make_renderer(EnvConfig(id=POINT, frame_size=size, render_quality=quality)).name
        for size, quality in ((32, "fast"), (32, "full"), (64, "fast"))
    }
    assert len(names) == 3


def test_equal_states_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(look: Look, snapshots: NDArray[np.float64]) -> NDArray[np.uint8]:
        drawn.append(len(snapshots))
        return np.round(snapshots[:, :1, None, None] * 100).astype(np.uint8).repeat(8, 1).repeat(8, 2).repeat(3, 3)

    monkeypatch.setattr(DRAWING, "draw", draw)
    layout = make_renderer(EnvConfig(id=POINT)).layout
    states = np.zeros((2, 3, layout.size))
    states[0, :, 0], states[1, :, 0] = (0.1, 0.2, 0.2), (0.2, 0.3, 0.3)
    frames = OGBenchRenderer(POINT, layout, 8).render(states)
    assert drawn == [3]
    assert frames[..., 0, 0, 0].tolist() == [[10, 20, 20], [20, 30, 30]]


def test_a_drawing_process_that_dies_or_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Drawing()
    look, states = Look(POINT, 16, "fast"), _states(count=2)
    frames = own.draw(look, states)
    assert own._process is not None
    first = own._process._process
    os.kill(first.pid, signal.SIGKILL)
    np.testing.assert_array_equal(own.draw(look, states), frames)
    second = own._process._process
    assert second.pid != first.pid
    os.kill(second.pid, signal.SIGSTOP)  # a driver that hangs
    monkeypatch.setattr(drawing, "BATCH_S", 0.3)
    original = drawing._Process.__init__

    def patient(process: drawing._Process, backend: str) -> None:
        monkeypatch.setattr(drawing, "BATCH_S", 120.0)
        original(process, backend)

    monkeypatch.setattr(drawing._Process, "__init__", patient)
    np.testing.assert_array_equal(own.draw(look, states), frames)
    assert second.poll() is not None
    third = own._process._process
    own.close()
    assert third.poll() is not None
    np.testing.assert_array_equal(own.draw(look, states), frames)
    own.close()


def test_a_drawing_process_ends_with_the_one_that_started_it() -> None:
    code = (
        "import os, sys\n"
        "from vlmrb.envs import EnvConfig, make_renderer\n"
        "import numpy as np\n"
        f"renderer = make_renderer(EnvConfig(id='{POINT}', frame_size=16))\n"
        "snapshot = np.zeros((1, renderer.layout.size)); snapshot[0, renderer.layout.num_qpos + 2] = 1\n"
        "renderer.render(snapshot)\n"
        "from vlmrb.envs.drawing import DRAWING\n"
        "print(DRAWING._process._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                break
        time.sleep(0.1)
    assert time.monotonic() < deadline


@pytest.mark.parametrize("chosen", [None, "egl"])
def test_without_opengl_one_line_says_what_to_install(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if chosen is None:
        monkeypatch.delenv("MUJOCO_GL", raising=False)
    else:
        monkeypatch.setenv("MUJOCO_GL", chosen)
    monkeypatch.setenv("EGL_PLATFORM", "nothing")
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/dev/null")  # libEGL finds no driver, as if there were none
    monkeypatch.setattr(drawing, "_backends", lambda: ("egl",))
    with pytest.raises(DrawingError, match=r"cannot be drawn here \(egl: .*\): install OpenGL.*libegl1") as error:
        Drawing().draw(Look(POINT, 16, "fast"), _states(count=1))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "backends"),
    [(None, ("egl", "osmesa")), ("disabled", ("egl", "osmesa")), ("OSMesa", ("osmesa",)), ("egl", ("egl",))],
)
def test_the_back_end_is_the_users_or_else_egl_and_then_osmesa(
    variable: str | None, backends: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if variable is not None:
        monkeypatch.setenv("MUJOCO_GL", variable)
    assert drawing._backends() == backends


def test_what_cannot_be_opened_is_said_in_one_line() -> None:
    with pytest.raises(DrawingError, match="scene-nothing-v0: "):
        DRAWING.draw(Look("scene-nothing-v0", 16, "fast"), np.zeros((1, 3)))


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_a_learner_whose_scorer_looks_at_frames_never_loads_opengl(backend: str, tmp_path: Path) -> None:
    """Scorer, preflight's clip and evaluation's GIF all draw; Mesa and Triton never meet."""
    config = {
        "env": {"id": POINT, "num_envs": 2, "max_steps": 20},
        "training": {"total_env_steps": 160, "learning_starts": 40, "frames_per_batch": 40, "replay_ratio": 0.1},
        "replay": {"capacity": 1000, "batch_size": 16, "clip_length": 8},
        "model": {"class_path": "vlmrb.algorithms.TD3", "init_args": {"hidden_sizes": [16, 16]}},
        "scoring": {
            "scorer": {"class_path": "tests.frame_scorers.BrightnessScorer"},
            "backend": backend,
        },
        "evaluation": {"every_n_env_steps": 160, "episodes": 1, "epsilon": 0.0},
        "trainer": {"accelerator": "cpu"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    code = (
        "import sys\n"
        "from vlmrb.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not code, code\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libmujoco' in maps and 'triton' in sys.modules\n"
        "print([name for name in ('libEGL', 'libOSMesa', 'libGL.so', 'swrast', 'gallium') if name in maps])"
    )
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", "-c", str(file), "--run_dir", str(run)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[]"
    summary = json.loads((run / "summary.json").read_text())
    assert backend == "process" or summary["scoring"]["scored"] > 0  # a run of seconds may be over too soon
    assert list((run / "clips").glob("*evaluation.gif"))


def test_a_scoring_process_draws_frames() -> None:
    renderer = make_renderer(EnvConfig(id=POINT))
    clips = ClipBatch(np.arange(2), np.stack([_states(count=4)] * 2), np.array([4, 4]), renderer)
    expected = BrightnessScorer().score(clips)
    backend = ProcessBackend(BrightnessScorer(), renderer, ScoringConfig())
    try:
        answers, deadline = backend.collect(), time.monotonic() + 120
        while not backend.accepting and time.monotonic() < deadline:
            answers = backend.collect()
            time.sleep(0.05)
        backend.submit(0, clips)
        while not answers and time.monotonic() < deadline:
            answers = backend.collect()
            time.sleep(0.05)
    finally:
        backend.close()
    assert answers[0].scores is not None, answers[0].error
    np.testing.assert_array_equal(answers[0].scores, expected)
    assert 0.05 < expected[0] < 0.95
