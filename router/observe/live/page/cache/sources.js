import { el } from "../base/dom.js";
import { count, share } from "../base/format.js";

/** Where every service may have KV, hottest first: each has a colour and a pattern (style.css `.src-ID`). */
const KNOWN = ["gpu", "cpu", "nvme", "s3", "peer"];

/** What is no place of KV: tokens that were computed, blocks without a copy. */
const NOWHERE = ["compute", "none"];

const NAMES = {
  gpu: "GPU pages",
  cpu: "RAM",
  nvme: "NVMe",
  s3: "S3",
  peer: "Peer",
  compute: "Computed",
  none: "No copy",
};

const MEANINGS = {
  gpu: "in the pages that the model works on: nothing to do",
  cpu: "loaded from main memory of the node",
  nvme: "loaded from the node's disk",
  s3: "loaded from the bucket",
  peer: "loaded from another node",
  compute: "computed now, as without a cache",
  none: "no copy of its own: another conversation's serves, or it is computed again",
};

/** Use the words of the device: without a GPU its pages lie in main memory. */
export function nameDevice(device) {
  NAMES.gpu = device === "cpu" ? "Pool pages" : "GPU pages";
}

/** Return the name of a source or a place. */
export function nameOf(id) {
  return NAMES[id] ?? id;
}

/** Return what it means for a token to come from there. */
export function meaningOf(id) {
  return MEANINGS[id] ?? "";
}

/** Return whose colour and pattern a source or a place has: further tiers share one, as the names tell them apart. */
export function styleOf(id) {
  return KNOWN.includes(id) || NOWHERE.includes(id) ? id : "other";
}

/** Return names of sources or places, each once: hottest first, then further tiers as they come, then nowhere. */
export function inOrder(ids) {
  return [...new Set(ids)].sort((a, b) => rankOf(a) - rankOf(b));
}

function rankOf(id) {
  if (NOWHERE.includes(id)) return KNOWN.length + 1;
  return KNOWN.includes(id) ? KNOWN.indexOf(id) : KNOWN.length;
}

/** Return the sources that are always named, and those of these tokens, in order. */
export function sourcesOf(tokens) {
  return inOrder([...KNOWN, ...Object.keys(tokens), "compute"]);
}

/** Return a sample of a source's colour and pattern. */
export function swatch(id) {
  return el("span", { class: `swatch src-${styleOf(id)}`, "aria-hidden": "true" });
}

/** Return how many tokens did not have to be computed. */
export function cachedOf(tokens) {
  return allOf(tokens) - (tokens.compute ?? 0);
}

/** Return the sum over all sources. */
export function allOf(tokens) {
  return Object.values(tokens).reduce((sum, part) => sum + part, 0);
}

/** Say in words where tokens came from: `640 RAM, 152 NVMe, 20 Computed`. */
export function inWords(tokens) {
  const parts = sourcesOf(tokens).filter((id) => tokens[id] > 0).map((id) => `${count(tokens[id])} ${nameOf(id)}`);
  return parts.join(", ") || "no tokens";
}

/** One bar cut into the sources of its tokens, the largest parts named inside. */
export class SourceBar {
  node = el("div", { class: "source-bar", role: "img" });
  #parts = new Map();

  show(tokens) {
    const all = allOf(tokens);
    this.node.setAttribute("aria-label", `Tokens by source: ${inWords(tokens)}`);
    const sources = inOrder([...sourcesOf(tokens), ...this.#parts.keys()]);
    for (const [place, id] of sources.entries()) {
      const part = tokens[id] ?? 0;
      if (!this.#parts.has(id)) {
        const text = el("span", {});
        const made = el("span", { class: `part src-${styleOf(id)}`, "data-source": id }, text);
        this.#parts.set(id, { node: made, text });
        this.node.insertBefore(made, this.node.children[place] ?? null);
      }
      const { node, text } = this.#parts.get(id);
      node.hidden = part === 0;
      node.style.flexGrow = String(part);
      node.title = `${nameOf(id)}: ${part.toLocaleString("en")} tokens, ${meaningOf(id)}`;
      text.textContent = share(part, all) > 0.22 ? `${count(part)} ${nameOf(id)}` : "";
    }
  }
}

/** Return what each tier holds over all nodes, hottest first. The bucket is one, which every node tells of. */
export function tiersOf(nodes) {
  const sums = new Map();
  for (const node of nodes) {
    for (const [name, tier] of Object.entries(node.tiers ?? {})) {
      const sum = sums.get(name) ?? { name, used: 0, limit: 0, off: true, problems: new Set() };
      const together = name === "s3" ? Math.max : (one, other) => one + other;
      sum.used = together(sum.used, tier.used_bytes);
      sum.limit = together(sum.limit, tier.limit_bytes);
      const isOff = tier.state.startsWith("off") && tier.limit_bytes === 0;
      if (!isOff) sum.off = false;
      if (!isOff && tier.state !== "up") sum.problems.add(tier.state);
      sums.set(name, sum);
    }
  }
  return inOrder(sums.keys()).map((name) => sums.get(name));
}
