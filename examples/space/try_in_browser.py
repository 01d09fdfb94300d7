"""Visit the page with a browser: questions, two visitors at once, what is refused, and a picture of an answer.

    pip install '.[space]' selenium          # and from Debian: apt-get install chromium chromium-driver
    python examples/space/try_in_browser.py                                    # the models of hf-memory demo
    python examples/space/try_in_browser.py TEACHER --picture docs/pictures/space.png

TEACHER is that of app.py, which is started and ended.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

APP = Path(__file__).with_name("app.py")
FLAGS = (
    "--headless",
    "--no-sandbox",  # for root, as in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOADING = 900  # seconds until the page must be there, also if the demo's models are made first
WRITING = 300  # seconds until an answer must be complete
WIDTH = 1280
PHONE = 400  # widths in pixels
COLOURS = 128  # of a picture
OTHER = "A second visitor asks something else."


@contextmanager
def served(words: list[str]) -> Iterator[str]:
    """The address of app.py with these arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(APP), *words, "--port", str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + LOADING
        while not answers(address):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("app.py must serve the page, and did not")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    """Whether a page is there."""
    try:
        return urlopen(address).status == 200
    except URLError:
        return False


class Visitor:
    """A browser that shows the page."""

    def __init__(self, address: str, profile: str):
        options = ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={WIDTH},1000"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.address = address
        self.browser = Chrome(options, ChromeService("/usr/bin/chromedriver"))
        self.browser.get(address)
        self.wait(lambda: self.button("Answer"))

    def wait(self, until, seconds: float = 30.0):
        """What `until` returns, as soon as that is true."""
        return WebDriverWait(self.browser, seconds, 0.1).until(lambda _: until())

    def find(self, css: str) -> list:
        """The elements that a selector finds."""
        return self.browser.find_elements(By.CSS_SELECTOR, css)

    def button(self, name: str):
        """The button with a name, or None."""
        return next((x for x in self.find("button") if x.text == name), None)

    def write(self, prompt: str) -> None:
        """Replace the prompt."""
        (box,) = self.find("textarea")
        change = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.browser.execute_script(change, box, prompt)

    def texts(self) -> list[str]:
        """The prompt, as both models have read it."""
        return [x.get_attribute("textContent") for x in self.find(".text")]

    def titles(self) -> set[str]:
        """How many heads of the student hold a token, in the words of the page, for all tokens of the prompt."""
        of_spans = "[...[...document.querySelectorAll('.text')].at(-1).children].map(x => x.title)"
        return set(self.browser.execute_script(f"return {of_spans}")) - {""}

    def answered(self) -> list[str]:
        """What teacher and student have written."""
        return [x.get_attribute("textContent") for x in self.find(".answer")]

    def is_running(self) -> bool:
        """Whether answers are being written, or awaited."""
        return self.button("Stop").is_enabled()

    def ask(self, prompt: str | None = None) -> None:
        """Press the button, with a new prompt or that which is there."""
        if prompt is not None:
            self.write(prompt)
        self.wait(lambda: self.button("Answer").is_enabled())
        self.button("Answer").click()

    def wait_for_answer(self) -> list[str]:
        """What both have written in the end."""
        self.wait(lambda: not self.is_running(), WRITING)
        return self.answered()

    def take_picture(self, file: Path) -> None:
        """Write the page as a PNG with few colours, which is a third as large."""
        self.resize(WIDTH)
        self.browser.save_screenshot(str(file))
        Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
        print(f"{file} has {file.stat().st_size / 1000:.0f} kB")

    def is_told(self, words: str) -> bool:
        """Whether the page says these words beside its own within some seconds."""
        return self.wait(lambda: any(words in x.text for x in self.find(".toast-body")))

    def hosts(self) -> set[str]:
        """Where the browser has asked for something."""
        messages = [
            json.loads(x["message"])["message"] for x in self.browser.get_log("performance")
        ]
        urls = [
            x["params"]["request"]["url"]
            for x in messages
            if x["method"] == "Network.requestWillBeSent"
        ]
        return {"/".join(url.split("/")[:3]) for url in urls if url.startswith("http")}

    def resize(self, width: int) -> None:
        """Show all of the page at a width."""
        self.browser.set_window_size(width, 1000)
        height = self.browser.execute_script("return document.documentElement.scrollHeight")
        self.browser.set_window_size(width, height + 150)

    def is_too_wide(self) -> bool:
        """Whether the page must be moved sideways to be read."""
        wide = "const x = document.documentElement; return x.scrollWidth > x.clientWidth"
        return self.browser.execute_script(wide)


def say(what: str, is_so: bool) -> None:
    """Print what was tried; end if it is not so."""
    print(f"{'yes' if is_so else 'NO '}  {what}", flush=True)
    if not is_so:
        sys.exit(1)


def try_page(address: str, folder: Path, picture: Path | None) -> None:
    """Visit the page; the first thing that is wrong ends the program with code 1."""
    first = Visitor(address, str(folder / "first"))
    second = Visitor(address, str(folder / "second"))
    try:
        first.ask("  ")
        say("an empty prompt is refused", first.is_told("no prompt"))
        first.ask("word " * 7000)
        say("a prompt that is too long is refused", first.is_told("shorten it"))
        first.browser.refresh()
        first.wait(lambda: first.button("Answer"))
        first.ask()
        first.wait(first.is_running)
        second.ask(OTHER)
        second.wait(second.is_running)
        written = first.wait_for_answer()
        say("both models answer", all(written))
        say("some tokens are held by some heads only", len(first.titles()) > 2)
        written = second.wait_for_answer()
        say("a second visitor waits for his turn, and is answered", all(written))
        say("... to his own prompt", all(OTHER in x for x in second.texts()))
        if picture is not None:
            first.take_picture(picture)
        second.ask("A third question.")
        second.wait(lambda: second.answered() != written and "reading" not in second.answered()[0])
        second.button("Stop").click()
        second.wait(lambda: not second.is_running())
        time.sleep(1)
        written = second.answered()
        time.sleep(3)
        say("Stop ends an answer", second.answered() == written)
        second.resize(PHONE)
        say(f"the page fits a screen of {PHONE} pixels", not second.is_too_wide())
        say("nothing was asked of another host", first.hosts() | second.hosts() == {address})
    finally:
        first.browser.quit()
        second.browser.quit()


def main() -> None:
    """Start the page and visit it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", nargs="?")
    parser.add_argument("--picture", type=Path, help="file for a picture of the first answer, PNG")
    given = parser.parse_args()
    words = [given.teacher] if given.teacher else []
    with served(words) as address, tempfile.TemporaryDirectory() as folder:
        try_page(address, Path(folder), given.picture)


if __name__ == "__main__":
    main()
