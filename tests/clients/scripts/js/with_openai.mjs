// The openai package of JavaScript: chat completions, tools, structured output, Responses.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as c from "./calls.mjs";

const client = new OpenAI({ baseURL: c.URL, apiKey: c.KEY, maxRetries: 0, timeout: c.REQUEST_MS });
const common = { model: c.MODEL, max_tokens: c.ANSWER_TOKENS, temperature: 0 };
const user = (content) => ({ role: "user", content });
const turn = (content) => [{ role: "system", content: c.system() }, user(content)];
const chat = (messages, fields) => client.chat.completions.create({ ...common, messages, ...fields });
const parameters = z.toJSONSchema(c.Weather);

c.call("models", [], async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  c.check(ids.includes(c.MODEL), ids);
});

c.call("chat", [], async () => {
  const answer = await chat(turn(c.FIRST));
  c.check(answer.choices[0].message.content, answer);
  c.check(answer.usage.total_tokens === answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage);
});

c.call("stream", [], async () => {
  let text = "";
  let usage;
  for await (const chunk of await chat(turn(c.FIRST), { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  c.check(text, "no text");
  c.check(usage?.completion_tokens > 0, `usage: ${JSON.stringify(usage)}`);
});

c.call("stream helper", [], async () => {
  const stream = client.chat.completions.stream({ ...common, messages: turn(c.FIRST) });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const answer = await stream.finalChatCompletion();
  c.check(text === answer.choices[0].message.content, [text, answer]);
});

c.call("second turn", [], async () => {
  const messages = turn(c.FIRST);
  const first = await chat(messages);
  const second = await chat([...messages, first.choices[0].message, user(c.SECOND)]);
  return c.checkCached(second.usage.prompt_tokens_details?.cached_tokens);
});

c.call("abort", [], async () => {
  const stop = new AbortController();
  const stream = await client.chat.completions.create(
    { ...common, messages: turn(c.FIRST), stream: true },
    { signal: stop.signal },
  );
  for await (const _ of stream) stop.abort();
});

c.call("tools: required, two steps", ["tools"], async () => {
  const tools = [{ type: "function", function: { name: "get_weather", strict: true, parameters } }];
  const fields = { tools, max_tokens: c.OBJECT_TOKENS };
  const messages = turn(c.WEATHER_QUESTION);
  const first = (await chat(messages, { ...fields, tool_choice: "required" })).choices[0].message;
  c.check(first.tool_calls?.length, first);
  c.Weather.parse(JSON.parse(first.tool_calls[0].function.arguments));
  const results = first.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: c.WEATHER_ANSWER }));
  const second = await chat([...messages, first, ...results], { ...fields, tool_choice: "none" });
  c.check(typeof second.choices[0].message.content === "string", second);
  return c.checkCached(second.usage.prompt_tokens_details?.cached_tokens);
});

c.call("runTools: named", ["tools"], async () => {
  let asked;
  const runner = client.chat.completions.runTools({
    ...common,
    max_tokens: c.OBJECT_TOKENS,
    messages: turn(c.WEATHER_QUESTION),
    // With a named tool the runner stops after its first call.
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          parameters,
          parse: JSON.parse,
          function: (found) => {
            asked = found;
            return c.WEATHER_ANSWER;
          },
        },
      },
    ],
  });
  await runner.done();
  c.Weather.parse(asked);
});

c.call("parse: json_schema", ["schema"], async () => {
  const answer = await client.chat.completions.parse({
    ...common,
    max_tokens: c.OBJECT_TOKENS,
    messages: turn(c.ORDER),
    response_format: zodResponseFormat(c.Order, "order"),
  });
  c.Order.parse(answer.choices[0].message.parsed);
});

c.call("error: model", [], () =>
  c.expectError(
    (error) => error instanceof OpenAI.NotFoundError,
    () => chat(turn(c.FIRST), { model: c.NO_MODEL }),
    c.NO_MODEL,
  ),
);

c.call("error: field", [], () =>
  c.expectError(
    (error) => error instanceof OpenAI.BadRequestError,
    () => chat(turn(c.FIRST), { temperature: 9 }),
    "temperature",
  ),
);

const respond = (fields) =>
  client.responses.create({ model: c.MODEL, input: c.FIRST, max_output_tokens: c.ANSWER_TOKENS, ...fields });

c.call("responses", ["responses"], async () => {
  c.check((await respond({ instructions: c.system() })).output_text, "no text");
});

c.call("responses: stream helper", ["responses"], async () => {
  const stream = client.responses.stream({ model: c.MODEL, input: c.FIRST, max_output_tokens: c.ANSWER_TOKENS });
  let text = "";
  stream.on("response.output_text.delta", ({ delta }) => (text += delta));
  const answer = await stream.finalResponse();
  c.check(text === answer.output_text, [text, answer]);
});

c.call("responses: previous_response_id", ["responses"], async () => {
  const instructions = c.system();
  const first = await respond({ instructions });
  const second = await respond({ instructions, input: c.SECOND, previous_response_id: first.id });
  return c.checkCached(second.usage.input_tokens_details?.cached_tokens);
});

c.call("responses: parse", ["responses", "schema"], async () => {
  const answer = await client.responses.parse({
    model: c.MODEL,
    input: c.ORDER,
    max_output_tokens: c.OBJECT_TOKENS,
    text: { format: zodTextFormat(c.Order, "order") },
  });
  c.Order.parse(answer.output_parsed);
});

await c.run();
