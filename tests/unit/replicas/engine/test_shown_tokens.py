"""Special tokens are left out of an answer's text, but for those that mark its parts."""

from __future__ import annotations

from samovar.replicas.answers import TextOut
from tests.support.engines.tiny_models import BOS_ID, BOS_TOKEN, PAD_ID, make_tiny_tokenizer


def test_a_special_token_is_text_only_where_it_is_wanted() -> None:
    tokenizer = make_tiny_tokenizer()
    ids = [*tokenizer.encode("é"), BOS_ID, PAD_ID, *tokenizer.encode("a")]

    def text(shown_ids: tuple[int, ...], stop: tuple[str, ...] = ()) -> str:
        out = TextOut(tokenizer.backend_tokenizer, stop, shown_ids)
        return "".join(out.push(token_id)[0] for token_id in ids) + out.flush()

    assert text(()) == "éa"
    assert text((BOS_ID,)) == f"é{BOS_TOKEN}a"
    assert text((BOS_ID,), stop=(BOS_TOKEN[:4],)) == "éa"
