import { el, say } from "../base/dom.js";
import { count, duration } from "../base/format.js";
import { SourceBar, allOf, cachedOf, inWords } from "./sources.js";

/**
 * One turn: its time to first token above what computing the whole prompt would have taken, on one scale, and
 * where its tokens came from.
 */
export class TurnBars {
  node = el("div", { class: "turn" });
  #seen = bar("First token", "seen");
  #price = bar("If recomputed", "price");
  #tokens = new SourceBar();
  #words = el("p", { class: "turn-words" });

  constructor() {
    const tokens = el("div", { class: "turn-line" }, el("span", { class: "turn-name" }, "Tokens"), this.#tokens.node);
    this.node.append(this.#seen.node, this.#price.node, tokens, this.#words);
  }

  /** Draw a turn as the service tells it (`turn` events); `scaleMs`: the longest bar's time. */
  show(turn, scaleMs = longestMs(turn)) {
    fill(this.#seen, turn.ttft_ms, scaleMs);
    fill(this.#price, turn.recompute_ms, scaleMs);
    this.#tokens.show(turn.tokens);
    say(this.#words, wordsOf(turn));
  }
}

/** Return the longest time of a turn that its bars show. */
export function longestMs(turn) {
  return Math.max(turn.ttft_ms ?? 0, turn.recompute_ms ?? 0, 1);
}

/** Say a turn in words: where its tokens came from, and what that gained. */
export function wordsOf(turn) {
  const [cached, all] = [cachedOf(turn.tokens), allOf(turn.tokens)];
  const parts = [cached > 0 ? `${count(cached)} of ${count(all)} prompt tokens reused: ${inWords(turn.tokens)}.` : `All ${count(all)} prompt tokens were computed.`];
  const gain = gainOf(turn);
  if (gain) parts.push(gain);
  if (turn.miss) parts.push(`Not more, because: ${turn.miss}.`);
  return parts.join(" ");
}

/** Say how much sooner the first token came than the whole prompt could have been computed; "" where it did not. */
export function gainOf(turn) {
  if (!(turn.ttft_ms > 0) || !(turn.recompute_ms > 0) || cachedOf(turn.tokens) === 0) return "";
  const times = turn.recompute_ms / turn.ttft_ms;
  return times >= 1.1 ? `${times < 9.95 ? times.toFixed(1) : Math.round(times)}× sooner than computing it all.` : "";
}

function bar(name, kind) {
  const fillNode = el("span", { class: `bar-fill ${kind}` });
  const value = el("span", { class: "bar-value" });
  const line = el("div", { class: "turn-line" }, el("span", { class: "turn-name" }, name));
  line.append(el("span", { class: "bar-track" }, fillNode, value));
  return { node: line, fill: fillNode, value };
}

function fill({ fill: node, value }, ms, scaleMs) {
  const known = Number.isFinite(ms);
  node.style.width = known ? `${Math.max(0.6, (78 * ms) / scaleMs)}%` : "0";
  say(value, known ? duration(ms / 1000) : "not known");
}
