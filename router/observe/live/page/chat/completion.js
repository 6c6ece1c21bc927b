import { ApiError } from "../base/api.js";
import { eventsOf } from "../base/sse.js";

/** The default model is a toy, which repeats itself; it is asked as `samovar chat` does. */
const TOY = "SmolLM2-135M-Instruct";
const TOY_SAMPLING = { temperature: 0, repetition_penalty: 1.1 };

/**
 * Ask for the next answer of a conversation; tell `on.delta({content, thinking})` each piece.
 *
 * Returns `{finish, receipt, ttftMs}`. Raises `ApiError`; an aborted `signal` raises its `AbortError`.
 */
export async function complete(api, request, on, signal, clock = performance) {
  const { model, session, requestId, messages, maxTokens } = request;
  const began = clock.now();
  const response = await api.send("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "X-Session-Id": session, "X-Request-Id": requestId },
    body: {
      model,
      messages,
      max_tokens: maxTokens,
      stream: true,
      stream_options: { include_usage: true },
      ...(model === TOY ? TOY_SAMPLING : {}),
    },
  });
  const result = { finish: null, receipt: null, ttftMs: null };
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") return result;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message ?? "The answer was cut off.");
    if (chunk.receipt) result.receipt = chunk.receipt;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const content = choice.delta?.content ?? "";
    const thinking = choice.delta?.reasoning_content ?? "";
    if (content || thinking) {
      result.ttftMs ??= clock.now() - began;
      on.delta({ content, thinking });
    }
    result.finish = choice.finish_reason ?? result.finish;
  }
  if (result.finish === null) throw new ApiError(0, "The connection ended in the middle of the answer.");
  return result;
}

/** Return what the service needs of a conversation's messages: failed answers and empty ones are left out. */
export function messagesFor(conversation) {
  return conversation.messages
    .filter(({ role, content, state }) => role === "user" || (content !== "" && state !== "failed"))
    .map(({ role, content }) => ({ role, content }));
}
