from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlmrb import checks, doctor
from vlmrb.checks import check_torchrl_abi, core_requirements, extra_requirements


def by_name(lines: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {line.name: line for line in lines}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Overrides what is found installed, by distribution."""
    overrides: dict[str, str | None] = {}
    real = checks.installed_version

    def installed_version(name: str) -> str | None:
        return overrides[name] if name in overrides else real(name)

    monkeypatch.setattr(doctor, "installed_version", installed_version)
    monkeypatch.setattr(checks, "installed_version", installed_version)
    return overrides


# ---- the report ----


def test_a_working_installation_exits_with_zero_and_says_so(tmp_path, capsys):
    assert doctor.doctor(runs_dir=tmp_path) == 0
    assert "everything that a run needs works" in capsys.readouterr().out


def test_json_holds_the_same_verdict_as_the_exit_code(tmp_path, capsys, versions):
    versions["torch"] = "2.13.0"
    assert doctor.doctor(runs_dir=tmp_path, json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [line["name"] for line in report["checks"] if line["status"] == "fail"] == ["torch"]


def test_advice_stands_below_its_line_in_the_table():
    table = doctor.format_table([doctor.Check("one", "ok", "1.0"), doctor.Check("two", "fail", "gone", "get it")])
    lines = table.splitlines()
    assert [line.split() for line in lines[:3]] == [["ok", "one", "1.0"], ["fail", "two", "gone"], ["→", "get", "it"]]
    assert lines[-1] == "1 failed"


# ---- packages ----


def test_a_core_package_of_the_wrong_version_fails_with_the_install_command(versions):
    versions["torchrl"] = "0.13.0"
    line = by_name(doctor.package_checks())["torchrl"]
    assert line.status == "fail"
    assert "0.13.0" in line.found
    assert line.advice.startswith("pip install 'torchrl")


def test_an_absent_core_package_fails(versions):
    versions["minigrid"] = None
    assert by_name(doctor.package_checks())["minigrid"].status == "fail"


def test_an_absent_extra_is_a_warning_that_says_what_to_install(versions):
    versions.update({requirement.name: None for requirement in extra_requirements("vlm")})
    line = by_name(doctor.package_checks())["[vlm]"]
    assert line.status == "warn"
    assert "transformers" in line.found
    assert line.advice == "pip install 'vlmrb[vlm]'"


def test_a_complete_extra_is_listed_with_its_versions(versions):
    versions["litserve"] = "0.2.19"
    assert by_name(doctor.package_checks())["[server]"] == doctor.Check("[server]", "ok", "litserve 0.2.19")


def test_an_extra_of_the_wrong_version_names_both_versions(versions):
    versions["litserve"] = "0.1.0"
    line = by_name(doctor.package_checks())["[server]"]
    assert line.status == "warn"
    assert "litserve>=0.2.19 (found 0.1.0)" in line.found


def test_requirements_of_extras_are_not_core_requirements():
    core = {requirement.name for requirement in core_requirements()}
    assert {"torch", "torchrl", "tensordict", "lightning"} <= core
    assert core.isdisjoint({"transformers", "litserve", "ray", "pytest"})


# ---- torch beside torchrl ----


def test_the_installed_pair_of_torch_and_torchrl_matches():
    check_torchrl_abi()
    assert doctor.abi_check().status == "ok"


def test_trees_that_do_not_load_raise_one_line_naming_versions_and_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl._torchrl", None)  # what an extension that fails to link looks like
    with pytest.raises(RuntimeError) as raised:
        check_torchrl_abi()
    message = str(raised.value)
    assert "\n" not in message
    assert f"torch {checks.installed_version('torch')}" in message
    assert "pip install 'torch==2.14.*' 'torchrl" in message
    line = doctor.abi_check()
    assert line.status == "fail"
    assert line.advice == message


def test_trees_that_compute_nonsense_are_refused(monkeypatch):
    import torchrl._torchrl as extension

    class Broken(dict):
        def __init__(self, capacity: int) -> None: ...

        def query(self, start: int, end: int) -> float:
            return 0.0

    monkeypatch.setattr(extension, "SumSegmentTreeFp64", Broken)
    with pytest.raises(RuntimeError, match="wrong answers"):
        check_torchrl_abi()


# ---- machine ----


def test_no_gpu_is_fine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: None)
    assert doctor.gpu_checks() == [doctor.Check("GPU", "ok", "none: training runs on the CPU")]


def test_a_gpu_that_torch_cannot_use_is_a_warning_naming_the_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "535.1")
    (line,) = doctor.gpu_checks()
    assert line.status == "warn"
    assert "535.1" in line.found
    assert "580" in line.advice


def test_a_gpu_beside_a_cpu_only_torch_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "580.1")
    (line,) = doctor.gpu_checks()
    assert line.status == "warn"
    assert "CPU only" in line.found


def test_a_gpu_that_cannot_compute_fails(monkeypatch):
    properties = namedtuple("Properties", "name total_memory")("Old Card", 8 * doctor.GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "580.1")

    def ones(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device\nmore text")

    monkeypatch.setattr(torch, "ones", ones)
    (line,) = doctor.gpu_checks()
    assert line.status == "fail"
    assert line.found == "Old Card, 8 GiB, driver 580.1: no kernel image is available for execution on the device"


@pytest.mark.gpu
def test_a_working_gpu_is_named():
    line = doctor.gpu_checks()[0]
    assert line.status == "ok"
    assert torch.cuda.get_device_name(0) in line.found


def test_the_driver_is_unknown_where_nvidia_smi_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._nvidia_driver() is None


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 2 * doctor.GIB)
    assert doctor.machine_check().status == "warn"


def test_processes_that_cannot_share_memory_fail(monkeypatch):
    def raw_value(kind: str) -> None:
        raise PermissionError(13, "Permission denied", "/dev/shm/pym-1")

    monkeypatch.setattr(doctor.multiprocessing, "RawValue", raw_value)
    line = doctor.processes_check()
    assert line.status == "fail"
    assert "/dev/shm/pym-1" in line.found


# ---- rendering ----

FAKE_MUJOCO = """
import os, time
from types import SimpleNamespace

class MjModel:
    @staticmethod
    def from_xml_string(text): return None

MjData = lambda model: None
mj_forward = lambda model, data: None

class Renderer:
    def __init__(self, model, height, width):
        behaviour = os.environ["FAKE_" + os.environ["MUJOCO_GL"].upper()]
        if behaviour == "hang":
            time.sleep(60)
        if behaviour == "raise":
            raise RuntimeError("cannot make a context")
    def update_scene(self, data): ...
    def render(self): return SimpleNamespace(shape=(16, 16, 3))
"""


@pytest.fixture
def mujoco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A stand-in for the mujoco package whose back-ends behave as FAKE_EGL and FAKE_OSMESA say."""
    (tmp_path / "mujoco.py").write_text(FAKE_MUJOCO)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("FAKE_EGL", "draw")
    monkeypatch.setenv("FAKE_OSMESA", "draw")
    return monkeypatch


def test_egl_is_preferred_where_it_draws(mujoco):
    line = by_name(doctor.rendering_checks())["rendering: MuJoCo"]
    assert (line.status, line.found, line.advice) == ("ok", "egl draws", "")


@pytest.mark.slow
def test_osmesa_is_tried_where_egl_hangs(mujoco):
    mujoco.setenv("FAKE_EGL", "hang")
    line = by_name(doctor.rendering_checks(timeout_s=3.0))["rendering: MuJoCo"]
    assert (line.status, line.found) == ("ok", "osmesa draws")


def test_no_working_back_end_is_a_warning_that_gives_the_reasons(mujoco):
    mujoco.setenv("FAKE_EGL", "raise")
    mujoco.setenv("FAKE_OSMESA", "raise")
    line = by_name(doctor.rendering_checks())["rendering: MuJoCo"]
    assert line.status == "warn"
    reasons = "egl: RuntimeError: cannot make a context; osmesa: RuntimeError: cannot make a context"
    assert line.found == reasons
    assert "libegl1" in line.advice


def test_a_back_end_chosen_by_the_user_is_the_only_one_tried(mujoco):
    mujoco.setenv("MUJOCO_GL", "osmesa")
    mujoco.setenv("FAKE_EGL", "raise")
    line = by_name(doctor.rendering_checks())["rendering: MuJoCo"]
    assert (line.status, line.found, line.advice) == ("ok", "osmesa draws", "")


def test_mujoco_is_not_mentioned_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert [line.name for line in doctor.rendering_checks()] == ["rendering: MiniGrid"]


# ---- disk ----


def test_a_missing_runs_folder_is_judged_by_its_parent_and_not_created(tmp_path):
    assert doctor.disk_check("runs folder", tmp_path / "a" / "b").status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_runs_folder_below_a_file_fails(tmp_path):
    (tmp_path / "file").touch()
    line = doctor.disk_check("runs folder", tmp_path / "file" / "runs")
    assert line.status == "fail"
    assert "not writable" in line.found


@pytest.mark.parametrize(("free_gib", "status"), [(0.2, "fail"), (2, "warn"), (50, "ok")])
def test_free_space_decides_the_status(tmp_path, monkeypatch, free_gib, status):
    usage = shutil.disk_usage(tmp_path)._replace(free=int(free_gib * doctor.GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert doctor.disk_check("runs folder", tmp_path).status == status


# ---- scorer ----


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers `/NNN` with status NNN."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize(("code", "status"), [(200, "ok"), (404, "ok"), (405, "ok"), (500, "fail"), (503, "fail")])
def test_a_server_counts_as_reached_unless_it_fails_itself(server, code, status):
    line = doctor.scorer_check(f"{server}/{code}")
    assert line.status == status
    assert str(code) in line.found


def test_nobody_listening_fails_and_says_how_to_go_on():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = doctor.scorer_check(f"http://127.0.0.1:{port}/")
    assert line.status == "fail"
    assert "refused" in line.found
    assert "uniform" in line.advice


def test_a_server_that_never_answers_times_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        line = doctor.scorer_check(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.2)
    assert line.status == "fail"
    assert "timed out" in line.found


def test_a_port_of_something_else_than_http_is_told_to_be_that():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        line = doctor.scorer_check(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert line.status == "fail"
    assert "speaks no HTTP" in line.found


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "localhost:8000", "http://", "http://localhost:99999", "http://[::1"]
)
def test_an_address_that_is_not_http_fails_in_one_line(url):
    line = doctor.scorer_check(url)
    assert line.status == "fail"
    assert "\n" not in line.found
    assert "write it as http://HOST:PORT" in line.advice


def test_https_asked_of_a_server_of_http_is_told_to_be_that(server):
    line = doctor.scorer_check(f"{server.replace('http', 'https')}/200")
    assert line.status == "fail"
    assert "write http://" in line.advice


def test_without_an_address_the_scorer_is_in_process():
    assert doctor.scorer_check(None).status == "ok"


# ---- cost ----


def test_importing_the_doctor_does_not_load_torch():
    code = "import sys, vlmrb.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
