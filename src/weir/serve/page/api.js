// The server's HTTP API. It changes nothing on the page.

const KEY = "weir-key";
let asking = null; // one question for a key, however many requests wait for it
let askForKey = async () => null;

/** What the server refused, or that it could not be reached. */
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Who is asked for a key: called with what was wrong with the last one, or with nothing. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** A response of the server's; where it wants a key, the user is asked until one is right. */
async function call(path, { method = "GET", body, signal, headers = {} } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const given = { ...headers };
    if (key !== null) given.Authorization = `Bearer ${key}`;
    if (body !== undefined) given["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method,
        headers: given,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Trouble("The server cannot be reached.");
    }
    if (response.status === 401) {
      // Another request may have asked for the key meanwhile.
      if (sessionStorage.getItem(KEY) === key) await newKey(key !== null);
      continue;
    }
    if (!response.ok) throw await trouble(response);
    return response;
  }
}

function newKey(wrong) {
  asking ??= askForKey(wrong ? "The server does not accept this key." : null)
    .then((key) => sessionStorage.setItem(KEY, key))
    .finally(() => {
      asking = null;
    });
  return asking;
}

async function trouble(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A body that is not the server's error has no message.
  }
  return new Trouble(message, response.status);
}

const json = async (path, given) => (await call(path, given)).json();
const place = (session) => `/v1/sessions/${encodeURIComponent(session)}`;

export const models = async () => (await json("/v1/models")).data;
export const sessions = async () => (await json("/v1/sessions")).data;
export async function turns(name) {
  const all = [];
  for (let after = ""; ; ) {
    const page = await json(`${place(name)}/turns?limit=1000${after}`);
    all.push(...page.data);
    if (!page.has_more) return all;
    after = `&after=${page.last_id}`;
  }
}
/** The newest turn of a session. */
export const newest = async (name) =>
  (await json(`${place(name)}/turns?limit=1&order=desc`)).data[0];
export const memory = (name, signal) => json(`${place(name)}/memory`, { signal });
export const fork = (name, turn) =>
  json(`${place(name)}/fork`, { method: "POST", body: { turn } });
export const remove = (name) => json(place(name), { method: "DELETE" });

/**
 * Ask for an answer, and receive it while it is generated.
 * Calls `began` with the session's name, then `said` with each piece of text.
 * Returns why it ended and its usage. Throws an error if it broke off.
 */
export async function ask(body, session, { signal, began, said }) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    headers: session === null ? {} : { "x-session-id": session },
    signal,
  });
  began(response.headers.get("x-session-id"));
  let reason = null;
  let usage = null;
  for await (const event of events(response.body)) {
    if (event === "[DONE]") return { reason, usage };
    const data = JSON.parse(event);
    if (data.error) throw new Trouble(data.error.message);
    usage = data.usage ?? usage;
    const choice = data.choices[0];
    if (choice?.delta.content) said(choice.delta.content);
    reason = choice?.finish_reason ?? reason;
  }
  throw new Trouble("The connection was lost before the answer was complete.");
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}
