"""Names what can be wrong with a running service, in the words that diagnose and the runbook share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that can be wrong.

    `title`: what it is; `symptom`: what users and operators see of it; `holds`: when it is said to hold;
    `remedy`: what helps. `causes`: name -> what that variant of it is.
    """

    name: str
    title: str
    symptom: str
    holds: str
    remedy: str
    causes: Mapping[str, str] = field(default_factory=dict)


CONDITIONS = (
    Condition(
        "kv_memory",
        "KV memory is the bottleneck",
        "Answers start late and come slowly while the device is busy; requests wait, answers pause.",
        "pages in use are 85 % of a replica's pool or more while requests wait, or one answer in ten was "
        "preempted",
        "Give the pool more memory (engine.pool_memory_fraction), halve a token's bytes "
        "(engine.kv_dtype: int8), or add replicas.",
    ),
    Condition(
        "no_offload",
        "Long contexts are preempted or refused, and nothing keeps what they had",
        "Long conversations stop for seconds in the middle of an answer, or are refused.",
        "most preempted sequences were dropped because engine.preemption is drop or tiers.swap_bytes_max "
        "is 0; "
        "or requests were refused and the pool holds less than the model's context",
        "Let preempted sequences keep their blocks in main memory (engine.preemption: price, "
        "tiers.swap_bytes_max), or make the pool hold a whole context.",
    ),
    Condition(
        "idle_sessions",
        "Idle conversations hold the memory, and no tier can take them",
        "People who come back after a pause wait as long as for a new conversation.",
        "at least half of the pool is kept for idle conversations, none of it is free, some was evicted, "
        "and no "
        "tier is up",
        "Switch the tiers on (tiers.enabled, tiers.cpu.bytes_max, tiers.nvme.bytes_max).",
    ),
    Condition(
        "prompt_changes",
        "Prompts change near their beginning, so what is behind the change is computed again",
        "Every turn is as slow as the first one, although nothing was evicted.",
        "one turn in ten, and three at least, left the prefix of its conversation's last prompt",
        "Keep what is sent before unchanged, and put what changes at the end of the prompt. The receipt's "
        "`miss` "
        "names token and part of each such prompt.",
        {
            "system": "The system prompt changes: a date, a time, a request's id or a user's status in it. "
            "Put it "
            "into the last user message; name a header line that clients write in "
            "router.prefix.volatile_lines",
            "tools": "The tools change: added, removed, reworded or reordered between turns. Send the same "
            "list in "
            "every turn, and restrict it by tool_choice; router.prefix.tools: ordered undoes reordering",
            "messages": "Earlier messages change: cut, summarised, edited, or sent without the reasoning "
            "that the "
            "model wrote. Append only, and shorten rarely and by much",
        },
    ),
    Condition(
        "other_namespace",
        "Turns of one conversation come with different cache salts",
        "A conversation finds nothing of its own last turn, with the tiers full of it.",
        "one turn in ten, and three at least, continued a conversation under another cache_salt",
        "Send the same cache_salt in all turns of a conversation, such as one for each user.",
    ),
    Condition(
        "never_stored",
        "Turns are not stored",
        "Conversations come back from the pool only, and never after an eviction or a restart.",
        "one extent in five, and three at least, was not stored",
        "It depends on the cause; the log of the replica or of the tier actor has each.",
        {
            "dropped:staged": "The memory in which extents wait for the tier actor, and its queue, are "
            "full: raise tiers.staged_bytes_max and tiers.store_queue_max",
            "dropped:evicted": "Turns that waited for that memory lost their pages meanwhile: raise "
            "tiers.staged_bytes_max",
            "dropped:error": "Copying or sealing blocks failed: see the replica's log",
            "refused:queue": "Too many stores wait in the tier actor: raise tiers.store_queue_max and "
            "tiers.io_threads, or put a faster tier first",
            "refused:full": "No tier has room that may be freed: raise tiers.nvme.bytes_max or "
            "tiers.cpu.bytes_max",
            "refused:quota": "Tenants have used their share of the tiers: raise tiers.tenant_share",
            "refused:down": "No tier was up: see breaker_open",
            "refused:no answer": "The tier actor did not answer: see its log",
            "refused:incarnation": "The tier actor was restarted during the turns: see its log",
            "skipped:not looked up": "The tiers had not answered when the turn ended: see timeouts",
            "skipped:no tier": "No tier that the profile allows was up: tiers.profiles, or breaker_open",
        },
    ),
    Condition(
        "evicted",
        "What returns was evicted: the tiers are too small",
        "People who come back soon are answered fast, after a longer pause slowly.",
        "a fifth of the tokens of returning conversations, or more, is computed again while the largest "
        "tier is "
        "full and evicts",
        "Raise the bytes_max of the lowest tier, or add a lower one; `samovar plan --trace` finds the size.",
    ),
    Condition(
        "timeouts",
        "The tiers answer too late, and prompts are computed instead",
        "First tokens take as long as without a cache, although status shows hits.",
        "one turn in ten, and three at least, was computed before its lookup was answered; or one block in "
        "twenty, and 64 at least, was not loaded in time",
        "Find out why the named tier is slow; until then let prompts wait longer (tiers.lookup_share, "
        "tiers.load_s_max).",
    ),
    Condition(
        "storage_slow",
        "Loading is dearer than computing",
        "The tiers fill, or stay empty, and prompts are computed.",
        "half of the decisions were to compute what a tier had, or half of the extents were not worth "
        "storing; three at least",
        "Use a faster medium, halve the bytes (engine.kv_dtype: int8), or switch the slow tier off: for this "
        "model and machine computing is quicker.",
        {
            "nothing stored": "The tiers take nothing, and every return is computed. `samovar doctor` shows "
            "both prices: if its medium is faster than the price here, the price is wrong, not the medium",
        },
    ),
    Condition(
        "prefill_bound",
        "Computing prompts takes nearly all of the time",
        "First tokens come late, with a queue, though pages are free; answers stutter.",
        "prompts take 70 % of the steps' time or more, requests wait now, and have waited for half a "
        "second or "
        "more on average",
        "Add replicas (cluster.replicas), or raise the share of cached tokens: see the other conditions.",
    ),
    Condition(
        "router_spills",
        "Conversations are sent away from the replica that has their blocks",
        "The same conversation is fast at one turn and slow at the next.",
        "one returning turn in five, and three at least, went to another replica because that was expected "
        "to "
        "be quicker",
        "Raise router.affinity_penalty_s if home is not that busy; else add replicas.",
    ),
    Condition(
        "predictor_off",
        "Who returns is not predicted",
        "The wrong conversations are evicted: hit rates are those of least-recently-used.",
        "the predictor is off, has failed, or is still cold after 200 turns",
        "See the tier actor's log for the reason, and whether tiers.predictor.file can be written.",
    ),
    Condition(
        "predictor_loses",
        "The predictor loses: least recently used would find more",
        "Conversations that were used lately are computed again, and the tiers are full of older ones.",
        "over 200 turns or more, least recently used would have found 1 % more of the tokens asked for",
        "Switch it off: tiers.policy.name: lru. What it learns goes on beside, and the same numbers say when "
        "it would win.",
    ),
    Condition(
        "breaker_open",
        "A tier does not answer and is left out",
        "Conversations that lie there are computed again.",
        "a tier's circuit breaker is open, or a tier that is set up is off, or the tier actor of a node does "
        "not answer",
        "See to the disk, the bucket or the process that is named; the tier is tried again by itself, one "
        "that could not be opened at the next start.",
    ),
    Condition(
        "disk_full",
        "The disk of the nvme tier is nearly full",
        "Turns are no longer stored on the disk, and other programs on it fail.",
        "the disk has less room than the tier may still take, and less than 1 GiB or a tenth of the tier's "
        "size; "
        "or the tier is read-only",
        "Free some room, lower tiers.nvme.bytes_max below what is there, or choose another tiers.nvme.dir.",
    ),
)

BY_NAME = {one.name: one for one in CONDITIONS}
