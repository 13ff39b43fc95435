"""`vlmrb serve`: puts any scorer behind HTTP, and leaves nothing running when it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

LOOPBACK_HOST = "127.0.0.1"
HOSTS = (LOOPBACK_HOST, "0.0.0.0", "::")  # what LitServe can listen on


def serve(
    configs: list[str],
    host: str = LOOPBACK_HOST,
    port: int = 8000,
    api_key_env: str = "VLMRB_API_KEY",
    accelerator: str = "auto",
    devices: int | list[int] | str = "auto",
    workers_per_device: int = 1,
    max_request_mb: float = 64.0,
    batch_wait_ms: float = 10.0,
    timeout_s: float = 100.0,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> int:
    """Serves the scorer of a configuration until Ctrl-C or SIGTERM; configs/scorer/remote.yaml is the other end.

    POST /score takes clips; GET /health says whether they are taken (open to all), /info who scores, /metrics how
    much and how fast (for Prometheus).

    Args:
        configs: configurations with a scoring section, later ones over earlier ones (-c FILE -c FILE …).
        host: address to listen on; anything but this machine alone (127.0.0.1) needs an API key.
        port: 1024 to 65535.
        api_key_env: environment variable with the API key that clients must send; all are let in if it is not set.
        accelerator: cpu, cuda or auto.
        devices: number of GPUs, or a list of them; auto is all.
        workers_per_device: processes with a scorer each. Higher → more clips/s while cores and memory last.
        max_request_mb: MiB of a request as sent; larger ones are refused.
        batch_wait_ms: milliseconds to wait for further requests to score together. Higher → fuller batches from
            several runs, later answers.
        timeout_s: seconds until a request is answered, whatever happens.
        tls_cert: certificate file (PEM), to serve https.
        tls_key: its private key.

    Returns:
        The exit code: 130 after Ctrl-C, 143 after SIGTERM, 1 if the server ended by itself.
    """
    if host not in HOSTS:
        raise ValueError(f"host={host} must be one of {', '.join(HOSTS)}")
    if host != LOOPBACK_HOST and not os.environ.get(api_key_env):
        raise ValueError(
            f"host={host} is open to other machines: set a key first (export {api_key_env}=…), or serve on "
            f"{LOOPBACK_HOST} and come through an SSH tunnel"
        )
    if not 1024 <= port <= 65535:
        raise ValueError(f"port={port} must lie between 1024 and 65535")
    if accelerator not in ("auto", "cpu", "cuda"):
        raise ValueError(f"accelerator={accelerator} must be auto, cpu or cuda")
    if isinstance(devices, str) and devices != "auto":
        raise ValueError(f"devices={devices} must be a number, a list of numbers or auto")
    numbers = devices if isinstance(devices, list) else [devices - 1] if isinstance(devices, int) else [0]
    if not numbers or min(numbers) < 0:
        raise ValueError(f"devices={devices} must be at least 1, a list of GPUs such as [0, 1], or auto")
    positive = {"workers_per_device": workers_per_device, "max_request_mb": max_request_mb, "timeout_s": timeout_s}
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")
    if not batch_wait_ms >= 0:
        raise ValueError(f"batch_wait_ms={batch_wait_ms} must not be negative")
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("tls_cert and tls_key go together: name both files, or neither")
    for file in (*configs, *filter(None, (tls_cert, tls_key))):
        if not Path(file).is_file():
            raise ValueError(f"{file} is no file")
    if tls_cert is not None:
        _require_certificate(tls_cert, tls_key)
    _require_free(host, port)
    if find_spec("litserve") is None:
        raise ValueError("serving needs LitServe: pip install 'vlmrb[server]'")
    options = {
        **positive,
        "configs": configs,
        "host": host,
        "port": port,
        "api_key_env": api_key_env,
        "accelerator": accelerator,
        "devices": devices,
        "batch_wait_ms": batch_wait_ms,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
    }
    with tempfile.TemporaryDirectory(prefix="vlmrb-serve-") as folder:  # here, as the one that is not killed
        return _supervise({**options, "folder": folder})


def _require_certificate(tls_cert: str, tls_key: str | None) -> None:
    """Refuses files that make no https: the server would find out in a thread of its own, and stay without one."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls_cert, tls_key)
    except OSError as error:  # as which SSLError counts
        raise ValueError(
            f"tls_cert={tls_cert} and tls_key={tls_key} are no certificate and its private key in PEM ({error})"
        ) from error


def _require_free(host: str, port: int) -> None:
    """Refuses an address that another program listens on."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended holds nothing
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port={port} cannot be had on {host} ({error.strerror}): choose another") from error


def _supervise(options: dict[str, Any]) -> int:
    """Runs the server in a session of its own and ends all of it together.

    LitServe starts a process for each worker and more; ended alone, its main process would leave them running.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            _kill(child)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "vlmrb.serving.child", json.dumps(options), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if not received:
            child.wait()
    finally:
        _kill(child)
        child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        logger.info("scoring server ended by %s", signal.Signals(received[0]).name)
        return 128 + received[0]
    if child.returncode < 0:  # else it has said itself why
        logger.error(
            "the scoring server was killed (%s): look for what ended it, such as a lack of memory, and start it again",
            signal.Signals(-child.returncode).name,
        )
    return 1


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills the server with all that it has started: models in memory, nothing to save, and clients ask again."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        logger.debug("nothing of the server is left")
