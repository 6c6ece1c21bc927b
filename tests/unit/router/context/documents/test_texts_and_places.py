"""Texts, chunks, PDFs within their limits, and where documents stand."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.optional_sections import DocumentsSettings
from samovar.configs.sections import (
    NvmeTierSettings,
    ProfileSettings,
    ProfilesSettings,
    S3TierSettings,
    TierSettings,
)
from samovar.router.context.documents import (
    DocumentFailed,
    chunks_of,
    end_of_documents,
    fenced_document,
    pinned,
    place_documents,
    read_pdf,
    text_of,
)
from samovar.router.context.documents.pdf_reader import text_of_pdf
from samovar.router.context.documents.text import PROGRAM
from samovar.router.openai import ChatMessage
from tests.house import ROOT
from tests.support.pdfs import bomb, file_of, pdf_of

SETTINGS = DocumentsSettings()


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_all_words_in_order_and_none_is_too_long(seed: int) -> None:
    rng = random.Random(seed)
    lines = [
        rng.choice(
            [
                "",
                "# Head",
                "## Sub head ##",
                "```",
                "x" * rng.randrange(200),
                "some words. " * rng.randrange(60),
            ]
        )
        for _ in range(60)
    ]
    text = "\n".join(lines)
    most = rng.choice([100, 300, 1200])
    chunks = chunks_of(text, "Title", rng.random() < 0.5, most)
    assert all(0 < len(chunk) <= most for _, chunk in chunks)
    assert all(len(title) <= 200 for title, _ in chunks)
    assert "".join(words(" ".join(chunk for _, chunk in chunks))) == "".join(words(text))


LONG = """
from samovar.router.context.compaction import pieces_of
from samovar.router.context.documents import chunks_of
from samovar.router.openai import ChatMessage
text = "x" * 2**25
assert "".join(one for _, one in chunks_of(text, "", False, 256)) == text
made = pieces_of([ChatMessage("user", text)], [0], 256, 2**20)
assert "".join(one.text for one in made) == "user: " + text
"""


def test_a_text_without_breaks_is_cut_in_time_of_its_length() -> None:
    # To copy the rest for each piece takes minutes.
    subprocess.run([sys.executable, "-c", LONG], cwd=ROOT, check=True, timeout=60)


def test_a_section_of_markdown_is_found_by_its_heading() -> None:
    chunks = chunks_of("intro\n\n# Taps #\nopen\n```\n# no heading\n```\n## Heat\nhot", "Manual", True, 200)
    assert [title for title, _ in chunks] == ["Manual", "Manual > Taps", "Manual > Heat"]
    assert chunks_of("# Taps\nopen", "", False, 200) == [("", "# Taps\nopen")]


def test_a_text_is_refused_without_anything_to_see_and_beyond_its_limit() -> None:
    assert text_of("\n\na\u200bb\x00\n", 99) == "ab"
    for bad in ("\u200b\n \n", " ", "\x00"):
        with pytest.raises(DocumentFailed, match="can be seen"):
            text_of(bad, 99)
    with pytest.raises(DocumentFailed, match=r"documents\.chars_max"):
        text_of("a" * 100, 99)


def settings(**fields: Any) -> DocumentsSettings:
    return DocumentsSettings.model_validate(fields)


async def test_a_pdf_is_read_in_a_process_of_its_own() -> None:
    text, pages = await read_pdf(pdf_of(["The tap is Zarya-7.", "Second page."], compress=True), SETTINGS)
    assert pages == 2
    assert words(text) == words("The tap is Zarya-7. Second page.")
    for data, own, why in (
        (pdf_of(["a"] * 4), settings(pages_max=3), "documents.pages_max"),
        (pdf_of(["a" * 50] * 3), settings(chars_max=99), "documents.chars_max"),
        (b"%PDF-1.7 nothing", SETTINGS, "no readable PDF"),
        (b"", SETTINGS, "no readable PDF"),
    ):
        with pytest.raises(DocumentFailed, match=why):
            await read_pdf(data, own)


LIMITED = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("reader", sys.argv[1])
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)
def endless(*given):
    while True: pass
works = {"memory": lambda *given: bytearray(2**30), "time": endless,
         "file": lambda *given: os.write(os.open(sys.argv[3], os.O_CREAT | os.O_RDWR), b"x")}
reader.text_of_pdf = works[sys.argv[2]]
reader.main(2**28, 1, 1, 1)
"""


