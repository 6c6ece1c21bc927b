/** A client that types says so this often at most. */
const TYPING_MS = 10_000;

/**
 * Tells the service what only the page knows: that somebody types, looks elsewhere, or has left.
 *
 * Of conversations that were answered in this tab. A hint that is lost costs nothing but what it would have saved.
 */
export class Leaving {
  #api;
  #clock;
  #answered = new Set();
  #typedMs = -Infinity;

  constructor(api, clock = performance) {
    this.#api = api;
    this.#clock = clock;
  }

  /** The service knows this conversation's session from now on. */
  answered(id) {
    this.#answered.add(id);
  }

  /** It was deleted: nothing is to be said of it. */
  forget(id) {
    this.#answered.delete(id);
  }

  typing(id) {
    if (this.#clock.now() - this.#typedMs < TYPING_MS || !this.#answered.has(id)) return;
    this.#typedMs = this.#clock.now();
    this.#tell(id, "typing");
  }

  hidden(id) {
    if (this.#answered.has(id)) this.#tell(id, "hidden");
  }

  /** The tab is closed, or left for another page: all that were answered in it. */
  closed() {
    for (const id of this.#answered) this.#tell(id, "closed");
    this.#answered.clear();
  }

  /** `keepalive`: as `sendBeacon`, which cannot send a key, it outlives the page. */
  #tell(id, event) {
    const sent = { method: "POST", body: { event }, keepalive: true };
    this.#api.send(`v1/sessions/${encodeURIComponent(id)}/hint`, sent).catch((error) => console.info(error.message));
  }
}
