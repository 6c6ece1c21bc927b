/** Tokens by source over time, in buckets: what the counters of `totals` grew by between two states. */
export class TokenHistory {
  #bucketS;
  #bucketsMax;
  #last = null;
  #since = null;
  #buckets = new Map();

  constructor(bucketS, bucketsMax) {
    this.#bucketS = bucketS;
    this.#bucketsMax = bucketsMax;
  }

  /** Take the totals of a state made at the service's time `t`; the first ones are where counting begins. */
  add(t, totals) {
    const restarted = totals.since_unix_s !== this.#since;
    const last = restarted ? null : this.#last;
    this.#since = totals.since_unix_s;
    this.#last = totals.tokens;
    if (last === null) return;
    const start = this.#startOf(t);
    for (const [id, tokens] of Object.entries(totals.tokens)) {
      const grown = tokens - (last[id] ?? 0);
      if (grown > 0) {
        if (!this.#buckets.has(start)) this.#buckets.set(start, {});
        const bucket = this.#buckets.get(start);
        bucket[id] = (bucket[id] ?? 0) + grown;
      }
    }
    for (const old of this.#buckets.keys()) {
      if (old <= start - this.#bucketS * this.#bucketsMax) this.#buckets.delete(old);
    }
  }

  /** Forget everything: another caller's counters follow. */
  clear() {
    this.#last = null;
    this.#since = null;
    this.#buckets.clear();
  }

  /** Return all buckets up to the service's time `t`, those without tokens included. */
  buckets(t) {
    const end = this.#startOf(t);
    return Array.from({ length: this.#bucketsMax }, (_, place) => {
      const start = end - (this.#bucketsMax - 1 - place) * this.#bucketS;
      return { t: start, tokens: this.#buckets.get(start) ?? {} };
    });
  }

  #startOf(t) {
    return Math.floor(t / this.#bucketS) * this.#bucketS;
  }
}

/** The last turns of each lineage, as the stream told them; bounded in all. */
export class TurnHistory {
  #each;
  #all;
  #turns = new Map();
  #count = 0;

  constructor(each, all) {
    this.#each = each;
    this.#all = all;
  }

  /** Take a turn; of the lineages the one whose turns are the oldest makes room. */
  add(turn) {
    const key = `${turn.session}/${turn.lineage}`;
    const turns = this.#turns.get(key) ?? [];
    this.#turns.delete(key);
    this.#turns.set(key, turns); // the last in the order of the map
    turns.push(turn);
    this.#count += 1;
    if (turns.length > this.#each) {
      turns.shift();
      this.#count -= 1;
    }
    while (this.#count > this.#all) {
      const [oldest, its] = this.#turns.entries().next().value;
      this.#count -= its.length;
      this.#turns.delete(oldest);
    }
  }

  /** Return a lineage's turns, the latest first. */
  of(session, lineage) {
    return [...(this.#turns.get(`${session}/${lineage}`) ?? [])].reverse();
  }

  /** Forget everything. */
  clear() {
    this.#turns.clear();
    this.#count = 0;
  }
}
