import { ApiError } from "../base/api.js";
import { byId, el, keyed, mark, say } from "../base/dom.js";
import { short } from "../base/format.js";
import { complete, messagesFor } from "./completion.js";
import { Leaving } from "./leaving.js";
import { MessageView } from "./message.js";
import { STARTERS } from "./starters.js";
import { ConversationStore } from "./store.js";

/** A browser opens six connections to a host of HTTP/1.1, and the live stream has one of them. */
const STREAMS_MAX = 4;
const TABS_CHARS = 22;
const SPOKEN_CHARS = 600;
const NEAR_END_PX = 80;
const LENGTH_PLACE = "samovar.answer-tokens";

/** The chat: conversations beside each other, each with a session of its own at the service. */
export class Chat {
  #api;
  #reveal;
  #model = null;
  #store = null;
  #scope = null;
  #active = null;
  #streams = new Map();
  #views = new Map();
  #tabs = new Map();
  #leaving;
  #messages = byId("messages");
  #box = this.#messages.parentElement;
  #atEnd = true;
  #prompt = byId("prompt");
  #length = byId("answer-tokens");

  /** `reveal(session)` shows a session's row beside the chat. */
  constructor(api, reveal) {
    this.#api = api;
    this.#reveal = reveal;
    this.#leaving = new Leaving(api);
    this.#length.value = localStorageOr(LENGTH_PLACE, this.#length.value);
    if (this.#length.selectedIndex < 0) this.#length.selectedIndex = 0;
    this.#length.addEventListener("change", () => keep(LENGTH_PLACE, this.#length.value));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("input", () => this.#leaving.typing(this.#active?.id));
    document.addEventListener("visibilitychange", () => document.hidden && this.#leaving.hidden(this.#active?.id));
    this.#box.addEventListener("scroll", () => {
      this.#atEnd = this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < NEAR_END_PX;
    });
    byId("stop").addEventListener("click", () => this.#streams.get(this.#active?.id)?.abort());
    byId("new-chat").addEventListener("click", () => this.#begin());
    byId("delete-chat").addEventListener("click", () => this.#delete());
    byId("show-row").addEventListener("click", () => this.#reveal(this.#active?.session));
    byId("starters").append(...STARTERS.map(({ name, text }) => el("button", { type: "button", on: { click: () => this.#send(text) } }, name)));
    addEventListener("pagehide", () => this.#leaving.closed());
    addEventListener("pagehide", () => this.#store?.list().forEach((one) => this.#streams.has(one.id) && this.#store.save(one)));
  }

  /** Talk to a model, in the name of a tenant whose history this browser may have; `null`: nobody may chat. */
  use(model, tenant) {
    this.#model = model;
    this.#enable(tenant !== null);
    byId("chat-refused").hidden = tenant !== null;
    if (tenant === this.#scope && this.#store !== null) return;
    this.#streams.forEach((stream) => stream.abort());
    this.#scope = tenant;
    this.#store = new ConversationStore(storageOrNone(), tenant ?? "", () => Date.now(), newId);
    this.#open(this.#store.list()[0] ?? this.#store.create());
  }

  /** Take a turn that the service has ended: the answer it belongs to shows it. */
  turn(turn) {
    for (const conversation of this.#store?.all.values() ?? []) {
      const message = conversation.messages.findLast(({ request }) => request !== undefined && request === turn.request_id);
      if (!message) continue;
      const { tokens, ttft_ms, recompute_ms, miss } = turn;
      message.turn = { tokens, ttft_ms, recompute_ms, miss };
      conversation.session = turn.session;
      this.#store.save(conversation);
      this.#views.get(message)?.draw();
      this.#drawHead();
      this.#follow();
      return;
    }
  }

  /** Return the title of the conversation with a session of the service; null if it is none of this browser's. */
  titleOf(session) {
    return this.#store?.ofSession(session)?.title || null;
  }

  /** Show nobody's conversations, until `use`. */
  leave() {
    this.#streams.forEach((stream) => stream.abort());
    this.#leaving = new Leaving(this.#api);
    this.#model = this.#store = this.#scope = this.#active = null;
    this.#views.clear();
    this.#messages.replaceChildren();
    keyed(byId("conversations"), this.#tabs, [], ({ id }) => id, null);
    byId("chat-empty").hidden = false;
    this.#prompt.value = ""; // what one tenant typed is not sent in another's name
    this.#announce("");
    this.#note("");
    this.#enable(false);
  }

  #enable(isOn) {
    for (const id of ["composer-fields", "new-chat", "delete-chat"]) byId(id).disabled = !isOn;
    if (!isOn) byId("show-row").disabled = true;
  }

  #begin() {
    const unused = this.#store.list().find(({ messages }) => messages.length === 0);
    this.#open(unused ?? this.#store.create());
    this.#prompt.focus();
  }

  #open(conversation) {
    this.#active = conversation;
    this.#views.clear();
    this.#messages.replaceChildren(...conversation.messages.map((message) => this.#viewOf(message).node));
    this.#drawHead();
    this.#toEnd();
  }

  #viewOf(message) {
    const view = new MessageView(message);
    this.#views.set(message, view);
    return view;
  }

  async #delete() {
    const conversation = this.#active;
    this.#leaving.forget(conversation.id);
    this.#streams.get(conversation.id)?.abort();
    this.#store.remove(conversation.id);
    this.#open(this.#store.list()[0] ?? this.#store.create());
    this.#announce("Conversation deleted.");
    if (conversation.messages.length === 0) return;
    try {
      await this.#api.send(`v1/sessions/${encodeURIComponent(conversation.id)}`, { method: "DELETE" });
    } catch (error) {
      if (error.status !== 404) this.#note(`Deleted here, but the service still has its blocks: ${error.message}`);
    }
  }

  #submit() {
    const text = this.#prompt.value.trim();
    if (text === "" || !this.#send(text)) return;
    this.#prompt.value = "";
  }

  #send(text) {
    const conversation = this.#active;
    if (this.#model === null || conversation === null || this.#streams.has(conversation.id)) return false;
    if (this.#streams.size >= STREAMS_MAX) {
      this.#note(`${STREAMS_MAX} answers are being written already. Wait for one of them, or stop it.`);
      return false;
    }
    this.#note("");
    const question = this.#store.add(conversation, { role: "user", content: text });
    const answer = { role: "assistant", content: "", thinking: "", state: "streaming", request: `page-${newId()}` };
    const request = {
      model: this.#model,
      session: conversation.id,
      requestId: answer.request,
      messages: messagesFor(conversation),
      maxTokens: Number(this.#length.value),
    };
    this.#store.add(conversation, answer);
    this.#store.save(conversation);
    this.#messages.append(this.#viewOf(question).node, this.#viewOf(answer).node);
    this.#announce("The model is answering.");
    this.#answer(conversation, answer, request);
    this.#drawHead();
    this.#toEnd();
    return true;
  }

  async #answer(conversation, answer, request) {
    const store = this.#store;
    const abort = new AbortController();
    this.#streams.set(conversation.id, abort);
    const delta = ({ content, thinking }) => {
      answer.content += content;
      answer.thinking += thinking;
      this.#views.get(answer)?.later();
      this.#follow();
    };
    try {
      const result = await complete(this.#api, request, { delta }, abort.signal);
      this.#leaving.answered(conversation.id);
      answer.state = result.finish === "length" ? "length" : "done";
      if (result.receipt) answer.turn ??= { tokens: result.receipt.tokens, ttft_ms: result.ttftMs, miss: result.receipt.miss };
    } catch (error) {
      answer.state = abort.signal.aborted ? "stopped" : "failed";
      answer.error = error instanceof ApiError ? error.message : "The page could not read the answer.";
      if (!(error instanceof ApiError) && !abort.signal.aborted) console.error(error);
    }
    this.#streams.delete(conversation.id);
    store.save(conversation);
    this.#views.get(answer)?.draw();
    if (store !== this.#store) return; // another tenant's page by now
    this.#drawHead();
    this.#follow();
    if (conversation === this.#active) this.#announce(spoken(answer));
  }

  /** Keep the end in view, unless the reader has scrolled away from it. */
  #follow() {
    if (this.#atEnd) requestAnimationFrame(() => (this.#box.scrollTop = this.#box.scrollHeight));
  }

  #toEnd() {
    this.#atEnd = true;
    this.#box.scrollTop = this.#box.scrollHeight;
  }

  #drawHead() {
    const conversation = this.#active;
    const isBusy = this.#streams.has(conversation.id);
    byId("chat-empty").hidden = conversation.messages.length > 0;
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("show-row").disabled = conversation.session === null;
    mark(this.#messages, "aria-busy", String(isBusy));
    byId("not-kept").hidden = this.#store.isKept;
    keyed(byId("conversations"), this.#tabs, this.#store.list(), ({ id }) => id, (made) => {
      const button = el("button", { type: "button", class: "conversation", on: { click: () => this.#open(this.#store.all.get(made.id)) } });
      const update = ({ id, title }) => {
        say(button, title ? short(title, TABS_CHARS) : "New conversation");
        mark(button, "title", title || null);
        mark(button, "aria-current", id === this.#active.id ? "true" : null);
        button.classList.toggle("busy", this.#streams.has(id));
      };
      return { node: el("li", {}, button), update };
    });
  }

  #announce(text) {
    say(byId("announce"), text);
  }

  #note(text) {
    say(byId("chat-note"), text);
  }
}

function spoken({ state, content, error }) {
  if (state === "failed") return `The answer failed: ${error}`;
  const said = state === "stopped" ? "Stopped. " : "Answer: ";
  return said + short(content, SPOKEN_CHARS);
}

/** Return an id that nobody guesses; `crypto.randomUUID` is there on https and localhost only. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the browser's storage, or an object that forgets where it allows none. */
function storageOrNone() {
  try {
    return localStorage;
  } catch {
    return { setItem: () => { throw new Error("no storage"); }, getItem: () => null, removeItem: () => {} };
  }
}

function localStorageOr(place, otherwise) {
  return storageOrNone().getItem(place) ?? otherwise;
}

function keep(place, value) {
  try {
    storageOrNone().setItem(place, value);
  } catch {
    // Kept nowhere, then: it holds for this page.
  }
}
