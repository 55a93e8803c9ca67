// Talks to a server with one client of Node: three streamed turns, then a forced call and its
// result. Run as: node sdks.mjs URL FOLDER CLIENT, where FOLDER has node_modules.
// Prints one line of JSON: tokens of the prompt and cached ones in each turn, and the call.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, folder, which] = process.argv.slice(2);
const installed = createRequire(`${folder}/`);
const load = async (name) => await import(pathToFileURL(installed.resolve(name)));

const model = "nano";
// Each client has a conversation that no other one has had. These words have answers that
// are not empty when nothing is sampled: some clients leave empty ones out of the history.
const WORDS = [`${which}: Prince Andrew went to the`, "In winter he was a", "He went to the"];
const temperature = 0;
const ANSWER = 16; // tokens
const CALL = 64;
const PLACE = {
  type: "object",
  properties: { place: { type: "string", maxLength: 8 } },
  required: ["place"],
  additionalProperties: false,
};
const TELLS = "Tells where somebody is.";

async function openaiChat() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const messages = [];
  const turns = [];
  const note = (usage) => turns.push([usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens]);
  for (const content of WORDS) {
    messages.push({ role: "user", content });
    const stream = await client.chat.completions.create({
      model, messages, max_completion_tokens: ANSWER, temperature, stream: true,
      stream_options: { include_usage: true }, store: false,
    });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    messages.push({ role: "assistant", content: text });
    note(usage);
  }
  const described = { name: "where", description: TELLS, parameters: PLACE, strict: true };
  const tools = [{ type: "function", function: described }];
  const asked = { model, messages, tools, max_completion_tokens: CALL, temperature };
  messages.push({ role: "user", content: "Where?" });
  const called = await client.chat.completions.create({ ...asked, tool_choice: "required" });
  note(called.usage);
  const message = called.choices[0].message;
  const call = message.tool_calls[0];
  messages.push(message, { role: "tool", tool_call_id: call.id, content: "Moscow" });
  note((await client.chat.completions.create({ ...asked, tool_choice: "none" })).usage);
  return { turns, call: [call.function.name, JSON.parse(call.function.arguments)] };
}

async function openaiResponses() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const input = [];
  const turns = [];
  const note = (usage) => turns.push([usage.input_tokens, usage.input_tokens_details.cached_tokens]);
  for (const content of WORDS) {
    input.push({ role: "user", content });
    const stream = client.responses.stream({
      model, input, max_output_tokens: ANSWER, temperature, store: false,
      include: ["reasoning.encrypted_content"],
    });
    const response = await stream.finalResponse();
    input.push(...response.output);
    note(response.usage);
  }
  const tools = [
    { type: "function", name: "where", description: TELLS, parameters: PLACE, strict: true },
    { type: "web_search" },
  ];
  const asked = { model, input, tools, max_output_tokens: CALL, temperature, store: false };
  input.push({ role: "user", content: "Where?" });
  const called = await client.responses.create({ ...asked, tool_choice: "required" });
  note(called.usage);
  const call = called.output.find((item) => item.type === "function_call");
  input.push(...called.output, { type: "function_call_output", call_id: call.call_id, output: "Moscow" });
  note((await client.responses.create({ ...asked, tool_choice: "none" })).usage);
  return { turns, call: [call.name, JSON.parse(call.arguments)] };
}

async function aiSdk(languageModel) {
  const { streamText, generateText, tool, jsonSchema } = await load("ai");
  const messages = [];
  const turns = [];
  const warned = [];
  const common = { model: languageModel, maxRetries: 0, temperature };
  const note = ({ usage, warnings }) => {
    turns.push([usage.inputTokens, usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens]);
    warned.push(...(warnings ?? []));
  };
  for (const content of WORDS) {
    messages.push({ role: "user", content });
    const failed = [];
    const result = streamText({
      ...common, messages, maxOutputTokens: ANSWER, onError: ({ error }) => failed.push(error),
    });
    await result.consumeStream();
    if (failed.length) throw failed[0];
    messages.push(...(await result.response).messages);
    note({ usage: await result.usage, warnings: await result.warnings });
  }
  const tools = { where: tool({ description: TELLS, inputSchema: jsonSchema(PLACE) }) };
  messages.push({ role: "user", content: "Where?" });
  const asked = { ...common, messages, tools, maxOutputTokens: CALL };
  const called = await generateText({ ...asked, toolChoice: "required" });
  note(called);
  const { toolCallId, toolName, input } = called.toolCalls[0];
  const output = { type: "text", value: "Moscow" };
  messages.push(...called.response.messages);
  messages.push({ role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output }] });
  note(await generateText({ ...asked, toolChoice: "none" }));
  return { turns, call: [toolName, input], warned };
}

