"""Debian's Chromium without a window, and what a person does with its tabs.

Selenium would download a browser or a driver if it found none; it is given the paths of both, so
that it never looks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar
from urllib.parse import quote

from selenium.common import exceptions
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE, end_with_parent
from tests import CACHE
from tests.set_up import SetUp

_T = TypeVar("_T")

#: The script of axe-core, which ``set_up.sh`` unpacks.
AXE: Final = CACHE / "axe" / "axe_playwright_python" / "axe.min.js"

#: Widths in pixels of a phone and of a wide window, with their heights.
PHONE, WIDE = (390, 844), (1400, 900)

#: A name of this machine that a browser does not trust as it does ``localhost``.
ELSEWHERE: Final = "tasks.example"

#: The arguments of Chromium. Root may not use the sandbox, and ``/dev/shm`` of a container is too
#: small. With the pipe, Chromium ends when its driver does.
_ARGUMENTS: Final = (
    *("headless=new", "disable-gpu", "disable-dev-shm-usage", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("disable-extensions", "disable-search-engine-choice-screen", "hide-scrollbars"),
    *("force-device-scale-factor=1", "lang=en-US", "remote-debugging-pipe"),
    f"host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
)

#: What may happen to an element while its page is replaced.
_REPLACED: Final = (
    exceptions.NoSuchElementException,
    exceptions.StaleElementReferenceException,
    exceptions.ElementClickInterceptedException,
    exceptions.ElementNotInteractableException,
)

#: What the driver says of the same in other words.
_REPLACED_WORDS: Final = ("does not belong to the document", "No node with given id found")


def program(*names: str) -> str:
    """Return the path of the first of some programs that is installed."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError(f"none of {', '.join(names)} is installed: see set_up.sh")
    return found


class Chromium(SetUp):
    """A browser.

    Attributes:
        driver: Its driver.
    """

    driver: Chrome

    def _set_up(self, stack: ExitStack) -> None:
        folder = stack.enter_context(TemporaryDirectory(prefix="rabbitdelay-"))
        options = ChromeOptions()
        options.binary_location = program("chromium", "google-chrome")
        for each in (*_ARGUMENTS, f"user-data-dir={folder}/profile"):
            options.add_argument(f"--{each}")
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # What it writes outside its profile goes with the folder, too.
        environment = {**os.environ, "HOME": folder, "TMPDIR": folder}
        service = Service(
            program("chromedriver"), env=environment, popen_kw={"preexec_fn": end_with_parent}
        )
        self.driver = Chrome(options, service)
        stack.callback(self.driver.quit)

    @contextmanager
    def tab(self, base: str) -> Iterator[Tab]:
        """A tab of its own.

        Args:
            base: The address of the page.
        """
        self.driver.switch_to.new_window("tab")
        tab = Tab(self.driver, self.driver.current_window_handle, base)
        try:
            yield tab
        finally:
            tab.close()
            self.driver.switch_to.window(self.driver.window_handles[0])


