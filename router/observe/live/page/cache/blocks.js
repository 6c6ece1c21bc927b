import { el, mark } from "../base/dom.js";
import { plural } from "../base/format.js";
import { inOrder, meaningOf, nameOf, styleOf } from "./sources.js";

/** Blocks are drawn one by one up to this many; longer chains by as many equal parts. */
export const CELLS_MAX = 64;
const STAGGER_MS_MAX = 240;

/**
 * Return where each block of a chain is, cut into at most `cellsMax` cells of equal length.
 *
 * A cell is `{place, below}`: the cheapest place, and the cheapest outside of the pool where that is another.
 * The pool has the chain's first `blocks.gpu`, as pools evict from the end; `runs` says the rest.
 */
export function cellsOf(chain, lineage, cellsMax = CELLS_MAX) {
  const inPool = Math.min(chain, lineage.blocks?.gpu ?? 0);
  const ends = [];
  let end = 0;
  for (const [place, length] of lineage.runs ?? []) ends.push([(end += length), place]);
  const count = Math.min(chain, cellsMax);
  const cells = [];
  let run = 0;
  for (let cell = 0; cell < count; cell++) {
    const block = Math.floor(((cell + 0.5) * chain) / count);
    while (run < ends.length && block >= ends[run][0]) run += 1;
    const stored = run < ends.length ? ends[run][1] : "none";
    if (block < inPool) cells.push({ place: "gpu", below: stored });
    else cells.push({ place: stored, below: "none" });
  }
  return cells;
}

/** Count a chain's blocks by their cheapest place. */
export function countsOf(chain, lineage) {
  const counts = {};
  for (const { place } of cellsOf(chain, lineage, Infinity)) counts[place] = (counts[place] ?? 0) + 1;
  return counts;
}

/**
 * A conversation's chain of blocks, from its first token at the left to its last at the right, in lanes by tier.
 * A block that moves slides from lane to lane; a copy that stays below is drawn faintly.
 */
export class BlockLanes {
  node = el("div", { class: "lanes" });
  #field = el("div", { class: "lanes-field", role: "img" });
  #labels = el("div", { class: "lanes-labels", "aria-hidden": "true" });
  #cells = [];
  #lanes = "";
  #drawn = "";

  constructor() {
    this.node.append(this.#labels, this.#field);
  }

  /** Draw a lineage whose chain has so many blocks; `lanes`: the places that get a lane. */
  show(chain, lineage, lanes) {
    const key = JSON.stringify([chain, lineage.blocks?.gpu, lineage.runs, lanes, nameOf("gpu")]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#layOut(lanes);
    const cells = cellsOf(chain, lineage);
    while (this.#cells.length > cells.length) {
      const { main, copy } = this.#cells.pop();
      main.remove();
      copy.remove();
    }
    cells.forEach((cell, place) => this.#put(cell, place, cells.length, lanes));
    mark(this.#field, "aria-label", said(chain, lineage));
  }

  #layOut(lanes) {
    const names = lanes.map(nameOf);
    if (this.#lanes === names.join()) return;
    this.#lanes = names.join();
    this.node.style.setProperty("--lanes", lanes.length);
    this.#labels.replaceChildren(...names.map((name, place) => el("span", { title: meaningOf(lanes[place]) }, name)));
  }

  #put({ place, below }, number, count, lanes) {
    if (number === this.#cells.length) {
      const copy = el("i", { class: "cell copy" });
      const main = el("i", { class: "cell" });
      this.#field.append(copy, main);
      this.#cells.push({ main, copy });
    }
    const { main, copy } = this.#cells[number];
    const width = `${100 / count}%`;
    const left = `${(100 * number) / count}%`;
    for (const cell of [main, copy]) {
      cell.style.width = width;
      cell.style.left = left;
    }
    main.style.transitionDelay = `${Math.round((STAGGER_MS_MAX * number) / count)}ms`;
    main.style.setProperty("--lane", lanes.indexOf(place));
    main.className = `cell at-${styleOf(place)}`;
    const isCopied = below !== "none" && below !== place;
    copy.hidden = !isCopied;
    if (isCopied) {
      copy.className = `cell copy at-${styleOf(below)}`;
      copy.style.setProperty("--lane", lanes.indexOf(below));
    }
  }
}

function said(chain, lineage) {
  if (!lineage.blocks) return `${plural(chain, "block")}; where they lie is not known now`;
  const counts = countsOf(chain, lineage);
  const parts = inOrder(Object.keys(counts)).map((place) => `${counts[place]} ${nameOf(place)}`);
  const unknown = lineage.blocks.gpu === null ? "; the engine does not say what is in the pool" : "";
  return `${plural(chain, "block")} by nearest tier: ${parts.join(", ") || "none"}${unknown}`;
}
