// What of the page needs no browser: `node --test`. `make test-page` runs it.

import assert from "node:assert/strict";
import { test } from "node:test";

const PAGE = new URL("../../router/observe/live/page/", import.meta.url);
const { mergePatch } = await import(new URL("base/merge.js", PAGE));
const { EventParser } = await import(new URL("base/sse.js", PAGE));
const format = await import(new URL("base/format.js", PAGE));
const live = await import(new URL("base/live.js", PAGE));
const { survivalAt, returnsWithin } = await import(new URL("cache/forecast.js", PAGE));
const { cellsOf, countsOf } = await import(new URL("cache/blocks.js", PAGE));
const { TokenHistory, TurnHistory } = await import(new URL("cache/history.js", PAGE));
const { lanesOf } = await import(new URL("cache/sessions.js", PAGE));
const sources = await import(new URL("cache/sources.js", PAGE));
const { gainOf, wordsOf } = await import(new URL("cache/turns.js", PAGE));
const diagnosis = await import(new URL("advice/diagnosis.js", PAGE));
const memory = await import(new URL("advice/memory.js", PAGE));
const store = await import(new URL("chat/store.js", PAGE));
const { Leaving } = await import(new URL("chat/leaving.js", PAGE));
const { complete, messagesFor } = await import(new URL("chat/completion.js", PAGE));

test("what only the page knows is told of conversations that were answered in it, and not too often", async () => {
  const told = [];
  let now = 0;
  const api = { send: async (path, { body, keepalive }) => told.push([path, body.event, keepalive]) };
  const leaving = new Leaving(api, { now: () => now });
  leaving.typing("a");
  leaving.hidden("a");
  leaving.closed();
  assert.deepEqual(told, []);
  leaving.answered("a/b");
  leaving.answered("c");
  leaving.answered("d");
  leaving.forget("d");
  for (now of [0, 5000, 10_000]) leaving.typing("a/b");
  leaving.hidden("c");
  leaving.closed();
  leaving.closed();
  const at = (id) => `v1/sessions/${id}/hint`;
  assert.deepEqual(told, [
    [at("a%2Fb"), "typing", true],
    [at("a%2Fb"), "typing", true],
    [at("c"), "hidden", true],
    [at("a%2Fb"), "closed", true],
    [at("c"), "closed", true],
  ]);
});

test("merge patches are those of RFC 7386, appendix A", () => {
  const cases = [
    [{ a: "b" }, { a: "c" }, { a: "c" }],
    [{ a: "b" }, { b: "c" }, { a: "b", b: "c" }],
    [{ a: "b" }, { a: null }, {}],
    [{ a: "b", b: "c" }, { a: null }, { b: "c" }],
    [{ a: ["b"] }, { a: "c" }, { a: "c" }],
    [{ a: "c" }, { a: ["b"] }, { a: ["b"] }],
    [{ a: { b: "c" } }, { a: { b: "d", c: null } }, { a: { b: "d" } }],
    [{ a: [{ b: "c" }] }, { a: [1] }, { a: [1] }],
    [["a", "b"], ["c", "d"], ["c", "d"]],
    [{ a: "b" }, ["c"], ["c"]],
    [{ a: "foo" }, null, null],
    [{ a: "foo" }, "bar", "bar"],
    [{ e: null }, { a: 1 }, { e: null, a: 1 }],
    [[1, 2], { a: "b", c: null }, { a: "b" }],
    [{}, { a: { bb: { ccc: null } } }, { a: { bb: {} } }],
  ];
  for (const [target, patch, result] of cases) assert.deepEqual(mergePatch(target, patch), result);
});

test("a patch changes neither what it is applied to nor any prototype", () => {
  const before = { a: { b: 1 }, c: { d: 1 } };
  const after = mergePatch(before, JSON.parse('{"a": {"b": 2}, "__proto__": {"bad": 1}, "toString": {"x": 1}}'));
  assert.deepEqual(before, { a: { b: 1 }, c: { d: 1 } });
  assert.equal(after.c, before.c);
  assert.equal(after.bad, undefined);
  assert.equal({}.bad, undefined);
  assert.deepEqual(after.toString, { x: 1 });
});

