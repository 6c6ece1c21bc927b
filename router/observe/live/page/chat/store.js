const PREFIX = "samovar.chat.v1.";
export const CONVERSATIONS_MAX = 24;
export const MESSAGES_MAX = 200;
export const CHARS_MAX = 400_000;
const TITLE_CHARS = 60;

/**
 * The conversations of this browser with one tenant of the service, the latest used first.
 *
 * Each lies under a key of its own, so that two tabs do not overwrite each other's. Bounded in number and size: the
 * longest unused goes. Where the browser keeps nothing they live as long as the page.
 */
export class ConversationStore {
  #storage;
  #prefix;
  #now;
  #newId;
  /** Conversations by id. */
  all = new Map();
  /** Whether the browser keeps them. */
  isKept = true;

  constructor(storage, scope, now, newId) {
    this.#storage = storage;
    this.#prefix = `${PREFIX}${encodeURIComponent(scope)}.`;
    this.#now = now;
    this.#newId = newId;
    for (const key of keysOf(storage)) {
      if (key.startsWith(this.#prefix)) this.#read(key);
    }
  }

  /** Return all, the latest used first. */
  list() {
    return [...this.all.values()].sort((a, b) => b.used - a.used);
  }

  /** Begin a conversation: `id` is also the session's at the service. */
  create() {
    const conversation = { id: this.#newId(), title: "", used: this.#now(), session: null, messages: [] };
    this.all.set(conversation.id, conversation);
    for (const old of this.list().slice(CONVERSATIONS_MAX)) this.remove(old.id);
    return conversation;
  }

  /** Add a message; it names the conversation if it is the first. */
  add(conversation, message) {
    conversation.messages.push(message);
    conversation.used = this.#now();
    if (!conversation.title) conversation.title = titleOf(message.content);
    return message;
  }

  /** Keep a conversation as it is now; drops others where the browser has no room. */
  save(conversation) {
    if (!this.all.has(conversation.id)) return; // deleted meanwhile
    const text = JSON.stringify(bounded(conversation));
    const others = this.list().filter(({ id }) => id !== conversation.id);
    for (;;) {
      try {
        this.#storage.setItem(this.#prefix + conversation.id, text);
        this.isKept = true;
        return;
      } catch {
        const oldest = others.pop();
        if (oldest === undefined) {
          this.isKept = false;
          return;
        }
        this.remove(oldest.id);
      }
    }
  }

  /** Forget a conversation. */
  remove(id) {
    this.all.delete(id);
    try {
      this.#storage.removeItem(this.#prefix + id);
    } catch {
      this.isKept = false;
    }
  }

  /** Return the conversation with a session of the service; undefined if it is none of these. */
  ofSession(session) {
    for (const conversation of this.all.values()) if (conversation.session === session) return conversation;
    return undefined;
  }

  #read(key) {
    try {
      const found = JSON.parse(this.#storage.getItem(key));
      if (key !== this.#prefix + found.id || !isWhole(found)) throw new Error("not a conversation");
      for (const message of found.messages) if (message.state === "streaming") message.state = "stopped";
      this.all.set(found.id, found);
    } catch {
      this.#storage.removeItem(key); // another version's, or cut off
    }
  }
}

/** Name a conversation by its first line. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return [...line].length > TITLE_CHARS ? `${[...line].slice(0, TITLE_CHARS).join("")}…` : line;
}

/** Return whether all that is drawn and sent of a conversation is there: one that is not would stop the page. */
function isWhole({ title, used, session, messages }) {
  const isSound = typeof title === "string" && Number.isFinite(used) && (session === null || typeof session === "string");
  return isSound && messages.length > 0 && messages.every(isMessage);
}

function isMessage({ role, content, thinking = "", turn }) {
  if (turn !== undefined && (turn === null || typeof turn.tokens !== "object" || turn.tokens === null)) return false;
  return (role === "user" || role === "assistant") && typeof content === "string" && typeof thinking === "string";
}

/** What is kept of a conversation: its latest messages, within bounds. */
function bounded(conversation) {
  const kept = [];
  let chars = 0;
  for (const message of conversation.messages.slice(-MESSAGES_MAX).reverse()) {
    chars += message.content.length + (message.thinking?.length ?? 0);
    if (chars > CHARS_MAX && kept.length > 0) break;
    kept.push(message);
  }
  return { ...conversation, messages: kept.reverse() };
}

function keysOf(storage) {
  try {
    return Object.keys(storage);
  } catch {
    return [];
  }
}
