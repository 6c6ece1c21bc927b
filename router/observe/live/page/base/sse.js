/** An event longer than this (live.message_bytes_max is less) is none of ours: the reader gives up, and collects no more. */
const EVENT_CHARS_MAX = 17 * 1024 * 1024;

/** Parse server-sent events from text that arrives in pieces (WHATWG HTML, "server-sent events"). */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];
  #chars = 0;

  /** Return the events that a piece of text completes, each as `{event, data}`. */
  feed(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line !== "") {
        this.#field(line);
      } else {
        if (this.#data.length) events.push({ event: this.#event || "message", data: this.#data.join("\n") });
        this.#event = "";
        this.#data = [];
        this.#chars = 0;
      }
    }
    if (this.#rest.length + this.#chars > EVENT_CHARS_MAX) throw new Error("an event is too long");
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment, which keeps the connection
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event = value;
    if (name === "data") {
      this.#data.push(value);
      this.#chars += value.length;
    }
  }
}

/** Yield the events of a response's body; `heard` is called with every piece, comments included. */
export async function* eventsOf(response, heard = () => {}) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already: there is nothing left to end
  }
}
