const KEY_PLACE = "samovar.key";

/** A failed request: the status (0: no answer) and what the service says of it. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The service this page came from, and the API key that is sent to it. The key lives as long as the tab. */
export class Api extends EventTarget {
  #key = sessionStorage.getItem(KEY_PLACE) ?? "";

  get hasKey() {
    return this.#key !== "";
  }

  /** Take another key, or none; listeners of `key` start over with it. */
  useKey(key) {
    this.#key = key;
    if (key) sessionStorage.setItem(KEY_PLACE, key);
    else sessionStorage.removeItem(KEY_PLACE);
    this.dispatchEvent(new Event("key"));
  }

  /** Send a request; return the response. Raises `ApiError`; a 401 also tells listeners of `refused`. */
  async send(path, { method = "GET", body, headers = {}, signal, keepalive = false } = {}) {
    const used = this.#key;
    const all = { ...headers };
    if (used) all.Authorization = `Bearer ${used}`;
    if (body !== undefined) all["Content-Type"] = "application/json";
    const sent = { method, headers: all, signal, keepalive, cache: "no-store", credentials: "omit", redirect: "error" };
    let response;
    try {
      response = await fetch(path, body === undefined ? sent : { ...sent, body: JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The service does not answer.");
    }
    if (response.ok) return response;
    const failure = await failureOf(response);
    if (failure.status === 401 && used === this.#key) this.dispatchEvent(new Event("refused"));
    throw failure;
  }
}

async function failureOf(response) {
  let said = `The service answered ${response.status}.`;
  try {
    said = (await response.json()).error.message ?? said;
  } catch {
    // A proxy's page, or a cut connection: the status has to say it.
  }
  const after = Number(response.headers.get("retry-after"));
  return new ApiError(response.status, said, Number.isFinite(after) ? after : 0);
}
