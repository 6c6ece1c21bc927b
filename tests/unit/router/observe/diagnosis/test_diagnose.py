"""Each planted condition is found, and no other; a healthy service has none."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from samovar.router.observe.diagnosis import BY_NAME, CONDITIONS, Snapshot, diagnose, size_live
from samovar.router.observe.diagnosis.diagnose import JUDGES
from samovar.router.observe.diagnosis.snapshot import Window
from tests.support.router.snapshots import (
    FRONT,
    HEALTHY,
    PLANTED,
    REPLICA,
    SERVING,
    with_front,
    with_replica,
    with_settings,
)


def test_nothing_is_wrong_with_a_healthy_service_nor_with_one_that_has_just_begun() -> None:
    assert [(one.condition, one.evidence) for one in diagnose(HEALTHY).holding] == []
    assert diagnose(Snapshot(0.0)).holding == ()
    assert diagnose(HEALTHY, HEALTHY).holding == ()
    assert all(one.state == "clear" and one.evidence for one in diagnose(HEALTHY).findings)


@pytest.mark.parametrize(("name", "cause"), PLANTED)
def test_a_planted_condition_is_said_and_no_other(name: str, cause: str) -> None:
    found = diagnose(PLANTED[name, cause])
    assert [(one.condition, one.cause) for one in found.holding] == [(name, cause)]
    (finding,) = found.holding
    assert finding.numbers
    assert any(letter.isdigit() for letter in finding.evidence)
    assert finding.changes, "nothing to change"
    for change in finding.changes:
        assert change.setting or change.deed
        assert str(change)


def test_every_condition_is_planted_and_judged() -> None:
    assert {name for name, _ in PLANTED} == set(BY_NAME) == set(JUDGES)
    assert [one.condition for one in diagnose(HEALTHY).findings] == [one.name for one in CONDITIONS]


@pytest.mark.parametrize("snapshot", PLANTED.values(), ids=map("-".join, PLANTED))
def test_a_diagnosis_is_plain_json(snapshot: Snapshot) -> None:
    found = diagnose(snapshot)
    assert json.loads(json.dumps(found.json()))["turns"] == found.turns


def test_what_a_change_brings_is_computed_with_the_measured_prices() -> None:
    (finding,) = diagnose(PLANTED["prompt_changes", "system"]).holding
    # 2,000 tokens behind token 16: 2000 x (1 ms + 10 ms / 512) and the pairs that attend.
    assert finding.numbers["token"] == 16
    assert finding.numbers["lost_tokens"] == 2000
    assert finding.numbers["seconds_a_turn"] == pytest.approx(
        2.0 + 2000 / 512 * 0.01 + 1e-8 * (2 * 16 + 2000) * 2000
    )
    assert "in system, at token 16 on average" in finding.evidence
    assert "a date, a time" in finding.changes[0].deed
    dear = replace(
        PLANTED["prompt_changes", "system"], replicas=(replace(REPLICA, prefill_price=(0.1, 1e-2, 0.0)),)
    )
    assert diagnose(dear).holding[0].numbers["seconds_a_turn"] > 10 * 2.0 - 1


def test_reordered_tools_name_the_setting_that_undoes_it_where_it_is_off() -> None:
    sent = with_settings(PLANTED["prompt_changes", "tools"], router__prefix__tools="as_sent")
    first, second = diagnose(sent).holding[0].changes
    assert (first.setting, first.now, first.to) == ("router.prefix.tools", "as_sent", "ordered")
    assert "same list in every turn" in second.deed


def test_a_slow_disk_says_from_which_length_it_wins_and_how_fast_it_would_have_to_be() -> None:
    (finding,) = diagnose(PLANTED["storage_slow", ""]).holding
    assert "nvme at 0.02 GB/s wins never" in finding.evidence
    assert finding.numbers["bytes_per_s_needed"] == pytest.approx(50_000 / (1e-3 + 0.01 / 512))
    assert [change.setting for change in finding.changes] == ["engine.kv_dtype", "tiers.nvme.bytes_max"]


def test_only_what_was_counted_since_the_snapshot_before_counts() -> None:
    bad = PLANTED["timeouts", "nvme"]
    later = replace(bad, at_s=bad.at_s + 30)
    assert diagnose(later, bad).holding == ()
    assert diagnose(later, bad).period_s == 30
    assert [one.condition for one in diagnose(later, HEALTHY).holding] == ["timeouts"]


def test_what_is_not_stored_because_a_tier_is_left_out_is_said_once() -> None:
    stores = {"taken": 3, "skipped:no tier": 90, "refused:down": 20}
    out = replace(PLANTED["breaker_open", "nvme"], replicas=(replace(REPLICA, stores=stores),))
    assert [one.condition for one in diagnose(out).holding] == ["breaker_open"]
    up = replace(out, nodes=HEALTHY.nodes)
    assert [(one.condition, one.cause) for one in diagnose(up).holding] == [
        ("never_stored", "skipped:no tier")
    ]


def test_a_node_whose_tiers_do_not_answer_is_named() -> None:
    (finding,) = diagnose(replace(HEALTHY, silent_nodes=("fedcba9876543210",))).holding
    assert (finding.condition, finding.cause) == ("breaker_open", "actor")
    assert "the tier actor of node fedcba98 does not answer" in finding.evidence


def test_a_counter_that_fell_belongs_to_a_process_that_was_restarted() -> None:
    before = with_replica(slow_lookups={"nvme": 1000}, finished={"stop": 5000})
    found = diagnose(PLANTED["timeouts", "nvme"], before)
    assert [one.condition for one in found.holding] == ["timeouts"]
    assert found.turns == 200


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_every_condition_has_its_words(condition: object) -> None:
    for name, text in asdict(condition).items():  # type: ignore[call-overload]
        if isinstance(text, str) and name != "name":
            assert text
            assert name == "holds" or text[0].isupper()
            assert name in ("title", "holds") or text.endswith(".")


def test_an_empty_window_of_a_busy_service_is_clear() -> None:
    idle = with_front(queue_s=FRONT.queue_s)
    assert diagnose(idle, idle).turns == 0


def of_two_models(small: tuple[float, float, float], large: tuple[float, float, float]) -> Snapshot:
    """The healthy service, which computes most again, with another model of eight times the KV."""
    other = replace(SERVING, replica_id="replica-2", model_name="a/large", bytes_per_token=400_000)
    other = replace(other, context_tokens_max=4096)
    replicas = (
        replace(REPLICA, prefill_price=small, decisions={"load": 3, "recompute": 60}),
        replace(REPLICA, replica_id="replica-2", prefill_price=large, pages_active=1000, waiting=9),
    )
    return replace(HEALTHY, replicas=replicas, serving=(SERVING, other))


def test_each_model_has_its_own_price_and_bytes() -> None:
    quick, slow = (1e-5, 1e-6, 0.0), (0.1, 1e-2, 0.0)
    for small, large in ((quick, slow), (slow, quick)):
        now = of_two_models(small, large)
        sizing = size_live(now, (2048, 8192))
        assert sizing is not None
        assert (sizing.model_name, sizing.replicas) == (SERVING.model_name, 1)
        assert (sizing.prefill.c0_s, sizing.prefill.a_s) == small[:2]
        assert Window(now).prefill == sizing.prefill, "the diagnosis has the same"
        assert sizing.contexts[1].sequences == SERVING.sessions_that_fit(8192), (
            "the other's context is shorter"
        )


def test_a_tier_is_useless_if_it_is_for_no_model() -> None:
    quick, slow = (1e-5, 1e-6, 0.0), (0.1, 1e-2, 0.0)

    def left_out(now: Snapshot) -> list[str]:
        (found,) = [one for one in diagnose(now).holding if one.condition == "storage_slow"]
        assert "token of a/model (" in found.evidence
        assert "token of a/large (" in found.evidence
        return [change.setting for change in found.changes if change.to == 0]

    assert left_out(of_two_models(quick, quick)) == ["tiers.cpu.bytes_max", "tiers.nvme.bytes_max"]
    assert left_out(of_two_models(quick, slow)) == []
    assert left_out(of_two_models(slow, quick)) == []


def test_a_full_pool_is_priced_as_its_own_model_s() -> None:
    now = of_two_models((1e-5, 1e-6, 0.0), (0.1, 1e-2, 0.0))
    both, own = (
        next(one for one in diagnose(of).holding if one.condition == "kv_memory")
        for of in (now, now.of_each_model[1])
    )
    assert both.changes == own.changes
