"""A real server that speaks S3's protocol, for tests: moto's, in memory, in a process of its own.

It refuses conditional writes correctly in races, too.
"""

from __future__ import annotations

import contextlib
import sys
import urllib.request
from pathlib import Path
from typing import Final

from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess, ServerStartError

_STARTS_WITHIN_S: Final = 90.0


class EmbeddedS3(EmbeddedServer):
    """A server with one bucket, whose data is gone once it ends."""

    def __init__(self, folder: Path, bucket: str = "millstream") -> None:
        super().__init__(folder)
        self._bucket = bucket
        self._port = free_port()

    @property
    def url(self) -> str:
        """Return the bucket's address."""
        return f"s3://{self._bucket}"

    @property
    def endpoint(self) -> str:
        """Return the server's address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, str]:
        """Return a client's further options, by obstore's names.

        In capitals after `AWS_` they are environment variables.
        """
        return {
            "endpoint": self.endpoint,
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "allow_http": "true",
            "virtual_hosted_style_request": "false",
        }

    @property
    def lake_options(self) -> dict[str, str]:
        """Return the options for `[streams.S.lake.storage_options]`."""
        names = {"endpoint": "AWS_ENDPOINT_URL"}
        return {names.get(name, f"AWS_{name.upper()}"): value for name, value in self.options.items()}

    def start(self) -> None:
        """Start it, and make the bucket."""
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = ServerProcess(command, log=self._folder / "s3.log")
        self._process.wait_until(self._has_bucket, within_s=_STARTS_WITHIN_S, what="the S3 server")

    def _has_bucket(self) -> bool:
        authorization = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        asked = urllib.request.Request(
            f"{self.endpoint}/{self._bucket}", method="PUT", headers={"Authorization": authorization}
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
        return False


__all__ = ["EmbeddedS3", "ServerStartError"]
