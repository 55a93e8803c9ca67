"""Take the picture of the server's page in docs/images from a running `weir serve`.

    weir serve smollm2 --archive 1GB
    python tests/serve/take_page_picture.py http://127.0.0.1:8000 docs/images/serve-page.png

It needs playwright and Chromium. The second message pastes part of a novel that is longer than the
default policy's windows. So the first message is forgotten, and the last one recalls it. The
conversation is sampled, so the words differ from run to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from browsers import find_browser, launch_browser

from weir.stream import BOOK, read_text

DESKTOP, PHONE = (1280, 800), (390, 844)
WAIT = 1_800_000
"""Milliseconds that an answer may take on a busy machine."""
FIRST = "My sister Ottilie keeps bees in Bergen. Remember that. What could I give her?"
NOVEL = "This is the beginning of a novel. Tell me who is in it.\n\n"
LAST = "Where does my sister Ottilie keep bees?"


def say(page: Any, words: str, longest: int) -> None:
    """Send a message and wait for the end of the answer."""
    turns = page.locator(".turn-foot").count()
    page.evaluate("n => { document.getElementById('longest').value = n; }", longest)
    page.get_by_label("Your message").fill(words)
    page.get_by_role("button", name="Send").click()
    page.wait_for_function(
        "n => document.querySelectorAll('.turn-foot').length > n", arg=turns, timeout=WAIT
    )


def overflow(page: Any) -> list[str]:
    """Return the visible elements that are wider than the window, or end outside it."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(each => {
            const box = each.getBoundingClientRect();
            return box.width && each.checkVisibility({ contentVisibilityAuto: true })
                && !each.classList.contains('unseen') && each.id !== 'skip'
                && (box.right > innerWidth + 1 || box.left < -1);
        }).map(each => `${each.tagName}#${each.id}.${each.className}`)"""
    )
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Hold a conversation, and save pictures of the page at two widths."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="address of the server, without /v1")
    parser.add_argument("picture", type=Path, help="file of the picture at desktop width")
    parser.add_argument("--phone", type=Path, help="folder for pictures at phone width")
    parser.add_argument(
        "--letters", type=int, default=20_000, help="letters of a novel that are pasted"
    )
    parser.add_argument("--session", help="show this conversation instead of holding a new one")
    given = parser.parse_args(words)
    path = find_browser()
    if path is None:
        parser.error("there is no Chromium on the PATH. Install it: apt-get install chromium")
    with sync_playwright() as started:
        browser = launch_browser(started, path)
        page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
        if given.session is None:
            page.goto(given.url)
            say(page, FIRST, 48)
            say(page, NOVEL + read_text(BOOK)[: given.letters], 48)
            say(page, LAST, 32)
        else:
            page.goto(f"{given.url}/#session={given.session}")
        page.locator("#text .held").first.wait_for(timeout=WAIT)
        page.wait_for_timeout(1000)  # the memory panel is drawn after the answer
        page.evaluate("document.querySelectorAll('.recalled').forEach(each => each.open = true)")
        page.evaluate(
            "const box = document.getElementById('scroll'); box.scrollTop = box.scrollHeight"
        )
        page.wait_for_timeout(300)
        page.screenshot(path=given.picture)
        sys.stdout.write(f"{given.picture}: {overflow(page) or 'nothing overflows'}\n")
        if given.phone is not None:
            given.phone.mkdir(parents=True, exist_ok=True)
            page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            for view in ("Conversations", "Chat", "Memory"):
                page.locator("#views").get_by_role("button", name=view).click()
                page.wait_for_timeout(300)
                page.screenshot(path=given.phone / f"{view.lower()}.png")
                sys.stdout.write(
                    f"{view} at {PHONE[0]} px: {overflow(page) or 'nothing overflows'}\n"
                )
        browser.close()


if __name__ == "__main__":
    main()
