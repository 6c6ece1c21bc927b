// Vercel's AI SDK: its provider for compatible servers, and OpenAI's (Responses) and Anthropic's own.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, NoObjectGeneratedError, Output, generateObject, generateText, isStepCount, streamText, tool } from "ai";
import * as c from "./calls.mjs";

const compatible = createOpenAICompatible({
  name: "samovar",
  baseURL: c.URL,
  apiKey: c.KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const plain = createOpenAICompatible({ name: "samovar", baseURL: c.URL, apiKey: c.KEY });
const openai = createOpenAI({ baseURL: c.URL, apiKey: c.KEY });
const anthropic = createAnthropic({ baseURL: c.URL, apiKey: c.KEY });
const fields = () => ({
  instructions: c.system(),
  maxOutputTokens: c.ANSWER_TOKENS,
  maxRetries: 0,
  abortSignal: AbortSignal.timeout(c.REQUEST_MS),
});
// The toy goes on calling until its limit, which is an error to this client.
const ONE_CALL = {
  samovar: { parallel_tool_calls: false },
  openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true },
};
const user = (content) => ({ role: "user", content });

const text = async (model, more = {}) => {
  const answer = await generateText({ model, prompt: c.FIRST, ...fields(), ...more });
  c.check(answer.text, answer.finishReason);
  c.check(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0, answer.usage);
};

const stream = async (model) => {
  const answer = streamText({ model, prompt: c.FIRST, ...fields(), onError: () => {} });
  let said = "";
  for await (const part of answer.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") said += part.text;
  }
  c.check(said, "no text");
  const usage = await answer.usage;
  c.check(usage.outputTokens > 0, usage);
};

const secondTurn = async (model) => {
  const same = fields();
  const first = await generateText({ model, messages: [user(c.FIRST)], ...same });
  const messages = [user(c.FIRST), ...first.response.messages, user(c.SECOND)];
  const second = await generateText({ model, messages, ...same });
  return c.checkCached(second.usage.inputTokenDetails.cacheReadTokens);
};

const twoSteps = async (model) => {
  let asked;
  const execute = async (found) => {
    asked = found;
    return c.WEATHER_ANSWER;
  };
  const answer = await generateText({
    model,
    prompt: c.WEATHER_QUESTION,
    ...fields(),
    maxOutputTokens: c.OBJECT_TOKENS,
    tools: { get_weather: tool({ description: "Look up the weather.", inputSchema: c.Weather, execute }) },
    providerOptions: ONE_CALL,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    stopWhen: isStepCount(2),
  });
  c.Weather.parse(asked);
  c.check(answer.steps.length === 2, answer.finishReason);
  return c.checkCached(answer.steps[1].usage.inputTokenDetails.cacheReadTokens);
};

const streamedCall = async (model) => {
  const answer = streamText({
    model,
    prompt: c.WEATHER_QUESTION,
    ...fields(),
    maxOutputTokens: c.OBJECT_TOKENS,
    tools: { get_weather: tool({ inputSchema: c.Weather }) },
    toolChoice: { type: "tool", toolName: "get_weather" },
    onError: () => {},
  });
  const made = [];
  for await (const part of answer.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "tool-call") made.push(part.input);
  }
  c.check(made.length, "no call in the stream");
  c.Weather.parse(made[0]);
};

const object = async (model) => {
  const answer = await generateText({
    model,
    prompt: c.ORDER,
    ...fields(),
    maxOutputTokens: c.OBJECT_TOKENS,
    output: Output.object({ schema: c.Order }),
  });
  c.Order.parse(answer.output);
};

const streamedObject = async (model) => {
  let failed;
  const answer = streamText({
    model,
    prompt: c.ORDER,
    ...fields(),
    maxOutputTokens: c.OBJECT_TOKENS,
    output: Output.object({ schema: c.Order }),
    onError: ({ error }) => (failed = error),
  });
  let last;
  for await (const part of answer.partialOutputStream) last = part;
  if (failed) throw failed;
  c.Order.parse(last);
};

const wrongModel = (provider) =>
  c.expectError(
    (error) => APICallError.isInstance(error) && error.statusCode === 404,
    () => text(provider(c.NO_MODEL)),
    c.NO_MODEL,
  );

c.call("generateText", [], () => text(compatible(c.MODEL)));
c.call("streamText", [], () => stream(compatible(c.MODEL)));
c.call("second turn", [], () => secondTurn(compatible(c.MODEL)));
c.call("tools: two steps", ["tools"], () => twoSteps(compatible(c.MODEL)));
c.call("tools: stream, named", ["tools"], () => streamedCall(compatible(c.MODEL)));
c.call("Output.object: json_schema", ["schema"], () => object(compatible(c.MODEL)));
c.call("Output.object: stream", ["schema"], () => streamedObject(compatible(c.MODEL)));
// Without `supportsStructuredOutputs` the schema goes into the prompt, and only an object is promised.
c.call("generateObject: json_object", ["schema"], async () => {
  try {
    const answer = await generateObject({
      model: plain(c.MODEL),
      output: "no-schema",
      prompt: c.ORDER,
      ...fields(),
      maxOutputTokens: c.OBJECT_TOKENS,
    });
    c.check(typeof answer.object === "object", answer.object);
  } catch (error) {
    const isCut = NoObjectGeneratedError.isInstance(error) && error.finishReason === "length";
    if (!isCut || !error.text.trimStart().startsWith("{")) throw error;
    return { detail: "an object that was cut off at the token limit" };
  }
});
c.call("error: model", [], () => wrongModel(compatible));
c.call("openai: chat", [], () => text(openai.chat(c.MODEL)));
c.call("openai: responses", ["responses"], () => text(openai(c.MODEL)));
c.call("openai: responses, stream", ["responses"], () => stream(openai(c.MODEL)));
c.call("openai: responses, second turn", ["responses"], () => secondTurn(openai(c.MODEL)));
c.call("openai: responses, tools", ["responses", "tools"], () => twoSteps(openai(c.MODEL)));
c.call("openai: responses, json_schema", ["responses", "schema"], () => object(openai(c.MODEL)));
c.call("anthropic: text", ["messages"], () => text(anthropic(c.MODEL)));
c.call("anthropic: stream", ["messages"], () => stream(anthropic(c.MODEL)));
c.call("anthropic: second turn", ["messages"], () => secondTurn(anthropic(c.MODEL)));
c.call("anthropic: tools", ["messages", "tools"], () => twoSteps(anthropic(c.MODEL)));
c.call("anthropic: error: model", ["messages"], () => wrongModel(anthropic));

await c.run();
