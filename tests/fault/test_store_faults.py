"""What the S3 store does when the server lies, dies, stalls, refuses, or is not the one that was meant."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ray_goodput.config import StoreSpec
from ray_goodput.errors import ObjectNotFoundError, StorageAccessError, StorageError, UploadError
from ray_goodput.storage import cloud, open_store
from ray_goodput.storage.cloud import CloudStore
from ray_goodput.storage.retry import RetryPolicy
from servers import JuiceFSGateway, MotoServer, free_port, s3_client

MIB = 1 << 20
BRIEF = RetryPolicy(total_s=1.0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[JuiceFSGateway]:
    """A gateway of one's own, to be killed."""
    with JuiceFSGateway(tmp_path / "gateway") as server:
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


class ScriptedServer:
    """An HTTP server whose answers the test gives: `answer(method, path, n)` -> (status, headers, body)."""

    def __init__(self, answer: Callable[[str, str, int], tuple[int, dict[str, str], bytes]]) -> None:
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                n = len(outer.requests)
                outer.requests.append(f"{self.command} {self.path}")
                status, headers, body = answer(self.command, self.path, n)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def store(self, **arguments: Any) -> CloudStore:
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        options = {"key": "k", "secret": "hush", "endpoint_url": endpoint}
        return CloudStore("s3://bucket/p", options, **{"retry": BRIEF, **arguments})

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def head(size: int, etag: str = '"e"') -> tuple[int, dict[str, str], bytes]:
    modified = "Wed, 01 Jan 2025 00:00:00 GMT"
    return 200, {"Content-Length": str(size), "ETag": etag, "Last-Modified": modified}, b""


@pytest.mark.parametrize("wrong", [{"secret": "hush-hush"}, {"key": "nobody-knows"}])
def test_a_wrong_key_is_an_access_error_at_once_that_tells_the_place_and_no_secret(
    juicefs_gateway: JuiceFSGateway, wrong: dict[str, str], tmp_path: Path
) -> None:
    store = open_store(StoreSpec(uri="s3://vol/wrong", options={**juicefs_gateway.storage_options, **wrong}))
    (tmp_path / "file").write_bytes(b"1" * 40 * MIB)
    started_s = time.monotonic()
    for call in (
        lambda: store.put("k", b"1"),
        lambda: store.get("k"),
        lambda: store.head("k"),
        lambda: store.create("k", b"1"),
        lambda: list(store.list()),
        lambda: store.list_folders(),
        lambda: store.delete(["k"]),
        lambda: store.upload_file("k", tmp_path / "file"),
        lambda: store.download_file("k", tmp_path / "down"),
        lambda: store.abort_uploads(),
    ):
        with pytest.raises(StorageAccessError) as caught:
            call()
        text = str(caught.value)
        assert juicefs_gateway.endpoint_url in text and "bucket vol" in text and "storage_options" in text
        assert "hush-hush" not in text and juicefs_gateway.storage_options["secret"] not in text
        assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert time.monotonic() - started_s < 20, "a wrong key was tried again and again"


def test_an_unknown_bucket_is_an_access_error_whatever_is_asked(juicefs_gateway: JuiceFSGateway) -> None:
    spec = StoreSpec(uri="s3://no-such-bucket/p", options=juicefs_gateway.storage_options)
    for call in (
        lambda store: store.head("k"),
        lambda store: store.get("k"),
        lambda store: store.put("k", b"1"),
        lambda store: store.create("k", b"1"),
        lambda store: store.list(),
        lambda store: store.delete(["k"]),
    ):
        with pytest.raises(StorageAccessError, match="bucket no-such-bucket"):
            call(open_store(spec))


def test_a_refused_connection_is_tried_within_the_budget_and_then_names_the_endpoint() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = CloudStore("s3://bucket/p", {"key": "k", "secret": "hush", "endpoint_url": endpoint}, retry=BRIEF)
    started_s = time.monotonic()
    with pytest.raises(StorageError, match=rf"{endpoint}.*server is up") as caught:
        store.put("k", b"1")
    assert not isinstance(caught.value, StorageAccessError)
    assert "no connection (ConnectionRefused)" in str(caught.value)
    assert 0.3 < time.monotonic() - started_s < 10


def test_no_credentials_anywhere_is_an_access_error_that_lists_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = CloudStore("s3://bucket/p", {"endpoint_url": f"http://127.0.0.1:{free_port()}"}, retry=BRIEF)
    with pytest.raises(StorageAccessError, match="no credentials found"):
        store.get("k")