test("events are the same wherever the stream is cut", () => {
  const text = ": ping\n\nevent: state\ndata: {\"a\": 1}\n\ndata: one\r\ndata: two\r\n\r\ndata:x\n\nevent: none\n\n";
  const wanted = [
    { event: "state", data: '{"a": 1}' },
    { event: "message", data: "one\ntwo" },
    { event: "message", data: "x" },
  ];
  for (let size = 1; size <= text.length; size++) {
    const parser = new EventParser();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...parser.feed(text.slice(at, at + size)));
    assert.deepEqual(found, wanted, `pieces of ${size}`);
  }
});

test("an endless event is refused", () => {
  const parser = new EventParser();
  assert.throws(() => {
    for (let piece = 0; piece < 20; piece++) parser.feed(`data: ${"x".repeat(1_000_000)}\n`);
  }, /too long/);
});

test("numbers are short and have their unit", () => {
  const said = [0, 7, 999, 1000, 1234, 15_000, 999_999, 4.2e6].map(format.count);
  assert.deepEqual(said, ["0", "7", "999", "1k", "1.2k", "15k", "1M", "4.2M"]);
  assert.deepEqual([0, 512, 1024, 1.5 * 2 ** 20, 2 ** 34].map(format.bytes), ["0 B", "512 B", "1 KiB", "1.5 MiB", "16 GiB"]);
  const durations = [0.0031, 0.24, 1, 12.4, 240, 9000, 400_000].map(format.duration);
  assert.deepEqual(durations, ["3.1 ms", "240 ms", "1 s", "12 s", "4 min", "2.5 h", "5 d"]);
  assert.deepEqual([0, 0.001, 0.5, 0.999, 1].map(format.percent), ["0%", "<1%", "50%", ">99%", "100%"]);
  for (const one of [format.count, format.bytes, format.duration, format.percent]) assert.equal(one(NaN), "–");
  assert.equal(format.short("héllo wörld", 6), "héllo…");
});

test("the chance to return follows the forecast's curve", () => {
  const atS = [10, 100, 1000];
  const survival = [0.9, 0.5, 0.1];
  assert.equal(survivalAt(atS, survival, 0), 1);
  assert.equal(survivalAt(atS, survival, 10), 0.9);
  assert.ok(Math.abs(survivalAt(atS, survival, 55) - 0.7) < 1e-12);
  assert.equal(survivalAt(atS, survival, 1e9), 0.1);
  assert.ok(Math.abs(returnsWithin(atS, survival, 100, 900) - 0.8) < 1e-12);
  assert.ok(Number.isNaN(returnsWithin(atS, [0.9, 0, 0], 200, 10)));
});

test("a block is drawn in the nearest tier that has it", () => {
  const lineage = { blocks: { gpu: 2 }, runs: [["cpu", 3], ["nvme", 2], ["none", 1], ["peer", 1]] };
  const places = cellsOf(10, lineage).map(({ place }) => place);
  assert.deepEqual(places, ["gpu", "gpu", "cpu", "nvme", "nvme", "none", "peer", "none", "none", "none"]);
  assert.deepEqual(cellsOf(10, lineage).slice(0, 3).map(({ below }) => below), ["cpu", "cpu", "none"]);
  assert.deepEqual(countsOf(10, lineage), { gpu: 2, cpu: 1, nvme: 2, none: 4, peer: 1 });
  assert.equal(cellsOf(5000, { blocks: { gpu: 0 }, runs: [["nvme", 5000]] }).length, 64);
  assert.deepEqual(cellsOf(0, { blocks: {}, runs: [] }), []);
  assert.equal(cellsOf(3, {}).length, 3); // the directory does not answer
});

test("tokens by source are counted from the first totals on, also over a restart", () => {
  const history = new TokenHistory(10, 3);
  history.add(100, { since_unix_s: 1, tokens: { gpu: 500 } });
  history.add(105, { since_unix_s: 1, tokens: { gpu: 520, cpu: 5 } });
  history.add(112, { since_unix_s: 1, tokens: { gpu: 521, cpu: 5 } });
  assert.deepEqual(history.buckets(119).map(({ tokens }) => tokens), [{}, { gpu: 20, cpu: 5 }, { gpu: 1 }]);
  history.add(120, { since_unix_s: 2, tokens: { gpu: 3 } });
  history.add(121, { since_unix_s: 2, tokens: { gpu: 4 } });
  assert.deepEqual(history.buckets(121).map(({ tokens }) => tokens), [{ gpu: 20, cpu: 5 }, { gpu: 1 }, { gpu: 1 }]);
});

