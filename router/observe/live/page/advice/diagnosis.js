import { byId, el, keyed, say } from "../base/dom.js";
import { plural } from "../base/format.js";

const STATES = { holds: "holds", clear: "does not hold", unknown: "cannot be judged yet" };
const MARKS = { holds: "!", clear: "✓", unknown: "?" };

/** Return the conditions of a diagnosis as a list, each with its name. */
export function conditionsOf(diagnosis) {
  return Object.entries(diagnosis?.conditions ?? {}).map(([name, condition]) => ({ name, ...condition }));
}

/** Return a diagnosis in one line. */
export function inOneLine(diagnosis) {
  const all = conditionsOf(diagnosis);
  const holding = all.filter(({ state }) => state === "holds");
  const unknown = all.filter(({ state }) => state === "unknown").length;
  const rest = unknown > 0 ? `; ${unknown} cannot be judged yet` : "";
  if (holding.length === 0) return `Nothing is wrong: none of ${all.length} conditions holds${rest}.`;
  return `${plural(holding.length, "problem")}: ${holding.map(({ title }) => title).join(" · ")}.`;
}

/** Return what to do about a finding: the setting with its value (or a deed), its present value, and what that brings. */
export function changeInWords({ setting, to, now, deed, brings }) {
  const what = deed ?? `${setting}: ${to}`;
  return { what: `${what.replace(/\.$/, "")}.`, now: setting === undefined ? "" : `Now ${now}.`, brings: sentence(brings) };
}

function sentence(clause) {
  return clause ? `${clause[0].toUpperCase()}${clause.slice(1).replace(/\.$/, "")}.` : "";
}

/** What `samovar diagnose` says, for who sees the cluster: a line while nothing is wrong, else what to change. */
export class DiagnosisPanel {
  #findings = new Map();
  #conditions = new Map();
  #said = null; // the problems that were announced last

  /** Draw a diagnosis; `undefined`: there is none for this caller. */
  show(diagnosis) {
    byId("diagnosis").hidden = diagnosis === undefined;
    const all = conditionsOf(diagnosis);
    const holding = all.filter(({ state }) => state === "holds");
    const line = diagnosis === undefined ? "" : inOneLine(diagnosis);
    say(byId("diagnosis-line"), line);
    byId("diagnosis").classList.toggle("trouble", holding.length > 0);
    keyed(byId("findings"), this.#findings, holding, (item) => item.name, () => new FindingItem());
    keyed(byId("conditions"), this.#conditions, all, (item) => item.name, () => new ConditionItem());
    byId("findings").hidden = holding.length === 0;
    const turns = diagnosis?.turns ?? 0;
    say(byId("diagnosis-since"), `Counted since the processes began, ${plural(turns, "answer")}; samovar diagnose --over 60 judges the next minute.`);
    this.#announce(holding.map(({ name }) => name).join(" "), line);
  }

  /** Forget everything: another caller's follows. */
  clear() {
    this.#said = null;
    this.show(undefined);
  }

  #announce(problems, line) {
    if (line !== "" && problems !== (this.#said ?? "")) say(byId("advice-announce"), line);
    if (line === "") say(byId("advice-announce"), "");
    this.#said = line === "" ? null : problems;
  }
}

class FindingItem {
  #title = el("h3");
  #symptom = el("p", { class: "caption" });
  #evidence = el("p");
  #cause = el("p");
  #changes = el("ul", { class: "changes" });
  #drawn = "";
  node = el("li", { class: "finding" }, this.#title, this.#symptom, this.#evidence, this.#cause, this.#changes);

  update({ title, symptom, evidence, cause, changes = [] }) {
    say(this.#title, `${title}.`);
    say(this.#symptom, symptom);
    say(this.#evidence, sentence(evidence));
    const isSaid = changes.some(({ deed }) => deed === cause);
    say(this.#cause, isSaid ? "" : (cause ?? ""));
    this.#cause.hidden = isSaid || cause === undefined;
    const key = JSON.stringify(changes);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#changes.replaceChildren(
      ...changes.map((change) => {
        const { what, now, brings } = changeInWords(change);
        return el("li", {}, el("strong", {}, what), ` ${now} ${brings}`);
      }),
    );
  }
}

class ConditionItem {
  #mark = el("span", { class: "condition-mark", "aria-hidden": "true" });
  #title = el("strong");
  #state = el("span", { class: "unseen" });
  #evidence = el("span", { class: "caption" });
  node = el("li", { class: "condition" }, this.#mark, el("span", {}, this.#title, this.#state, " ", this.#evidence));

  update({ state, title, evidence }) {
    say(this.#mark, MARKS[state] ?? "");
    say(this.#title, title);
    say(this.#state, ` ${STATES[state] ?? state}:`);
    say(this.#evidence, sentence(evidence));
    this.node.dataset.state = state;
  }
}
