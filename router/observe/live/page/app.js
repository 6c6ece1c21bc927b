import { DiagnosisPanel } from "./advice/diagnosis.js";
import { MemoryPanel } from "./advice/memory.js";
import { Api } from "./base/api.js";
import { byId, mark, say } from "./base/dom.js";
import { LiveStream } from "./base/live.js";
import { Overview } from "./cache/overview.js";
import { SessionList } from "./cache/sessions.js";
import { TurnHistory } from "./cache/history.js";
import { nameDevice } from "./cache/sources.js";
import { Chat } from "./chat/view.js";

const TURNS_EACH = 8;
const TURNS_ALL = 400;
const TICK_MS = 1000;
const USAGE_MS = 15_000;
const HIDDEN_MS = 15_000;
const LINKS = {
  connecting: "Connecting…",
  live: "Live",
  waiting: "Reconnecting…",
  paused: "Paused",
  lost: "Not connected",
};

const api = new Api();
const turns = new TurnHistory(TURNS_EACH, TURNS_ALL);
const overview = new Overview();
const diagnosis = new DiagnosisPanel();
const memory = new MemoryPanel();
const chat = new Chat(api, revealSession);
const sessions = new SessionList(turns, (session) => chat.titleOf(session));
let state = null;
let arrivedMs = 0;
let isDue = false;
let hiddenTimer = null;

const stream = new LiveStream((signal) => api.send("v1/live", { signal }), {
  state(next) {
    state = next;
    arrivedMs = performance.now();
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(draw);
  },
  turn(turn) {
    turns.add(turn);
    chat.turn(turn);
    if (state) sessions.show(state, now());
  },
  link: showLink,
});

/** Return the service's time: what the last state said, and what has passed here since. */
function now() {
  return state.t + (performance.now() - arrivedMs) / 1000;
}

function draw() {
  isDue = false;
  if (state === null) return; // another key was given meanwhile
  nameDevice(state.model?.device ?? "");
  say(byId("model"), state.model?.name ?? "");
  say(byId("scope"), scopeOf(state));
  chat.use(state.model?.name ?? null, state.tenant ?? null);
  overview.show(state, now());
  diagnosis.show(state.diagnosis);
  memory.show(state.memory);
  sessions.show(state, now());
  if (state.nodes === undefined) askUsage();
}

function scopeOf({ scope, tenant }) {
  if (tenant === undefined) return "whole cluster";
  return scope === "cluster" ? "" : `tenant ${tenant}`;
}

let usageMs = -Infinity;
let usageAbort = new AbortController(); // of whoever's key is used now

/** Ask for a tenant's own usage, now and then. */
async function askUsage() {
  if (performance.now() - usageMs < USAGE_MS) return;
  usageMs = performance.now();
  const { signal } = usageAbort;
  try {
    const usage = await (await api.send("v1/usage", { signal })).json();
    if (!signal.aborted) overview.showUsage(usage);
  } catch (error) {
    if (error.status === undefined && !signal.aborted) throw error; // else the stream's own link says what is wrong
  }
}

function showLink(what, failure) {
  const node = byId("link");
  node.dataset.link = what;
  say(byId("link-text"), LINKS[what]);
  mark(node, "title", failure?.message ?? null);
  byId("retry").hidden = what !== "lost" || failure?.status === 401;
  say(byId("lost"), what === "lost" && failure?.status !== 401 ? (failure?.message ?? "The service does not answer.") : "");
}

function revealSession(session) {
  if (!session) return;
  showView("cache");
  sessions.reveal(session);
}

// -- the key ----------------------------------------------------------------------------

const keyDialog = byId("key-dialog");

function askKey(wasRefused) {
  say(byId("key-error"), wasRefused && api.hasKey ? "The service does not know this key." : "");
  byId("key-forget").hidden = !api.hasKey;
  if (!keyDialog.open) keyDialog.showModal();
  byId("key").focus();
}

api.addEventListener("refused", () => askKey(true));
api.addEventListener("key", () => {
  state = null; // nothing of the last key's owner stays in view
  turns.clear();
  overview.clear();
  diagnosis.clear();
  memory.clear();
  chat.leave();
  sessions.show(null, 0);
  say(byId("scope"), "");
  usageMs = -Infinity;
  usageAbort.abort();
  usageAbort = new AbortController();
  stream.start();
});
byId("key-button").addEventListener("click", () => askKey(false));
byId("key-close").addEventListener("click", () => keyDialog.close());
byId("key-forget").addEventListener("click", () => {
  keyDialog.close();
  api.useKey("");
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (key === "") return;
  keyDialog.close();
  api.useKey(key);
});
byId("retry").addEventListener("click", () => stream.start());

// -- one view at a time where there is no room for more ----------------------------------

const narrow = matchMedia("(max-width: 899px)");
const tabs = [...document.querySelectorAll("[role=tab]")];
let view = "chat";

function showView(name) {
  view = name;
  document.body.dataset.view = name;
  for (const tab of tabs) {
    const isOn = tab.dataset.view === name;
    mark(tab, "aria-selected", String(isOn));
    tab.tabIndex = isOn ? 0 : -1;
    const panel = byId(tab.getAttribute("aria-controls"));
    mark(panel, "role", narrow.matches ? "tabpanel" : null);
    mark(panel, "tabindex", narrow.matches ? "0" : null); // it may scroll
    panel.hidden = narrow.matches && !isOn;
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => showView(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    showView(next.dataset.view);
    next.focus();
  });
}
narrow.addEventListener("change", () => showView(view));
showView(view);

// -- nothing is asked for while nobody looks ----------------------------------------------

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(() => stream.pause(), HIDDEN_MS);
  else if (byId("link").dataset.link === "paused") stream.start();
});
setInterval(() => {
  if (state === null || document.hidden) return;
  overview.tick(now());
  sessions.tick(now());
}, TICK_MS);
stream.start();
