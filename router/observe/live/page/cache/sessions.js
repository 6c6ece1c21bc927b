import { byId, el, keyed, say } from "../base/dom.js";
import { bytes, count, duration, plural, short } from "../base/format.js";
import { BlockLanes } from "./blocks.js";
import { SurvivalCurve } from "./forecast.js";
import { allOf, cachedOf, inOrder } from "./sources.js";
import { TurnBars, gainOf, longestMs } from "./turns.js";

const ROWS_FIRST = 8;
const ID_CHARS = 6;
const TITLE_CHARS = 48;
const STATES = { typing: "somebody is typing", tool: "waits for a tool", closed: "closed" };

/** The caller's conversations, the most recently used first: blocks by tier, forecast, turns. */
export class SessionList {
  #list = byId("sessions");
  #empty = byId("sessions-empty");
  #more = byId("sessions-more");
  #summary = byId("sessions-summary");
  #rows = new Map();
  #limit = ROWS_FIRST;
  #turns;
  #titleOf;
  #seen = null;

  /** `turns`: the `TurnHistory`; `titleOf(session)`: its title if it is one of this browser's conversations. */
  constructor(turns, titleOf) {
    this.#turns = turns;
    this.#titleOf = titleOf;
    this.#more.addEventListener("click", () => {
      this.#limit *= 2;
      if (this.#seen) this.show(...this.#seen);
    });
  }

  /** Draw a state (`null`: none yet) as of the service's time `now`. */
  show(state, now) {
    this.#seen = [state, now];
    const sessions = Object.entries(state?.sessions ?? {}).sort((a, b) => b[1].last_used_unix_s - a[1].last_used_unix_s);
    const shown = sessions.slice(0, this.#limit);
    this.#empty.hidden = sessions.length > 0;
    if (sessions.length === 0) say(byId("example"), exampleOf(state?.model?.name));
    this.#more.hidden = sessions.length <= this.#limit;
    const known = `${count(sessions.length)}${state?.left_out?.includes("sessions") ? " and more" : ""}`;
    const isAll = known === String(shown.length);
    say(this.#summary, isAll ? plural(shown.length, "conversation") : `${shown.length} of ${known}, the latest used`);
    const lanes = lanesOf(state, shown);
    const items = shown.map(([name, session]) => ({ name, session, state, now, lanes }));
    keyed(this.#list, this.#rows, items, (item) => item.name, () => new Row(this.#turns, this.#titleOf));
  }

  /** Bring a conversation's row into view and point to it. */
  reveal(name) {
    const row = this.#rows.get(name)?.node;
    if (!row) return;
    row.scrollIntoView({ block: "nearest" });
    row.classList.remove("pointed");
    void row.offsetWidth; // so that the animation starts over
    row.classList.add("pointed");
  }

  /** Say when time has passed without news: the idle times. */
  tick(now) {
    if (this.#seen?.[0]) this.show(this.#seen[0], now);
  }
}

/** Return a request to copy, as this service takes it. */
function exampleOf(model) {
  const url = new URL("v1/chat/completions", document.baseURI);
  const body = JSON.stringify({ model: model ?? "MODEL", messages: [{ role: "user", content: "Hello" }] });
  return `curl ${url} \\\n  -H 'Content-Type: application/json' -H 'X-Session-Id: tea' \\\n  -d '${body}'`;
}

/** Return the lanes to draw: places that this service has or that some conversation uses. */
export function lanesOf(state, sessions) {
  const used = new Set(["gpu", "cpu", "nvme", "none"]);
  for (const node of Object.values(state?.nodes ?? {})) {
    for (const [name, tier] of Object.entries(node.tiers ?? {})) if (!tier.state.startsWith("off")) used.add(name);
  }
  for (const [, session] of sessions) {
    for (const lineage of Object.values(session.lineages)) {
      for (const [place] of lineage.runs ?? []) used.add(place);
    }
  }
  return inOrder(used);
}

class Row {
  node = el("li", { class: "session" });
  #title = el("h3", { class: "session-title" });
  #facts = el("p", { class: "session-facts" });
  #lanes = new BlockLanes();
  #curve = new SurvivalCurve();
  #turn = new TurnBars();
  #earlier = el("ol", { class: "earlier" });
  #earlierBox = el("details", { class: "more" }, el("summary", {}, "Earlier turns"), this.#earlier);
  #beside = el("p", { class: "hint" });
  #turns;
  #titleOf;
  #drawn = null;

  constructor(turns, titleOf) {
    this.#turns = turns;
    this.#titleOf = titleOf;
    const head = el("div", { class: "session-head" }, this.#title, this.#facts);
    const where = el("div", { class: "session-where" }, this.#lanes.node, this.#curve.node);
    this.node.append(head, where, this.#turn.node, this.#earlierBox, this.#beside);
  }

  update({ name, session, state, now, lanes }) {
    const [tag, lineage] = mainOf(session);
    const title = this.#titleOf(name);
    this.node.dataset.session = name;
    this.node.classList.toggle("mine", title !== null);
    say(this.#title, title === null ? `Session ${name.replace(/^sess_/, "").slice(0, ID_CHARS)}` : short(title, TITLE_CHARS));
    this.#title.title = name;
    say(this.#facts, factsOf(session, lineage, now));
    const chain = Math.floor(lineage.tokens / (state.model?.block_tokens ?? 16));
    this.#lanes.show(chain, lineage, lanes);
    this.#curve.show(lineage.forecast ?? null, state.forecast_at_s, now);
    this.node.classList.toggle("running", lineage.running === true);
    this.#showTurns(name, tag);
    const others = Object.keys(session.lineages).length - 1;
    this.#beside.hidden = others === 0;
    if (others > 0) say(this.#beside, `and ${plural(others, "other prompt")} under the same id (titles, sub-agents)`);
  }

  #showTurns(name, tag) {
    const turns = this.#turns.of(name, tag);
    const latest = turns[0] ?? null;
    this.#turn.node.hidden = latest === null;
    this.#earlierBox.hidden = turns.length < 2;
    if (latest === null || latest === this.#drawn) return;
    this.#drawn = latest;
    this.#turn.show(latest, Math.max(...turns.map(longestMs)));
    this.#earlier.replaceChildren(...turns.slice(1).map((turn) => el("li", {}, briefly(turn))));
  }
}

function mainOf(session) {
  const all = Object.entries(session.lineages);
  return all.find(([, lineage]) => lineage.main) ?? all[0] ?? ["", { tokens: 0, turns: 0, blocks: {}, bytes: {}, runs: [] }];
}

function factsOf(session, lineage, now) {
  const held = Object.values(lineage.bytes ?? {}).reduce((sum, size) => sum + size, 0);
  const parts = [`${count(lineage.tokens)} tokens`, plural(lineage.turns, "turn")];
  if (held > 0) parts.push(`${bytes(held)} held`);
  if (lineage.running) parts.push("answering now");
  else parts.push(`idle ${duration(Math.max(0, Math.round(now - session.last_used_unix_s)))}`);
  if (STATES[lineage.state]) parts.push(STATES[lineage.state]);
  if (session.tenant) parts.push(`tenant ${session.tenant}`);
  if (lineage.home) parts.push(`at ${lineage.home}`);
  return parts.join(" · ");
}

function briefly(turn) {
  const times = `${duration(turn.ttft_ms / 1000)} to the first token, ${duration(turn.recompute_ms / 1000)} if recomputed`;
  const gain = gainOf(turn);
  return `${times}; ${count(cachedOf(turn.tokens))} of ${count(allOf(turn.tokens))} tokens reused${gain ? "" : " (nothing gained)"}`;
}
