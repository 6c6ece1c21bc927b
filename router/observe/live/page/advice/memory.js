import { byId, el, say } from "../base/dom.js";
import { bytes, count, duration, plural } from "../base/format.js";
import { inOrder, nameOf } from "../cache/sources.js";

/** Name a context's length: 2048 is 2k. */
export function lengthOf(tokens) {
  return tokens % 1024 === 0 ? `${tokens / 1024}k` : tokens.toLocaleString("en");
}

/** Return the contexts that the model can have. */
export function fitting(memory) {
  return memory.contexts.filter(({ sequences }) => sequences !== undefined);
}

/** Return in one line what a token takes, and how many conversations fit. */
export function fitInWords(memory) {
  const contexts = fitting(memory);
  const shown = contexts.length > 1 ? [contexts[0], contexts.at(-1)] : contexts;
  const parts = shown.map(({ sequences, tokens }) => `${sequences.toLocaleString("en")} of ${lengthOf(tokens)}`);
  const fit = parts.length > 0 ? `; room for ${parts.join(", or ")}` : "";
  return `${bytes(memory.bytes_per_token)} a token${fit}.`;
}

/** Return for each tier, hottest first, from which length on a load is sooner there than computing. */
export function winsInWords(memory) {
  return tiersOf(memory).map((name) => {
    const from = memory.tiers[name].wins_from;
    const when = from === undefined ? "never, in this context" : from <= 1 ? "always" : `from ${from.toLocaleString("en")} tokens on`;
    return { name, when };
  });
}

function tiersOf(memory) {
  return inOrder(Object.keys(memory.tiers));
}

/** What `samovar plan --live` says: what fits at each length, how fast it decodes, and what loading takes. */
export class MemoryPanel {
  #drawn = "";

  /** Draw a sizing; `undefined`: there is none for this caller, or nothing is measured yet. */
  show(memory) {
    byId("memory").hidden = memory === undefined;
    const key = JSON.stringify(memory ?? null);
    if (key === this.#drawn) return;
    this.#drawn = key;
    say(byId("memory-line"), memory === undefined ? "" : fitInWords(memory));
    byId("memory-table").replaceChildren(...(memory === undefined ? [] : tableOf(memory)));
    byId("memory-wins").replaceChildren(...(memory === undefined ? [] : winsInWords(memory).map(({ name, when }) => el("li", {}, el("strong", {}, nameOf(name)), ` ${when}`))));
    byId("memory-none").hidden = memory === undefined || Object.keys(memory.tiers).length > 0;
    say(byId("memory-notes"), memory === undefined ? "" : notesOf(memory));
  }

  /** Forget everything: another caller's follows. */
  clear() {
    this.show(undefined);
  }
}

function notesOf(memory) {
  const pools = memory.replicas > 1 ? `${memory.replicas} pools of ${bytes(memory.pool_bytes)}` : `a pool of ${bytes(memory.pool_bytes)}`;
  return `KV as ${memory.kv_dtype} in ${pools}; contexts end at ${plural(memory.context_tokens, "token")}. Prices are those measured while serving.`;
}

function tableOf(memory) {
  const tiers = tiersOf(memory);
  const heads = ["Context", "KV of one", "Fit at once", "Run at once", "One decodes", "All decode", "Computing it", ...tiers.map((name) => `From ${nameOf(name)}`)];
  const rows = fitting(memory).map((one) => {
    const cells = [bytes(one.kv_bytes), whole(one.sequences), whole(one.running), rate(one.alone_tokens_per_s), rate(one.batch_tokens_per_s), duration(one.compute_s)];
    const loads = tiers.map((name) => loadOf(one.load_s[name], one.compute_s));
    return el("tr", {}, el("th", { scope: "row" }, lengthOf(one.tokens)), cells.map((text) => el("td", {}, text)), loads);
  });
  return [el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, rows)];
}

function loadOf(seconds, computeS) {
  const isSooner = seconds < computeS;
  return el("td", { class: isSooner ? "sooner" : "" }, duration(seconds), isSooner ? el("span", { class: "unseen" }, ", sooner than computing") : null);
}

function whole(number) {
  return number.toLocaleString("en");
}

function rate(tokensPerS) {
  return tokensPerS > 0 ? `${count(tokensPerS)}/s` : "–";
}
