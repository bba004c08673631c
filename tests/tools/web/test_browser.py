"""The page in a real browser: read without scripts, dark and light, on a phone, a lock freed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.web import make_app
from tests.support.wait import wait_until
from tests.tools.web.browser import DESK, PHONE, look, scripts, served
from tests.tools.web.conftest import SECRET

PAGES = ("/", "/lock?resource=order:1", "/waiters", "/nodes", "/events", "/login", "/no-such")
LONG = "<script>alert(1)</script>" + "k" * 480


@pytest.fixture
def driver(chromium: Any) -> Iterator[Any]:
    """Yield a new-looking browser.

    Afterwards it must have no complaint about scripts or policies.
    """
    look(chromium)
    scripts(chromium, True)
    chromium.get_log("browser")
    yield chromium
    # A form that was refused is an error of the network for a browser, and none of ours.
    said = [line for line in chromium.get_log("browser") if line["source"] != "network"]
    chromium.delete_all_cookies()
    chromium.get("about:blank")
    assert said == []


@pytest.fixture
def site(redlock: Redlock, servers: list[LocalServer]) -> Iterator[str]:
    """A page over nodes with a held lock, a hostile one and a leak."""
    redlock.acquire("order:1", owner=Owner("worker-a", 4001, "6f1c", task="shop.pay"), ttl=600)
    redlock.acquire(LONG, owner=Owner("h" * 200, 1, "i" * 200, task="<b>" * 60), ttl=600)
    with redis.Redis(port=servers[0].port) as node:
        node.set("redlock:legacy", "of another program")
    page = make_app(redlock=redlock, token=SECRET, idle=None)
    with served(page) as url:
        yield url
    page.close()


def text(driver: Any) -> str:
    """Return the text of the page; none while another page is loading."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
        return str(driver.find_element("tag name", "body").text)
    return ""


def ask(driver: Any, script: str) -> Any:
    return driver.execute_script(f"return {script}")


def test_page_is_read_searched_and_a_lock_freed_without_any_script(
    driver: Any, site: str, redlock: Redlock
) -> None:
    scripts(driver, False)
    driver.get(site)
    assert "order:1" in text(driver) and "<script>alert(1)</script>" in text(driver)
    box = driver.find_element("css selector", "input[type=search]")
    box.send_keys("shop")
    box.submit()
    wait_until(lambda: "q=shop" in driver.current_url, 30, "it was searched")
    (link,) = wait_until(lambda: driver.find_elements("css selector", "table a bdi"), 30, "it came")
    assert link.text == "order:1"
    link.click()
    wait_until(lambda: "Timeline" in text(driver), 30, "the lock's own page")
    driver.find_element("link text", "Free this lock …").click()
    wait_until(lambda: "/login" in driver.current_url, 30, "the token is asked for")
    (field,) = wait_until(lambda: driver.find_elements("id", "token"), 30, "here")
    field.send_keys(SECRET)
    field.submit()
    wait_until(lambda: "Free this lock?" in text(driver), 30, "who holds it is shown")
    assert "shop.pay" in text(driver) and "does not stop its holder" in text(driver)
    assert redlock.holder("order:1") is not None
    driver.find_element("css selector", "form.acts button").click()
    wait_until(lambda: "It was deleted on" in text(driver), 30, "it is freed")
    assert redlock.holder("order:1") is None
    driver.find_element("css selector", "form button.quiet").click()
    wait_until(lambda: "Sign in" in text(driver), 30, "signed out")


def test_page_refreshes_itself_with_scripts(driver: Any, site: str, redlock: Redlock) -> None:
    driver.get(f"{site}/?refresh=2")
    ask(driver, "window.stays = true")
    redlock.acquire("order:2", ttl=600)
    wait_until(lambda: "order:2" in text(driver), 60, "the new lock is on the page", every=0.1)
    assert ask(driver, "window.stays") is True, "without loading the page anew"


def test_page_refreshes_itself_without_scripts(driver: Any, site: str, redlock: Redlock) -> None:
    driver.get("about:blank")
    scripts(driver, False)
    driver.get(f"{site}/?refresh=2")
    redlock.acquire("order:3", ttl=600)
    wait_until(lambda: "order:3" in driver.page_source, 60, "it was loaded anew", every=0.1)


