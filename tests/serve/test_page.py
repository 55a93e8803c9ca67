"""The page at `/` in a browser: it chats, shows the cache's memory, and contacts no other host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from browsers import find_browser, launch_browser
from servers import Server, make_client, serving
from take_page_picture import overflow

from weir.serve.api import Keys

pytestmark = pytest.mark.slow  # needs a browser

KEY, OTHER = "wk-alice-0123456789", "wk-bob-0123456789"
PHONE = {"viewport": {"width": 375, "height": 667}, "is_mobile": True, "has_touch": True}
LATER = 30_000
"""Milliseconds that anything in a browser may take on a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER)]
    with serving(make_client(rows=2), Keys(hashes)) as server:
        yield server


@pytest.fixture(scope="module")
def recalling() -> Iterator[Server]:
    """Yield a server that forgets after 1,600 tokens, and recalls what a message asks for."""
    hashes = [hashlib.sha256(KEY.encode()).hexdigest()]
    client = make_client(policy="sink(4) | recent(1600)", archive=10_000_000, recall=256)
    with serving(client, Keys(hashes)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = launch_browser(started, path)
        yield browser
        browser.close()


@dataclass
class User:
    """A person with a browser, the URLs that its pages requested, and the errors in these pages."""

    server: Server
    context: Any
    asked: set[str] = field(default_factory=set)
    trouble: list[str] = field(default_factory=list)

    def tab(self, path: str = "/") -> Any:
        page = self.context.new_page()
        page.set_default_timeout(LATER)
        page.on("request", lambda request: self.asked.add(request.url))
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("console", lambda line: self._heard(line))
        page.goto(f"{self.server.url}{path}")
        return page

    def _heard(self, line: Any) -> None:
        if line.type == "error" and "Failed to load resource" not in line.text:
            self.trouble.append(line.text)


@pytest.fixture
def user(server: Server, browser: Any) -> Iterator[Callable[..., User]]:
    """Yield a function that makes users.

    At the end, none of their pages may have failed or contacted another host.
    """
    users = []

    def make(key: str | None = KEY, at: Server = server, **given: Any) -> User:
        one = User(at, browser.new_context(**given))
        if key is not None:
            one.context.add_init_script(f"sessionStorage.setItem('weir-key', '{key}')")
        users.append(one)
        return one

    yield make
    for one in users:
        one.context.close()
        assert one.trouble == []
        assert one.asked
        assert {
            url.partition("/page/")[0].rstrip("/") for url in one.asked if "/v1/" not in url
        } == {one.server.url}
        assert all(url.startswith(f"{one.server.url}/") for url in one.asked)
        one.server.settled()


def say(page: Any, words: str, longest: int = 8) -> None:
    """Send a message and wait for the end of the answer."""
    turns = page.locator(".turn-foot").count()
    page.evaluate("n => { document.getElementById('longest').value = n; }", longest)
    page.get_by_label("Your message").fill(words)
    page.get_by_role("button", name="Send").click()
    wait(page, "n => document.querySelectorAll('.turn-foot').length > n", turns)


def wait(page: Any, what: str, given: Any = None) -> None:
    page.wait_for_function(what, arg=given, timeout=LATER)


def expect(locator: Any) -> Any:
    """Return Playwright's assertions, with a longer time limit for what a page has to request."""
    from playwright.sync_api import expect as soon

    soon.set_options(timeout=LATER)
    return soon(locator)


def number(page: Any, id: str) -> int:
    return int(page.locator(f"#{id}").inner_text().replace(",", ""))


def answers(page: Any) -> list[str]:
    return page.locator(".said.assistant").all_inner_texts()


def test_far_past_the_window_it_talks_and_shows_what_is_left(user, server):
    page = user().tab()
    expect(page.locator("#policy")).to_have_text("sink(2) | recent(6) | heavy(4)")
    say(page, "Once upon a time", longest=400)
    wait(page, "() => Number(document.getElementById('seen').innerText) > 400")
    session = page.url.partition("#session=")[2]
    told = httpx.get(
        f"{server.url}/v1/sessions/{session}/memory", headers={"Authorization": f"Bearer {KEY}"}
    ).json()
    for each in ("seen", "held", "folds"):
        expect(page.locator(f"#{each}")).to_have_text(f"{told[each]:,}")
    held = [token["at"] for token in told["tokens"] if any(token["pools"])]
    expect(page.locator("#text .held")).to_have_count(len(held))
    ids = page.locator("#text .held").evaluate_all("all => all.map(each => each.id)")
    assert ids == [f"token-{at}" for at in held]
    expect(page.locator("#summary")).to_contain_text("times as much")
    # While the next answer is generated, the number of tokens seen grows, and so does the
    # text. An answer that is stopped is not saved.
    page.evaluate("document.getElementById('longest').value = 60000")
    page.get_by_label("Your message").fill("And then?")
    page.keyboard.press("Enter")
    page.locator("#live").wait_for()
    before, length = number(page, "seen"), len(answers(page)[-1])
    wait(
        page,
        "([seen, length]) => Number(document.getElementById('seen').innerText.replace(',', '')) > "
        "seen && document.querySelector('.coming').innerText.length > length",
        [before, length],
    )
    page.keyboard.press("Escape")
    wait(page, "() => !document.querySelector('.coming')")
    expect(page.get_by_label("Your message")).to_have_value("And then?")
    expect(page.locator("#seen")).to_have_text(f"{told['seen']:,}")
    expect(page.locator(".said.assistant")).to_have_count(1)


@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_it_shows_what_is_held_what_is_forgotten_and_what_was_recalled(user, recalling, screen):
    page = user(at=recalling, **screen).tab()

    def view(name: str) -> None:
        """Switch to a part of the page, if only one is shown at a time."""
        if screen:
            page.get_by_role("button", name=name, exact=True).tap()

    code = "The secret access code of Alice Moreau is 48213."
    say(page, code)
    view("Memory")
    expect(page.locator("#lost")).to_have_text("0")
    expect(page.locator("#archive")).to_contain_text("Nothing was recalled for the newest message.")
    assert "48213" in "".join(page.locator("#text .held").all_inner_texts())
    view("Chat")
    say(page, "Filler without any meaning. " * 70)
    expect(page.locator(".recalled")).to_have_count(0)
    first, second = page.locator("#turns li").nth(0), page.locator("#turns li").nth(1)
    # The sinks hold four tokens of the first turn.
    expect(first.locator(".lost")).to_have_text(re.compile(r"^\d+ of its \d+ tokens forgotten$"))
    expect(second.locator(".lost")).to_have_text(
        re.compile(r"^\d+ of its [\d,]+ tokens forgotten$")
    )
    box = second.locator(".said.user").bounding_box()
    assert box["height"] < 300  # a long message has a scroll bar
    say(page, "What is the secret access code of Alice Moreau?")
    third = page.locator("#turns li").nth(2)
    told = re.compile(r"^I said, on \d.*:\n> The secret access code of Alice Moreau is 48213\.$")
    count = re.compile(r"^\d+ tokens recalled from the archive for this message$")
    for step in range(3):
        recalled = page.locator("#turns li").nth(2).locator(".recalled")
        expect(recalled.locator("summary")).to_have_text(count)
        expect(recalled.locator("p")).to_be_hidden()
        recalled.locator("summary").click()
        expect(recalled.locator("p")).to_be_visible()
        assert told.match(recalled.locator("p").inner_text())
        assert overflow(page) == []
        view("Memory")
        tokens = recalled.locator("summary").text_content().partition(" ")[0]
        expect(page.locator("#archive")).to_have_text(
            f"The archive holds the text of 6 messages. {tokens} tokens of it were recalled for "
            "the newest message."
        )
        wait(page, "() => Number(document.getElementById('lost').innerText.replace(',', '')) > 400")
        assert re.search(r"[\d,]+ tokens forgotten", page.locator("#text").inner_text())
        assert overflow(page) == []
        view("Chat")
        if step == 0:  # the excerpts were saved
            page.reload()
            wait(page, "() => document.querySelectorAll('.turn-foot').length === 3")
        elif step == 1:  # a fork has them, too
            name = page.url
            third.get_by_role("button", name="Fork from here").click()
            wait(page, "name => location.href !== name", name)
            wait(page, "() => document.querySelectorAll('.turn-foot').length === 3")


def test_a_reload_finds_the_session_and_two_tabs_share_it(user):
    mine = user()
    page = mine.tab()
    say(page, "Hello there")
    page.reload()
    wait(page, "() => document.querySelectorAll('.turn-foot').length === 1")
    told = answers(page)
    current = page.locator("#list [aria-current]")
    assert "Hello there" in current.inner_text()
    other = mine.tab("/" + page.url.rpartition("/")[2])
    wait(other, "() => document.querySelectorAll('.turn-foot').length === 1")
    assert answers(other) == told
    say(page, "Go on")
    wait(other, "() => document.querySelectorAll('.turn-foot').length === 2")
    say(other, "And on")
    wait(page, "() => document.querySelectorAll('.turn-foot').length === 3")
    assert answers(page) == answers(other)
    wait(page, "() => document.querySelector('#list .when').innerText.startsWith('3 turns')")
    # An answer continues while its user looks at another conversation.
    page.evaluate("document.getElementById('longest').value = 500")
    page.get_by_label("Your message").fill("For long")
    page.keyboard.press("Enter")
    page.locator(".coming").wait_for()
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#turns li")).to_have_count(0)
    page.locator("#list .open").first.click()
    wait(page, "() => document.querySelectorAll('.turn-foot').length === 4")
    assert len(answers(page)[-1]) > 450
    # Both tabs use one session, and no second one was created.
    wait(other, "() => document.querySelector('#list .when').innerText.startsWith('4 turns')")
    expect(page.locator("#list li")).to_have_count(other.locator("#list li").count())


def test_all_can_be_done_by_keyboard(user):
    page = user(key=OTHER, reduced_motion="reduce").tab()
    wait(page, "() => document.activeElement.id === 'say'")
    press = page.keyboard.press

    def focused() -> str:
        return page.evaluate(
            "(at => at === document.body ? '' : at.ariaLabel || at.innerText)"
            "(document.activeElement)"
        )

    def tab_to(name: str) -> None:
        for _ in range(40):
            if focused().strip().startswith(name):
                return
            press("Tab")
        raise AssertionError(f"Tab does not reach {name}")

    page.evaluate("document.getElementById('longest').value = 5")
    tab_to("Skip to the message box")
    press("Enter")
    for number in range(2):
        page.keyboard.type(f"Number {number}")
        press("Enter")
        wait(page, "n => document.querySelectorAll('.turn-foot').length === n", number + 1)
    first = page.url
    page.get_by_role("region", name="Conversation").focus()
    press("Tab")
    assert focused() == "Fork from here"
    press("Enter")
    wait(page, "() => document.querySelectorAll('.turn-foot').length === 1")
    assert page.url != first
    wait(page, "() => document.querySelectorAll('#list li').length === 2")
    wait(page, "() => document.activeElement.id === 'say'")
    page.locator("#text .token").first.wait_for()
    page.get_by_role("group", name="The text").focus()
    press("Home")
    press("ArrowRight")
    told = re.compile(r'Token 1, ".*": held by sink in 2 of 2 heads\.')
    expect(page.locator("#detail")).to_have_text(told)
    assert page.evaluate("document.getAnimations().length") == 0
    tab_to("Delete Number 0")
    press("Enter")
    page.get_by_role("dialog", name="Delete this conversation?").wait_for()
    tab_to("Delete")
    press("Enter")
    wait(page, "() => document.querySelectorAll('#list li').length === 1")
    assert page.url.partition("#")[2] == ""
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, [tabindex]')].filter(each => "
        "!(each.labels?.length || each.ariaLabel || each.getAttribute('aria-labelledby') || "
        "each.textContent.trim())).map(each => each.outerHTML)"
    )
    assert unnamed == []


