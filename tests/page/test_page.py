"""The page over a scripted service: chat, blocks that move, keys, and what it must never do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Error, expect

from samovar.cache_tiers.pricing import TierPrice
from samovar.router.observe.diagnosis import CONDITIONS, diagnose
from tests.page.conftest import NARROW, PICTURES, WIDE, Seen, answers, axe_problems, live, say
from tests.page.fake_service import ADMIN, World, populate, step_down
from tests.support.pages import PAGES, blocks_of
from tests.support.router.snapshots import HEALTHY, NVME, OFF, PLANTED, REPLICA, with_tiers
from tests.support.services.service import until

pytestmark = pytest.mark.slow

Opener = Callable[..., Any]
HOSTILE = """<img src=x onerror="window.bad=1"> <script>window.bad=2</script>
<iframe src="http://192.0.2.1/"></iframe> ![picture](http://192.0.2.1/x.png) <style>body{display:none}</style>

[click](javascript:window.bad=3) [data](data:text/html,<script>window.bad=4</script>) [out](https://example.com/a)

```<b>html
<img src=y onerror="window.bad=5">
```

| <a href="javascript:window.bad=6">cell</a> |
| --- |
| </textarea><svg onload=window.bad=7> |
"""


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_quiet(
    fake: str, world: World, open_page: Opener, seen: Seen, size: tuple[int, int], scheme: str
) -> None:
    world.replies["hello"] = "Some **text**\n\n```python\nprint(1)\n```\n\n- a\n- b"
    page = live(open_page(fake, size, color_scheme=scheme))
    assert axe_problems(page) == []
    populate(world)
    say(page, "hello")
    answers(page, 1)
    if size == NARROW:
        for name in ("Conversations", "Overview", "Chat"):
            page.get_by_role("tab", name=name).click()
            expect(page.get_by_role("tabpanel")).to_have_count(1)
            assert axe_problems(page) == []
            page_width = page.locator("html").evaluate("(html) => html.scrollWidth")
            assert page_width <= size[0]
    else:
        expect(page.locator(".session")).to_have_count(5)
        assert axe_problems(page) == []
    page.get_by_role("button", name="API key").click()
    assert axe_problems(page) == []
    seen.check()


def test_a_models_text_is_inert(fake: str, world: World, open_page: Opener, seen: Seen) -> None:
    world.replies["hello"] = HOSTILE
    page = live(open_page(fake))
    say(page, "hello")
    answer = answers(page, 1)
    expect(answer).to_contain_text("onerror=")
    expect(answer).to_contain_text("[image: picture]")
    assert answer.locator("img, script, iframe, style, svg[onload]").count() == 0
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://example.com/a"]
    assert page.evaluate("window.bad") is None
    seen.check()


def test_an_answer_is_stopped_and_history_survives_a_reload(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    world.replies["long"] = "word " * 3000
    page = live(open_page(fake))
    say(page, "hello")
    answers(page, 1)
    say(page, "long")
    expect(page.locator(".streaming")).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".from-assistant").nth(1)).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.reload()
    live(page)
    expect(page.locator(".from-assistant").first).to_contain_text("It is hot.")
    expect(page.locator(".from-assistant .turn").first).to_be_visible()
    expect(page.locator(".from-assistant").nth(1)).to_contain_text("Stopped.")
    say(page, "hello")  # goes on in the same session: it has its blocks
    expect(page.locator(".from-assistant").nth(2).locator(".part[data-source=gpu]")).to_be_visible()
    seen.check()


def test_the_service_hears_who_types_who_looks_away_and_who_leaves(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    page = live(open_page(fake))
    page.get_by_label("Message to the model").fill("hel")  # of a session that the service does not know yet
    say(page, "hello")
    answers(page, 1)
    (session,) = [name.partition("/")[2] for name in world.talks]
    assert world.hints == []
    for text in ("a", "ab"):
        page.get_by_label("Message to the model").fill(text)
    until("typing", lambda: world.hints == [(session, "typing")])
    page.close(run_before_unload=True)
    until("closed", lambda: (session, "closed") in world.hints)
    assert {event for _, event in world.hints} <= {"typing", "hidden", "closed"}
    assert len([one for one in world.hints if one[1] == "typing"]) == 1
    seen.check()


def test_the_snippet_of_the_documentation_tells_the_same(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    every = [block for page in PAGES for block in blocks_of(page)]
    (code,) = [block.text for block in every if block.language == "js"]
    assert len(code.splitlines()) <= 30
    page = live(open_page(fake, bypass_csp=True))  # of the live page, not of whoever uses the snippet
    page.evaluate(
        f"(() => {{ {code.replace('export ', '')}"
        "; tellSamovar(location.origin, 'a-b', document.getElementById('prompt')); })()"
    )
    for text in ("a", "ab"):
        page.get_by_label("Message to the model").fill(text)
    until("typing", lambda: world.hints == [("a-b", "typing")])
    page.close(run_before_unload=True)
    until("closed", lambda: ("a-b", "closed") in world.hints)
    seen.check()


def test_of_a_deleted_conversation_nothing_is_told(fake: str, world: World, open_page: Opener) -> None:
    page = live(open_page(fake))
    say(page, "hello")
    answers(page, 1)
    page.get_by_role("button", name="Delete").click()
    until("deleted", lambda: len(world.deleted) == 1)
    say(page, "hello")
    answers(page, 1)
    page.close(run_before_unload=True)
    until("closed", lambda: any(event == "closed" for _, event in world.hints))
    assert world.deleted[0] not in {session for session, _ in world.hints}


def test_conversations_go_on_beside_each_other_each_with_its_session(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    world.replies["long"] = "tick " * 60
    page = live(open_page(fake))
    say(page, "long")
    page.get_by_role("button", name="New conversation").click()
    say(page, "hello")
    expect(answers(page, 1)).to_contain_text("It is hot.")
    page.get_by_role("button", name="long").click()
    expect(answers(page, 1)).to_contain_text("tick tick")
    expect(page.locator(".session.mine")).to_have_count(2)
    assert len(world.talks) == 2
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".session")).to_have_count(1)
    assert len(world.deleted) == 1
    expect(page.locator("#conversations li")).to_have_count(1)
    seen.check()


def test_blocks_are_seen_moving_down_and_coming_back(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    page = live(open_page(fake))
    page.get_by_role("button", name="Send a long text").click()
    answers(page, 1)
    row = page.locator(".session.mine")
    (talk,) = world.talks.values()
    for place in ("gpu", "cpu", "nvme"):
        expect(row.locator(f".cell:not(.copy).at-{place}")).to_have_count(min(64, talk.blocks))
        if place != "nvme":
            step_down(talk)
    expect(row.get_by_role("img", name="blocks by nearest tier")).to_have_accessible_name(
        f"{talk.blocks} blocks by nearest tier: {talk.blocks} NVMe"
    )
    say(page, "And in one word?")
    answer = answers(page, 2)
    expect(answer.locator(".part[data-source=nvme]")).to_be_visible()
    expect(answer).to_contain_text("sooner than computing it all")
    expect(row.locator(".turn")).to_contain_text("NVMe")
    expect(row.locator(".cell:not(.copy).at-gpu").first).to_be_visible()
    expect(page.locator("#legend [data-source=nvme]")).not_to_contain_text("NVMe0%")
    seen.check()


def test_a_key_is_asked_for_and_a_tenant_sees_only_its_own(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    world.has_keys = True
    page = open_page(fake)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()

    def use(key: str) -> None:
        dialog.get_by_label("Key").fill(key)
        dialog.get_by_role("button", name="Use the key").click()

    use("wrong")
    expect(dialog).to_contain_text("does not know this key")
    assert axe_problems(page) == []
    use("key-a")
    live(page)
    say(page, "hello")
    answers(page, 1)
    expect(page.locator("#card-held")).to_contain_text("RAM")
    expect(page.locator("#card-tiers")).to_be_hidden()
    expect(page.locator("#diagnosis")).to_be_hidden()
    expect(page.locator("#memory")).to_be_hidden()
    page.reload()  # the key is kept in the tab
    live(page)
    expect(page.locator(".from-assistant")).to_contain_text("It is hot.")
    assert axe_problems(page) == []

    page.get_by_role("button", name="API key").click()
    dialog.get_by_role("button", name="Forget the key").click()
    expect(dialog).to_be_visible()  # it is asked for again, and nothing stays in view
    expect(page.locator(".session, .message, #conversations li")).to_have_count(0)
    expect(page.locator("#card-held")).to_be_hidden()
    use("key-b")
    expect(page.locator("#scope")).to_have_text("tenant b")
    expect(page.locator(".session")).to_have_count(0)
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#hit-caption")).to_have_text("no prompt has come yet")

    page.get_by_role("button", name="API key").click()
    use(ADMIN)
    expect(page.locator("#scope")).to_have_text("whole cluster")
    expect(page.locator(".session")).to_contain_text("tenant a")
    expect(page.locator("#chat-refused")).to_be_visible()
    expect(page.get_by_label("Message to the model")).to_be_disabled()
    expect(page.locator("#card-tiers")).to_be_visible()
    expect(page.locator("#diagnosis-line")).to_contain_text("Nothing is wrong")
    page.locator("#diagnosis > summary").click()
    page.get_by_role("button", name="API key").click()
    use("key-a")  # what the administrator saw does not stay
    expect(page.locator("#scope")).to_have_text("tenant a")
    for part in ("#diagnosis", "#memory"):
        expect(page.locator(part)).to_be_hidden()
    for part in ("#diagnosis-line", "#findings", "#conditions", "#memory-table", "#advice-announce"):
        expect(page.locator(part)).to_have_text("")
    told = [said for said in seen.errors if "401" in said]  # the browser's own line about the refusals
    assert seen.errors == told
    assert seen.foreign == []


def test_rows_are_not_said_to_be_all_where_the_stream_left_some_out(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    world.has_more = True
    populate(world)
    page = live(open_page(fake))
    expect(page.locator("#sessions-summary")).to_have_text("4 of 4 and more, the latest used")
    seen.check()


def test_nothing_of_the_last_keys_owner_stays_or_comes_late(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    world.has_keys = True
    page = open_page(fake)
    late: list[Any] = []
    page.route("**/v1/usage", lambda route: route.continue_() if late else late.append(route))
    dialog = page.get_by_role("dialog")

    def use(key: str) -> None:
        dialog.get_by_label("Key").fill(key)
        dialog.get_by_role("button", name="Use the key").click()

    use("key-a")
    live(page)
    say(page, "hello")
    answers(page, 1)
    expect(page.locator("#announce")).to_contain_text("Answer:")
    page.get_by_label("Message to the model").fill("what only a would say")
    page.get_by_role("button", name="API key").click()
    use("key-b")
    expect(page.locator("#scope")).to_have_text("tenant b")
    expect(page.locator("#announce")).to_have_text("")
    expect(page.get_by_label("Message to the model")).to_have_value("")
    expect(page.locator("#held")).to_contain_text("RAM")
    with contextlib.suppress(Error):  # the page waits for it no longer
        late[0].fulfill(json={"bytes_held": {"s3": 7 * 2**30}})
    page.wait_for_timeout(300)
    expect(page.locator("#held")).not_to_contain_text("7 GiB")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_wrong_is_said_with_evidence_setting_and_gain(
    fake: str, world: World, open_page: Opener, seen: Seen, size: tuple[int, int], scheme: str
) -> None:
    page = live(open_page(fake, size, color_scheme=scheme))
    if size == NARROW:
        page.get_by_role("tab", name="Overview").click()
    line, announced = page.locator("#diagnosis-line"), page.locator("#advice-announce")
    expect(line).to_have_text(f"Nothing is wrong: none of {len(CONDITIONS)} conditions holds.")
    expect(announced).to_have_text("")
    expect(page.locator("#findings")).to_be_hidden()  # a line, and no more
    world.snapshot = PLANTED["kv_memory", ""]
    expect(line).to_have_text("1 problem: KV memory is the bottleneck.")
    expect(announced).to_have_text("1 problem: KV memory is the bottleneck.")
    summary = page.locator("#diagnosis > summary")
    summary.focus()
    page.keyboard.press("Enter")
    (finding,) = diagnose(world.snapshot).holding
    shown = page.locator(".finding")
    expect(shown).to_have_count(1)
    expect(shown).to_contain_text(finding.evidence)
    expect(shown.locator(".changes li")).to_have_count(len(finding.changes))
    for change in finding.changes:
        expect(shown).to_contain_text(f"{change.setting}: {change.to_in_words}")
        expect(shown).to_contain_text(change.brings[1:])
    page.locator("#memory > summary").click()
    if os.environ.get("TESTS_PICTURES") and (size, scheme) == (WIDE, "light"):
        page.locator(".advice").screenshot(path=PICTURES / "page-1280-diagnosis.png")
    page.get_by_text("All that was looked at").click()
    expect(page.locator(".condition")).to_have_count(len(CONDITIONS))
    assert axe_problems(page) == []
    assert page.locator("html").evaluate("(html) => html.scrollWidth") <= size[0]
    world.snapshot = HEALTHY
    expect(announced).to_contain_text("Nothing is wrong")
    expect(shown).to_have_count(0)
    seen.check()


def test_memory_is_shown_for_each_length_that_the_model_can_have(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    page = live(open_page(fake))
    expect(page.locator("#memory-line")).to_contain_text("room for 8 of 2k, or 2 of 8k")
    page.locator("#memory > summary").click()
    rows = page.locator("#memory-table tbody tr")
    expect(rows).to_have_count(3)
    expect(page.locator("#memory-table thead")).to_contain_text("From NVMe")
    expect(rows.nth(2).locator("th")).to_have_text("8k")
    expect(rows.nth(2).locator(".sooner")).to_have_count(2)
    expect(page.locator("#memory-wins")).to_contain_text("NVMe from 4 tokens on")
    slow = replace(NVME, price=TierPrice(20.0, 1e3))
    world.snapshot = with_tiers(slow, OFF)
    expect(page.locator("#memory-wins")).to_have_text("NVMe never, in this context")
    expect(page.locator(".sooner")).to_have_count(0)
    world.snapshot = replace(HEALTHY, replicas=(replace(REPLICA, prefill_price=(0.0, 0.0, 0.0)),))
    expect(page.locator("#memory")).to_be_hidden()  # nothing is measured yet
    expect(page.locator("#diagnosis")).to_be_visible()
    seen.check()


def test_the_stream_comes_back_and_is_closed_while_nobody_looks(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    page = live(open_page(fake))
    world.cut += 1
    until("the page has connected again", lambda: world.live_opened == 2)
    populate(world)
    expect(page.locator(".session")).to_have_count(4)
    live(page)
    page.close()
    until("the stream is closed", lambda: world.live_open == 0)
    seen.check()


def test_a_refusal_is_said_and_the_text_may_be_sent_again(
    fake: str, world: World, open_page: Opener, seen: Seen
) -> None:
    page = live(open_page(fake))
    say(page, "fail")
    expect(page.locator(".message-status.error")).to_have_text("Failed: This prompt is too long.")
    say(page, "hello")
    expect(page.locator(".from-assistant").nth(1)).to_contain_text("It is hot.")
    assert all("400" in said for said in seen.errors)


def test_everything_is_done_with_keys_alone(fake: str, open_page: Opener, seen: Seen) -> None:
    page = live(open_page(fake))
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the chat")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    expect(answers(page, 1)).to_contain_text("It is hot.")
    expect(page.locator(".from-user")).to_contain_text("hello you")
    expect(page.locator("#announce")).to_have_text("Answer: It is **hot**.")
    assert page.get_by_label("Message to the model").input_value() == ""
    seen.check()
