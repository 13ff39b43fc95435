"""The real server, as `vlmrb serve` starts it: who may ask, what is answered, and that nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import urllib3
from doorkey_clips import make_clips
from servers import Served, free_port, get, members, serving, wait_for

from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.scoring.scorer import ScorerError, identity
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.serving.client import RemoteError
from vlmrb.serving.wire import pack

pytestmark = pytest.mark.slow

KEY = "a key for tests"
TINY_VLM = Path(__file__).parent.parent.parent / "examples" / "tiny_vlm" / "perception_lm"
SPRITES = {"class_path": "vlmrb.scoring.sprites.SpritesScorer"}
QUICK = {"wait_s": 20.0, "deadline_s": 30.0, "timeout_s": 20.0, "backoff_s": 0.05, "breaker_s": 0.2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Sprites on two workers, behind a key, with a limit of 20 KiB a request."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, SPRITES, "--max_request_mb", "0.02", workers=2, env={"VLMRB_API_KEY": KEY}) as server:
        yield server


@pytest.fixture(scope="module")
def clips() -> ClipBatch:
    renderer = make_renderer(EnvConfig(id="MiniGrid-DoorKey-6x6-v0"))
    return make_clips(6, 16, renderer, env_steps=120, instances=4)


@pytest.fixture
def scorer(served: Served, monkeypatch: pytest.MonkeyPatch) -> RemoteScorer:
    monkeypatch.setenv("VLMRB_API_KEY", KEY)
    return RemoteScorer(served.url, **QUICK)


def post(served: Served, body: bytes, key: str | None = KEY) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    response = urllib3.request("POST", f"{served.url}/score", body=body, headers=headers, retries=False, timeout=30)
    return response.status, response.data.decode()


def test_scores_are_those_of_the_scorer_itself_bit_for_bit(scorer, clips):
    local = SpritesScorer()
    assert identity(scorer) == identity(local)
    assert (scorer.needs, scorer.frame_size, scorer.prompt) == (local.needs, local.frame_size, "")
    scorer.setup()
    few = clips.select(np.arange(20))
    np.testing.assert_array_equal(scorer.score(few), local.score(few))
    assert 0 < local.score(few).mean() < 1


def test_a_batch_larger_than_a_request_may_be_is_sent_in_parts(scorer, clips, served):
    assert len(pack(clips, scorer._known())) > 0.02 * 2**20
    before = served.metric("vlmrb_clips_total", KEY)
    np.testing.assert_array_equal(scorer.score(clips), SpritesScorer().score(clips))
    assert served.metric("vlmrb_clips_total", KEY) - before == len(clips)
    assert scorer.stats()["requests"] > 2
    assert scorer.stats()["failed_requests"] == 0


def test_many_runs_at_once_get_their_own_scores(scorer, clips, served):
    expected = SpritesScorer().score(clips)
    wrong: list[str] = []

    def run(seed: int) -> None:
        mine = RemoteScorer(served.url, **QUICK)
        for _ in range(4):
            rows = np.random.default_rng(seed).integers(0, len(clips), 5)
            if not np.array_equal(mine.score(clips.select(rows)), expected[rows]):
                wrong.append(f"run {seed}")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("path", ["/info", "/metrics", "/server", "/ready", "/health", "/"])
@pytest.mark.parametrize("key", [None, "another key", KEY[:-1], "ключ", ""])
def test_only_the_health_page_is_open_to_those_without_the_key(served, path, key):
    sent = None if key is None else key.encode().decode("latin-1")
    assert get(served.url + path, sent)[0] == (200 if path in ("/", "/health") else 401)
    assert get(served.url + path, KEY)[0] == 200


def test_there_are_no_other_pages(served):
    assert {get(served.url + path, KEY)[0] for path in ("/docs", "/openapi.json", "/shutdown", "/predict")} == {404}


def test_clips_are_not_even_read_without_the_key(served):
    assert post(served, b"x" * 100, key=None)[0] == 401
    assert post(served, b"x" * 10**7, key="another")[0] == 401


def test_a_wrong_key_is_told_from_a_missing_server_in_one_line(served, monkeypatch):
    monkeypatch.setenv("VLMRB_API_KEY", "another")
    with pytest.raises(ScorerError, match=r"refused the API key in \$VLMRB_API_KEY") as caught:
        identity(RemoteScorer(served.url, **QUICK))
    assert "\n" not in str(caught.value)


def test_requests_that_cannot_be_answered_are_refused_with_the_reason(served, scorer, clips):
    right = scorer._known()
    few = clips.select(np.arange(2))
    message = pack(few, right)
    assert post(served, message)[0] == 200
    assert post(served, b"hello")[0] == 400
    assert post(served, message[:-5]) == (400, '{"detail":"the body is not of the size that its header tells"}')
    assert post(served, b"x" * 50_000)[0] == 413
    status, reason = post(served, pack(few, replace(right, version="0")))
    assert status == 409
    assert "here scores 'sprites' version" in reason
    assert "the request is for 'sprites' version '0'" in reason
    status, reason = post(served, pack(few, replace(right, frame_size=64)))
    assert (status, "at 64 px" in reason) == (409, True)


def test_a_version_that_was_not_asked_for_is_refused_before_the_run_begins(served, scorer):
    with pytest.raises(ScorerError, match="version is '1:.*', but scorer_version wants '0'"):
        identity(RemoteScorer(served.url, scorer_name="sprites", scorer_version="0", **QUICK))
    with pytest.raises(ScorerError, match="name is 'sprites', but scorer_name wants 'perception'"):
        identity(RemoteScorer(served.url, scorer_name="perception", **QUICK))
    identity(RemoteScorer(served.url, scorer_name="sprites", scorer_version=scorer.version, **QUICK))


def test_a_run_goes_on_only_with_the_scorer_it_began_with(scorer):
    scorer._identity = replace(scorer._known(), version="0")
    with pytest.raises(
        RemoteError, match="has become 'sprites' version '1:.*; this run began with 'sprites' version '0'"
    ):
        scorer.setup()


def test_it_listens_to_this_machine_alone(served):
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [address for _, address, _, state, *_ in sockets if state == "0A"]
    own = f":{served.port:04X}"
    assert [address for address in listening if address.endswith(own)] == [f"0100007F{own}"]


def test_a_killed_worker_is_replaced_and_its_request_scored_by_another(tmp_path, clips):
    slow = {"class_path": "odd_scorers.SlowScorer", "init_args": {"seconds": 1.5}}
    with serving(tmp_path, slow, workers=2) as server:
        scorer = RemoteScorer(server.url, **QUICK)
        identity(scorer)
        few = clips.select(np.arange(4))
        scores: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: scores.append(scorer.score(few))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metric("vlmrb_requests_in_flight") == 2)
        victim = server.workers()[0]
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert len(scores) == 2
        np.testing.assert_array_equal(scores[0], scores[1])
        wait_for(lambda: server.healthy(2) and victim not in server.workers() and len(server.workers()) == 2)


@pytest.mark.parametrize(
    ("number", "victim", "code"),
    [
        (signal.SIGTERM, "supervisor", 143),
        (signal.SIGINT, "supervisor", 130),
        (signal.SIGKILL, "supervisor", -9),
        (signal.SIGKILL, "main", 1),
    ],
)
def test_nothing_is_left_running_however_it_ends(tmp_path, number, victim, code):
    with serving(tmp_path, {"class_path": "vlmrb.scoring.milestones.MilestonesScorer"}, workers=2) as server:
        session = server.session
        assert len(members(session)) >= 4  # the server's main process, its guard, two workers and their helpers
        os.kill(server.process.pid if victim == "supervisor" else session, number)
        assert server.process.wait(10) == code
        wait_for(lambda: not members(session), timeout_s=5)
        with pytest.raises(urllib3.exceptions.HTTPError):
            get(f"{server.url}/health")
        assert ("the scoring server was killed (SIGKILL)" in server.log.read_text()) == (victim == "main")


def test_a_scorer_that_cannot_be_set_up_ends_the_server_with_the_reason(tmp_path):
    broken = {"class_path": "odd_scorers.BrokenSetupScorer", "init_args": {"kind": "raise"}}
    with serving(tmp_path, broken, wait=False) as server:
        session = server.session
        assert server.process.wait(60) == 1
        assert "scorer 'broken setup' cannot be set up: RuntimeError: boom" in server.log.read_text()
        wait_for(lambda: not members(session), timeout_s=5)


def test_a_configuration_without_a_scorer_is_refused_in_one_line(tmp_path):
    with serving(tmp_path, {"class_path": "odd_scorers.NoSuchScorer"}, wait=False) as server:
        assert server.process.wait(60) == 1
        (line,) = [line for line in server.log.read_text().splitlines() if "error" in line]
        assert "NoSuchScorer" in line


def test_a_request_that_takes_too_long_is_answered_all_the_same(tmp_path, clips):
    slow = {"class_path": "odd_scorers.SlowScorer", "init_args": {"seconds": 3.0}}
    with serving(tmp_path, slow, "--timeout_s", "0.5") as server:
        scorer = RemoteScorer(server.url, **QUICK)
        with pytest.raises(RemoteError, match=r"status 504, not scored within 0\.5 s"):
            scorer.score(clips.select(np.arange(2)))
        assert server.metric('vlmrb_requests_total{status="504"}') == 3
        assert server.metric("vlmrb_requests_in_flight") == 0


def test_a_port_that_is_taken_is_said_to_be(tmp_path, served):
    with serving(tmp_path, SPRITES, port=served.port, wait=False) as server:
        assert server.process.wait(60) == 1
        assert "already in use" in server.log.read_text()


def test_of_two_servers_that_start_on_one_port_one_ends_and_the_other_serves(tmp_path):
    port = free_port()
    with (
        serving(tmp_path, SPRITES, port=port, wait=False) as one,
        serving(tmp_path, SPRITES, port=port, wait=False) as two,
    ):
        wait_for(lambda: None in (codes := [one.process.poll(), two.process.poll()]) and 1 in codes, timeout_s=90)
        ended, serves = (one, two) if one.process.poll() == 1 else (two, one)
        log = ended.log.read_text()
        assert f"port={port} was taken while the scorer was loaded" in log or "in use" in log
        wait_for(serves.healthy)


def test_a_vision_language_model_gives_the_same_scores_served_as_in_this_process(tmp_path):
    model = {
        "class_path": "vlmrb.scoring.hf.HFScorer",
        "init_args": {"model": str(TINY_VLM), "frame_size": 64, "dtype": "float32", "device": "cpu"},
    }
    renderer = make_renderer(EnvConfig(id="MiniGrid-DoorKey-8x8-v0"))
    clips = make_clips(8, 32, renderer, env_steps=60, instances=4)
    local = HFScorer(**model["init_args"])
    local.setup()
    with serving(tmp_path, model) as server:
        scorer = RemoteScorer(server.url, **QUICK)
        assert identity(scorer) == identity(local)
        assert scorer.prompt == local.prompt
        np.testing.assert_allclose(scorer.score(clips), local.score(clips), atol=1e-6)
        assert scorer.stats()["mass"] > 0.9


def test_a_failing_scorer_says_why_and_the_next_clips_are_scored(tmp_path, clips):
    trouble = {"kind": "raise", "times": 3, "count_file": str(tmp_path / "count")}
    scorer_section = {
        "class_path": "odd_scorers.TroubledScorer",
        "init_args": {"trouble": {"class_path": "odd_scorers.Trouble", "init_args": trouble}},
    }
    with serving(tmp_path, scorer_section) as server:
        scorer = RemoteScorer(server.url, **QUICK)
        with pytest.raises(RemoteError, match="status 500, .*the scorer raised RuntimeError: boom"):
            scorer.score(clips.select(np.arange(3)))
        assert scorer.score(clips.select(np.arange(3))).shape == (3,)
        assert server.metric("vlmrb_errors_total") == 3


def test_https_with_a_certificate_of_ones_own(tmp_path, clips):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    files = ("--tls_cert", str(cert), "--tls_key", str(key))
    with serving(tmp_path, SPRITES, *files, wait=False) as server:
        trusting = RemoteScorer(server.url, **{**QUICK, "wait_s": 60.0}, ca_file=str(cert))
        few = clips.select(np.arange(3))
        np.testing.assert_array_equal(trusting.score(few), SpritesScorer().score(few))
        with pytest.raises(ScorerError, match="certificate is not trusted .*ca_file"):
            identity(RemoteScorer(server.url, **QUICK))


def test_a_server_that_is_down_at_the_start_is_waited_for_or_refused_as_told(tmp_path):
    port = free_port()
    with pytest.raises(ScorerError, match=r"no scoring server is there .*cannot be reached.*wait_s"):
        identity(RemoteScorer(f"http://127.0.0.1:{port}", **{**QUICK, "wait_s": 0.0}))
    waiting = RemoteScorer(f"http://127.0.0.1:{port}", **{**QUICK, "wait_s": 60.0})
    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(identity(waiting)))
    thread.start()
    with serving(tmp_path, SPRITES, port=port):
        thread.join(60)
        assert found == [identity(SpritesScorer())]
