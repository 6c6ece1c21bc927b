import { mark, say, svg, el } from "../base/dom.js";
import { duration, percent } from "../base/format.js";

const WIDTH = 150;
const HEIGHT = 46;
const FOOT = 10; // for the marks of time below the curve
const TICKS_S = [
  [60, "1 min"],
  [3600, "1 h"],
  [86400, "1 d"],
];
const SOON_S = 600;

/** Return S(t), the chance that it is still away t seconds later, between the forecast's points. */
export function survivalAt(atS, survival, t) {
  let earlier = [0, 1];
  for (let place = 0; place < Math.min(atS.length, survival.length); place++) {
    const later = [atS[place], survival[place]];
    if (t <= later[0]) {
      const part = (t - earlier[0]) / (later[0] - earlier[0]);
      return earlier[1] + (later[1] - earlier[1]) * part;
    }
    earlier = later;
  }
  return earlier[1];
}

/** Return P(returns within `withinS` | away for `idleS` now); NaN where the forecast gives it no chance at all. */
export function returnsWithin(atS, survival, idleS, withinS) {
  const now = survivalAt(atS, survival, idleS);
  return now > 0 ? 1 - survivalAt(atS, survival, idleS + withinS) / now : NaN;
}

/** Return the place of a time on the curve's axis, 0 to 1: logarithmic from the first second to the last point. */
export function timeToX(t, lastS) {
  return Math.min(1, Math.log1p(Math.max(0, t)) / Math.log1p(lastS));
}

/** A small curve: how likely a conversation is still idle as time passes, and where it is now. */
export class SurvivalCurve {
  #area = svg("path", { class: "curve-area" });
  #line = svg("path", { class: "curve-line" });
  #now = svg("line", { class: "curve-now", y1: 0, y2: HEIGHT - FOOT });
  #ticks = svg("g", { class: "curve-ticks" });
  #picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "curve" });
  #text = el("span", { class: "curve-text" });
  node = el("div", { class: "forecast" });
  #drawn = "";

  constructor() {
    this.#picture.append(this.#area, this.#line, this.#now, this.#ticks);
    this.node.append(this.#picture, this.#text);
  }

  /** Draw a forecast (`null`: none is known) as seen at the service's time `nowUnixS`. */
  show(forecast, atS, nowUnixS) {
    const known = forecast?.survival && atS?.length > 0;
    this.#picture.classList.toggle("unknown", !known);
    if (!known) {
      say(this.#text, "no forecast yet");
      mark(this.#picture, "aria-label", "Forecast of its return: none yet");
      return;
    }
    const { survival, since_unix_s: sinceUnixS } = forecast;
    const lastS = atS.at(-1);
    this.#draw(survival, atS, lastS);
    const idleS = Math.max(0, nowUnixS - sinceUnixS);
    const x = (timeToX(idleS, lastS) * WIDTH).toFixed(1);
    mark(this.#now, "x1", x);
    mark(this.#now, "x2", x);
    const soon = returnsWithin(atS, survival, idleS, SOON_S);
    say(this.#text, `${percent(soon)} back in ${duration(SOON_S)}`);
    mark(this.#picture, "aria-label", `Forecast: returns within ${duration(SOON_S)} with ${percent(soon)}`);
  }

  #draw(survival, atS, lastS) {
    const key = `${survival}|${atS}`;
    if (key === this.#drawn) return;
    this.#drawn = key;
    const low = HEIGHT - FOOT;
    const points = [[0, 1], ...survival.map((value, place) => [atS[place], value])].map(
      ([t, value]) => `${(timeToX(t, lastS) * WIDTH).toFixed(1)},${((1 - value) * (low - 2) + 1).toFixed(1)}`,
    );
    this.#line.setAttribute("d", `M${points.join("L")}`);
    this.#area.setAttribute("d", `M0,${low}L${points.join("L")}L${WIDTH},${low}Z`);
    this.#ticks.replaceChildren(
      ...TICKS_S.filter(([t]) => t <= lastS).map(([t, name]) => {
        const x = timeToX(t, lastS) * WIDTH;
        return svg("text", { x: Math.min(x, WIDTH - 1), y: HEIGHT - 1, "text-anchor": x > WIDTH - 15 ? "end" : "middle" }, name);
      }),
    );
  }
}
