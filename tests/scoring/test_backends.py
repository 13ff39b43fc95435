"""Back-ends by themselves: what reaches the scorer, what is left behind, and who is disturbed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_scorers import (
    CountingScorer,
    FrameScorer,
    GatedScorer,
    GoodScorer,
    GreyRenderer,
    LibrariesScorer,
    ParentScorer,
    SlowScorer,
    SpinningScorer,
    TalkativeScorer,
    Trouble,
    TroubledScorer,
    expected_scores,
)

from vlmrb.scoring.backends import Answer, Backend, SyncBackend, ThreadBackend
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.process import ProcessBackend, make_backend
from vlmrb.scoring.scorer import Scorer

HERE = Path(__file__).parent


def make_clips(count: int, seed: int = 0, length: int = 4, size: int = 3, dtype: Any = np.uint8) -> ClipBatch:
    rng = np.random.default_rng(seed)
    snapshots = rng.integers(0, 100, (count, length, size)).astype(dtype)
    return ClipBatch(np.arange(count), snapshots, rng.integers(2, length + 1, count))


@pytest.fixture
def start() -> Iterator[Callable[..., ProcessBackend]]:
    """Starts process back-ends and stops them when the test ends."""
    started: list[ProcessBackend] = []

    def start(scorer: Scorer, renderer: Any = None, **settings: Any) -> ProcessBackend:
        started.append(ProcessBackend(scorer, renderer, ScoringConfig(**settings)))
        return started[-1]

    yield start
    for backend in started:
        backend.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    return value


def ready(backend: Backend) -> None:
    wait_for(lambda: backend.collect() or backend.accepting)


def ask(backend: Backend, clips: ClipBatch, ticket: int = 0) -> Answer:
    ready(backend)
    backend.submit(ticket, clips)
    (found,) = wait_for(backend.collect)
    return found


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize("make", [SyncBackend, ThreadBackend])
def test_answers_come_in_the_order_of_submission(make: type[Backend]):
    backend = make(GoodScorer())
    ready(backend)
    answers: list[Answer] = []
    for ticket in range(5):
        backend.submit(ticket, make_clips(3, seed=ticket))
    while len(answers) < 5:
        answers += backend.collect()
    backend.close()
    for ticket, found in enumerate(answers):
        assert found.ticket == ticket
        np.testing.assert_array_equal(found.scores, expected_scores(make_clips(3, seed=ticket).snapshots))


@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_what_a_scorer_has_learned_comes_back_with_answers_and_is_restored_elsewhere(kind: str):
    settings = ScoringConfig(backend=kind, batch_clips=8)
    backend = make_backend(CountingScorer(padding=300_000), None, settings)
    learned = []
    for ticket in range(5):
        found = ask(backend, make_clips(3), ticket)
        assert found.state is not None
        learned.append(int.from_bytes(found.state[:8]))
        assert found.state[8:] == bytes(300_000)
    backend.close()
    assert learned == [3, 6, 9, 12, 15]
    other = make_backend(CountingScorer(), None, settings)
    assert ask(other, make_clips(3)).scores[0] == 0
    other.restore(found.state)
    assert [ask(other, make_clips(3), ticket).scores[0] for ticket in (1, 2)] == pytest.approx([0.15, 0.18])
    other.close()


@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_processor_seconds_come_with_answers(kind: str):
    backend = make_backend(SpinningScorer(0.1), None, ScoringConfig(backend=kind))
    first, second = [ask(backend, make_clips(1), ticket).cpu_s for ticket in range(2)]
    backend.close()
    assert 0.1 <= second < 0.15
    if kind == "process":
        assert first > 0.15  # with its start: Python and NumPy are loaded
    else:
        assert 0.1 <= first < 0.15


def test_a_scorer_that_learns_too_much_for_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vlmrb.scoring.scorer.MAX_STATE_BYTES", 1000)
    found = ask(SyncBackend(CountingScorer(padding=1000)), make_clips(1))
    assert found.fatal
    assert "1,008 bytes" in found.error


def test_a_scorer_that_learns_nothing_cannot_be_restored_and_goes_on():
    backend = SyncBackend(GoodScorer())
    backend.restore(b"something")
    found = ask(backend, make_clips(1))
    assert "learns nothing that could be restored" in found.error
    assert found.scores is None
    assert ask(backend, make_clips(1)).scores is not None
    assert ask(backend, make_clips(1)).state is None


def test_sync_closes_the_scorer_once_even_if_that_fails():
    class Closing(GoodScorer):
        closed = 0

        def close(self) -> None:
            Closing.closed += 1
            raise OSError("cannot even close")

    backend = SyncBackend(Closing())
    backend.close()
    backend.close()
    assert Closing.closed == 1
    assert not backend.accepting


def test_a_thread_ends_when_it_is_closed():
    backend = ThreadBackend(GoodScorer())
    ready(backend)
    backend.close()
    assert not any(thread.name == "scorer-good" for thread in threading.enumerate())


def test_a_hung_thread_is_reported_and_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("vlmrb.scoring.backends.THREAD_GRACE_S", 0.05)
    scorer = GatedScorer()
    backend = ThreadBackend(scorer)
    ready(backend)
    backend.submit(0, make_clips(1))
    time.sleep(0.05)
    backend.close()
    assert "scorer 'gated' is still busy in its thread" in caplog.text
    scorer.gate.set()


# Process: what travels


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_a_process_sees_the_very_clips(start: Callable[..., ProcessBackend], dtype: Any):
    backend = start(GoodScorer(), batch_clips=8)
    for ticket, count in enumerate([8, 1, 5, 8, 2]):  # slots are used again, by batches of other sizes
        clips = make_clips(count, seed=ticket, dtype=dtype)
        np.testing.assert_array_equal(ask(backend, clips, ticket).scores, expected_scores(clips.snapshots))


def test_a_process_keeps_batches_in_flight_apart(start: Callable[..., ProcessBackend]):
    backend = start(SlowScorer(0.02), batch_clips=4, max_in_flight=3)
    ready(backend)
    answers: list[Answer] = []
    for ticket in range(9):
        wait_for(lambda ticket=ticket: answers.extend(backend.collect()) or ticket - len(answers) < 3)
        backend.submit(ticket, make_clips(4, seed=ticket))
    wait_for(lambda: answers.extend(backend.collect()) or len(answers) == 9)
    for ticket, found in enumerate(answers):
        assert found.ticket == ticket
        np.testing.assert_array_equal(found.scores, expected_scores(make_clips(4, seed=ticket).snapshots))


def test_ids_lengths_and_the_renderer_reach_the_process(start: Callable[..., ProcessBackend]):
    class_clips = make_clips(6)
    clips = ClipBatch(class_clips.clip_ids + 10**12, class_clips.snapshots, class_clips.lengths, GreyRenderer())
    found = ask(start(FrameScorer(), GreyRenderer()), clips)
    np.testing.assert_array_equal(found.scores, FrameScorer().score(clips))
    poisoned = ask(start(TroubledScorer(Trouble("raise", poison=10**12 + 3))), clips)
    assert poisoned.error == "raised RuntimeError: boom"
    assert 'raise RuntimeError("boom")' in poisoned.detail


def test_handing_over_never_waits_for_a_process_that_reads_nothing(start: Callable[..., ProcessBackend]):
    backend = start(GoodScorer(), batch_clips=256, max_in_flight=8)
    ready(backend)
    os.kill(backend.pid, signal.SIGSTOP)
    clips = make_clips(256, length=32, size=768)  # 6 MB each: far more than a pipe holds
    begin = time.monotonic()
    for ticket in range(8):
        backend.submit(ticket, clips)
        assert backend.collect() == []
    assert time.monotonic() - begin < 5
    os.kill(backend.pid, signal.SIGCONT)
    answers: list[Answer] = []
    wait_for(lambda: answers.extend(backend.collect()) or len(answers) == 8)
    np.testing.assert_array_equal(answers[-1].scores, expected_scores(clips.snapshots))


def test_a_light_scorer_process_loads_no_heavy_library(start: Callable[..., ProcessBackend]):
    assert ask(start(LibrariesScorer()), make_clips(2)).scores.tolist() == [0.0, 0.0]


def test_threads_of_the_process_are_limited_unless_told_otherwise(start: Callable[..., ProcessBackend]):
    for threads in (1, 3, None):
        backend = start(GoodScorer(), threads=threads)
        ready(backend)
        environment = Path(f"/proc/{backend.pid}/environ").read_bytes().split(b"\0")
        expected = os.environ.get("OMP_NUM_THREADS") if threads is None else str(threads)
        found = [entry.split(b"=")[1].decode() for entry in environment if entry.startswith(b"OMP_NUM_THREADS=")]
        assert found == ([] if expected is None else [expected])


def test_without_files_in_memory_an_unnamed_one_on_disk_carries_the_clips(
    start: Callable[..., ProcessBackend], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "memfd_create")
    clips = make_clips(5)
    np.testing.assert_array_equal(ask(start(GoodScorer()), clips).scores, expected_scores(clips.snapshots))


def test_a_batch_larger_than_its_slot_is_refused_instead_of_overwriting_another(start: Callable[..., ProcessBackend]):
    backend = start(GoodScorer(), batch_clips=2)
    ask(backend, make_clips(2))
    with pytest.raises(ValueError, match="a batch of 36 bytes of snapshots"):
        backend.submit(1, make_clips(3))


# Process: how it ends


def test_close_may_be_repeated_and_leaves_no_process(start: Callable[..., ProcessBackend]):
    backend = start(GoodScorer())
    ready(backend)
    pid = backend.pid
    backend.close()
    backend.close()
    assert is_gone(pid)
    assert backend.pid is None
    assert backend.collect() == []


def test_close_does_not_wait_for_a_busy_process(start: Callable[..., ProcessBackend]):
    backend = start(SlowScorer(3600))
    ready(backend)
    backend.submit(0, make_clips(1))
    begin, pid = time.monotonic(), backend.pid
    backend.close()
    assert time.monotonic() - begin < 2
    assert is_gone(pid)


def test_close_while_it_starts_leaves_no_process(start: Callable[..., ProcessBackend]):
    backend = start(GoodScorer())
    pid = backend.pid
    backend.close()
    assert is_gone(pid)


def test_what_the_scorer_started_goes_with_it(start: Callable[..., ProcessBackend], tmp_path: Path):
    backend = start(ParentScorer(str(tmp_path / "pids")))
    ready(backend)
    scorer_pid, helper_pid = map(int, (tmp_path / "pids").read_text().split())
    assert scorer_pid == backend.pid
    assert not is_gone(helper_pid)
    backend.submit(0, make_clips(1))  # busy, so that it is killed
    backend.close()
    wait_for(lambda: is_gone(helper_pid))


def test_a_forgotten_back_end_takes_its_process_along(start: Callable[..., ProcessBackend]):
    backend = ProcessBackend(GoodScorer(), None, ScoringConfig())
    pid = backend.pid
    del backend
    assert wait_for(lambda: is_gone(pid))


def test_ctrl_c_in_the_terminal_does_not_reach_the_process(start: Callable[..., ProcessBackend]):
    backend = start(GoodScorer())
    ready(backend)
    assert os.getpgid(backend.pid) != os.getpgid(0)
    os.kill(backend.pid, signal.SIGINT)  # nor would it mind
    assert ask(backend, make_clips(2)).scores is not None


@pytest.mark.parametrize(("failures", "lives"), [(1, True), (9, False)])
def test_a_process_that_cannot_be_started_again_costs_a_restart(
    start: Callable[..., ProcessBackend], monkeypatch: pytest.MonkeyPatch, failures: int, lives: bool
):
    backend = start(GoodScorer(), backoff_s=0.0, max_restarts=2)
    ready(backend)
    real, left = subprocess.Popen, [OSError(12, "Cannot allocate memory")] * failures

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if left:
            raise left.pop()
        return real(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    os.kill(backend.pid, signal.SIGKILL)
    wait_for(lambda: backend.collect() or backend.dead or (backend.restarts and backend.accepting))
    assert bool(backend.dead) is not lives
    assert ("could not be started (Cannot allocate memory)" in backend.dead) is not lives
    assert backend.restarts == 2


def test_no_process_is_started_while_the_killed_one_may_still_hold_the_gpu(
    start: Callable[..., ProcessBackend], monkeypatch: pytest.MonkeyPatch
):
    backend = start(SlowScorer(3600), timeout_s=0.05, backoff_s=0.0)
    ready(backend)
    first = backend.pid
    with monkeypatch.context() as patch:
        patch.setattr("vlmrb.scoring.process._kill", lambda process, wait_s: None)  # as if it did not go away
        backend.submit(0, make_clips(1))
        (lost,) = wait_for(backend.collect)
        assert lost.scores is None
        for _ in range(20):
            assert backend.collect() == []
            assert backend.pid is None
            time.sleep(0.005)
    os.kill(first, signal.SIGKILL)
    ready(backend)
    assert backend.pid not in (None, first)


def test_pauses_before_restarts_double(start: Callable[..., ProcessBackend], caplog: pytest.LogCaptureFixture):
    backend = start(TroubledScorer(Trouble("die")), backoff_s=0.02, max_restarts=3)
    while not backend.dead:
        if backend.accepting:
            backend.submit(0, make_clips(1))
        wait_for(lambda: backend.collect() or backend.accepting or backend.dead)
    pauses = [record.getMessage().rsplit(" in ")[-1] for record in caplog.records if "restart" in record.getMessage()]
    assert pauses == ["0.02 s", "0.04 s", "0.08 s"]
    assert backend.restarts == 3


# Process: with a training program around it

PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(HERE)!r})
from odd_scorers import GoodScorer, ParentScorer, SlowScorer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.process import ProcessBackend
import numpy as np

class OwnScorer(GoodScorer):
    name = "own"

def run(scorer, then):
    backend = ProcessBackend(scorer, None, ScoringConfig())
    while not backend.accepting:
        backend.collect()
        time.sleep(0.002)
    backend.submit(0, ClipBatch(np.arange(1), np.zeros((1, 2, 1)), np.array([2])))
    print(backend.pid, flush=True)
    then(backend)
"""


