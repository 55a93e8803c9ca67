// The page: the open conversation, the handling of events, and the times at which the
// server is asked for changes.

import * as api from "./api.js";
import { addTurn, beginTurn, onForkFrom, showForgotten, showTurns } from "./chat.js";
import { askForKey, askToDelete } from "./dialogs.js";
import { byId, several } from "./dom.js";
import { showMemory } from "./memory.js";
import { showSessions, titleOf } from "./sessions.js";

const HASH = "#session="; // in the address of a conversation
const OFTEN = 350; // milliseconds between two looks at a cache that changes
const SELDOM = 3000; // and at one that may be changed by somebody else

const page = {
  model: null,
  session: null, // its name; null for one that has not begun
  turns: [], // those that lead to its end
  answering: null, // what stops the answer that is coming
  elsewhere: false, // whether another client is being answered in this session
};
const tabs = new BroadcastChannel("weir");
let looking = null; // the timer of the next look at the cache

// --- which conversation

/** Open a conversation, or a new one for null. An answer that is coming in another goes on. */
async function open(session, { view = "chat" } = {}) {
  page.answering = null;
  busy(false);
  if (session !== page.session) showMemory(null);
  page.session = session;
  page.turns = [];
  page.elsewhere = false;
  trouble(null);
  named(session);
  show(view);
  if (session === null) {
    showTurns([]);
    await list();
    byId("say").focus();
    return;
  }
  await Promise.all([load(), list()]);
  look(0);
}

/** The turns of the open conversation, as they are saved. */
async function load() {
  const session = page.session;
  try {
    const turns = await api.turns(session);
    if (session !== page.session || page.answering) return;
    page.turns = turns.filter((turn) => turn.current);
    showTurns(page.turns);
  } catch (error) {
    if (error.status !== 404) throw error;
    await open(null);
    trouble("This conversation no longer exists on the server.");
  }
}

function named(session) {
  const hash = session === null ? "" : HASH + encodeURIComponent(session);
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname);
}

/** The session that the address names; null for none. */
function fromAddress() {
  if (!location.hash.startsWith(HASH)) return null;
  try {
    return decodeURIComponent(location.hash.slice(HASH.length)) || null;
  } catch {
    return null;
  }
}

async function list() {
  const found = await api.sessions();
  showSessions(found, page.session, { open: guarded(open), remove: guarded(remove) });
}

async function remove(session) {
  const what = `${titleOf(session)}: ${several(session.turns, "turn")}. This cannot be undone.`;
  if (!(await askToDelete(what))) return;
  await api.remove(session.id);
  tabs.postMessage(session.id);
  if (session.id === page.session) await open(null, { view: "sessions" });
  else await list();
}

async function fork(turn) {
  const made = await api.fork(page.session, turn.id);
  tabs.postMessage(made.id);
  await open(made.id);
  status("A new conversation continues from that turn.");
  byId("say").focus();
}

// --- a turn

async function say(words) {
  const stop = new AbortController();
  const coming = beginTurn(words);
  let answer = "";
  let began = null; // when the first text came; before that, the prompt was read
  page.answering = stop;
  busy(true);
  trouble(null);
  let session = page.session;
  const mine = () => page.answering === stop;
  try {
    const messages = page.turns.flatMap((turn) => turn.messages);
    const body = {
      model: page.model,
      messages: [...messages, { role: "user", content: words }],
      temperature: number("temperature", 0.7),
      max_completion_tokens: number("longest", 256),
    };
    const { usage } = await api.ask(body, session, {
      signal: stop.signal,
      began(name) {
        session = name;
        if (!mine()) return;
        page.session = name;
        named(name);
        look(0);
      },
      said(more) {
        began ??= performance.now();
        answer += more;
        coming.said(more);
      },
    });
    const seconds = (performance.now() - (began ?? Infinity)) / 1000;
    tabs.postMessage(session);
    if (!mine()) return;
    const saved = await api.newest(session);
    if (!mine()) return;
    const turn = {
      ...saved,
      messages: [
        { role: "user", content: words },
        { role: "assistant", content: answer },
      ],
      seen: usage.weir.seen,
      rate: seconds > 0 ? (usage.completion_tokens - 1) / seconds : 0,
    };
    page.turns.push(turn);
    addTurn(turn, coming.element);
    status(`The model: ${answer}`);
  } catch (error) {
    if (error.name !== "AbortError") trouble(error.message);
    if (mine()) {
      coming.drop();
      if (error.name === "AbortError") status("The answer was stopped and is not saved.");
      if (!byId("say").value) byId("say").value = words;
      if (!page.turns.length) {
        page.session = null;
        named(null);
        showMemory(null);
      }
    }
  } finally {
    if (mine()) {
      page.answering = null;
      busy(false);
      look(0);
    }
    await list();
  }
}

