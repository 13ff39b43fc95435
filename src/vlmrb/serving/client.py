"""HTTP for scorers that live elsewhere: several servers, retries with back-off and jitter, a deadline for it all."""

from __future__ import annotations

import copy
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    import urllib3

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 10.0
MAX_BAD_ANSWERS = 3  # of one request: a scorer that fails on these clips fails every time
MAX_ANSWER_BYTES = 16 << 20
MAX_TEXT = 300  # characters of a server's error that are passed on
MIN_ATTEMPT_S = 2.0  # what an attempt may take even if the deadline is nearer
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NOT_READY = (429, 502, 503)  # busy, restarting, or loading: worth waiting for


class RemoteError(RuntimeError):
    """No server gave a usable answer: an ordinary failure, after which clips may be tried again."""


class RefusedError(RemoteError):
    """The servers were reached and said no: asking again in the same way is of no use."""


class _UnreachableError(RemoteError):
    """A server is not there, or not yet."""


class _UnsuitableError(RemoteError):
    """A server has another key or another scorer; the others may do, or itself once that is put right."""


@dataclass
class _Server:
    """What is known of one server.

    Attributes:
        url: base address.
        failures: in a row.
        rests_until: of `time.monotonic`; the circuit is open until then.
        trouble: what went wrong last, empty after a success.
        unsuitable: whether that is its key or scorer.
    """

    url: str
    failures: int = 0
    rests_until: float = 0.0
    trouble: str = ""
    unsuitable: bool = False