def test_every_page_fits_phone_and_desk_and_reads_in_light_and_dark(driver: Any, site: str) -> None:
    for path in (*PAGES, f"/lock?resource={quote(LONG)}"):
        driver.get(site + path)
        for dark in (False, True):
            look(driver, dark=dark)
            assert (ask(driver, GROUND) == "rgb(18, 20, 22)") is dark
            assert ask(driver, CONTRAST) == [], (path, dark)
        for size in (PHONE, DESK):
            look(driver, size=size)
            wide = ask(driver, "[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide[0] <= size[0] and wide[1] == size[0], path


def test_banner_without_a_quorum_is_seen_first_and_goes_when_nodes_are_back(
    driver: Any, site: str, servers: list[LocalServer]
) -> None:
    look(driver, size=PHONE)
    driver.get(f"{site}/?refresh=2")
    ask(driver, "window.stays = true")
    assert ask(driver, BANNER) is None
    for server in servers[2:]:
        server.kill()
    wait_until(lambda: "No quorum: no lock can be taken" in text(driver), 60, "it comes by itself")
    assert ask(driver, "window.stays") is True
    for path in PAGES[:5]:
        driver.get(site + path)
        for dark, size in itertools.product((False, True), (PHONE, DESK)):
            look(driver, dark=dark, size=size)
            it = ask(driver, BANNER)
            assert it["text"].startswith("No quorum: no lock can be taken."), path
            assert "2 of 5 nodes answer; 3 must." in it["text"], path
            assert it["first"] and it["top"] > 0 and it["bottom"] < size[1] / 2, (path, it)
            red, green, blue = it["ground"]
            assert red > 150 and red > green + 90 and red > blue + 90, (path, it)
            assert ask(driver, WIDTH) <= size[0], path
            assert ask(driver, CONTRAST) == [], (path, dark)
    driver.get(f"{site}/nodes?refresh=2")
    assert ask(driver, BANNER) is not None
    for server in servers[2:]:
        server.start()
    wait_until(lambda: ask(driver, BANNER) is None, 60, "it goes by itself")


def test_row_on_a_phone_is_a_card_and_still_a_table_for_screen_readers(
    driver: Any, site: str
) -> None:
    look(driver, size=PHONE)
    driver.get(site)
    row = driver.find_element("css selector", "tbody tr")
    assert ask(driver, "getComputedStyle(document.querySelector('tbody td')).display") == "flex"
    assert row.aria_role == "row"
    assert driver.find_element("css selector", "tbody th").aria_role == "rowheader"


def test_addresses_of_nodes_do_not_wrap_on_a_phone(driver: Any, site: str) -> None:
    look(driver, size=PHONE)
    for path in ("/nodes", "/lock?resource=order:1"):
        driver.get(site + path)
        ask(driver, "document.querySelector('.address bdi').textContent = 'a-long-name.'.repeat(5)")
        assert set(ask(driver, ADDRESS_LINES)) == {1}, path
        assert ask(driver, WIDTH) <= PHONE[0], path


def test_page_can_be_used_by_keyboard_and_has_landmarks(driver: Any, site: str) -> None:
    from selenium.webdriver.common.keys import Keys

    driver.get(site)
    driver.find_element("tag name", "body").send_keys(Keys.TAB)
    assert driver.switch_to.active_element.text == "Skip to content"
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert ask(driver, "getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for name in ("header", "nav", "main", "footer"):
        assert driver.find_elements("tag name", name), name
    assert ask(driver, "document.documentElement.lang") == "en"
    assert ask(driver, UNNAMED) == []
    scopes = driver.find_elements("css selector", "table th:not([scope])")
    assert scopes == []


ADDRESS_LINES = """[...document.querySelectorAll('.address bdi')]
    .map((it) => it.getClientRects().length)"""
WIDTH = "document.documentElement.scrollWidth"
BANNER = """(() => {
  const it = document.querySelector('main .banner.stop');
  if (!it) return null;
  const seen = [...document.querySelectorAll('main *')].find((one) => one.innerText?.trim());
  const ground = document.createElement('canvas').getContext('2d');
  ground.fillStyle = getComputedStyle(it).backgroundColor; ground.fillRect(0, 0, 1, 1);
  const {top, bottom} = it.getBoundingClientRect();
  return {text: it.innerText.trim(), top, bottom, first: seen.contains(it),
    ground: [...ground.getImageData(0, 0, 1, 1).data].slice(0, 3)};
})()"""
GROUND = "getComputedStyle(document.body).backgroundColor"
UNNAMED = """[...document.querySelectorAll('input:not([type=hidden], [hidden])')]
    .filter((it) => !it.labels.length).map((it) => it.outerHTML)"""

# WCAG 2: the ratio of luminances of text and background; 4.5 for text of this size.
CONTRAST = """(() => {
  const parse = (colour) => {
    const made = document.createElement('canvas').getContext('2d');
    made.fillStyle = colour; made.fillRect(0, 0, 1, 1);
    return [...made.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (it) => {
    for (; it; it = it.parentElement) {
      const colour = parse(getComputedStyle(it).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const it = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !it.checkVisibility() || it.closest('noscript')) continue;
    const [a, b] = [parse(getComputedStyle(it).color), ground(it)].map(light).sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${walk.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""
