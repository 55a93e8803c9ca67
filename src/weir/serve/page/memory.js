// The contents of a session's cache: numbers, pictures, and the text token by token.

import { drawGrowth, drawSlots, drawStream } from "./pictures.js";
import { byId, bytes, count, el, several } from "./dom.js";
import { Text } from "./text.js";

const text = new Text(byId("text"), byId("detail"));
let shown = null;

// Pools that most policies have look the same in all of them; others take the looks that are left.
const USUAL = { sink: 0, recent: 1, beginning: 3, header: 4, kept: 3 };
const LEFT = [2, 5, 3, 4, 0, 1];

/** The class that gives a pool its color and its line; the last pool is of tokens that wait. */
export function lookOf(pools, n) {
  if (n === pools.length - 1) return "pool-new";
  const name = pools[n].name;
  if (name in USUAL) return `pool-${USUAL[name]}`;
  const taken = pools.map((pool) => USUAL[pool.name]);
  const left = LEFT.filter((look) => !taken.includes(look));
  const others = pools.filter((pool) => !(pool.name in USUAL));
  return `pool-${left.length ? left[others.indexOf(pools[n]) % left.length] : 0}`;
}

/** Show the data of `GET /v1/sessions/ID/memory`; null shows nothing. */
export function showMemory(memory) {
  byId("nothing").hidden = memory !== null;
  byId("known").hidden = memory === null;
  if (memory === null) {
    shown = null;
    return;
  }
  if (shown !== memory.id) text.clear();
  shown = memory.id;
  const { seen, read, held, folds, pools } = memory;
  const share = memory.bytes_of_all / memory.bytes;
  byId("live").hidden = memory.doing === null;
  byId("summary").textContent =
    share > 1
      ? `A cache of all tokens would take ${bytes(memory.bytes_of_all)}, ${times(share)} as much.`
      : `A cache of all tokens would take ${bytes(memory.bytes_of_all)}, which is no more than this cache.`;
  for (const [id, value] of [
    ["seen", count(seen)],
    ["held", count(held)],
    ["lost", count(read - held)],
    ["folds", count(folds)],
    ["bytes", bytes(memory.bytes)],
  ]) {
    byId(id).textContent = value;
  }
  byId("archive").hidden = memory.archive === undefined;
  byId("archive").textContent = memory.archive === undefined ? "" : aboutArchive(memory.archive);
  drawGrowth(byId("growth"), memory);
  drawSlots(byId("slots"), pools, lookOf);
  drawStream(byId("stream"), memory, lookOf);
  byId("legend").replaceChildren(
    ...pools.map((pool, n) => {
      const name = el("span", { className: `token held ${lookOf(pools, n)}` }, pool.name);
      const what = n === pools.length - 1 ? "waiting" : several(pool.tokens, "token");
      return el("li", {}, name, el("b", {}, count(round(pool.slots))), el("span", {}, what));
    }),
    el(
      "li",
      {},
      el("span", { className: "token gone" }, "forgotten"),
      el("b", {}, ""),
      el("span", {}, several(read - held, "token")),
    ),
  );
  text.show(memory, lookOf);
}

/** What the archive has of this conversation, in words. */
function aboutArchive({ working, turns, recalled_tokens: recalled }) {
  if (!working) return "The archive is not working, so no earlier text can be recalled. See the server's log.";
  const has = `The archive holds the text of ${several(turns, "message")}.`;
  if (!recalled) return `${has} Nothing was recalled for the newest message.`;
  const were = recalled === 1 ? "was" : "were";
  return `${has} ${several(recalled, "token")} of it ${were} recalled for the newest message.`;
}

const round = (n) => (Number.isInteger(n) ? n : Number(n.toFixed(1)));
const times = (n) => (n < 10 ? `${n.toFixed(1)} times` : `${count(Math.round(n))} times`);
