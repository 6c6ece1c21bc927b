import { el, say } from "../base/dom.js";
import { TurnBars } from "../cache/turns.js";
import { MarkdownView } from "./markdown.js";

const LONG_CHARS = 700;
const NAMES = { user: "You", assistant: "Model" };

/** One message: the text, what was thought before it, how it ended, and what its first token cost. */
export class MessageView {
  node;
  #message;
  #body = new MarkdownView();
  #thinking = el("p", { class: "thinking-text" });
  #thinkingBox = el("details", { class: "more thinking" }, el("summary", {}, "What the model thought"), this.#thinking);
  #status = el("p", { class: "message-status" });
  #turn = new TurnBars();
  #isDue = false;

  constructor(message) {
    this.#message = message;
    const { role } = message;
    this.node = el("li", { class: `message from-${role}` }, el("h3", { class: "message-name" }, NAMES[role] ?? role));
    if (role === "user") this.node.append(typed(message.content));
    else this.node.append(this.#thinkingBox, this.#body.node, this.#status, this.#turn.node);
    this.draw();
  }

  /** Draw the message before the next frame, however often it is asked for until then. */
  later() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.draw();
    });
  }

  /** Draw the message as it is now. */
  draw() {
    const { role, content, thinking, state, error, turn } = this.#message;
    if (role === "user") return;
    this.#body.show(content);
    this.#thinkingBox.hidden = !thinking;
    say(this.#thinking, thinking ?? "");
    say(this.#status, statusOf(state, content, error));
    this.#status.hidden = this.#status.textContent === "";
    this.#status.classList.toggle("error", state === "failed");
    this.node.classList.toggle("streaming", state === "streaming");
    this.#turn.node.hidden = !turn;
    if (turn) this.#turn.show(turn);
  }
}

function statusOf(state, content, error) {
  if (state === "failed") return `Failed: ${error}`;
  if (state === "stopped") return "Stopped.";
  if (state === "length") return "Ended at the longest answer allowed.";
  if (state === "streaming" && content === "") return "Reading the conversation…";
  return "";
}

/** What a person typed is shown as it is; a long text is folded. */
function typed(text) {
  if (text.length <= LONG_CHARS) return el("p", { class: "typed" }, text);
  const folded = el("details", { class: "more" }, el("summary", {}, `The rest (${text.length.toLocaleString("en")} characters)`));
  const cut = text.lastIndexOf(" ", LONG_CHARS / 2);
  folded.append(el("p", { class: "typed" }, text.slice(cut).trimStart()));
  return el("div", {}, el("p", { class: "typed" }, `${text.slice(0, cut)} …`), folded);
}