const number = (id, usual) => {
  const input = byId(id);
  return input.value !== "" && input.checkValidity() ? input.valueAsNumber : usual;
};

function busy(is) {
  byId("send").hidden = is;
  byId("send").disabled = false;
  byId("stop").hidden = !is;
  byId("turns").setAttribute("aria-busy", String(is));
}

// --- the contents of the cache

/** Look at the cache after some time, and again and again. */
function look(after) {
  clearTimeout(looking);
  looking = setTimeout(async () => {
    let next = SELDOM;
    try {
      next = await glance();
    } catch (error) {
      if (!page.answering) trouble(error.message);
    }
    if (page.session !== null && !document.hidden) look(next);
  }, after);
}

/** Look at the cache now; returns when to look again. */
async function glance() {
  const session = page.session;
  if (session === null) return SELDOM;
  let memory;
  try {
    memory = await api.memory(session);
  } catch (error) {
    if (error.status !== 404) throw error;
    // A session exists once its first turn has ended. Before that there is nothing to show.
    if (session === page.session && !page.answering) await open(null);
    return OFTEN;
  }
  if (session !== page.session) return OFTEN;
  showMemory(memory);
  showForgotten(memory.forgotten.turns);
  if (page.answering) return OFTEN;
  page.elsewhere = memory.doing !== null;
  byId("send").disabled = page.elsewhere;
  if (page.elsewhere) status("Another window is using this conversation.");
  else if (memory.seen !== (page.turns.at(-1)?.seen ?? 0)) {
    // Another client has added to this conversation.
    await Promise.all([load(), list()]);
  }
  return page.elsewhere ? OFTEN : SELDOM;
}

// --- the page itself

/** On a small screen one of the three parts is shown. */
function show(view) {
  document.body.dataset.view = view;
  for (const button of byId("views").children) {
    if (button.dataset.to === view) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

/** What is wrong, where the user sees it; null for nothing. */
function trouble(text) {
  byId("trouble").hidden = text === null;
  byId("trouble").textContent = text ?? "";
}

/** What has happened, for those who do not see it. */
function status(text) {
  byId("status").textContent = text;
}

/** The same, and what goes wrong in it is said. */
function guarded(work) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (error) {
      trouble(error.message);
    }
  };
}

function grow() {
  const box = byId("say");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function wire() {
  api.onKeyNeeded(async (wrong) => {
    const key = await askForKey(wrong);
    byId("forget-key").hidden = false;
    return key;
  });
  byId("forget-key").hidden = !api.hasKey();
  byId("forget-key").addEventListener("click", () => {
    api.forgetKey();
    location.replace(location.pathname);
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address names the conversation
    show("chat");
    byId("say").focus();
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const box = byId("say");
    // A message sent before the conversation is open would be lost when it opens.
    if (!page.model || !box.value.trim() || page.answering || page.elsewhere) return;
    const words = box.value;
    box.value = "";
    grow();
    guarded(say)(words);
    box.focus();
  });
  byId("say").addEventListener("input", grow);
  byId("say").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && page.answering && !document.querySelector("dialog[open]")) {
      page.answering.abort();
    }
  });
  byId("stop").addEventListener("click", () => {
    page.answering?.abort();
    byId("say").focus();
  });
  byId("new").addEventListener("click", () => guarded(open)(null));
  for (const button of byId("views").children) {
    button.addEventListener("click", () => show(button.dataset.to));
  }
  onForkFrom(guarded(fork));
  addEventListener("hashchange", () => {
    if (fromAddress() !== page.session) guarded(open)(fromAddress());
  });
  tabs.addEventListener("message", (event) => {
    guarded(list)();
    if (event.data === page.session && !page.answering) look(0);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) {
      guarded(list)();
      look(0);
    }
  });
}

async function start() {
  wire();
  show("chat");
  const [model] = await api.models();
  page.model = model.id;
  byId("model").textContent = model.id;
  byId("policy").textContent = model.weir.policy;
  byId("policy").title = model.weir.pools;
  if (model.weir.continues) byId("say").placeholder = "Begin a sentence, and the model continues it";
  await open(fromAddress());
}

guarded(start)();