async function aiSdkResponses() {
  const { createOpenAI } = await load("@ai-sdk/openai");
  return await aiSdk(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(model));
}

async function aiSdkChat() {
  const { createOpenAI } = await load("@ai-sdk/openai");
  return await aiSdk(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat(model));
}

async function aiSdkCompatible() {
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const options = { name: "weir", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true };
  options.supportsStructuredOutputs = true; // or the schema of Output.object is left out
  return await aiSdk(createOpenAICompatible(options)(model));
}

async function aiSdkAnthropic() {
  const { createAnthropic } = await load("@ai-sdk/anthropic");
  return await aiSdk(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model));
}

async function anthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const messages = [];
  const turns = [];
  const note = (usage) =>
    turns.push([usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens]);
  for (const content of WORDS) {
    messages.push({ role: "user", content });
    const said = await client.messages.stream({ model, messages, max_tokens: ANSWER, temperature }).finalMessage();
    messages.push({ role: "assistant", content: said.content });
    note(said.usage);
  }
  const tools = [{ name: "where", description: TELLS, input_schema: PLACE }];
  messages.push({ role: "user", content: "Where?" });
  const asked = { model, messages, tools, max_tokens: CALL, temperature };
  const called = await client.messages.create({ ...asked, tool_choice: { type: "any" } });
  note(called.usage);
  const call = called.content.find((block) => block.type === "tool_use");
  messages.push({ role: "assistant", content: called.content });
  const content = [{ type: "tool_result", tool_use_id: call.id, content: "Moscow" }];
  messages.push({ role: "user", content });
  const counted = await client.messages.countTokens({ model, messages, tools });
  const last = await client.messages.create({ ...asked, tool_choice: { type: "none" } });
  note(last.usage);
  if (counted.input_tokens !== turns.at(-1)[0]) throw new Error(`counted ${counted.input_tokens}`);
  return { turns, call: [call.name, call.input] };
}

async function ollama() {
  const { Ollama } = await load("ollama");
  const client = new Ollama({ host: url });
  const messages = [];
  const turns = [];
  for (const content of WORDS) {
    messages.push({ role: "user", content });
    let text = "", last = null;
    const stream = await client.chat({ model, messages, stream: true, options: { num_predict: ANSWER, temperature } });
    for await (const part of stream) {
      text += part.message.content;
      last = part;
    }
    messages.push({ role: "assistant", content: text });
    turns.push([last.prompt_eval_count, last.cached_count]);
  }
  return { turns, call: null };
}

async function langchain() {
  const { ChatOpenAI } = await load("@langchain/openai");
  const { HumanMessage, ToolMessage } = await load("@langchain/core/messages");
  const make = (maxTokens) =>
    new ChatOpenAI({
      model, maxTokens, temperature, maxRetries: 0, apiKey: "none", useResponsesApi: true, zdrEnabled: true,
      configuration: { baseURL: `${url}/v1` },
    });
  const messages = [];
  const turns = [];
  const note = (usage) => turns.push([usage.input_tokens, usage.input_token_details.cache_read]);
  for (const content of WORDS) {
    messages.push(new HumanMessage(content));
    let whole = null;
    for await (const chunk of await make(ANSWER).stream(messages)) {
      whole = whole === null ? chunk : whole.concat(chunk);
    }
    messages.push(whole);
    note(whole.usage_metadata);
  }
  const tools = [
    { type: "function", function: { name: "where", description: TELLS, parameters: PLACE } },
  ];
  messages.push(new HumanMessage("Where?"));
  const called = await make(CALL).bindTools(tools, { tool_choice: "where" }).invoke(messages);
  note(called.usage_metadata);
  const call = called.tool_calls[0];
  messages.push(called, new ToolMessage({ content: "Moscow", tool_call_id: call.id }));
  const after = await make(CALL).bindTools(tools, { tool_choice: "none" }).invoke(messages);
  note(after.usage_metadata);
  return { turns, call: [call.name, call.args] };
}

const CLIENTS = {
  "openai-chat": openaiChat,
  "openai-responses": openaiResponses,
  "ai-sdk-responses": aiSdkResponses,
  "ai-sdk-chat": aiSdkChat,
  "ai-sdk-compatible": aiSdkCompatible,
  "ai-sdk-anthropic": aiSdkAnthropic,
  anthropic,
  ollama,
  langchain,
};
console.log(JSON.stringify(await CLIENTS[which]()));