test("turns are bounded for each lineage and in all", () => {
  const turns = new TurnHistory(3, 5);
  for (let number = 0; number < 9; number++) turns.add({ session: "a", lineage: "1", number });
  assert.deepEqual(turns.of("a", "1").map(({ number }) => number), [8, 7, 6]);
  for (let number = 0; number < 3; number++) turns.add({ session: "b", lineage: "1", number });
  assert.deepEqual(turns.of("a", "1"), []);
  assert.equal(turns.of("b", "1").length, 3);
});

test("a turn says what it gained only where it reused something", () => {
  const turn = { tokens: { cpu: 640, compute: 20 }, ttft_ms: 80, recompute_ms: 1260 };
  assert.equal(gainOf(turn), "16× sooner than computing it all.");
  assert.match(wordsOf({ ...turn, miss: "late" }), /^640 of 660 prompt tokens reused: 640 RAM, 20 Computed\. .*because: late\.$/);
  assert.equal(wordsOf({ tokens: { compute: 30 }, ttft_ms: 50, recompute_ms: 60 }), "All 30 prompt tokens were computed.");
});

test("tokens of a further tier count, and are named before what was computed", () => {
  const tokens = { compute: 20, gpu: 1, tape: 300, cpu: 4 };
  assert.deepEqual([sources.cachedOf(tokens), sources.allOf(tokens)], [305, 325]);
  assert.deepEqual([sources.cachedOf({}), sources.allOf({})], [0, 0]);
  assert.deepEqual(sources.sourcesOf(tokens), ["gpu", "cpu", "nvme", "s3", "peer", "tape", "compute"]);
  assert.equal(sources.inWords(tokens), "1 GPU pages, 4 RAM, 300 tape, 20 Computed");
  assert.match(wordsOf({ tokens: { tape: 300, compute: 20 }, ttft_ms: 1, recompute_ms: 9 }), /^300 of 320 .* reused: 300 tape, 20 Computed\./);
  const history = new TokenHistory(10, 1);
  for (const tape of [1, 8]) history.add(5, { since_unix_s: 1, tokens: { tape } });
  assert.deepEqual(history.buckets(5)[0].tokens, { tape: 7 });
  assert.deepEqual(["gpu", "compute", "none", "tape"].map(sources.styleOf), ["gpu", "compute", "none", "other"]);
});

test("blocks of a further tier have a lane, above those without a copy", () => {
  const lineage = { blocks: { gpu: 1 }, runs: [["s3", 1], ["tape", 2], ["none", 1]] };
  const lanes = lanesOf({ nodes: { n: { tiers: { disc: { state: "up" }, peer: { state: "off" } } } } }, [["s", { lineages: { l: lineage } }]]);
  assert.deepEqual(lanes, ["gpu", "cpu", "nvme", "s3", "disc", "tape", "none"]);
  for (const place of Object.keys(countsOf(4, lineage))) assert.ok(lanes.includes(place), place);
  assert.deepEqual(lanesOf(null, []), ["gpu", "cpu", "nvme", "none"]);
});

/** The browser's storage, as far as the page uses it; `isFull` makes it refuse. */
function newShelf() {
  const items = {};
  const hidden = {
    isFull: { value: false, writable: true },
    getItem: { value: (key) => items[key] ?? null },
    removeItem: { value: (key) => delete items[key] },
    setItem: {
      value: (key, value) => {
        if (items.isFull) throw new Error("QuotaExceededError");
        items[key] = value;
      },
    },
  };
  return Object.defineProperties(items, hidden);
}

function conversations(shelf, scope = "a") {
  let number = Object.keys(shelf).length;
  return new store.ConversationStore(shelf, scope, () => ++number, () => `id-${number}`);
}

test("conversations survive a reload, bounded, each tenant's apart", () => {
  const shelf = newShelf();
  const first = conversations(shelf);
  for (let number = 0; number < store.CONVERSATIONS_MAX + 5; number++) {
    const made = first.create();
    first.add(made, { role: "user", content: `hello ${number}\nmore` });
    first.add(made, { role: "assistant", content: "hi", state: "streaming" });
    first.save(made);
  }
  const again = conversations(shelf).list();
  assert.equal(again.length, store.CONVERSATIONS_MAX);
  assert.equal(again[0].title, `hello ${store.CONVERSATIONS_MAX + 4}`);
  assert.equal(again[0].messages[1].state, "stopped");
  assert.deepEqual(conversations(shelf, "b").list(), []);
  assert.deepEqual(conversations(shelf, "").list(), []);
});