class Tab:
    """A tab, and what a person does in it.

    Args:
        driver: The browser's driver.
        handle: Which of its tabs.
        base: The address of the page.
    """

    def __init__(self, driver: Chrome, handle: str, base: str) -> None:
        self.base = base
        self._driver = driver
        self._handle = handle

    @property
    def driver(self) -> Chrome:
        """The driver, looking at this tab."""
        if self._driver.current_window_handle != self._handle:
            self._driver.switch_to.window(self._handle)
        return self._driver

    def close(self) -> None:
        """Close the tab."""
        self.driver.close()

    def go(self, path: str) -> None:
        """Enter an address."""
        self.driver.get(f"{self.base}{path}")

    def sign_in(self, name: str, password: str, path: str = "/now") -> None:
        """Open a page with a name and a password, which the browser keeps for this address."""
        credentials = f"{quote(name)}:{quote(password)}@"
        self.driver.get(f"{self.base.replace('//', f'//{credentials}')}{path}")
        self.go(path)  # no script may fetch while they stand in the address

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **arguments: Any) -> Any:
        """Send a command of Chromium's DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    @property
    def path(self) -> str:
        """Where the tab is, without the name of the server."""
        return self.driver.current_url.removeprefix(self.base)

    @property
    def text(self) -> str:
        """What one reads on the page, with single spaces."""
        return " ".join(self._tried(lambda: self._one("body").text).split())

    def see(self, *texts: str) -> None:
        """Wait until the page has some texts."""
        try:
            wait_for(lambda: all(each in self.text for each in texts), f"{texts}", PATIENCE, 0.05)
        except TimeoutError as error:
            raise AssertionError(f"{error}; there is: {self.text}") from error

    def see_no(self, text: str) -> None:
        """Wait until the page does not have a text."""
        wait_for(lambda: text not in self.text, f"no {text!r}", PATIENCE, 0.05)

    def fill(self, label: str, text: str) -> None:
        """Type a text into the field with a label, instead of what it has."""

        def fill() -> None:
            field = self._labelled(label)
            field.clear()
            field.send_keys(text)

        self._tried(fill)

    def value(self, label: str) -> str:
        """Return what the field with a label has."""
        return self._tried(lambda: str(self._labelled(label).get_property("value")))

    def press(self, name: str, within: str = "") -> None:
        """Press the button with a name."""
        where = f"{within}//button[normalize-space()={_quoted(name)}]"
        self._tried(lambda: self._one(where, By.XPATH).click())

    def follow(self, text: str) -> None:
        """Follow the link with a text."""
        self._tried(lambda: self._one(f"//a[normalize-space()={_quoted(text)}]", By.XPATH).click())

    def tick(self, label: str) -> None:
        """Tick the box with a label."""
        self._tried(lambda: self._one(f"[aria-label='{label}']").click())

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element that a selector finds, also of those out of sight."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())",
            selector,
        )
        return [" ".join(each.split()) for each in found]

    def _labelled(self, label: str) -> WebElement:
        where = f"//label[normalize-space()={_quoted(label)}]"
        return self._one(f"#{self._one(where, By.XPATH).get_attribute('for')}")

    def _one(self, where: str, by: str = By.CSS_SELECTOR) -> WebElement:
        return self.driver.find_element(by, where)

    def _tried(self, act: Callable[[], _T]) -> _T:
        """Do something, again while the page is being replaced under it."""
        outcome: list[_T] = []
        failed: list[Exception] = []

        def succeeds() -> bool:
            try:
                outcome.append(act())
            except _REPLACED as error:
                failed.append(error)
            except exceptions.WebDriverException as error:
                if not any(each in str(error) for each in _REPLACED_WORDS):
                    raise
                failed.append(error)
            return bool(outcome)

        try:
            wait_for(succeeds, "the element", PATIENCE, 0.05)
        except TimeoutError as error:
            raise AssertionError(f"{failed[-1]}; there is: {self.text}") from error
        return outcome[0]

    def resize(self, size: tuple[int, int]) -> None:
        """Be a phone, or a window; see :data:`PHONE` and :data:`WIDE`."""
        width, height = size
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            screenWidth=width,
            screenHeight=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    @contextmanager
    def without_scripts(self) -> Iterator[None]:
        """The tab runs no scripts of its pages in the block."""
        self.command("Emulation.setScriptExecutionDisabled", value=True)
        try:
            yield
        finally:
            self.command("Emulation.setScriptExecutionDisabled", value=False)

    def complaints(self, *expected: str) -> list[str]:
        """Return what the browser has complained of since the last time, in any of its tabs.

        These are errors of scripts, violations of the policy, and answers with an error.

        Args:
            *expected: Words of complaints that are expected, such as that of a page that answers
                503.
        """
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [
            message
            for each in entries
            if (message := f"{each['level']}: {each['message']}")
            and not any(word in message for word in expected)
        ]

    def barriers(self) -> list[str]:
        """Return what axe-core finds."""
        self.run(AXE.read_text())
        found: list[dict[str, Any]] = self.driver.execute_async_script(_RUN_AXE)
        return [
            f"{self.path}: {rule['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for rule in found
            for node in rule["nodes"]
        ]

    def picture(self) -> bytes:
        """Return the window's content as PNG."""
        return self.driver.get_screenshot_as_png()


def _quoted(text: str) -> str:
    """Return a text as a literal of XPath, which has no escapes."""
    return f"'{text}'" if "'" not in text else f'"{text}"'


_RUN_AXE: Final = """
const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then(found => done(found.violations));
"""