def test_nothing_can_be_said_before_the_server_has_told_of_its_model(user):
    one, held = user(), []
    one.context.route("**/v1/models", lambda route: held.append(route))
    page = one.tab()
    send = page.get_by_role("button", name="Send")
    expect(send).to_be_disabled()
    page.get_by_label("Your message").fill("Too early")
    page.get_by_label("Your message").press("Enter")
    assert page.get_by_label("Your message").input_value() == "Too early"
    held[0].continue_()
    expect(send).to_be_enabled()
    say(page, "Once", longest=2)
    assert len(answers(page)) == 1


def test_on_a_phone_nothing_is_wider_than_the_screen(user):
    page = user(**PHONE).tab()
    say(page, "w" * 300, longest=300)
    for view, shown in (("Conversations", "sessions"), ("Memory", "memory"), ("Chat", "chat")):
        page.get_by_role("button", name=view, exact=True).tap()
        assert page.locator(f"#{shown}").is_visible()
        assert page.locator("#sessions:visible, #chat:visible, #memory:visible").count() == 1
        wide = page.evaluate(
            "[document.scrollingElement, ...document.querySelectorAll('#scroll, #memory, #text, "
            "#sessions')].filter(each => each.scrollWidth > Math.max(each.clientWidth, 0) && "
            "each.clientWidth).map(each => each.id || each.tagName)"
        )
        assert wide == []
    # When a part that was hidden is shown again, it is scrolled to its end.
    for name in ("text", "scroll"):
        page.get_by_role("button", name="Memory" if name == "text" else "Chat", exact=True).tap()
        wait(
            page,
            "id => { const box = document.getElementById(id);"
            "return box.scrollHeight - box.scrollTop - box.clientHeight < 2; }",
            name,
        )
    assert page.get_by_role("button", name="Send").bounding_box()["height"] >= 40


