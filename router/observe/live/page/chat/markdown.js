import MarkdownIt from "../vendor/markdown-it-15.0.3.esm.min.js";
import { el } from "../base/dom.js";

/**
 * A model's text becomes elements by name from this list, and text: no markup of its own is ever parsed. What is
 * not listed is shown as its content.
 */
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 blockquote ul ol li em strong s table thead tbody tr th td hr br code pre".split(" "),
);
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" }; // below the page's own
const NESTING_MAX = 24;
const parser = new MarkdownIt({ html: false, linkify: false, typographer: false, breaks: true, maxNesting: NESTING_MAX });

/** A message whose Markdown is drawn while it grows: finished blocks keep their elements. */
export class MarkdownView {
  node = el("div", { class: "markdown" });
  #sources = [];

  show(text) {
    const lines = text.split("\n");
    const groups = topLevel(parser.parse(text, {}));
    groups.forEach((tokens, place) => {
      const [from, to] = tokens[0].map ?? [0, lines.length];
      const source = `${tokens[0].type} ${lines.slice(from, to).join("\n")}`;
      if (this.#sources[place] === source) return;
      this.#sources[place] = source;
      const made = el("div");
      build(made, tokens);
      const old = this.node.children[place];
      if (old) old.replaceWith(...made.childNodes);
      else this.node.append(...made.childNodes);
    });
    while (this.node.children.length > groups.length) this.node.lastElementChild.remove();
    this.#sources.length = groups.length;
  }
}

/** Split tokens into the blocks of the top level: each is drawn as one element. */
function topLevel(tokens) {
  const groups = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) groups.push([]);
    groups.at(-1).push(token);
    depth += token.nesting;
  }
  return groups;
}

function build(parent, tokens) {
  const open = [parent];
  for (const token of tokens) {
    const here = open.at(-1);
    if (token.type === "inline") {
      build(here, token.children);
    } else if (token.nesting > 0) {
      const made = opened(token);
      here.append(made);
      open.push(made);
    } else if (token.nesting < 0) {
      open.pop();
    } else {
      here.append(leaf(token));
    }
  }
}

function opened(token) {
  if (token.tag === "a") return link(token);
  if (!TAGS.has(token.tag)) return el("span");
  const made = el(HEADINGS[token.tag] ?? token.tag, { class: token.hidden ? "tight" : null });
  if (token.tag === "ol" && token.attrGet("start")) made.setAttribute("start", token.attrGet("start"));
  const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  if (align) made.classList.add(`to-${align[1]}`);
  return made;
}

/** A link to elsewhere, by http only: a model's link must not call the service in its reader's name. */
function link(token) {
  const href = token.attrGet("href") ?? "";
  if (!/^https?:\/\//i.test(href)) return el("span");
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href });
}

function leaf(token) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak":
      return el("br");
    case "hr":
      return el("hr");
    case "code_inline":
      return el("code", {}, token.content);
    case "fence":
    case "code_block":
      return code(token);
    case "image": // nothing is fetched for a model
      return document.createTextNode(`[image: ${token.content}]`);
    default:
      return document.createTextNode(token.content);
  }
}

function code(token) {
  const language = /^[\w+#.-]{1,20}/.exec(token.info ?? "")?.[0] ?? "";
  const text = token.content.replace(/\n$/, "");
  const label = language ? `Code, ${language}` : "Code";
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, text));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "code"));
  if (navigator.clipboard) head.append(copyButton(text));
  return el("div", { class: "code" }, head, pre);
}

function copyButton(text) {
  const button = el("button", { type: "button", class: "quiet small" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
  });
  return button;
}
