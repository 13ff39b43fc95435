"""`vlmrb doctor`: looks at everything a run leans on and says what to do where something is missing."""

from __future__ import annotations

import http.client
import importlib.util
import multiprocessing
import os
import platform
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Literal

from vlmrb.checks import check_torchrl_abi, core_requirements, extra_requirements, installed_version

GIB = 2**30
DISK_WARN_BYTES = 5 * GIB  # a pair of checkpoints with a replay buffer of 10⁶ rows takes a few GiB
DISK_FAIL_BYTES = GIB // 2
MEMORY_WARN_BYTES = 4 * GIB
OLDEST_DRIVER = {"12": "525", "13": "580"}  # by CUDA's major version, from NVIDIA's compatibility table


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: `ok`; `warn`: an optional part is missing or narrow; `fail`: a run would not work.
        found: what was found.
        advice: what to do about it; empty if nothing is needed.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def doctor(runs_dir: str | Path = "runs", scorer_url: str | None = None, json: bool = False) -> int:
    """Looks at versions, GPU, rendering, disk and scorer; prints what works and what to do about the rest.

    Args:
        runs_dir: where runs would be written. It is not created.
        scorer_url: a scoring server to knock at (`http://…`); None: the scorer runs inside the training process.
        json: print one JSON object instead of a table.

    Returns:
        The exit code: 0 if everything that a run needs works, else 1.
    """
    checks = run_checks(Path(runs_dir), scorer_url)
    failed = sum(check.status == "fail" for check in checks)
    if json:
        from json import dumps

        print(dumps({"ok": failed == 0, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(format_table(checks))
    return 1 if failed else 0


def run_checks(runs_dir: Path, scorer_url: str | None = None) -> list[Check]:
    """All checks, in the order of the report."""
    return [
        *package_checks(),
        abi_check(),
        *gpu_checks(),
        machine_check(),
        processes_check(),
        *rendering_checks(),
        tensorboard_check(),
        disk_check("runs folder", runs_dir),
        disk_check("temporary files", Path(tempfile.gettempdir())),
        scorer_check(scorer_url),
    ]


def format_table(checks: list[Check]) -> str:
    """The report as text: a line per check, with the advice below it where there is any."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<4}  {'':<{width}}  → {check.advice}")
    count = {status: sum(check.status == status for check in checks) for status in ("warn", "fail")}
    verdict = f"{count['fail']} failed" if count["fail"] else "everything that a run needs works"
    lines.append(f"\n{verdict}" + (f"; {count['warn']} optional or narrow (warn)" if count["warn"] else ""))
    return "\n".join(lines)


def package_checks() -> list[Check]:
    """Python, each package that core needs (against the versions the package asks for), and each optional part."""
    checks = [Check("python", "ok", platform.python_version())]
    for requirement in core_requirements():
        found, advice = installed_version(requirement.name), f"pip install '{requirement}'"
        if found is None:
            checks.append(Check(requirement.name, "fail", "not installed", advice))
        elif not requirement.specifier.contains(found, prereleases=True):
            checks.append(Check(requirement.name, "fail", f"{found}, needed: {requirement.specifier}", advice))
        else:
            checks.append(Check(requirement.name, "ok", found))
    extras = metadata("vlmrb").get_all("Provides-Extra") or []
    return checks + [_extra_check(extra) for extra in extras if extra != "dev"]


def _extra_check(extra: str) -> Check:
    present, lacking = [], []
    for requirement in extra_requirements(extra):
        found = installed_version(requirement.name)
        if found is None:
            lacking.append(requirement.name)
        elif not requirement.specifier.contains(found, prereleases=True):
            lacking.append(f"{requirement.name}{requirement.specifier} (found {found})")
        else:
            present.append(f"{requirement.name} {found}")
    if not lacking:
        return Check(f"[{extra}]", "ok", ", ".join(present))
    return Check(f"[{extra}]", "warn", f"not installed: {', '.join(lacking)}", f"pip install 'vlmrb[{extra}]'")


def abi_check() -> Check:
    """Do torch and torchrl, as installed, work together?"""
    try:
        check_torchrl_abi()
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library that torch links to is missing
        return Check("torch/torchrl pair", "fail", "prioritised replay does not work", str(error))
    return Check("torch/torchrl pair", "ok", "compiled segment trees load and compute")


def gpu_checks() -> list[Check]:
    """Each CUDA device after a small computation on it, or why there is none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Check("GPU", "fail", f"torch does not import: {error}", "reinstall torch")]
    driver = _nvidia_driver()
    with warnings.catch_warnings():  # torch warns about an old driver; the line below says it
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if not usable:
        if driver is None:
            return [Check("GPU", "ok", "none: training runs on the CPU")]
        if torch.version.cuda is None:
            return [Check("GPU", "warn", f"driver {driver}, but this torch is for the CPU only", "reinstall torch")]
        oldest = OLDEST_DRIVER.get(torch.version.cuda.split(".")[0], "of its age")
        advice = f"CUDA {torch.version.cuda} wants driver {oldest} or newer; look also at CUDA_VISIBLE_DEVICES"
        return [Check("GPU", "warn", f"driver {driver}, but torch sees no device: training runs on the CPU", advice)]
    checks = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, driver {driver or 'unknown'}"
        try:
            torch.ones(2, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            checks.append(Check(f"GPU {index}", "fail", f"{found}: {reason}", "train with --trainer.accelerator=cpu"))
        else:
            checks.append(Check(f"GPU {index}", "ok", found))
    return checks


def _nvidia_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):  # no driver, or one that does not answer
        return None
    return answer[0] if answer else None


def machine_check() -> Check:
    """Processor cores and memory this process may use."""
    memory = memory_bytes()
    found = f"{usable_cores()} cores, {memory / GIB:.1f} GiB of memory"
    if memory < MEMORY_WARN_BYTES:
        return Check("CPU", "warn", found, "choose a smaller replay buffer, or keep it in memory-mapped storage")
    return Check("CPU", "ok", found)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, or the container's limit where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def free_memory_bytes() -> int:
    """Memory that could be taken now without swapping, within the container's limit."""
    free = memory_bytes()
    information = Path("/proc/meminfo")
    if information.is_file():
        fields = dict(line.split(":") for line in information.read_text().splitlines())
        free = min(free, 1024 * int(fields["MemAvailable"].split()[0]))
    used = Path("/sys/fs/cgroup/memory.current")
    if used.is_file():
        free = min(free, max(0, memory_bytes() - int(used.read_text())))
    return free


def processes_check() -> Check:
    """Can processes share memory? Scorers and environments in processes of their own lean on it."""
    try:
        multiprocessing.RawValue("d")
    except OSError as error:
        advice = "make /dev/shm writable for this user, or score with the thread back-end"
        return Check("shared memory", "fail", f"not to be had: {error}", advice)
    return Check("shared memory", "ok", "processes can share memory")


_MUJOCO_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
assert renderer.render().shape == (16, 16, 3)
"""


def rendering_checks(timeout_s: float = 60.0) -> list[Check]:
    """Can frames be drawn? MuJoCo is asked only if it is installed.

    Args:
        timeout_s: how long one MuJoCo back-end may take to draw a frame of 16 × 16 pixels. EGL has been seen to hang,
            and Mesa to crash a process that imports triton later, so each back-end draws in a process of its own.
    """
    checks = [Check("rendering: MiniGrid", "ok", "drawn in NumPy, needs no display")]
    if importlib.util.find_spec("mujoco") is None:
        return checks
    chosen = os.environ.get("MUJOCO_GL")
    reasons = []
    for backend in [chosen] if chosen else ["egl", "osmesa"]:
        reason = _probe_mujoco(backend, timeout_s)
        if reason is None:
            return [*checks, Check("rendering: MuJoCo", "ok", f"{backend} draws")]
        reasons.append(f"{backend}: {reason}")
    advice = (
        "OGBench's frames need OpenGL, a GPU's or in software: on Debian or Ubuntu apt-get install libegl1 "
        "libgl1-mesa-dri libopengl0 (or libosmesa6)"
    )
    return [*checks, Check("rendering: MuJoCo", "warn", "; ".join(reasons), advice)]


def _probe_mujoco(backend: str, timeout_s: float) -> str | None:
    """None if MuJoCo draws a frame with this back-end, else why not."""
    environment = os.environ | {"MUJOCO_GL": backend}
    command = [sys.executable, "-c", _MUJOCO_PROBE]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no frame within {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def tensorboard_check() -> Check:
    """Does the writer of TensorBoard logs import?"""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except (ImportError, OSError) as error:
        return Check("TensorBoard logs", "fail", f"the writer does not import: {error}", "pip install -U tensorboard")
    return Check("TensorBoard logs", "ok", "the writer imports; look at them with: tensorboard --logdir runs")


def disk_check(name: str, folder: Path) -> Check:
    """Is the folder (or, while it does not exist, where it would be made) writable, and is there space?"""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):  # the only sure test of a read-only file system, also for root
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Check(name, "fail", f"{folder}: not writable ({error.strerror})", "choose another folder")
    found = f"{folder}: {free / GIB:.1f} GiB free"
    if free < DISK_FAIL_BYTES:
        return Check(name, "fail", found, "make room: checkpoints with their replay buffer would not fit")
    if free < DISK_WARN_BYTES:
        return Check(name, "warn", found, "a checkpoint with a large replay buffer may not fit")
    return Check(name, "ok", found)


def scorer_check(url: str | None, timeout_s: float = 5.0) -> Check:
    """Does anyone answer at the scorer's address?

    Any HTTP answer below 500 counts: which paths exist is the server's affair.

    Args:
        url: `http://…` or `https://…`; None: the scorer runs inside the training process and needs no server.
        timeout_s: seconds to wait for the answer.
    """
    if url is None:
        return Check("scorer", "ok", "in-process scorers are ready; no server was asked for")
    try:
        address = urllib.parse.urlsplit(url)
        sound = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is none
        sound = False
    if not sound:
        advice = "write it as http://HOST:PORT, with a port from 1 to 65535"
        return Check("scorer", "fail", f"{url}: not an http(s) address", advice)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return Check("scorer", "ok", f"{url} answers ({answer.status})")
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return Check("scorer", "ok", f"{url} answers ({error.code})")
        return Check("scorer", "fail", f"{url} answers {error.code} {error.reason}", "look into the server's log")
    except http.client.HTTPException as error:
        found = f"{url}: what listens there speaks no HTTP ({type(error).__name__})"
        return Check("scorer", "fail", found, "look at the port: another program may have it")
    except (OSError, ValueError) as error:  # refused, unknown host, time-out; ValueError: malformed address
        reason = getattr(error, "reason", error)
        advice = "start the server, or train without it: replay is uniform as long as nothing is scored"
        if isinstance(reason, ssl.SSLCertVerificationError):
            advice = "trust its certificate: the scorer's ca_file, or SSL_CERT_FILE for this look"
        elif isinstance(reason, ssl.SSLError):
            advice = "the server does not speak https: write http://, or serve with --tls_cert and --tls_key"
        return Check("scorer", "fail", f"{url}: {reason}", advice)
