// The conversation: its turns, and the answer that is being generated.

import { byId, count, el, endOf, several } from "./dom.js";

const SHOWN = 60; // turns that are shown at first; more on request
const MARGIN = 48; // pixels from the end that still count as the end

const list = byId("turns");
const scroll = byId("scroll");
const end = endOf(scroll, MARGIN);
let all = [];
let from = 0;
let onFork = () => {};
let forgotten = new Map(); // how much of a turn is forgotten, by the turn's id

byId("earlier").addEventListener("click", () => {
  const high = scroll.scrollHeight;
  const first = from;
  from = Math.max(0, from - SHOWN);
  list.prepend(...all.slice(from, first).map(item));
  byId("earlier").hidden = from === 0;
  scroll.scrollTop += scroll.scrollHeight - high;
});

/** Who is told when a conversation is to be forked from a turn. */
export function onForkFrom(fork) {
  onFork = fork;
}

/** Show saved turns, each as `GET /v1/sessions/ID/turns` returns it. */
export function showTurns(turns) {
  all = turns;
  forgotten = new Map();
  from = Math.max(0, turns.length - SHOWN);
  list.replaceChildren(...turns.slice(from).map(item));
  byId("earlier").hidden = from === 0;
  byId("welcome").hidden = turns.length > 0;
  end.go();
}

/** Show how much of each turn is forgotten: the `forgotten.turns` of the session's memory. */
export function showForgotten(turns) {
  forgotten = new Map(turns.map((turn) => [turn.id, turn]));
  for (const made of list.children) dress(made);
}

/** One more turn, which has just ended, in the place of the one that was coming. */
export function addTurn(turn, coming) {
  all = [...all, turn];
  coming.replaceWith(item(turn));
  end.settle();
}

/** A turn that is coming; `said` adds to its answer. */
export function beginTurn(words) {
  byId("welcome").hidden = true;
  const text = document.createTextNode("");
  const answer = el("div", { className: "said assistant coming" }, text);
  const made = el("li", {}, bubble("user", words), answer);
  list.append(made);
  end.go();
  let due = false;
  return {
    element: made,
    said(more) {
      text.appendData(text.data ? more : more.trimStart());
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        end.settle();
      });
    },
    drop() {
      made.remove();
      byId("welcome").hidden = list.children.length > 0;
    },
  };
}

function item(turn) {
  const fork = el("button", { type: "button", className: "quiet fork" }, "Fork from here");
  fork.addEventListener("click", () => onFork(turn));
  const { completion_tokens: answered } = turn.usage;
  const facts = [
    `${several(turn.seen, "token")} read`,
    `${several(answered ?? 0, "token")} in the answer`,
  ];
  if (turn.rate) facts.push(`${Math.round(turn.rate)} tokens/s`);
  const made = el(
    "li",
    {},
    ...turn.messages.flatMap(({ role, content }, n) =>
      // What was recalled was put before the last message that is not an answer.
      n === turn.messages.length - 2 && turn.recalled
        ? [recalled(turn), bubble(role, content)]
        : [bubble(role, content)],
    ),
    el(
      "div",
      { className: "turn-foot" },
      el("span", {}, facts.join(" · ")),
      el("span", { className: "lost" }),
      fork,
    ),
  );
  made.dataset.turn = turn.id;
  dress(made);
  return made;
}

/** The text that was recalled in a turn, with who said it and when. */
function recalled(turn) {
  const tokens = several(turn.usage.recalled, "token");
  return el(
    "details",
    { className: "recalled" },
    el("summary", {}, `${tokens} recalled from the archive for this message`),
    el("p", { dir: "auto" }, turn.recalled),
  );
}

/** Say at the foot of a turn how much of it is forgotten. */
function dress(made) {
  const lost = forgotten.get(made.dataset.turn);
  const foot = made.querySelector(".lost");
  if (!foot) return; // an answer that is coming
  const whole = lost?.forgotten === lost?.tokens;
  const text = !lost
    ? ""
    : whole
      ? "forgotten"
      : `${count(lost.forgotten)} of its ${several(lost.tokens, "token")} forgotten`;
  if (foot.textContent !== text) foot.textContent = text;
  made.classList.toggle("forgotten", Boolean(lost) && whole);
}

function bubble(role, content) {
  const who = { user: "You", assistant: "The model" }[role] ?? role;
  const text = content.trim();
  return el(
    "div",
    { className: `said ${role}${text ? "" : " nothing"}`, dir: "auto" },
    el("span", { className: "unseen" }, `${who}: `),
    text || "(empty)",
  );
}