@pytest.mark.parametrize("source", ["variables", "profile"])
def test_credentials_and_endpoint_come_from_the_environment(
    juicefs_gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    options = juicefs_gateway.storage_options
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", options["endpoint_url"])
    if source == "variables":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    else:
        profile = f"[default]\naws_access_key_id = {options['key']}\naws_secret_access_key = {options['secret']}\n"
        (tmp_path / "credentials").write_text(profile)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = open_store(StoreSpec(uri=f"s3://vol/from-{source}"))
    store.put("k", b"1")
    assert store.get("k") == b"1"
    assert store.abort_uploads() == 0


def test_a_server_that_restarts_is_waited_for(gateway: JuiceFSGateway) -> None:
    store = CloudStore("s3://vol/p", gateway.storage_options)
    store.put("before", b"1")
    gateway.kill()
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(store.put, "during", b"2"),
            pool.submit(store.get, "before"),
            pool.submit(lambda: list(store.list("nothing"))),
        ]
        gateway.start()
        assert [call.result(timeout=45) for call in calls] == [None, b"1", []]
    assert store.get("during") == b"2"


def kill_at_piece(gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch, *, piece: int, restart: bool) -> None:
    """The gateway dies when a multipart upload reads its n-th piece, the first time."""
    real, struck = cloud.file_pieces, []

    def pieces(*arguments: Any) -> Iterator[bytes]:
        for n, data in enumerate(real(*arguments)):
            if n == piece and not struck:
                struck.append(n)
                gateway.kill()
                if restart:
                    gateway.start()
            yield data

    monkeypatch.setattr(cloud, "file_pieces", pieces)


@pytest.mark.parametrize("piece", [1, 4])
def test_a_server_killed_in_mid_upload_leaves_nothing_under_the_final_name(
    gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, piece: int
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(MIB) * 48)
    store = CloudStore("s3://vol/p", gateway.storage_options, retry=BRIEF, part_bytes=8 * MIB, max_concurrency=2)
    store.put("old", b"kept")
    kill_at_piece(gateway, monkeypatch, piece=piece, restart=False)
    with pytest.raises(StorageError, match="p/new"):
        store.upload_file("new", tmp_path / "file")
    gateway.start()
    assert [info.key for info in store.list()] == ["old"]
    with pytest.raises(ObjectNotFoundError):
        store.head("new")
    assert store.abort_uploads() == 1
    assert store.abort_uploads() == 0
    store.upload_file("new", tmp_path / "file")
    assert store.head("new").size_bytes == 48 * MIB


def test_a_writer_killed_in_mid_upload_leaves_only_what_abort_uploads_removes(juicefs_gateway: JuiceFSGateway) -> None:
    script = textwrap.dedent(f"""
        import os, signal
        from ray_goodput.storage import cloud
        def dying(*args):
            yield b"x" * (8 << 20)
            yield b"y" * (8 << 20)
            os.kill(os.getpid(), signal.SIGKILL)
        cloud.file_pieces = dying
        store = cloud.CloudStore("s3://vol/dying", {juicefs_gateway.storage_options!r}, part_bytes=8 << 20)
        store.upload_file("object", "/dev/null", size_bytes=24 << 20)
    """)
    assert subprocess.run([sys.executable, "-c", script], timeout=50).returncode == -signal.SIGKILL
    store = CloudStore("s3://vol/dying", juicefs_gateway.storage_options)
    assert list(store.list()) == []
    assert store.abort_uploads("another") == 0
    assert store.abort_uploads() == 1
    assert store.abort_uploads() == 0