def test_markup_is_shown_as_text(user):
    mine = user(key=OTHER)
    page = mine.tab()
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    say(page, evil)
    page.reload()
    wait(page, "() => document.querySelector('#list .title') && document.querySelector('.token')")
    expect(page.locator(".said.user")).to_contain_text(evil)
    expect(page.locator("#list .title").first).to_have_text(evil[:80])
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, nav img, aside img, body script").count() == 0
    # The browser does not interpret markup either, even if a script of the page inserts it.
    for wrong in ("body.innerHTML = '<p>'", "body.setAttribute('onclick', 'hacked = 1')"):
        with pytest.raises(Exception, match="requires 'Trusted"):
            page.evaluate(f"document.{wrong}")
    assert len(mine.trouble) >= 2
    assert all("requires 'Trusted" in trouble for trouble in mine.trouble)
    mine.trouble.clear()


def test_a_key_is_asked_for_until_it_is_right_and_stays_in_its_tab(user):
    page = user(key=None).tab()
    dialog = page.get_by_role("dialog", name="This server requires an API key")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Continue").click()
    page.get_by_text("The server does not accept this key.").wait_for()
    assert page.locator("#policy").inner_text() == ""
    dialog.get_by_label("Key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#policy:not(:empty)").wait_for()
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [
        0,
        "",
        page.url,
    ]
    assert KEY not in page.url
    page.get_by_role("button", name="Forget the key").click()
    dialog.wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_page_is_open_sealed_and_kept_by_browsers(server):
    index = httpx.get(f"{server.url}/")
    head = httpx.head(f"{server.url}/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == index.headers["etag"]
    assert (index.status_code, index.headers["cache-control"]) == (200, "no-cache")
    assert "default-src 'none'" in index.headers["content-security-policy"]
    assert "unsafe" not in index.headers["content-security-policy"]
    assert index.headers["x-content-type-options"] == "nosniff"
    same = httpx.get(f"{server.url}/", headers={"If-None-Match": index.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    named = re.findall(r'(?:src|href)="([^"#]+)"', index.text)
    assert {name.rpartition(".")[2] for name in named} == {"svg", "css", "js"}
    for name in named:
        found = httpx.get(f"{server.url}/{name}")
        assert found.status_code == 200
        assert found.headers["cache-control"].endswith("immutable")
    place = named[0].rpartition("/")[0]
    gone = [f"{place}/index.html", f"{place}/..%2fpage.py", f"{place}/nothing.js", "page/0/main.js"]
    assert {httpx.get(f"{server.url}/{path}").status_code for path in gone} == {404}
    assert httpx.get(f"{server.url}/v1/sessions").status_code == 401


def test_text_stands_out_from_its_ground_in_light_and_dark(server):
    named = re.findall(r'href="([^"]+\.css)"', httpx.get(f"{server.url}/").text)
    css = httpx.get(f"{server.url}/{named[0]}").text
    light, dark = re.findall(r":root \{([^}]*)\}", css)
    for scheme in (light, light + dark):
        colors = {name: _rgb(its) for name, its in re.findall(r"--([\w-]+): (#\w{6})", scheme)}
        strong = int(re.findall(r"--strong: (\d+)%", scheme)[-1]) / 100
        pairs = [("ink", "card"), ("ink", "paper"), ("ink", "tint"), ("on-deep", "deep")]
        pairs += [("gray", ground) for ground in ("card", "paper", "tint")]
        pairs += [("deep", "tint"), ("deep", "card"), ("bad", "bad-tint"), ("card", "bad")]
        for text, ground in pairs:
            assert _contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        for pool in ("0", "1", "2", "3", "4", "5", "-new"):
            mixed = tuple(
                strong * a + (1 - strong) * b
                for a, b in zip(colors[f"c{pool}"], colors["card"], strict=True)
            )
            assert _contrast(colors["ink"], mixed) >= 4.5, pool
            assert _contrast(colors[f"c{pool}"], colors["card"]) >= 3, pool


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the contrast ratio of two colors as WCAG 2.2 defines it."""
    lights = []
    for color in (one, other):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        lights.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)
