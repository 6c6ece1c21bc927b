import { byId, el, keyed, mark, say } from "../base/dom.js";
import { bytes, count, duration, percent, plural, share, short } from "../base/format.js";
import { Calibration, SourcesOverTime } from "./charts.js";
import { TokenHistory } from "./history.js";
import { allOf, nameOf, sourcesOf, styleOf, swatch, tiersOf } from "./sources.js";

const BUCKET_S = 10;
const BUCKETS = 30;
const ROWS_MAX = 8;
const ID_CHARS = 12;
const PREDICTORS = {
  cold: "cold: too few turns yet",
  km: "from how long others stayed away",
  learned: "learned from turns served here",
};

/** The panels at the top: what the cache gains, and what it is made of. */
export class Overview {
  #history = new TokenHistory(BUCKET_S, BUCKETS);
  #chart = new SourcesOverTime(byId("chart-sources"), BUCKET_S);
  #calibration = new Calibration(byId("chart-calibration"));
  #legend = new Map();
  #tiers = new Map();
  #replicas = new Map();
  #nodes = new Map();
  #prefetch = new Map();
  #held = new Map();
  #bucket = null;
  #last = null;

  /** Draw a state as of the service's time `now`. */
  show(state, now) {
    this.#last = state;
    this.#history.add(state.t, state.totals);
    this.#drawTotals(state.totals);
    this.#drawChart(now, true);
    const isCluster = state.nodes !== undefined || state.replicas !== undefined;
    for (const id of ["card-tiers", "card-cluster", "card-forecast"]) byId(id).hidden = !isCluster;
    byId("card-held").hidden = isCluster;
    if (!isCluster) return;
    const nodes = Object.entries(state.nodes ?? {});
    this.#drawTiers(nodes);
    this.#drawCluster(Object.entries(state.replicas ?? {}), nodes, state.routing);
    this.#drawForecast(nodes);
  }

