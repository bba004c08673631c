"""Certificates, signed by authorities of our own."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["Authority"]


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """Signs certificates; its own is `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.ca, key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl(
            *("req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign"),
            *("-keyout", str(key), "-out", str(self.ca)),
        )
        self._key = key

    def sign(self, name: str, alternative: str) -> tuple[Path, Path]:
        """A certificate for `name` and its key."""
        base = self.folder / f"{self.name}-{name}"
        cert, key, request = (base.with_suffix(end) for end in (".pem", ".key", ".csr"))
        extensions = base.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alternative}\nauthorityKeyIdentifier=keyid\n")
        openssl(
            *("req", "-newkey", "ed25519", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", str(key), "-out", str(request)),
        )
        openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key)),
            *("-days", "2", "-CAcreateserial", "-extfile", str(extensions), "-out", str(cert)),
        )
        return cert, key