def test_an_upload_survives_a_server_that_dies_and_comes_back(
    gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = os.urandom(MIB) * 48
    (tmp_path / "file").write_bytes(data)
    store = CloudStore("s3://vol/p", gateway.storage_options, part_bytes=8 * MIB, max_concurrency=2)
    kill_at_piece(gateway, monkeypatch, piece=3, restart=True)
    store.upload_file("new", tmp_path / "file")
    store.download_file("new", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_a_server_that_stalls_is_given_up_after_the_request_timeout(gateway: JuiceFSGateway) -> None:
    store = CloudStore("s3://vol/p", gateway.storage_options, retry=BRIEF, request_timeout_s=1.0)
    store.put("k", b"1")
    gateway.pause()
    try:
        for call in (lambda: store.get("k"), lambda: store.put("k", b"2")):
            with pytest.raises(StorageError, match="timed out"):
                call()
    finally:
        gateway.resume()
    assert store.get("k") in (b"1", b"2")


def test_success_reported_for_an_object_that_never_arrived_is_an_upload_error(tmp_path: Path) -> None:
    def answer(method: str, path: str, n: int) -> tuple[int, dict[str, str], bytes]:
        return (200, {"ETag": '"e"'}, b"") if method == "PUT" else (404, {}, b"")

    (tmp_path / "file").write_bytes(b"x" * 10)
    with ScriptedServer(answer) as server:
        for call in (
            lambda: server.store().put("k", b"1"),
            lambda: server.store().upload_file("k", tmp_path / "file"),
            lambda: server.store().create("k", b"1"),
        ):
            with pytest.raises(UploadError, match="is not there"):
                call()


def test_an_object_that_arrived_short_is_removed_and_is_an_upload_error() -> None:
    def answer(method: str, path: str, n: int) -> tuple[int, dict[str, str], bytes]:
        return head(3) if method == "HEAD" else (200, {"ETag": '"e"'}, b"")

    with ScriptedServer(answer) as server, pytest.raises(UploadError, match="3 bytes after an upload of 5 bytes"):
        server.store().put("k", b"12345")
    assert server.requests[-1] == "DELETE /bucket/p/k"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_asked_again(status: int) -> None:
    def answer(method: str, path: str, n: int) -> tuple[int, dict[str, str], bytes]:
        if n < 3:
            return status, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
        return head(1) if method == "HEAD" else (200, {"ETag": '"e"'}, b"")

    with ScriptedServer(answer) as server:
        server.store(retry=RetryPolicy(total_s=20.0)).put("k", b"1")
    assert len(server.requests) == 5


def test_a_body_that_is_cut_off_is_never_taken_for_the_object(tmp_path: Path) -> None:
    def answer(method: str, path: str, n: int) -> tuple[int, dict[str, str], bytes]:
        status, headers, _ = head(10)
        body = b"0123456789" if n >= 2 else b"0123"
        return status, {**headers, "Content-Range": "bytes 0-9/10"}, body

    with ScriptedServer(answer) as server:
        assert server.store(retry=RetryPolicy(total_s=20.0)).get("k") == b"0123456789"


def test_a_wrong_region_or_redirect_is_an_access_error() -> None:
    def answer(method: str, path: str, n: int) -> tuple[int, dict[str, str], bytes]:
        return 301, {}, b"<Error><Code>PermanentRedirect</Code><Message>Use another endpoint.</Message></Error>"

    with ScriptedServer(answer) as server, pytest.raises(StorageAccessError, match="region_name"):
        server.store().get("k")


def test_exactly_one_of_many_creators_wins_where_the_server_can_tell(moto: MotoServer) -> None:
    stores = [CloudStore(f"{moto.uri}/race", moto.storage_options) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(lambda i: stores[i].create("lock", b"%d" % i), range(6)))
    assert sum(won) == 1
    assert stores[0].get("lock") == b"%d" % won.index(True)


def test_names_on_the_server_are_the_keys_as_given(moto: MotoServer) -> None:
    store, client = CloudStore(f"{moto.uri}/names", moto.storage_options), s3_client(moto)
    names = ["plain", "ü/日本", "a b+c%20d#e?f=g&h", "'quoted'/(1)*.bin", ".metadata"]
    for name in names:
        store.put(name, name.encode())
    found = client.list_objects_v2(Bucket=moto.bucket, Prefix="names/")["Contents"]
    assert sorted(entry["Key"] for entry in found) == sorted(f"names/{name}" for name in names)
    client.put_object(Bucket=moto.bucket, Key="names/by/another#client%41.bin", Body=b"1")
    assert store.get("by/another#client%41.bin") == b"1"
    client.put_object(Bucket=moto.bucket, Key="names/by/", Body=b"")
    assert [info.key for info in store.list("by")] == ["by/another#client%41.bin"]
    assert "by" not in [info.key for info in store.list()]


def test_an_object_replaced_while_it_is_downloaded_comes_down_whole_and_new(
    juicefs_gateway: JuiceFSGateway, moto: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for server in (juicefs_gateway, moto):
        store = CloudStore(f"{server.uri}/replaced", server.storage_options)
        store.put("k", b"a" * 70 * MIB)
        real, fetched = store._fetch, []

        def fetch(
            key: str, path: str, start: int, *rest: Any, store: Any = store, real: Any = real, seen: Any = fetched
        ):
            if start and not seen:
                seen.append(start)
                store.put("k", b"b" * 69 * MIB)
            return real(key, path, start, *rest)

        monkeypatch.setattr(store, "_fetch", fetch)
        monkeypatch.setattr(store, "_max_concurrency", 1)
        info = store.download_file("k", tmp_path / "file")
        assert fetched and info.size_bytes == 69 * MIB
        assert (tmp_path / "file").read_bytes() == b"b" * 69 * MIB


def test_a_store_carried_over_a_fork_says_so_instead_of_hanging() -> None:
    script = textwrap.dedent("""
        import os
        from ray_goodput.errors import StorageError
        from ray_goodput.storage.cloud import CloudStore
        store = CloudStore("s3://bucket/p", {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"})
        if os.fork() == 0:
            try:
                store.get("k")
            except StorageError as error:
                os._exit(7 if "fork" in str(error) else 1)
            os._exit(2)
        raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert subprocess.run([sys.executable, "-c", script], timeout=50).returncode == 7
