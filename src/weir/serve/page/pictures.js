// Small pictures of a cache's contents. Each has a description in words.

import { bytes, count, el, several, svg } from "./dom.js";

const WIDE = 400;
const HIGH = 110;
const BINS = 200;

/** What all tokens would take, beside what the row takes. */
export function drawGrowth(into, { read, bytes: row, bytes_of_all: all }) {
  const far = nice(Math.max(read, 1));
  const top = Math.max(all * (far / Math.max(read, 1)), row) * 1.08;
  const x = (tokens) => ((tokens / far) * WIDE).toFixed(1);
  const y = (some) => (HIGH - (some / top) * HIGH).toFixed(1);
  const label =
    `After ${several(read, "token")}, the keys and values of all of them would take ${bytes(all)}; ` +
    `the cache takes ${bytes(row)}, the same as at the beginning.`;
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { class: "all", d: `M0 ${HIGH}L${x(read)} ${y(all)}V${HIGH}Z` }),
    svg("path", { class: "all-line", d: `M0 ${HIGH}L${x(read)} ${y(all)}` }),
    svg("path", { class: "row", d: `M0 ${y(row)}H${x(read)}V${HIGH}H0Z` }),
    svg("path", { class: "row-line", d: `M0 ${y(row)}H${x(read)}` }),
    svg("path", { class: "now", d: `M${x(read)} 0V${HIGH}` }),
  );
  into.replaceChildren(
    picture,
    el(
      "div",
      { className: "axis", ariaHidden: "true" },
      el("span", {}, "0"),
      el("span", {}, several(far, "token")),
    ),
  );
}

/** The slots in use of a layer and a head, pool by pool. */
export function drawSlots(into, pools, lookOf) {
  const all = pools.reduce((sum, pool) => sum + pool.slots, 0) || 1;
  const said = pools.map((pool) => `${pool.name} ${Math.round(pool.slots)}`).join(", ");
  const bar = el("div", { className: "bar", role: "img", ariaLabel: `Slots in use: ${said}` });
  pools.forEach((pool, n) => {
    if (!pool.slots) return;
    const part = el("span", { className: lookOf(pools, n), title: pool.name });
    part.style.flexGrow = String(pool.slots / all);
    bar.append(part);
  });
  into.replaceChildren(bar);
}

/** Where in the whole stream tokens are held. */
export function drawStream(into, { seen, pools, tokens, pairs, held }, lookOf) {
  const size = Math.max(1, seen / BINS);
  const bins = Array.from({ length: Math.ceil(seen / size) }, () => pools.map(() => 0));
  for (const token of tokens) {
    const bin = bins[Math.min(bins.length - 1, Math.floor(token.at / size))];
    token.pools.forEach((some, n) => {
      bin[n] += some / pairs;
    });
  }
  const bars = [];
  bins.forEach((bin, at) => {
    const all = bin.reduce((sum, some) => sum + some, 0);
    if (!all) return;
    const most = bin.indexOf(Math.max(...bin));
    const high = Math.max(0.12, Math.min(1, all / size));
    const sizes = { x: at, y: 1 - high, width: 1.05, height: high };
    bars.push(svg("rect", { ...sizes, class: lookOf(pools, most) }));
  });
  const label = `${count(held)} of ${several(seen, "token")} are in the cache; the height of a bar is the share of held tokens at that place.`;
  const box = `0 0 ${Math.max(1, bins.length)} 1`;
  into.replaceChildren(
    svg("svg", { viewBox: box, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars),
    el(
      "div",
      { className: "axis", ariaHidden: "true" },
      el("span", {}, "first"),
      el("span", {}, `token ${count(Math.max(0, seen - 1))}`),
    ),
  );
}

/** The next of 1, 2, 5, 10, 20, 50, ... */
function nice(n) {
  const power = 10 ** Math.floor(Math.log10(n));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= n);
}
