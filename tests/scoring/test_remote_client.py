"""The client's patience, and where it ends: each way in which a server can fail."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
from servers import Reply, Scripted, free_port

from vlmrb.scoring import remote
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.serving.client import Client, RefusedError, RemoteError
from vlmrb.serving.wire import Identity

KEY = "VLMRB_TEST_KEY"
QUICK = {"timeout_s": 1.0, "backoff_s": 0.02, "breaker_s": 0.2}


def number(content: bytes) -> int:
    return int(content)


def replies(*answers: Reply | None) -> Callable[[str, bytes, Mapping[str, str]], Reply | None]:
    """Gives these answers one after the other, the last one for ever."""
    left = list(answers)
    return lambda path, body, headers: left.pop(0) if len(left) > 1 else left[0]


def ask(client: Client, deadline_s: float = 5.0, **options: object) -> int:
    return client.ask("/score", number, body=b"clips", deadline_s=deadline_s, **options)


@pytest.mark.parametrize("first", [(503, b"loading"), (429, b"busy"), (500, b"boom"), (200, b"garbage"), None])
def test_a_passing_failure_is_tried_again(first):
    with Scripted(replies(first, (200, b"7"))) as server:
        client = Client(server.url, KEY, **QUICK)
        assert ask(client) == 7
        assert (client.attempts, client.failures, len(server.seen)) == (2, 1, 2)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [((500, b'{"detail": "no such thing"}'), "no such thing"), ((200, b"<html>"), "invalid literal")],
)
def test_bad_answers_are_not_asked_for_ever(answer, reason):
    with Scripted(replies(answer)) as server:
        client = Client(server.url, KEY, **QUICK)
        with pytest.raises(RemoteError, match=reason):
            ask(client, deadline_s=60)
        assert len(server.seen) == 3


@pytest.mark.parametrize("status", [302, 400, 404, 413])
def test_a_request_that_is_refused_is_not_repeated(status):
    with Scripted(replies((status, b"no"))) as server:
        with pytest.raises(RemoteError, match=f"{server.url}: status {status}"):
            ask(Client(server.url, KEY, **QUICK), deadline_s=60 if status != 302 else 0)
        assert len(server.seen) == 1


def test_a_page_of_html_is_passed_on_in_one_line():
    page = replies((404, b"<html>\n  <h1>Not\n  here</h1>\n</html>"))
    with Scripted(page) as server, pytest.raises(RefusedError) as caught:
        ask(Client(server.url, KEY, **QUICK))
    assert str(caught.value) == f"{server.url}: status 404, <html> <h1>Not here</h1> </html>"


def test_a_server_that_comes_back_before_the_deadline_costs_nothing():
    port = free_port()
    client = Client(f"http://127.0.0.1:{port}", KEY, **QUICK)
    server: list[Scripted] = []
    timer = threading.Timer(0.5, lambda: server.append(Scripted(replies((200, b"7")), port)))
    timer.start()
    assert ask(client, deadline_s=20) == 7
    server[0].__exit__()


def test_a_missing_server_is_given_up_at_the_deadline():
    client = Client(f"http://127.0.0.1:{free_port()}", KEY, **QUICK)
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"cannot be reached .*refused.*gave up after 0.5 s"):
        ask(client, deadline_s=0.5)
    assert time.monotonic() - began < 0.5 + 0.5


def test_no_deadline_means_one_attempt_at_each_server():
    with Scripted(replies((503, b""))) as first, Scripted(replies((503, b""))) as second:
        with pytest.raises(RemoteError):
            ask(Client([first.url, second.url], KEY, **QUICK), deadline_s=0)
        assert len(first.seen) == len(second.seen) == 1


def slow(path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    time.sleep(0.7)
    return 200, b"7"


def test_a_server_that_hangs_is_left_for_another_one():
    with Scripted(slow) as hung, Scripted(replies((200, b"7"))) as other:
        client = Client([hung.url, other.url], KEY, **{**QUICK, "timeout_s": 0.2})
        began = time.monotonic()
        assert ask(client) == 7
        assert time.monotonic() - began < 0.6
        assert len(hung.seen) == len(other.seen) == 1


def test_a_hung_server_alone_is_named_with_its_time():
    with Scripted(slow) as hung, pytest.raises(RemoteError, match=r"did not answer within 0.2 s"):
        ask(Client(hung.url, KEY, **{**QUICK, "timeout_s": 0.2}), deadline_s=10)


def test_an_endless_answer_is_cut_off():
    with Scripted(replies((200, b"7" * (17 << 20)))) as server, pytest.raises(RemoteError, match="without end"):
        ask(Client(server.url, KEY, **QUICK))


def test_an_answer_that_trickles_in_takes_no_longer_than_an_attempt_may():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the client hangs up
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while True:
                    connection.sendall(b"7")
                    time.sleep(0.02)

        threading.Thread(target=trickle, daemon=True).start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY, **{**QUICK, "timeout_s": 0.3})
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"without end .*within 0\.3 s"):
            ask(client, deadline_s=0.0)
        assert time.monotonic() - began < 3.0  # a thousand bytes would take 20 s


def test_the_parts_of_a_batch_that_is_too_large_share_its_deadline(monkeypatch):
    scorer = RemoteScorer("http://127.0.0.1:1", deadline_s=10, timeout_s=5)
    scorer._identity = Identity("far", "1", "", "snapshots", None)
    scorer._max_bytes = 1
    clock = SimpleNamespace(now=100.0)
    allowed = []

    def ask(path, read, *, deadline_s, **options):
        allowed.append(deadline_s)
        clock.now += 4.0
        return np.full(1, 0.5, np.float32), {}

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(scorer._client, "ask", ask)
    clips = ClipBatch(np.arange(4), np.zeros((4, 3, 2), np.uint8), np.full(4, 3))
    assert len(scorer.score(clips)) == 4
    assert allowed == [10, 6, 2, 0]


def test_servers_take_turns():
    with Scripted(replies((200, b"1"))) as first, Scripted(replies((200, b"2"))) as second:
        client = Client([first.url, second.url], KEY, **QUICK)
        assert [ask(client) for _ in range(4)] == [1, 2, 1, 2]


@pytest.mark.slow
def test_a_failing_server_is_left_alone_for_a_while_and_then_tried_once():
    answers: list[Reply] = [(503, b"")]
    with Scripted(lambda *_: answers[0]) as bad, Scripted(replies((200, b"2"))) as good:
        client = Client([bad.url, good.url], KEY, **{**QUICK, "breaker_s": 3600})

        def an_hour_passes() -> None:
            client._servers[0].rests_until -= 3600

        for _ in range(20):
            assert ask(client) == 2
        assert len(bad.seen) == 3
        assert client.resting == 1
        an_hour_passes()
        for _ in range(4):
            assert ask(client) == 2
        assert len(bad.seen) == 4  # one request found out that it is not back
        answers[0] = (200, b"1")
        an_hour_passes()
        assert {ask(client) for _ in range(4)} == {1, 2}
        assert client.resting == 0


@pytest.mark.slow
def test_pauses_differ_from_run_to_run():
    def pauses() -> list[float]:
        times: list[float] = []

        def script(*_: object) -> Reply:
            times.append(time.monotonic())
            return 503, b""

        with Scripted(script) as server, pytest.raises(RemoteError):
            ask(Client(server.url, KEY, backoff_s=0.1, breaker_failures=99), deadline_s=3.0)
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    first, second = pauses(), pauses()
    assert first[0] >= 0.05
    assert first[2] >= 0.2  # doubled twice, shortened by no more than a half
    assert max(abs(a - b) for a, b in zip(first, second, strict=False)) > 0.002


@pytest.mark.parametrize(("status", "reason"), [(401, f"API key in .{KEY}"), (409, "here scores another")])
def test_a_wrong_key_or_scorer_is_said_at_once_when_impatient_and_waited_for_when_patient(status, reason):
    with Scripted(replies((status, b"here scores another"), (status, b""), (200, b"7"))) as server:
        client = Client(server.url, KEY, **QUICK)
        with pytest.raises(RefusedError, match=reason):
            ask(client, patient=False, deadline_s=60)
        assert len(server.seen) == 1
        time.sleep(0.2)
        assert ask(client) == 7


def test_a_server_with_another_scorer_is_left_for_the_right_one():
    with Scripted(replies((409, b"another"))) as wrong, Scripted(replies((200, b"2"))) as right:
        client = Client([wrong.url, right.url], KEY, **{**QUICK, "breaker_s": 60})
        assert [ask(client) for _ in range(6)] == [2] * 6
        assert len(wrong.seen) == 1


def test_the_key_is_read_from_the_environment_and_nowhere_else(monkeypatch):
    given: list[str | None] = []

    def script(path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        given.append(headers.get("Authorization"))
        return 200, b"7"

    with Scripted(script) as server:
        client = Client(server.url, KEY, **QUICK)
        ask(client)
        monkeypatch.setenv(KEY, "secret")
        ask(client)
        assert given == [None, "Bearer secret"]
        assert b"secret" not in pickle.dumps(client)


def test_a_key_on_an_open_wire_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv(KEY, "secret")
    with caplog.at_level(logging.WARNING):
        Client("http://192.0.2.1:8000", KEY)._open_pool()
        Client("https://192.0.2.1:8000", KEY)._open_pool()
        Client("http://127.0.0.1:8000", KEY)._open_pool()
    assert [record.message for record in caplog.records] == [
        "http://192.0.2.1:8000: the API key travels unencrypted; use https"
    ]


def test_connections_stay_behind_when_a_client_travels():
    with Scripted(replies((200, b"7"))) as server:
        client = Client(server.url, KEY, **QUICK)
        ask(client)
        assert ask(pickle.loads(pickle.dumps(client))) == 7


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        ([], "names no server"),
        ("127.0.0.1:8000", "no address"),
        ("ftp://host", "no address"),
        ("http://", "no address"),
        ("http://host:80x", "no address"),
        ("http://host:0", "no address"),
        ("http://user:secret@host", "key belongs"),
        (["http://a:1", "http://a:1/"], "twice"),
    ],
)
def test_addresses_that_cannot_work_are_refused(urls, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        Client(urls, KEY)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["timeout_s", "backoff_s", "breaker_s", "breaker_failures"])
def test_settings_that_cannot_work_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        Client("http://a", KEY, **{name: 0})
