"""A real browser without a screen: the system's Chromium and its driver, nothing is downloaded."""

from __future__ import annotations

import base64
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from werkzeug.serving import make_server

PHONE = (390, 844)
DESK = (1280, 860)


def missing() -> str:
    """Return which parts of a browser are not installed; empty if none is missing."""
    if shutil.which("chromedriver") is None or _chromium() is None:
        return "Chromium and its driver are not installed: apt install chromium chromium-driver"
    return ""


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A Chromium of its own; closed in the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="redlock-browser-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _chromium() or ""
        for flag in (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", "--no-first-run", "--disable-extensions", "--lang=en"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        driver.set_page_load_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()


def look(driver: Any, *, dark: bool = False, size: tuple[int, int] = DESK) -> None:
    """Look as a reader with that preference and that screen."""
    scheme = "dark" if dark else "light"
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
    phone = {"mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**screen, **phone})


def scripts(driver: Any, allowed: bool) -> None:
    """Allow or forbid scripts of pages. Scripts of the driver run all the same."""
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})


def picture(driver: Any, path: Path) -> None:
    """Write the screen as PNG."""
    data = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def served(wsgi: Callable[..., Any]) -> Iterator[str]:
    """The address of a server with that app, on a free port."""
    server = make_server("127.0.0.1", 0, wsgi, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