test("a long conversation keeps its latest messages", () => {
  const shelf = newShelf();
  const kept = conversations(shelf);
  const made = kept.create();
  for (let number = 0; number < store.MESSAGES_MAX + 9; number++) kept.add(made, { role: "user", content: `${number}` });
  kept.add(made, { role: "user", content: "x".repeat(store.CHARS_MAX - 3) });
  kept.save(made);
  const [again] = conversations(shelf).list();
  assert.ok(again.messages.length < 5);
  assert.equal(again.messages.at(-1).content.length, store.CHARS_MAX - 3);
});

test("where the browser has no room the page says so, and another version's entry is dropped", () => {
  const shelf = newShelf();
  shelf.setItem("samovar.chat.v1.a.bad", "{");
  const kept = conversations(shelf);
  assert.deepEqual(Object.keys(shelf), []);
  shelf.isFull = true;
  const made = kept.create();
  kept.add(made, { role: "user", content: "x" });
  kept.save(made);
  assert.equal(kept.isKept, false);
  assert.equal(kept.list().length, 1);
});

test("what is kept but cannot be drawn is dropped", () => {
  const sound = { id: "x", title: "t", used: 1, session: null, messages: [{ role: "user", content: "a" }] };
  const answer = { role: "assistant", content: "a" };
  const spoilt = [
    { id: "y" },
    { title: 3 },
    { used: "now" },
    { session: {} },
    { messages: [] },
    { messages: {} },
    { messages: [null] },
    { messages: [{ role: "user" }] },
    { messages: [{ ...answer, role: "system" }] },
    { messages: [{ ...answer, turn: null }] },
    { messages: [{ ...answer, turn: {} }] },
    { messages: [{ ...answer, thinking: 5 }] },
  ];
  for (const part of [{}, ...spoilt]) {
    const shelf = newShelf();
    shelf.setItem("samovar.chat.v1.a.x", JSON.stringify({ ...sound, ...part }));
    const isSound = spoilt.indexOf(part) < 0;
    assert.equal(conversations(shelf).list().length, isSound ? 1 : 0, JSON.stringify(part));
    assert.equal(Object.keys(shelf).length, isSound ? 1 : 0);
  }
});

function answering(pieces) {
  const body = new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(new TextEncoder().encode(piece));
      controller.close();
    },
  });
  return { send: async () => ({ body }) };
}
const chunk = (delta, more = {}) => `data: ${JSON.stringify({ choices: [{ delta, finish_reason: null }], ...more })}\n\n`;
const request = { model: "m", session: "s", requestId: "r", messages: [], maxTokens: 1 };

test("an answer is read with its receipt; a cut one and an error in it are failures", async () => {
  const heard = [];
  const on = { delta: (piece) => heard.push(piece) };
  const end = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "receipt": {"tokens": {"gpu": 1}}}\n\n';
  const whole = [chunk({ role: "assistant" }), chunk({ content: "a" }), chunk({ reasoning_content: "t" }), end, "data: [DONE]\n\n"];
  const result = await complete(answering(whole), request, on, null, { now: () => 5 });
  assert.deepEqual(heard, [{ content: "a", thinking: "" }, { content: "", thinking: "t" }]);
  assert.deepEqual(result, { finish: "stop", receipt: { tokens: { gpu: 1 } }, ttftMs: 0 });
  await assert.rejects(complete(answering([chunk({ content: "a" })]), request, on, null), /middle of the answer/);
  const failed = [chunk({ content: "a" }), 'data: {"error": {"message": "replica lost"}}\n\n'];
  await assert.rejects(complete(answering(failed), request, on, null), /replica lost/);
});

test("failed and empty answers are not sent again", () => {
  const messages = [
    { role: "user", content: "a" },
    { role: "assistant", content: "half", state: "failed" },
    { role: "user", content: "b" },
    { role: "assistant", content: "", state: "stopped" },
    { role: "assistant", content: "kept", state: "stopped", turn: {} },
  ];
  assert.deepEqual(messagesFor({ messages }).map(({ content }) => content), ["a", "b", "kept"]);
});

