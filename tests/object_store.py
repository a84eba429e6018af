"""A real S3-compatible server for tests: moto's, a process of its own on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from jobs import remote

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "an-id",
    "AWS_SECRET_ACCESS_KEY": "tiger-8c1f",
    "AWS_EC2_METADATA_DISABLED": "true",
}
START_TIMEOUT_S = 30.0


class ObjectStore:
    """The server. Objects are in its memory: `suspend` makes it dumb, `stop` forgets them.

    checks_access: refuse who has no user there
    """

    def __init__(self, *, checks_access: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._environment = dict(os.environ)
        if checks_access:
            self._environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "0"
        self._process = self._start()
        self.files = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
        )

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def suspend(self) -> None:
        """It takes connections and says nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    # ---- what is in it -------------------------------------------------------------------

    def uri(self, path: str) -> str:
        return f"s3://{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    def make_bucket(self, name: str) -> None:
        self.files.create_dir(name)

    def delete_bucket(self, name: str) -> None:
        self.files.delete_dir(name)

    def put(self, path: str, data: bytes) -> str:
        with self.files.open_output_stream(path) as sink:
            sink.write(data)
        return self.uri(path)

    def put_table(self, path: str, columns: dict[str, Any], **options: Any) -> str:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink, **options)
        return self.put(path, sink.getvalue().to_pybytes())

    def names(self, path: str) -> list[str]:
        selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
        return sorted(
            info.path.removeprefix(path + "/") for info in self.files.get_file_info(selector)
        )


@contextmanager
def running_store(**options: Any) -> Iterator[ObjectStore]:
    store = ObjectStore(**options)
    try:
        yield store
    finally:
        store.stop()
        remote._open_store.cache_clear()
