"""Scoring servers for tests: the real one as a subprocess, and one that misbehaves as told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import urllib3

Reply = tuple[int, bytes]
TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(url: str, key: str | None = None) -> Reply:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    response = urllib3.request("GET", url, headers=headers, retries=False, timeout=5)
    return response.status, response.data


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def members(session: int) -> set[int]:
    """Returns the processes of a session that still run."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session, …
            if int(fields[3]) == session and fields[0] != "Z":
                found.add(int(folder.name))
    return found


class Served:
    """A real `vlmrb serve`, running.

    Attributes:
        url: its address.
        process: the supervisor.
        log: file with all that it says.
    """

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path, scheme: str = "http") -> None:
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.process = process
        self.log = log

    @property
    def session(self) -> int:
        """The server's session, led by the supervisor's one child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(lambda: bool(children.read_text()))
        return int(children.read_text().split()[0])

    def workers(self) -> list[int]:
        """Process ids of the workers that have said they are ready and still live."""
        said = [int(line.rpartition("process ")[2][:-1]) for line in self._lines() if "is ready on" in line]
        return [pid for pid in said if pid in members(self.session)]

    def healthy(self, ready: int = 1) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server has ended: {self.log.read_text()}")
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            status, content = get(f"{self.url}/health")
            return status == 200 and json.loads(content)["ready"] >= ready
        return False

    def metric(self, name: str, key: str | None = None) -> float:
        page = get(f"{self.url}/metrics", key)[1].decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@contextlib.contextmanager
def serving(
    folder: Path,
    scorer: Mapping[str, Any],
    *options: str,
    port: int | None = None,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[Served]:
    """Serves a scorer (class path and init_args) until the block ends.

    Args:
        folder: for the configuration and the log.
        scorer: the ``scoring.scorer`` section.
        *options: of `vlmrb serve`.
        port: a free one if not given.
        workers: processes, all of which are waited for.
        env: added to the environment.
        wait: for the server to be ready.
    """
    port = port or free_port()
    name = f"served-{port}-{len(list(folder.glob('served-*')))}"
    config, log = folder / f"{name}.yaml", folder / f"{name}.log"
    config.write_text(json.dumps({"scoring": {"scorer": dict(scorer), "backend": "process", "batch_clips": 16}}))
    command = ["-m", "vlmrb.cli", "serve", "-c", str(config), "--port", str(port), "--accelerator", "cpu"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command, "--workers_per_device", str(workers), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), **(env or {})},
            stdout=file,
            stderr=file,
        )
    served = Served(port, process, log, "https" if "--tls_cert" in options else "http")
    try:
        if wait:
            wait_for(lambda: served.healthy(workers))
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


class Scripted:
    """An HTTP server that answers each request with what `script` says, given path, body and headers.

    Attributes:
        url: its address.
        seen: paths asked for, in order.
    """

    def __init__(self, script: Callable[[str, bytes, Mapping[str, str]], Reply | None], port: int = 0) -> None:
        self.seen: list[str] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:  # noqa: N802 — the name that the library calls
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen.append(self.path)
                reply = script(self.path, body, self.headers)
                if reply is None:
                    self.close_connection = True
                    return
                status, content = reply
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(content)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None:
                pass  # a client that hangs up is what some tests are about

        self._server = Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()
