// A text, token by token, shaded by the pools that hold it. The elements are reused while the
// tokens stay, so that a forgotten token fades.

import { count, el, endOf, several } from "./dom.js";

const MARGIN = 24; // pixels from its end that still count as its end

export class Text {
  #box;
  #detail;
  #end;
  #spans = new Map(); // by place in the stream
  #memory = null;
  #at = null; // the token that is pointed at

  constructor(box, detail) {
    this.#box = box;
    this.#detail = detail;
    this.#end = endOf(box, MARGIN);
    box.addEventListener("pointerover", (event) => this.#point(placeOf(event.target)));
    box.addEventListener("click", (event) => this.#point(placeOf(event.target)));
    box.addEventListener("keydown", (event) => this.#walk(event));
  }

  clear() {
    this.#box.replaceChildren();
    this.#spans.clear();
    this.#memory = null;
    this.#point(null);
  }

  show(memory, lookOf) {
    const box = this.#box;
    const first = this.#memory === null;
    this.#memory = memory;
    const spans = new Map();
    const wanted = [];
    let next = 0;
    for (const token of memory.tokens) {
      if (token.at > next) wanted.push(gap(token.at - next));
      next = token.at + 1;
      const span = this.#spans.get(token.at) ?? el("span", { id: `token-${token.at}` });
      dress(span, token, memory, lookOf);
      spans.set(token.at, span);
      wanted.push(span);
    }
    this.#spans = spans;
    place(box, wanted);
    if (first) this.#end.go();
    else this.#end.settle();
    if (this.#at !== null) this.#point(spans.has(this.#at) ? this.#at : null);
  }

  #point(at) {
    if (this.#at !== null) this.#spans.get(this.#at)?.classList.remove("here");
    if (at === undefined) at = this.#at; // between tokens
    this.#at = at;
    const span = this.#spans.get(at);
    if (!span) {
      this.#at = null;
      this.#box.removeAttribute("aria-activedescendant");
      this.#say("Point at a token, or use the arrow keys.");
      return;
    }
    span.classList.add("here");
    this.#say(about(this.#memory, at));
  }

  #say(text) {
    if (this.#detail.textContent !== text) this.#detail.textContent = text;
  }

  #walk(event) {
    const places = [...this.#spans.keys()];
    if (!places.length || event.altKey || event.ctrlKey || event.metaKey) return;
    const now = this.#at === null ? places.length : places.indexOf(this.#at);
    const to = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      Home: 0,
      End: places.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const at = places[Math.max(0, Math.min(places.length - 1, to))];
    this.#point(at);
    this.#spans.get(at).scrollIntoView({ block: "nearest" });
  }
}

/** Make the children of an element these, and touch only what is not there already. */
function place(box, wanted) {
  let child = box.firstChild;
  for (const each of wanted) {
    if (child === each) {
      child = child.nextSibling;
    } else if (each.className === "gap" && child?.className === "gap") {
      child.textContent = each.textContent;
      child = child.nextSibling;
    } else {
      box.insertBefore(each, child);
    }
  }
  while (child) {
    const next = child.nextSibling;
    child.remove();
    child = next;
  }
}

/** Give a token its text, and the look of the pool that holds it in most layers and heads. */
function dress(span, token, { pools, pairs, read }, lookOf) {
  const text = token.text ?? "\u2026";
  if (span.textContent !== text) span.textContent = text;
  const most = Math.max(...token.pools);
  const kind = token.at >= read ? "unread" : most ? "held" : "gone";
  const look = most ? lookOf(pools, token.pools.indexOf(most)) : "";
  const here = span.classList.contains("here") ? "here" : "";
  const special = token.special ? "special" : "";
  const name = ["token", kind, look, special, here].filter(Boolean).join(" ");
  if (span.className !== name) span.className = name;
  const share = String(Math.min(1, sum(token.pools) / pairs));
  if (span.style.getPropertyValue("--share") !== share) span.style.setProperty("--share", share);
}

const gap = (n) => el("span", { className: "gap" }, `${several(n, "token")} forgotten`);
const sum = (numbers) => numbers.reduce((all, n) => all + n, 0);
const placeOf = (target) =>
  target.id?.startsWith("token-") ? Number(target.id.slice(6)) : undefined;

/** Who holds a token, in words. */
function about({ tokens, pools, pairs, read }, at) {
  const token = tokens.find((each) => each.at === at);
  const said = token.text === null ? "text not kept" : JSON.stringify(token.text);
  const start = `Token ${count(at)}, ${said}: `;
  if (at >= read) return `${start}not read yet.`;
  const by = pools
    .map((pool, n) => [pool.name, token.pools[n]])
    .filter(([, some]) => some)
    .map(([name, some]) => `${name} in ${count(some)}`);
  if (!by.length) return `${start}forgotten.`;
  return `${start}held by ${by.join(", ")} of ${several(pairs, "head")}.`;
}
