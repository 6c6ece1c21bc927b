import { mergePatch } from "./merge.js";
import { eventsOf } from "./sse.js";

export const FIRST_WAIT_MS = 500;
export const WAIT_MS_MAX = 30_000;
export const TRIES_MAX = 20;
/** The service is heard at least this often (changes, or comments that keep the connection). */
export const SILENCE_MS_MAX = 45_000;
const LASTING = new Set([401, 403, 404, 405]); // another try would be told the same

/** Return how long to wait before try `number` (from 1): doubled each time, bounded, spread by a quarter. */
export function waitMs(number, random) {
  return Math.min(WAIT_MS_MAX, FIRST_WAIT_MS * 2 ** (number - 1)) * (0.75 + 0.5 * random);
}

/**
 * Follow the service's live stream while somebody looks.
 *
 * `open(signal)` returns the response. `on.state(state)` is told the whole state after each change, `on.turn(turn)`
 * each turn that ended, `on.link(what, error)` one of `connecting`, `live`, `waiting`, `lost`, `paused`.
 */
export class LiveStream {
  #open;
  #on;
  #clock;
  #tries = 0;
  #abort = null;
  #timer = null;
  #watch = null;
  #isUsual = false; // it ended as streams do after a while: nobody needs to hear of that

  constructor(open, on, clock = globalThis) {
    this.#open = open;
    this.#on = on;
    this.#clock = clock;
  }

  /** Connect, from the first try on; a connection that is there ends. */
  start() {
    this.#end();
    this.#tries = 0;
    this.#isUsual = false;
    this.#connect();
  }

  /** Disconnect until `start`: the service computes nothing for a page that is not seen. */
  pause() {
    this.#end();
    this.#on.link("paused", null);
  }

  #end() {
    this.#clock.clearTimeout(this.#timer);
    this.#clock.clearTimeout(this.#watch);
    this.#abort?.abort();
    this.#abort = null;
  }

  async #connect() {
    const abort = new AbortController();
    this.#abort = abort;
    if (!this.#isUsual) this.#on.link("connecting", null);
    let failure = null;
    this.#heard(abort); // a service that never answers is silent, too
    try {
      await this.#follow(await this.#open(abort.signal), abort);
    } catch (error) {
      failure = error;
    }
    this.#clock.clearTimeout(this.#watch);
    if (this.#abort === abort) this.#again(failure); // else it was ended on purpose
  }

  async #follow(response, abort) {
    let state = null;
    this.#heard(abort);
    for await (const { event, data } of eventsOf(response, () => this.#heard(abort))) {
      if (this.#abort !== abort) return;
      if (event === "turn") {
        this.#on.turn(JSON.parse(data));
      } else if (event === "state" || (event === "change" && state !== null)) {
        if (event === "state") this.#on.link("live", null);
        state = event === "state" ? JSON.parse(data) : mergePatch(state, JSON.parse(data));
        this.#tries = 0;
        this.#on.state(state);
      }
    }
  }

  #heard(abort) {
    this.#clock.clearTimeout(this.#watch);
    this.#watch = this.#clock.setTimeout(() => {
      if (this.#abort !== abort) return;
      abort.abort();
      this.#again(null);
    }, SILENCE_MS_MAX);
  }

  #again(failure) {
    this.#abort = null;
    this.#tries += 1;
    if (LASTING.has(failure?.status) || this.#tries > TRIES_MAX) {
      this.#on.link("lost", failure);
      return;
    }
    const wait = Math.max(waitMs(this.#tries, Math.random()), (failure?.retryAfterS ?? 0) * 1000);
    this.#isUsual = failure === null && this.#tries === 1;
    if (!this.#isUsual) this.#on.link("waiting", failure);
    this.#timer = this.#clock.setTimeout(() => this.#connect(), wait);
  }
}