class Client:
    """Asks one of several equal servers, and the next one if that fails.

    Servers take turns. After ``breaker_failures`` failures in a row a server is left alone for ``breaker_s``, then one
    request finds out whether it is back. While no server is there, a request waits with growing random pauses until
    its deadline; after three bad answers (errors, time-outs, garbage) it gives up earlier. Several threads may ask.

    Args:
        urls: base addresses, ``http://host:port`` or ``https://…``.
        api_key_env: environment variable that holds the API key; if it is not set, none is sent.
        timeout_s: seconds one attempt may take.
        backoff_s: seconds of the first pause, doubled with each further round through the servers, at most 10. Each
            is shortened at random by up to a half, so that many runs do not come back at the same moment.
        breaker_failures: failures in a row after which a server is left alone.
        breaker_s: seconds for which it is.
        ca_file: certificates to trust instead of the system's, for ``https`` with a private authority.
        connections: kept open to each server; as many as threads ask at a time.

    Attributes:
        attempts: requests sent.
        failures: requests sent that brought no usable answer.
        bytes_sent: in their bodies.

    Raises:
        ValueError: a setting cannot work.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        api_key_env: str,
        *,
        timeout_s: float = 60.0,
        backoff_s: float = 0.5,
        breaker_failures: int = 3,
        breaker_s: float = 10.0,
        ca_file: str | None = None,
        connections: int = 1,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("backoff_s", backoff_s), ("breaker_s", breaker_s)):
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if breaker_failures < 1:
            raise ValueError(f"breaker_failures={breaker_failures} must be at least 1")
        self._api_key_env = api_key_env
        self._timeout_s, self._backoff_s = timeout_s, backoff_s
        self._breaker_failures, self._breaker_s = breaker_failures, breaker_s
        self._ca_file = ca_file
        self._connections = connections
        self._servers = [_Server(url) for url in _checked(urls)]
        self._turn = 0
        self._jitter = random.Random()  # of its own: the run's random streams are left alone
        self._pool: urllib3.PoolManager | None = None
        self._lock = threading.Lock()
        self.attempts = self.failures = self.bytes_sent = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves open connections behind."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_pool", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up with connections of its own."""
        self.__dict__.update(state, _pool=None, _lock=threading.Lock())

    @property
    def urls(self) -> list[str]:
        """The servers' base addresses."""
        return [server.url for server in self._servers]

    def each(self) -> list[Client]:
        """Returns a client for each server alone, with the same settings."""
        clients = [copy.copy(self) for _ in self._servers]
        for client, server in zip(clients, self._servers, strict=True):
            client._servers, client._turn = [_Server(server.url)], 0
        return clients

    @property
    def resting(self) -> int:
        """The number of servers that are left alone at present."""
        return sum(server.rests_until > time.monotonic() for server in self._servers)

    def ask(
        self,
        path: str,
        read: Callable[[bytes], T],
        *,
        deadline_s: float,
        body: bytes | None = None,
        content_type: str = "application/json",
        patient: bool = True,
    ) -> T:
        """Sends a request until a server has answered it.

        Args:
            path: appended to a server's address.
            read: makes the result of an answer's body; whatever `ValueError` it raises makes the answer a bad one.
            deadline_s: seconds in all.
            body: sent with POST; ``None`` is a GET.
            content_type: of the body.
            patient: wait for servers with another key or scorer, which may be put right, as for missing ones.

        Returns:
            What ``read`` made of the answer.

        Raises:
            RefusedError: the request was refused, for a reason that stays.
            RemoteError: no usable answer in time.
        """
        deadline = time.monotonic() + deadline_s
        rounds = bad = 0
        while True:
            for server in self._in_turn():
                try:
                    found = read(self._attempt(server, path, body, content_type, deadline))
                except RefusedError as error:
                    raise RefusedError(f"{server.url}: {error}") from error
                except _UnsuitableError as error:
                    self._failed(server, str(error), unsuitable=True)
                except _UnreachableError as error:
                    self._failed(server, str(error))
                except (RemoteError, ValueError) as error:
                    self._failed(server, str(error))
                    bad += 1
                else:
                    server.failures, server.trouble, server.unsuitable = 0, "", False
                    return found
                if bad >= MAX_BAD_ANSWERS:
                    raise RemoteError(self._troubles())
            if not patient and all(server.unsuitable for server in self._servers):
                raise RefusedError(self._troubles())
            rounds += 1
            pause = min(self._backoff_s * 2 ** (rounds - 1), MAX_BACKOFF_S) * self._jitter.uniform(0.5, 1.0)
            back = min(server.rests_until for server in self._servers) - time.monotonic()
            if time.monotonic() + max(pause, back) >= deadline:
                raise RemoteError(f"{self._troubles()} (gave up after {deadline_s:.3g} s)")
            time.sleep(max(pause, back))

    def close(self) -> None:
        """Closes connections; another request would open new ones."""
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    def _in_turn(self) -> list[_Server]:
        """Returns the servers that are not left alone, another one first each time."""
        with self._lock:
            first, self._turn = self._turn, (self._turn + 1) % len(self._servers)
        servers = self._servers[first:] + self._servers[:first]
        return [server for server in servers if server.rests_until <= time.monotonic()]

    def _failed(self, server: _Server, trouble: str, unsuitable: bool = False) -> None:
        with self._lock:
            self.failures += 1
            server.failures += 1
            server.trouble, server.unsuitable = trouble, unsuitable
            if unsuitable or server.failures >= self._breaker_failures:
                server.rests_until = time.monotonic() + self._breaker_s

    def _troubles(self) -> str:
        return "; ".join(f"{server.url}: {server.trouble}" for server in self._servers if server.trouble)

    def _attempt(self, server: _Server, path: str, body: bytes | None, content_type: str, deadline: float) -> bytes:
        import urllib3

        allowed_s = min(self._timeout_s, max(deadline - time.monotonic(), MIN_ATTEMPT_S))
        ends = time.monotonic() + allowed_s
        with self._lock:
            self.attempts += 1
            self.bytes_sent += len(body or b"")
        try:
            response = self._open_pool().request(
                "GET" if body is None else "POST",
                server.url + path,
                body=body,
                headers={**self._key(), **({} if body is None else {"Content-Type": content_type})},
                timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, allowed_s), read=allowed_s),
                retries=False,  # ours know the other servers
                redirect=False,
                preload_content=False,
            )
            content = bytearray()
            while part := response.read1(1 << 16):  # what is there; a full part of a trickle would be waited for
                content += part
                if len(content) > MAX_ANSWER_BYTES or time.monotonic() > ends:
                    response.close()
                    raise RemoteError(f"an answer without end ({len(content)} bytes within {allowed_s:.3g} s)")
            response.release_conn()
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
            raise _UnreachableError(f"cannot be reached ({_reason(error)})") from error
        except urllib3.exceptions.ReadTimeoutError as error:
            raise RemoteError(f"did not answer within {allowed_s:.3g} s") from error
        except urllib3.exceptions.HTTPError as error:
            if "CERTIFICATE" in str(error) or isinstance(error, urllib3.exceptions.SSLError):
                raise _UnsuitableError(f"its certificate is not trusted ({_reason(error)}); see ca_file") from error
            raise _UnreachableError(f"broke the connection ({_reason(error)})") from error
        return self._content(response.status, bytes(content))

    def _content(self, status: int, content: bytes) -> bytes:
        if status == 200:
            return content
        text = " ".join(f"status {status}, {content[:MAX_TEXT].decode(errors='replace')}".split())
        if status in NOT_READY:
            raise _UnreachableError(text)
        if status in (401, 403):
            raise _UnsuitableError(f"refused the API key in ${self._api_key_env} ({text})")
        if status == 409:
            raise _UnsuitableError(text)
        if 400 <= status < 500:
            raise RefusedError(text)
        raise RemoteError(text)

    def _key(self) -> Mapping[str, str]:
        key = os.environ.get(self._api_key_env)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _open_pool(self) -> urllib3.PoolManager:
        import urllib3

        with self._lock:
            if self._pool is None:
                open_ones = [url for url in self.urls if urlsplit(url).scheme == "http" and not _is_local(url)]
                if open_ones and self._key():
                    logger.warning("%s: the API key travels unencrypted; use https", ", ".join(open_ones))
                self._pool = urllib3.PoolManager(ca_certs=self._ca_file, maxsize=self._connections)
            return self._pool


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in LOOPBACK


def _reason(error: Exception) -> str:
    inner = error.args[-1] if error.args else None
    if isinstance(inner, Exception):
        name, text = type(inner).__name__, " ".join(str(inner).split())
        return text if name in text else f"{name}: {text}"
    return str(error).rpartition(": ")[2] or type(error).__name__


def _has_sound_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0  # None leaves it the scheme's
    except ValueError:
        return False


def _checked(urls: str | Sequence[str]) -> list[str]:
    found = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
    if not found:
        raise ValueError("urls names no server; give one like http://127.0.0.1:8000")
    for url in found:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_sound_port(parts):
            raise ValueError(f"urls: {url!r} is no address like http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query:
            raise ValueError("urls must hold no user, password or query; the key belongs into api_key_env's variable")
    if len(set(found)) < len(found):
        raise ValueError(f"urls names a server twice: {', '.join(found)}")
    return found
