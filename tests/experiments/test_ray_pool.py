from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from finished_cells import make_cell
from signalled import left_running, run_until
from test_run import LONG, OFTEN, UNIFORM, unreadable_episodes, write_study

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.ray_pool import RayPool, import_ray, require_answer, run_cell

ONE = {"num_cpus": 1.0, "num_gpus": 0.0}


def test_missing_ray_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(RuntimeError, match=r"^Ray is not installed .*pip install 'vlmrb\[ray\]'"),
        RayPool("x:1", 1, ONE),
    ):
        pass


def test_ray_that_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libray.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(RuntimeError, match=r"^Ray cannot be loaded \(libray.so: .*install it anew"):
        import_ray()


def test_node_without_the_sweeps_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nowhere is not there on this node"):
        run_cell(make_cell(tmp_path / "sweep"), str(tmp_path / "nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True], ids=["nobody there", "somebody else"])
def test_address_that_does_not_answer_is_given_up_in_time(listens: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=rf"^Ray at {address} did not answer within 10 s: .* `ray start --head`"):
            require_answer(address, timeout_s=10)


@pytest.mark.slow
def test_impossible_address_is_refused_with_rays_reason() -> None:
    with pytest.raises(RuntimeError, match="^Ray at nonsense cannot be used: .*nonsense"):
        require_answer("nonsense", timeout_s=100)


@pytest.mark.slow
def test_cluster_of_its_own_runs_and_records_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    refused, lost = (make_cell(tmp_path / "sweep", scheme, overrides=["--env.no", "1"]) for scheme in "ab")
    with RayPool("local", 1, ONE) as pool:
        assert pool.jobs == 1
        pool.launch(refused)
        assert pool.ended(timeout_s=200) == [(refused, True)]
        monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "nowhere"))
        pool.launch(lost)
        assert pool.ended(timeout_s=200) == [(lost, True)]
    assert [cell.status for cell in (refused, lost)] == ["failed", "failed"]
    assert "--env.no" in refused.last_words()[0]
    assert f"Ray could not start this run: {tmp_path}/nowhere is not there" in lost.last_words()[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Starts a cluster of two nodes with a place for one run each, and returns its address."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=small)
    nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    yield nodes.address
    nodes.shutdown()


def worker_of(folder: Path) -> int | None:
    """Returns the process that looks after a run."""
    for command in left_running(str(folder)):
        if "vlmrb.experiments.child" in command:
            return int(command.split()[3])
    return None


@pytest.mark.slow
def test_run_whose_worker_is_killed_goes_on_with_another(tmp_path: Path, cluster: str) -> None:
    study, out = write_study(tmp_path, LONG, seeds="0-1", overrides=OFTEN, jobs=None)
    folders = [out / "base" / "uniform" / f"seed_{seed}" for seed in (0, 1)]
    killed: list[int] = []

    def kill() -> bool:
        if all((folder / "checkpoints/last.ckpt").exists() for folder in folders):
            worker = worker_of(folders[0])
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)
        return bool(killed)

    exit_code, printed = run_until(["sweep", str(study), "--ray", cluster], kill, [])
    assert exit_code == 0, printed
    assert "uniform  2 of 2" in printed
    records = [json.loads((folder / "cell.json").read_text()) for folder in folders]
    assert [[attempt["exit_code"] for attempt in record["attempts"]] for record in records] == [[None, 0], [0]]
    assert "resuming" in (folders[0] / "log.txt").read_text()
    steps = [row[0] for row in json.loads((folders[0] / "summary.json").read_text())["history"]]
    assert steps == sorted(set(steps))
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_sigterm_ends_runs_on_ray_saved_and_another_sweep_goes_on(tmp_path: Path, cluster: str) -> None:
    schemes = {"uniform": str(UNIFORM), "bad": [str(UNIFORM), unreadable_episodes(tmp_path)]}
    study, out = write_study(tmp_path, LONG, schemes=schemes, seeds="0-1", overrides=OFTEN, jobs=3)
    good = [out / "base" / "uniform" / f"seed_{seed}" for seed in (0, 1)]
    command = ["sweep", str(study), "--ray", cluster]
    ready = (good[1] / "checkpoints/last.ckpt").exists
    exit_code, printed = run_until(command, ready, [signal.SIGTERM])
    assert exit_code == 143, printed
    assert "base uniform seed 1: interrupted" in printed
    assert "FAILED (exit code None)" not in printed  # what had not begun was taken back
    assert json.loads((good[1] / "cell.json").read_text())["exit_code"] == 143
    assert left_running(str(tmp_path)) == []
    exit_code, printed = run_until(command, lambda: True, [])
    assert exit_code == 1, printed
    assert f"bad seed 0: FAILED (exit code 1): vlmrb fit: error: --prefill {tmp_path}/nowhere" in printed
    assert "resuming" in (good[1] / "log.txt").read_text()
    assert all(json.loads((folder / "summary.json").read_text())["finished"] for folder in good)


def fail_once_saved(cell: Cell, cluster: str) -> None:
    """Starts a run on Ray and meets an error when it has a checkpoint, which is emptied."""
    checkpoint = cell.folder / "checkpoints/last.ckpt"
    with RayPool(cluster, 1, ONE) as pool:
        pool.launch(cell)
        while not checkpoint.exists():
            assert pool.ended(timeout_s=0.1) == []
        os.truncate(checkpoint, 0)
        raise OSError("the disk is full")


@pytest.mark.slow
def test_error_of_the_sweep_ends_runs_on_ray_saved(tmp_path: Path, cluster: str) -> None:
    cell = make_cell(tmp_path / "sweep", overrides=OFTEN[0].split())
    (tmp_path / "base.yaml").write_text(LONG)
    (tmp_path / "uniform.yaml").write_text(UNIFORM.read_text())
    with pytest.raises(OSError, match="disk is full"):
        fail_once_saved(cell, cluster)
    assert cell.exit_code == 143
    assert (cell.folder / "checkpoints/last.ckpt").stat().st_size > 0  # written anew as it left
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_cluster_without_room_for_a_run_is_refused(cluster: str) -> None:
    with (
        pytest.raises(RuntimeError, match="no node of the Ray cluster has room .*'num_gpus': 0.5"),
        RayPool(cluster, None, {"num_cpus": 1.0, "num_gpus": 0.5}),
    ):
        pass