/** A clock that a test moves. */
class Clock {
  now = 0;
  #timers = new Map();
  #next = 1;
  setTimeout = (run, ms) => {
    this.#timers.set(this.#next, { run, at: this.now + ms });
    return this.#next++;
  };
  clearTimeout = (id) => this.#timers.delete(id);
  async pass(ms) {
    const end = this.now + ms;
    for (;;) {
      await settle();
      const [due] = [...this.#timers].filter(([, { at }]) => at <= end).sort((a, b) => a[1].at - b[1].at);
      if (!due) break;
      this.#timers.delete(due[0]);
      this.now = due[1].at;
      due[1].run();
    }
    this.now = end;
    await settle();
  }
}
const settle = async () => {
  for (let turn = 0; turn < 20; turn++) await new Promise((resolve) => setImmediate(resolve));
};

function streaming(script) {
  const seen = { opened: 0, states: [], turns: [], links: [] };
  const clock = new Clock();
  const open = async (signal) => script(seen.opened++, signal);
  const on = {
    state: (state) => seen.states.push(state),
    turn: (turn) => seen.turns.push(turn),
    link: (what) => seen.links.push(what),
  };
  return { seen, clock, stream: new live.LiveStream(open, on, clock) };
}

function lines(text, isOpen = false) {
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
      if (!isOpen) controller.close();
    },
  });
  return { body };
}

test("the live stream puts changes together and comes back when it ends", async () => {
  const text = 'event: change\ndata: {"x": 1}\n\nevent: state\ndata: {"a": {"b": 1}}\n\nevent: change\ndata: {"a": {"b": 2}}\n\nevent: turn\ndata: {"t": 1}\n\n';
  const { seen, clock, stream } = streaming(() => lines(text));
  stream.start();
  await clock.pass(5000);
  assert.deepEqual(seen.states.slice(0, 2), [{ a: { b: 1 } }, { a: { b: 2 } }]);
  assert.deepEqual(seen.turns[0], { t: 1 });
  assert.ok(seen.opened >= 3);
  stream.pause();
  const opened = seen.opened;
  await clock.pass(60_000);
  assert.equal(seen.opened, opened);
});

test("waits double up to a bound, and the page gives up in the end", async () => {
  assert.equal(live.waitMs(1, 0.5), live.FIRST_WAIT_MS);
  assert.equal(live.waitMs(3, 0.5), live.FIRST_WAIT_MS * 4);
  assert.equal(live.waitMs(90, 0.5), live.WAIT_MS_MAX);
  const { seen, clock, stream } = streaming(() => Promise.reject(new Error("down")));
  stream.start();
  await clock.pass(live.WAIT_MS_MAX * 2 * live.TRIES_MAX);
  assert.equal(seen.opened, live.TRIES_MAX + 1);
  assert.equal(seen.links.at(-1), "lost");
});

test("a refused key is not tried again, and Retry-After is honoured", async () => {
  const refused = streaming(() => Promise.reject(Object.assign(new Error("no"), { status: 401 })));
  refused.stream.start();
  await refused.clock.pass(60_000);
  assert.equal(refused.seen.opened, 1);
  const busy = streaming(() => Promise.reject(Object.assign(new Error("busy"), { status: 429, retryAfterS: 20 })));
  busy.stream.start();
  await busy.clock.pass(19_000);
  assert.equal(busy.seen.opened, 1);
  await busy.clock.pass(2000);
  assert.equal(busy.seen.opened, 2);
});

test("a service that never answers is given up", async () => {
  const { seen, clock, stream } = streaming(() => new Promise(() => {}));
  stream.start();
  await clock.pass(live.SILENCE_MS_MAX + 5000);
  assert.equal(seen.opened, 2);
  stream.pause();
});

test("an event may be as long as the service's settings allow", () => {
  const long = "x".repeat(16 * 1024 * 1024);
  const parser = new EventParser();
  assert.deepEqual(parser.feed(`data: ${long}`), []);
  assert.equal(parser.feed("\n\n")[0].data.length, long.length);
  assert.throws(() => parser.feed("x".repeat(18 * 1024 * 1024)), /too long/);
});

