"""What `make bench-service` sends: side requests follow the answers that they followed in the trace."""

from __future__ import annotations

import pytest

from bench import service
from bench._service_player import scripts
from bench._trace_generator import GeneratorOptions, generate
from bench._trace_patterns import Patterns
from tests.support.traffic import made


def test_side_requests_follow_the_turns_of_their_conversation() -> None:
    patterns = Patterns(side=1.0, title=1.0)
    turns = list(generate(GeneratorOptions("chat", 60, 1, block_tokens=256, patterns=patterns)).turns())
    found = scripts(turns, scale=0.01, tokens_max=600, seed=1)
    main = {script.session: script for script in found if not script.lineage}
    side = [script for script in found if script.lineage]
    assert len({(script.session, script.lineage) for script in found}) == len(found)
    assert all(not any(script.is_main) and len(script.prompts) == 1 for script in side)
    assert all(all(script.is_main) for script in main.values())
    assert all(script.after <= len(main[script.session].prompts) for script in side)
    titles = [script for script in side if script.after == 0]
    assert len(titles) == len(main)
    for session, script in main.items():
        after = [one.after for one in side if one.session == session]
        assert sorted(after) == sorted([0, *(3 * [*range(1, len(script.prompts) + 1)])])
    assert all(0 <= script.starts_s < 1.0 for script in side if script.after)
    assert not {script.prompts[0][:2] for script in side} & {s.prompts[0][:2] for s in main.values()}


def test_a_trace_without_lineages_is_played_as_before() -> None:
    turns = made(60)
    found = scripts(turns, scale=0.01, tokens_max=10_000, seed=1)
    assert [script.session for script in found] == sorted({turn.session for turn in turns})
    assert sum(len(script.prompts) for script in found) == len(turns)
    assert all(script.after == 0 and all(script.is_main) for script in found)


def test_a_pattern_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        service.arguments(["--patterns", "tags"])
    assert "no pattern 'tags'" in capsys.readouterr().err
