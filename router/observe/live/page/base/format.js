const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format a count: 950, 1.2k, 34k, 5.6M. */
export function count(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size < 1000) return String(Math.round(value));
  for (const [unit, letter] of [[1e3, "k"], [1e6, "M"], [1e9, "G"], [1e12, "T"]]) {
    const scaled = value / unit;
    if (Math.abs(scaled) < 999.5) return `${digits(scaled)}${letter}`;
  }
  return value.toExponential(1);
}

/** Format bytes in binary units. */
export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  let scaled = value;
  let unit = 0;
  while (Math.abs(scaled) >= 1024 && unit < BYTES.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${unit ? digits(scaled) : Math.round(scaled)} ${BYTES[unit]}`;
}

/** Format a duration given in seconds: 3.1 ms, 240 ms, 1.9 s, 4 min, 2.5 h, 3 d. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 0.9995) return `${digits(seconds * 1000)} ms`;
  if (size < 99.5) return `${digits(seconds)} s`;
  if (size < 5400) return `${Math.round(seconds / 60)} min`;
  if (size < 172800) return `${digits(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Format a share of 1 as a percentage. */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 1) return "<1%";
  if (value > 99 && value < 100) return ">99%";
  return `${Math.round(value)}%`;
}

/** Return `part / whole`, or NaN where there is no whole. */
export function share(part, whole) {
  return whole > 0 ? part / whole : NaN;
}

/** Shorten a text to so many characters. */
export function short(text, chars) {
  const marks = [...text];
  return marks.length <= chars ? text : `${marks.slice(0, chars - 1).join("").trimEnd()}…`;
}

/** Name a number of things: 1 token, 2 tokens. */
export function plural(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

function digits(value) {
  const size = Math.abs(value);
  if (size >= 9.95) return String(Math.round(value));
  return value.toFixed(1).replace(/\.0$/, "");
}
