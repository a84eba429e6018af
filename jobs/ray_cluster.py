"""The Ray that a job runs in, without Ray: which one, and does somebody answer there?"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from jobs.records import RunnerError

ADDRESS_VARIABLE = "RAY_ADDRESS"
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
PROBE_TIMEOUT_S = 3.0
OBJECT_STORE_NBYTES = 80 << 20  # of a Ray of our own; its least is 75 MiB, its default a third


def cluster_address(environ: Mapping[str, str]) -> str | None:
    """The host and port of the cluster to join; None for a Ray of our own.

    Raises RunnerError: RAY_ADDRESS is neither empty, `local`, nor a host and port.
    """
    address = environ.get(ADDRESS_VARIABLE, "")
    if address in ("", "local"):
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise RunnerError(
            f"{ADDRESS_VARIABLE} is {address!r}; give the host and port of the cluster's GCS, like "
            "10.0.0.1:6379, or unset it to run in a Ray of its own"
        )
    return address


def is_on_loopback(address: str) -> bool:
    """Whether Ray must be told to keep to loopback, which it else leaves for a public address."""
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def probe_cluster(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> None:
    """Raise RunnerError where nobody listens at `address`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunnerError(
            f"no Ray answers at {ADDRESS_VARIABLE}={address} ({why or 'no answer'}); start that "
            f"cluster, or unset {ADDRESS_VARIABLE} to run in a Ray of its own"
        ) from error


def refused_by_cluster(address: str, error: str, environ: Mapping[str, str]) -> str:
    """What to say where a port answers and Ray cannot join."""
    mode = environ.get("RAY_AUTH_MODE", "not set")
    token = environ.get("RAY_AUTH_TOKEN_PATH", "not set")
    return (
        f"the Ray at {ADDRESS_VARIABLE}={address} cannot be joined: {error}; where it is protected "
        f"by a token, set RAY_AUTH_MODE=token (it is {mode}) and RAY_AUTH_TOKEN_PATH to the file "
        f"with that token (it is {token}), for `ntx-batch runner start` too"
    )