test("a silent connection is given up", async () => {
  const { seen, clock, stream } = streaming(() => lines('event: state\ndata: {"a": 1}\n\n', true));
  stream.start();
  await clock.pass(live.SILENCE_MS_MAX - 1);
  assert.equal(seen.opened, 1);
  await clock.pass(5000);
  assert.equal(seen.opened, 2);
  stream.pause();
});

const QUIET = { state: "clear", title: "KV memory is the bottleneck", evidence: "3 of 10 pages are in use" };
const LOUD = { state: "holds", title: "The disk is full", evidence: "no room", symptom: "Turns are not stored.", changes: [] };

test("a healthy service has one quiet line, another names its problems", () => {
  const line = (conditions) => diagnosis.inOneLine({ turns: 4, conditions });
  assert.equal(line({ a: QUIET, b: QUIET }), "Nothing is wrong: none of 2 conditions holds.");
  assert.equal(line({ a: QUIET, b: { ...QUIET, state: "unknown" } }), "Nothing is wrong: none of 2 conditions holds; 1 cannot be judged yet.");
  assert.equal(line({ a: QUIET, b: LOUD }), "1 problem: The disk is full.");
  assert.equal(line({ a: LOUD, b: LOUD }), "2 problems: The disk is full · The disk is full.");
});

test("a change is said with the value that is set now, a deed without", () => {
  const setting = { setting: "tiers.cpu.bytes_max", to: "2 = 2 B", now: "1 B", brings: "two tokens" };
  assert.deepEqual(diagnosis.changeInWords(setting), { what: "tiers.cpu.bytes_max: 2 = 2 B.", now: "Now 1 B.", brings: "Two tokens." });
  assert.deepEqual(diagnosis.changeInWords({ deed: "See the log.", brings: "" }), { what: "See the log.", now: "", brings: "" });
});

const SIZED = {
  bytes_per_token: 49152,
  contexts: [{ tokens: 2048, sequences: 8 }, { tokens: 4096, sequences: 4 }, { tokens: 8192, sequences: 2 }, { tokens: 16384 }],
  tiers: { tape: {}, s3: {}, nvme: { wins_from: 1200 }, cpu: { wins_from: 1 } },
};

test("memory is told for the contexts that the model can have", () => {
  assert.deepEqual(memory.fitting(SIZED).map(({ tokens }) => memory.lengthOf(tokens)), ["2k", "4k", "8k"]);
  assert.equal(memory.fitInWords(SIZED), "48 KiB a token; room for 8 of 2k, or 2 of 8k.");
  assert.equal(memory.fitInWords({ ...SIZED, contexts: SIZED.contexts.slice(0, 1) }), "48 KiB a token; room for 8 of 2k.");
  assert.equal(memory.fitInWords({ ...SIZED, contexts: SIZED.contexts.slice(3) }), "48 KiB a token.");
  assert.equal(memory.lengthOf(1000), "1,000");
});

test("each tier says from which length on it is sooner than computing, the hottest first", () => {
  assert.deepEqual(memory.winsInWords(SIZED), [
    { name: "cpu", when: "always" },
    { name: "nvme", when: "from 1,200 tokens on" },
    { name: "s3", when: "never, in this context" },
    { name: "tape", when: "never, in this context" },
  ]);
});

test("a tier's bytes are those of all nodes, the bucket's are counted once, and one that cannot be opened says why", () => {
  const node = (tiers) => ({ tiers: Object.fromEntries(tiers.map(([name, state, used, limit]) => [name, { state, used_bytes: used, limit_bytes: limit }])) });
  const nodes = [
    node([["cpu", "up", 1, 4], ["nvme", "off: cannot open it", 0, 8], ["s3", "up", 40, 100], ["more", "off: not configured", 0, 0]]),
    node([["cpu", "up", 2, 4], ["nvme", "up", 3, 8], ["s3", "up", 41, 100], ["more", "off: not configured", 0, 0]]),
  ];
  const told = sources.tiersOf(nodes).map(({ name, used, limit, off, problems }) => [name, used, limit, off, [...problems]]);
  assert.deepEqual(told, [
    ["cpu", 3, 8, false, []],
    ["nvme", 3, 16, false, ["off: cannot open it"]],
    ["s3", 41, 100, false, []],
    ["more", 0, 0, true, []],
  ]);
});