@pytest.mark.parametrize("how", ["memory", "time", "file"])
def test_the_reader_has_limits_of_memory_processor_time_and_files(how: str, tmp_path: Path) -> None:
    told = [sys.executable, "-I", "-c", LIMITED, str(PROGRAM), how, str(tmp_path / "file")]
    done = subprocess.run(told, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stdout == b""
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) == 0


def test_a_bomb_unpacks_to_nothing_or_is_refused() -> None:
    told = text_of_pdf(bomb(2**27), 10, 1000)
    assert "error" in told or told["text"] == ""


async def test_a_reader_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from samovar.router.context.documents import text

    endless = tmp_path / "endless.py"
    endless.write_text("import time\nwhile True: time.sleep(1)\n")
    monkeypatch.setattr(text, "PROGRAM", endless)
    with pytest.raises(DocumentFailed, match=r"documents\.pdf_s_max"):
        await read_pdf(b"x", settings(pdf_s_max=0.2))
    endless.write_text("raise SystemExit(3)\n")
    with pytest.raises(DocumentFailed, match=r"documents\.pdf_bytes_max"):
        await read_pdf(b"x", SETTINGS)


def test_the_reader_imports_nothing_of_samovar_and_may_write_nothing() -> None:
    code = f"import runpy; runpy.run_path({str(PROGRAM)!r}); import sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert "router" not in done.stdout
    assert "configs" not in done.stdout


def test_malformed_pdfs_give_a_reason() -> None:
    rng = random.Random(18)
    good = [
        pdf_of(["Some text.", "More."]),
        pdf_of(["Packed."], compress=True),
        file_of([b"<< >>", b"[1 0 R]"]),
    ]
    reasons = set()
    for _ in range(300):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 30)):
            at = rng.randrange(len(data))
            how = rng.randrange(3)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at : at + rng.randrange(40)]
            else:
                data[at:at] = data[: rng.randrange(60)]
            data = data or bytearray(b"%")
        told = text_of_pdf(bytes(data), 10, 10_000)
        assert set(told) in ({"error"}, {"text", "pages"})
        reasons.add("error" in told)
    assert reasons == {True, False}


def test_documents_stand_before_everything_that_the_client_wrote() -> None:
    whole = fenced_document("doc-1", "Title", "one\ntwo", ())
    user, system = ChatMessage("user", "Why?"), ChatMessage("system", "Date: today\nBe brief.")
    (first, _) = place_documents((system, user), [whole], has_system=True)
    assert first.content == f"{whole.fence}\nDate: today\nBe brief."
    (moved, _) = place_documents((system, user), [whole], has_system=True, volatile_lines=("date",))
    assert moved.content == f"Date: today\n{whole.fence}\nBe brief.", "the prompt builder takes the date away"
    alone = place_documents((user,), [whole], has_system=True)
    assert alone == (ChatMessage("system", whole.fence), user)
    (without,) = place_documents((user,), [whole], has_system=False)
    assert (without.role, without.content) == ("user", f"{whole.fence}\nWhy?")
    assert end_of_documents(f"<s>{first.content}", [whole]) == (3, 3 + len(whole.fence) - 1)
    assert end_of_documents("<s>Why?", [whole]) is None


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, "nvme"),
        ({"s3": S3TierSettings(bucket="b")}, "s3"),
        ({"nvme": NvmeTierSettings(bytes_max=0)}, "cpu"),
        (
            {
                "s3": S3TierSettings(bucket="b"),
                "profiles": ProfilesSettings(documents=ProfileSettings(lowest="cpu")),
            },
            "cpu",
        ),
    ],
)
def test_a_prefill_is_pinned_to_the_lowest_tier_of_its_profile(fields: Any, first: str) -> None:
    made = pinned(TierSettings(**fields))
    assert made is not None
    assert (made.first, made.write_behind) == (first, ())
    assert pinned(TierSettings(enabled=False)) is None
