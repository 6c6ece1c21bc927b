// What the scripts of this folder do: the same calls and lines as `../calls.py`.

import { randomUUID } from "node:crypto";
import { z } from "zod";

const { CLIENT_URL, CLIENT_MODEL, CLIENT_KEY, CLIENT_CALL_S } = process.env;
export const URL = `${CLIENT_URL}/v1`;
export const MODEL = CLIENT_MODEL;
export const KEY = CLIENT_KEY;
const CALL_S = Number(CLIENT_CALL_S);
export const REQUEST_MS = (CALL_S * 1000) / 2;
export const ANSWER_TOKENS = 24;
export const OBJECT_TOKENS = 256;
export const NO_MODEL = "no-such-model";
export const FIRST = "Which tea goes with lemon cake?";
export const SECOND = "And which one with bread and cheese?";
export const ORDER =
  "I would like two cups of green tea without milk, please. Give the order as a JSON object.";
export const Order = z.object({
  tea: z.enum(["black", "green", "white"]),
  cups: z.int().min(1).max(9),
  has_milk: z.boolean(),
});
export const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.int().min(1).max(3) });
export const WEATHER_QUESTION = "What will the weather in Rome be tomorrow?";
export const WEATHER_ANSWER = "sunny, 24 degrees";

// A system message of a few blocks that no conversation before has had.
export const system = () =>
  `Conversation ${randomUUID()}. You serve tea in a small house at the end of the street. You answer in one ` +
  "short sentence, you never invent a tea that is not on the card, and you say so if you do not know.";

const planned = [];

// Plan a call. `needs`: what a server has to have for it.
export const call = (name, needs, make) => planned.push({ name, needs, make });

export function check(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export function checkCached(tokens) {
  check(tokens > 0, `cached tokens of the second turn: ${tokens}`);
  return { cached_tokens: tokens };
}

// `make` throws the client's own error, with the server's sentence in it.
export async function expectError(isKind, make, says) {
  let thrown;
  try {
    await make();
  } catch (error) {
    thrown = error;
  }
  check(thrown, "no error");
  check(isKind(thrown), `${thrown.constructor.name}: ${sentence(thrown)}`);
  check(sentence(thrown).includes(says), `${thrown.constructor.name} without ${says}: ${sentence(thrown)}`);
  return { detail: `${thrown.constructor.name}: ${sentence(thrown)}` };
}

function sentence(error) {
  for (let behind = error; behind; behind = behind.lastError ?? behind.cause) {
    const said = behind.error?.message ?? behind.data?.error?.message;
    if (said) return said;
    try {
      const body = JSON.parse(behind.responseBody);
      if (body.error?.message) return body.error.message;
    } catch {}
  }
  return error.message;
}

const print = (line) => console.log(JSON.stringify(line));

const tooLong = () => new Promise((_, fail) => setTimeout(() => fail(new Error(`not within ${CALL_S} s`)), CALL_S * 1000));

// Make all calls, whatever comes of them.
export async function run() {
  print({ plan: planned.map(({ name, needs }) => ({ call: name, needs })) });
  for (const { name, make } of planned) {
    const began = performance.now();
    let result;
    try {
      result = { ok: true, detail: "", ...(await Promise.race([make(), tooLong()])) };
    } catch (error) {
      result = { ok: false, error: error.constructor.name, detail: sentence(error) };
    }
    print({ call: name, seconds: Number(((performance.now() - began) / 1000).toFixed(3)), ...result });
  }
  process.exit(0);
}