  /** Draw a tenant's own `/v1/usage`. */
  showUsage(usage) {
    const held = Object.entries(usage.bytes_held ?? {}).map(([name, size]) => ({ name, size }));
    const most = Math.max(1, ...held.map(({ size }) => size));
    keyed(byId("held"), this.#held, held, (item) => item.name, () => meter((item) => ({
      source: item.name, style: styleOf(item.name), name: nameOf(item.name), share: item.size / most, value: bytes(item.size),
    })));
    byId("held-unknown").hidden = held.length > 0;
  }

  /** Move the chart on where nothing has happened. */
  tick(now) {
    if (this.#last) this.#drawChart(now, false);
  }

  /** Forget everything: another caller's numbers follow. */
  clear() {
    this.#history.clear();
    this.#last = null;
    for (const id of ["card-tiers", "card-cluster", "card-forecast", "card-held"]) byId(id).hidden = true;
    for (const id of ["hit-rate", "hit-caption", "saved"]) say(byId(id), "");
    keyed(byId("legend"), this.#legend, [], (item) => item.id, null);
    keyed(byId("held"), this.#held, [], (item) => item.name, null);
    this.#chart.show([]);
  }

  #drawTotals(totals) {
    const all = allOf(totals.tokens);
    say(byId("hit-rate"), all > 0 ? percent(totals.hit_rate ?? 0) : "–");
    const since = duration((this.#last.t ?? 0) - totals.since_unix_s);
    say(byId("hit-caption"), all > 0 ? `of ${count(all)} prompt tokens were not computed again` : "no prompt has come yet");
    say(byId("saved"), totals.saved_s > 0 ? `${duration(totals.saved_s)} of computing saved in ${since}` : `counted since ${since}`);
    keyed(byId("legend"), this.#legend, sourcesOf(totals.tokens).map((id) => ({ id, part: totals.tokens[id] ?? 0, all })), (item) => item.id, (item) => {
      const value = el("span", { class: "legend-value" });
      const name = el("span", { class: "legend-name" });
      const node = el("li", { "data-source": item.id }, swatch(item.id), name, value);
      const update = ({ id, part, all: whole }) => {
        say(name, nameOf(id));
        say(value, whole > 0 ? percent(share(part, whole)) : "");
        node.title = `${part.toLocaleString("en")} tokens`;
      };
      return { node, update };
    });
  }

  #drawChart(now, isNews) {
    const buckets = this.#history.buckets(now);
    if (!isNews && buckets.at(-1).t === this.#bucket) return;
    this.#bucket = buckets.at(-1).t;
    this.#chart.show(buckets);
    const recent = buckets.reduce((sum, { tokens }) => sum + allOf(tokens), 0);
    mark(byId("chart-sources"), "aria-label", `Prompt tokens by source, the last ${duration(BUCKET_S * BUCKETS)}: ${count(recent)} in all`);
    byId("chart-quiet").hidden = recent > 0;
  }

  #drawTiers(nodes) {
    const order = tiersOf(nodes.map(([, node]) => node));
    const pages = Object.values(this.#last.replicas ?? {}).map((replica) => replica.pages ?? {});
    const total = pages.reduce((sum, page) => sum + (page.total ?? 0), 0);
    const used = pages.reduce((sum, page) => sum + (page.active ?? 0) + (page.cached ?? 0), 0);
    if (total > 0) order.unshift({ name: "gpu", pages: true, used, limit: total, off: false, problems: new Set() });
    keyed(byId("tiers"), this.#tiers, order, (item) => item.name, () => meter(tierRow));
  }

  #drawCluster(replicas, nodes, routing) {
    const shown = replicas.slice(0, ROWS_MAX).map(([name, replica]) => ({ name, replica }));
    keyed(byId("replicas"), this.#replicas, shown, (item) => item.name, () => meter(replicaRow));
    const places = nodes.slice(0, ROWS_MAX).map(([name, node]) => ({ name, node, replicas: replicas.filter(([, one]) => one.node === name).length }));
    keyed(byId("nodes"), this.#nodes, places, (item) => item.name, () => {
      const node = el("li");
      return { node, update: (item) => say(node, nodeText(item)) };
    });
    const hidden = replicas.length + nodes.length - shown.length - places.length;
    const routed = routing ? `Turns routed: ${count(routing.home)} home, ${count(routing.moved + routing.spilled)} elsewhere, ${count(routing.new)} new.` : "";
    say(byId("routing"), hidden > 0 ? `${routed} ${hidden} more not shown.` : routed);
    say(byId("cluster-summary"), `${plural(replicas.length, "replica")}, ${plural(nodes.length, "node")}`);
  }

  #drawForecast(nodes) {
    const known = nodes.map(([, node]) => node.predictor).filter(Boolean);
    const best = known.sort((a, b) => b.turns - a.turns)[0] ?? null;
    say(byId("predictor"), best === null ? "not known" : (PREDICTORS[best.state] ?? best.state));
    const points = best?.calibration?.points ?? [];
    byId("calibration-box").hidden = points.length === 0;
    byId("calibration-none").hidden = points.length > 0;
    if (points.length > 0) {
      this.#calibration.show(points);
      const spoken = points.map(([p, o]) => `${percent(p)} came true ${percent(o)}`).join(", ");
      mark(byId("chart-calibration"), "aria-label", `Calibration within ${duration(best.calibration.horizon_s)}: ${spoken}`);
    }
    const sums = { used_bytes: 0, late_bytes: 0, wasted_bytes: 0, moving_bytes: 0, started_bytes: 0 };
    for (const [, node] of nodes) for (const name of Object.keys(sums)) sums[name] += node.prefetch?.[name] ?? 0;
    const parts = [["used", "used"], ["late", "late"], ["wasted", "wasted"]];
    const most = Math.max(1, ...parts.map(([name]) => sums[`${name}_bytes`]));
    keyed(byId("prefetch"), this.#prefetch, parts.map(([name, words]) => ({ name, words, size: sums[`${name}_bytes`], most })), (item) => item.name, () =>
      meter((item) => ({ source: item.name, name: item.words, share: item.size / item.most, value: bytes(item.size) })));
    say(byId("against-lru"), againstLru(nodes));
    const regrets = nodes.map(([, node]) => node.prefetch?.regret?.demand).filter(Number.isFinite);
    const regret = regrets.length ? regrets.reduce((sum, one) => sum + one, 0) / regrets.length : null;
    say(byId("regret"), sums.started_bytes === 0 ? "Nothing has been prefetched yet." : regret === null ? "Regret: not known yet." : `Regret against loading on demand ${regret.toFixed(2).replace("-", "−")}: prefetching ${regret < 0 ? "gains" : "gains nothing"}.`);
  }
}

/** Return what the policy finds beside least recently used, over all nodes. */
function againstLru(nodes) {
  const sum = (name) => nodes.reduce((all, [, node]) => all + (node.lru?.[name] ?? 0), 0);
  const [asked, gained, regretted] = ["asked_tokens", "gained_tokens", "regretted_tokens"].map(sum);
  if (asked === 0) return "Against least recently used: nothing to compare yet.";
  const gain = (gained - regretted) / asked;
  const verdict = gain < -0.01 ? " It loses: tiers.policy.name: lru switches it off." : "";
  const told = nodes.reduce((all, [, node]) => {
    for (const [name, n] of Object.entries(node.predictor?.hints ?? {})) all[name.split(":")[1]] = (all[name.split(":")[1]] ?? 0) + n;
    return all;
  }, {});
  const hints = told.received ? ` Hints: ${count(told.received)} received, ${count(told.true ?? 0)} came true, ${count(told.false ?? 0)} did not.` : "";
  const size = `${gain < 0 ? "−" : "+"}${(100 * Math.abs(gain)).toFixed(1)} %`;
  return `Against least recently used: ${size} of the prompt tokens asked for (${count(gained)} gained, ${count(regretted)} regretted).${verdict}${hints}`;
}

/** A line with a name, a bar and a value; `rowOf(item)` returns them as `{name, share, value, source, style, note}`. */
function meter(rowOf) {
  const name = el("span", { class: "meter-name" });
  const fill = el("span", { class: "meter-fill" });
  const track = el("span", { class: "meter-track", "aria-hidden": "true" }, fill);
  const value = el("span", { class: "meter-value" });
  const node = el("li", { class: "meter" }, name, track, value);
  const update = (item) => {
    const row = rowOf(item);
    say(name, row.name);
    say(value, row.value);
    node.title = row.note ?? "";
    node.dataset.source = row.source ?? "";
    fill.className = `meter-fill src-${row.style ?? row.source ?? "plain"}`;
    fill.style.width = row.share > 0 ? `${Math.min(100, Math.max(2, 100 * row.share)).toFixed(1)}%` : "0";
    node.classList.toggle("off", row.off === true);
    node.classList.toggle("trouble", row.trouble === true);
  };
  return { node, update };
}

function tierRow({ name, pages, used, limit, off, problems }) {
  const trouble = problems.size > 0;
  const filled = pages ? `${count(used)} of ${count(limit)} pages` : `${bytes(used)} of ${bytes(limit)}`;
  const value = off ? "off" : trouble ? [...problems].map((state) => state.split(":")[0]).join(", ") : filled;
  const note = [filled, ...problems].join("; ");
  return { source: name, style: styleOf(name), name: nameOf(name), share: share(used, limit), value, off, trouble, note };
}

function replicaRow({ name, replica }) {
  const pages = replica.pages ?? {};
  const busy = share(pages.active ?? 0, pages.total ?? 0);
  const load = [`${replica.running} running`, replica.waiting ? `${replica.waiting} waiting` : "", replica.loading ? `${replica.loading} loading` : ""];
  const note = `${count(pages.active)} pages in use, ${count(pages.cached)} cached, ${count(pages.free)} free; ${plural(replica.preemptions ?? 0, "preemption")}`;
  return { source: "gpu", name: short(name, ID_CHARS), share: busy, value: load.filter(Boolean).join(", "), note };
}

function nodeText({ name, node, replicas }) {
  const parts = [`Node ${short(name, ID_CHARS)}`, plural(replicas, "replica"), `${count(node.queue)} moves waiting`];
  if (node.draining) parts.push("draining");
  if (node.transport && node.transport !== "off") parts.push(`to peers by ${node.transport}`);
  return parts.join(" · ");
}