def launch(tmp_path: Path, rest: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a program; returns it and the id of its scoring process."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM + rest)
    program = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert program.stdout is not None
    return program, int(program.stdout.readline() or 0)


def rest_of(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Waits for the end; returns what is left of both streams (`communicate` would miss what `readline` read ahead)."""
    assert program.stdout is not None
    assert program.stderr is not None
    out, error = program.stdout.read(), program.stderr.read()
    program.wait(30)
    return out, error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_program_ended_by_a_signal_leaves_no_scorer_behind(number: signal.Signals, tmp_path: Path):
    program, pid = launch(tmp_path, "run(SlowScorer(3600), lambda backend: time.sleep(3600))")
    assert not is_gone(pid)
    program.send_signal(number)
    assert program.wait(20) != 0
    assert wait_for(lambda: is_gone(pid), timeout_s=10)


@pytest.mark.parametrize("whom", ["training program", "scorer"])
def test_what_the_scorer_started_goes_even_if_a_process_is_killed_that_cannot_see_to_it(whom: str, tmp_path: Path):
    pids = tmp_path / "pids"
    program, pid = launch(tmp_path, f"run(ParentScorer({str(pids)!r}), lambda backend: time.sleep(3600))")
    helper_pid = int(pids.read_text().split()[1])
    assert not is_gone(helper_pid)
    os.kill(pid if whom == "scorer" else program.pid, signal.SIGKILL)
    try:
        assert wait_for(lambda: is_gone(helper_pid), timeout_s=10)
        assert is_gone(pid)
    finally:
        program.kill()
        program.wait(10)


def test_a_process_that_takes_its_time_to_die_keeps_its_exit_code(start: Callable[..., ProcessBackend]):
    found = ask(start(TroubledScorer(Trouble("die slowly"))), make_clips(1))
    assert found.error == "died (exit code 3)"


def test_a_process_that_only_closes_its_pipe_is_killed_and_gets_no_exit_code(start: Callable[..., ProcessBackend]):
    backend = start(TroubledScorer(Trouble("go deaf")))
    ready(backend)
    pid = backend.pid
    assert ask(backend, make_clips(1)).error == "died"
    assert is_gone(pid)


@pytest.mark.parametrize("then", ["lambda backend: None", "lambda backend: 1 / 0", "lambda backend: os._exit(0)"])
def test_a_program_that_ends_without_closing_leaves_no_scorer_behind(then: str, tmp_path: Path):
    program, pid = launch(tmp_path, f"run(SlowScorer(3600), {then})")
    program.wait(20)
    assert wait_for(lambda: is_gone(pid), timeout_s=10)


def test_without_help_from_the_kernel_the_process_notices_that_its_parent_is_gone(tmp_path: Path):
    code = (
        "import sys, time; sys.platform = 'elsewhere'\n"
        "from vlmrb.scoring import worker\n"
        "worker.PARENT_CHECK_S = 0.05\n"
        "import os; worker.die_with(os.getppid()); print(os.getpid(), flush=True); time.sleep(3600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    assert wait_for(lambda: is_gone(pid), timeout_s=10)


def test_a_scorer_defined_in_the_training_script_works_if_its_start_is_guarded(tmp_path: Path):
    program, _ = launch(
        tmp_path,
        """
def score(backend):
    while not (answers := backend.collect()):
        time.sleep(0.002)
    print(answers[0].scores, flush=True)

if __name__ == "__main__":
    run(OwnScorer(), score)
""",
    )
    out, error = rest_of(program)
    assert (out.strip(), program.returncode) == ("[0.]", 0), error


def test_a_training_script_without_a_guard_is_told_so_instead_of_starting_itself_over_and_over(tmp_path: Path):
    program, _ = launch(tmp_path, "run(OwnScorer(), lambda backend: None)")
    out, error = rest_of(program)
    assert program.returncode != 0
    assert 'must guard its start with if __name__ == "__main__"' in error
    assert out == ""


@pytest.mark.parametrize(("level", "heard"), [(logging.INFO, True), (logging.WARNING, False)])
def test_a_scorer_in_a_process_is_heard_as_far_as_the_learner_logs(caplog, capfd, start, level, heard):
    caplog.set_level(level, logger="vlmrb")
    ready(start(TalkativeScorer()))
    assert ("INFO vlmrb.scoring.talkative (scoring process): here I am" in capfd.readouterr().err) == heard
