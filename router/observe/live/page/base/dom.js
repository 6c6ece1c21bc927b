const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element. `on` has its listeners, `class` its class; other properties are attributes, and `true` is an
 * empty one. Strings among the children become text, never markup.
 */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Make an SVG element, as `el` does. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set an element's text, and leave the document alone where it is that text already. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set an attribute, or remove it for null. */
export function mark(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Make a parent's children those of a list, in its order: nodes of items that stay are kept.
 *
 * `make(item)` returns `{node, update(item)}`; `parts` remembers them between calls.
 */
export function keyed(parent, parts, items, keyOf, make) {
  const wanted = new Set(items.map(keyOf));
  for (const [key, part] of parts) {
    if (!wanted.has(key)) {
      part.node.remove();
      parts.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!parts.has(key)) parts.set(key, make(item));
    const part = parts.get(key);
    part.update(item);
    if (part.node === place) place = place.nextSibling;
    else parent.insertBefore(part.node, place);
  }
}
