"""The page of a real service: conversations leave the pool and return, seen by their owner only.

`TESTS_PICTURES=1` also writes the pictures of `docs/img`, which a person should look at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from samovar.router.observe.diagnosis import BY_NAME, diagnose, snapshot_of
from tests.page.conftest import NARROW, PICTURES, WIDE, Seen, answers, axe_problems, live, say
from tests.support.services.guests import Conversation
from tests.support.services.service import for_served_dtype, until
from tests.support.services.tier_service import ADMIN_KEY, MIB, TierService, flag, tier_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Opener = Callable[..., Any]
KEYS = {name: f"key-of-tenant-{name}" for name in ("alice", "bob")}
ANSWER_S = 120.0
RAM_BYTES = for_served_dtype(64 * MIB)
"""Room for the conversations and for what fills the pool once (24 MiB), not twice."""
LOADS_MAX = 6
ADVISED_MS = 60_000
"""The page is advised every ten seconds, and a machine may be slow."""
GUESTS = 3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    flags = {"tiers.cpu.bytes-max": str(RAM_BYTES)}
    with tier_service(tmp_path_factory.mktemp("page"), flags) as service:
        yield service


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    env = {"SAMOVAR_AUTH__API_KEYS": flag(KEYS), "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY}
    with tier_service(tmp_path_factory.mktemp("keys"), env=env, key=ADMIN_KEY) as service:
        yield service


def begin(page: Any, starter: str | None, text: str = "") -> None:
    """Begin a conversation with a starter, or with a text, and wait for the answer."""
    page.get_by_label("Answer up to").select_option("64")
    if starter is not None:
        page.get_by_role("button", name=starter).click()
    else:
        say(page, text)
    answers(page, 1, ANSWER_S)


def out_of_the_pool(page: Any) -> None:
    """Wait until no conversation of this browser has a block in the pool."""
    expect(page.locator(".session.mine .cell:not(.copy).at-gpu")).to_have_count(0, timeout=60_000)


def says_what_the_command_says(page: Any, service: TierService) -> None:
    """Check the page's diagnosis beside the service's own numbers, which change no more."""
    with service.http() as client:
        stats, metrics = client.get("/cache/stats").json(), client.get("/metrics").text
    found = diagnose(snapshot_of(stats, metrics, 0.0))
    line = page.locator("#diagnosis-line")
    holding = [BY_NAME[one.condition].title for one in found.holding]
    for title in holding or ["Nothing is wrong"]:
        expect(line).to_contain_text(title, timeout=ADVISED_MS)
    expect(page.locator(".finding")).to_have_count(len(holding), timeout=ADVISED_MS)
    expect(page.locator("#memory-line")).to_contain_text("a token; room for")


def test_two_conversations_leave_the_pool_and_return_from_their_tiers(
    service: TierService, open_page: Opener, seen: Seen, tmp_path: Path
) -> None:
    page = live(open_page(service.url, WIDE))
    for number in range(GUESTS):
        guest = Conversation(number, turn_words=40)
        service.turn(guest)
        service.turn(guest)
    begin(page, "Send a long text")
    page.get_by_role("button", name="New conversation").click()
    begin(page, None, f"My day, in short: {Conversation(77, turn_words=330).next_messages()[-1]['content']}")
    expect(page.locator(".session.mine")).to_have_count(2)
    service.settle()
    pictures = PICTURES if os.environ.get("TESTS_PICTURES") else tmp_path
    on_disk = page.locator(".session.mine", has_text="Read this").locator(".cell:not(.copy).at-nvme")
    for title, source in (("My day", "cpu"), ("Read this text", "nvme")):
        for _ in range(LOADS_MAX):
            service.overrun()
            out_of_the_pool(page)
            service.settle()
            if source == "cpu" or on_disk.count() > 0:
                break
        page.get_by_role("button", name=title).click()
        say(page, "Say that again in fewer words, please.")
        answer = answers(page, 2, ANSWER_S)
        expect(answer.locator(f".source-bar [data-source={source}]")).to_be_visible()
        expect(answer.locator(".bar-fill.seen")).to_be_visible()
        expect(answer.locator(".bar-fill.price")).to_be_visible()
        seen_px, price_px = (answer.locator(f".bar-fill.{kind}").bounding_box() for kind in ("seen", "price"))
        assert seen_px["width"] > 0
        assert price_px["width"] > 0
        expect(answer.locator(".turn-words")).to_contain_text("prompt tokens reused")
        expect(page.locator(".session.mine .turn-words").first).to_contain_text("prompt tokens reused")
    expect(page.locator("#tiers [data-source=nvme] .meter-value")).to_contain_text("MiB of")
    expect(page.locator("#replicas .meter")).to_have_count(1)
    says_what_the_command_says(page, service)
    assert axe_problems(page) == []
    page.wait_for_timeout(1500)  # what moves has arrived
    page.screenshot(path=pictures / "page-1280.png")
    page.locator("#memory > summary").click()
    expect(page.locator("#memory-table tbody tr")).not_to_have_count(0)
    expect(page.locator("#memory-table thead")).to_contain_text("From NVMe")
    page.locator("#memory > summary").click()
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    expect(page.get_by_role("tabpanel")).to_have_count(1)
    assert axe_problems(page) == []
    page.screenshot(path=pictures / "page-390-chat.png")
    page.get_by_role("button", name="Its blocks").click()
    expect(page.get_by_role("tab", name="Conversations")).to_have_attribute("aria-selected", "true")
    page.wait_for_timeout(2000)
    page.screenshot(path=pictures / "page-390-blocks.png")
    page.reload()
    live(page)
    expect(page.locator(".from-assistant")).to_have_count(2)
    seen.check()


def test_who_closes_the_tab_is_not_expected_back(service: TierService, open_page: Opener) -> None:
    def sessions() -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in client.get("/v1/sessions").json()["data"]}

    def is_demoted() -> bool:
        """Whether the session that this tab began is closed, and nobody waits for it."""
        one = client.get(f"/v1/sessions/{session}").json()
        return one["state"] == "closed" and one["lineages"][0]["likely_within_600s"] == 0.0

    with service.http() as client:
        before = sessions().keys()
        page = live(open_page(service.url))
        begin(page, "Ask a short question")
        ((session, card),) = [item for item in sessions().items() if item[0] not in before]
        assert card["state"] == "idle"
        began_s = time.monotonic()
        page.close(run_before_unload=True)
        until("demoted", is_demoted)
        print(f"demoted {time.monotonic() - began_s:.2f} s after the tab was closed")


@pytest.mark.guarantee("G2", "F14")
def test_a_second_tenant_sees_nothing_of_the_first(
    with_keys: TierService, open_page: Opener, seen: Seen
) -> None:
    def opened(key: str) -> Any:
        page = open_page(with_keys.url)
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Use the key").click()
        return live(page)

    alice, bob, admin = opened(KEYS["alice"]), opened(KEYS["bob"]), opened(ADMIN_KEY)
    expect(alice.locator("#scope")).to_have_text("tenant alice")
    begin(alice, "Ask a short question")
    expect(alice.locator(".session.mine")).to_have_count(1)
    expect(alice.locator("#hit-caption")).to_contain_text("prompt tokens")
    expect(admin.locator(".session")).to_contain_text("tenant alice")
    expect(admin.get_by_label("Message to the model")).to_be_disabled()
    expect(admin.locator("#card-tiers")).to_be_visible()
    expect(admin.locator("#diagnosis-line")).not_to_be_empty(timeout=ADVISED_MS)
    for page in (alice, bob):
        expect(page.locator("#diagnosis")).to_be_hidden()
        expect(page.locator("#memory")).to_be_hidden()
        expect(page.locator("#conditions")).to_be_empty()
    expect(bob.locator("#scope")).to_have_text("tenant bob")
    expect(bob.locator(".session")).to_have_count(0)
    expect(bob.locator(".message")).to_have_count(0)
    expect(bob.locator("#hit-caption")).to_have_text("no prompt has come yet")
    expect(bob.locator("#card-tiers")).to_be_hidden()
    session = alice.locator(".session").get_attribute("data-session")
    assert session not in bob.content()
    assert session in admin.content()
    refused = [said for said in seen.errors if "401" in said]  # until the key was given
    assert seen.errors == refused
    assert seen.foreign == []
